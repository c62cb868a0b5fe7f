"""States of profiled graphs that are no chain."""

from __future__ import annotations

from pathlib import Path

from autoshard.costmodel import read_profile

LINE = "{0} -- {1} -- forward_compute_time={2}, backward_compute_time=0, activation_size=1, parameter_size=0"


def test_side_branches_come_with_the_layer_that_needs_them(tmp_path: Path) -> None:
    """A second input's embedding, two layers deep, is joined by d; e, which nobody uses, is left out."""
    layers = [
        ("i", "Input0", 9),
        ("a", "A", 1),
        ("b", "B", 2),
        ("c", "C", 4),
        ("d", "D", 8),
        ("e", "__getitem__(1)", 16),
    ]
    edges = [("i", "a"), ("b", "c"), ("a", "d"), ("c", "d"), ("a", "e")]
    path = tmp_path / "profile.txt"
    lines = [LINE.format(*layer) for layer in layers] + [f"\t{a} -- {b}" for a, b in edges]
    path.write_text("\n".join(lines))
    states = read_profile(path)
    assert [round(s.compute_s * 1e3) for s in states] == [1, 15]
    assert [s.smaller for s in states] == [(), (0,)]
