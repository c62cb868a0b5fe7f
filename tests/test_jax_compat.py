"""Which versions of JAX are refused."""

from __future__ import annotations

import jax
import pytest

from autoshard.jax_compat import check_version


def test_installed_version_passes() -> None:
    assert check_version(jax.__version_info__) is None


@pytest.mark.parametrize("version", [(0, 10, 0), (0, 10, 1), (0, 11, 0), (0, 12, 0, 1)])
def test_tested_versions_pass(version: tuple[int, ...]) -> None:
    assert check_version(version) is None


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ImportError) as caught:
        check_version((0, 10, 2))
    assert str(caught.value) == (
        "jax 0.10.2 is installed.\n"
        "  expected: another version of jax: it computes wrong values on CPU, jax-ml/jax#39103.\n"
        "  to do: pip install 'jax>=0.10,!=0.10.2,<0.13'."
    )


def test_too_old_is_refused() -> None:
    with pytest.raises(ImportError, match=r"jax 0\.9\.2 is installed"):
        check_version((0, 9, 2))


def test_newer_than_tested_warns() -> None:
    assert "tested on 0.10 to 0.12" in str(check_version((0, 13, 0)))
