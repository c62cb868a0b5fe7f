"""Golden files: printed IR kept in the repository, written anew with --update-golden."""

from __future__ import annotations

from pathlib import Path


def check_golden(path: Path, text: str, update: bool) -> None:
    if update:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    assert path.is_file(), f"{path} is missing: run pytest with --update-golden and look at it"
    assert text == path.read_text(encoding="utf-8"), f"{path} differs: look at it, then run with --update-golden"
