"""A plan as a page: what is folded, joined, escaped and refused. The page in a browser: test_report_browser.py."""

from __future__ import annotations

import dataclasses
import html
import importlib.resources
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autoshard import cli
from autoshard.errors import ArgumentError, PlanError
from autoshard.ir import Spec
from autoshard.plan import Alternative, Argument, Plan
from autoshard.report import report_html, write_report
from autoshard.report.content import MOST_ROWS, MOST_SPANS, embed
from autoshard.report.fold import fold_arguments, local_bytes, within
from autoshard.report.page import SCRIPTS
from autoshard.report.thin import join_spans, lane_spans, thin_curve
from autoshard.timeline import Lane, Span, Timeline
from tests.report_plans import HOSTILE, hostile, large, medium
from tests.test_plan import PLAN

# ---- folding


def state(path: str, spec: Spec = ((),), nbytes: int = 32) -> Argument:
    return Argument(path, f"f32[{nbytes // 4}]", spec, nbytes, True)


def folds_of(*inputs: Argument, donated: tuple[int, ...] = ()) -> list[tuple[tuple[str, ...], str]]:
    plan = dataclasses.replace(PLAN, inputs=inputs, outputs=(), donated=donated)
    return [(f.paths, f.role) for f in fold_arguments(plan)]


def test_paths_that_differ_in_numbers_are_one_row() -> None:
    found = folds_of(*(state(f"layers/{i}/w") for i in (0, 1, 10)), state("layers/x/w"))
    assert found == [(("layers/0/w", "layers/1/w", "layers/10/w"), "state"), (("layers/x/w",), "state")]


@pytest.mark.parametrize(
    "other",
    [
        state("layers/1/w", (("data",),)),
        state("layers/1/w", nbytes=64),
        state("layers/1/v"),
        dataclasses.replace(state("layers/1/w"), type="i32[8]"),
        dataclasses.replace(state("layers/1/w"), state=False),
    ],
)
def test_what_differs_otherwise_has_a_row_of_its_own(other: Argument) -> None:
    assert len(folds_of(state("layers/0/w"), other)) == 2


def test_donated_arguments_are_told_apart() -> None:
    assert folds_of(state("a/0"), state("a/1"), donated=(1,)) == [(("a/0",), "state"), (("a/1",), "state, donated")]


def test_rows_that_take_most_of_a_device_come_first() -> None:
    split = state("split", (("data", "model"),), 800)
    assert [
        paths for paths, _ in folds_of(state("small"), split, state("b/0", nbytes=64), state("b/1", nbytes=64))
    ] == [
        ("b/0", "b/1"),
        ("split",),
        ("small",),
    ]


@pytest.mark.parametrize("path", ["", "7", "a/7", "7/a", "a/007/b/3", "٣/x", "²"])
def test_paths_are_put_together_again(path: str) -> None:
    assert folds_of(state(path)) == [((path,), "state")]


def test_bytes_on_one_device() -> None:
    sizes = {"data": 2, "model": 4}
    assert local_bytes(64, (("data", "model"), ()), sizes) == 8
    assert local_bytes(65, (("data",),), sizes) == 33
    assert local_bytes(64, (), sizes) == 64


def test_an_axis_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match=r"a spec over the axis 'rows'\.\n? *expected: axes of the mesh"):
        report_html(dataclasses.replace(PLAN, inputs=(state("w", (("rows",),)),)))


def test_too_many_paths_leave_out_the_smallest() -> None:
    inputs = tuple(state("x" * 100 + c, nbytes=4 * (1 + i)) for i, c in enumerate("abcd"))
    folds = fold_arguments(dataclasses.replace(PLAN, inputs=inputs, outputs=()))
    assert [f.nbytes for f in within(folds, 400)] == [16, 12]
    assert within(folds, 10_000) == folds


# ---- joining


def lane_of(*times: tuple[float, float]) -> tuple[Span, ...]:
    return tuple(Span(0, f"op{i}", "matmul", start, end, 1, "") for i, (start, end) in enumerate(times))


def test_few_spans_are_kept() -> None:
    (blocks,) = join_spans((lane_of((0, 1), (1, 3)),), 2)
    assert [(b.start_s, b.end_s, b.joined) for b in blocks] == [(0, 1, 1), (1, 3, 1)]


def test_neighbours_are_joined_to_the_longest() -> None:
    (blocks,) = join_spans((lane_of((0, 0.1), (0.1, 0.4), (0.5, 0.6), (9, 10)),), 2)
    assert [(b.longest.name, b.start_s, b.end_s, b.count, b.joined) for b in blocks] == [
        ("op1", 0, 0.6, 3, 3),
        ("op3", 9, 10, 1, 1),
    ]
    assert blocks[0].busy_s == pytest.approx(0.5)


@pytest.mark.parametrize("most", [1, 2, 10, 100, 5000])
def test_joining_keeps_busy_time_and_counts(most: int) -> None:
    lanes = lane_spans(large(1100, 3000).timeline)
    blocks = join_spans(lanes, most)
    assert sum(map(len, blocks)) <= max(most, len(lanes))
    for lane, row in zip(lanes, blocks, strict=True):
        assert sum(b.joined for b in row) == len(lane)
        assert sum(b.count for b in row) == sum(s.count for s in lane)
        assert sum(b.busy_s for b in row) == pytest.approx(sum(s.end_s - s.start_s for s in lane))


def test_spans_without_duration_are_joined_too() -> None:
    assert [len(row) for row in join_spans((lane_of(*[(0.0, 0.0)] * 50),), 3)] == [1]
    assert [len(row) for row in join_spans((lane_of(*[(0.0, 0.0)] * 50, (1.0, 2.0)),), 3)] == [2]


@pytest.mark.parametrize(
    "span",
    [
        Span(1, "x", "k", 0.0, 1.0, 1, ""),
        Span(-1, "x", "k", 0.0, 1.0, 1, ""),
        Span(0, "x", "k", 2.0, 1.0, 1, ""),
        Span(0, "x", "k", 0.0, math.inf, 1, ""),
        Span(0, "x", "k", math.nan, 1.0, 1, ""),
    ],
)
def test_a_span_that_cannot_be_is_refused(span: Span) -> None:
    with pytest.raises(PlanError, match="a span 'x' in lane"):
        report_html(dataclasses.replace(PLAN, timeline=Timeline((Lane("compute", "0", 1.0),), (span,))))


def test_a_thinned_curve_keeps_its_peak_and_its_end() -> None:
    points = tuple((float(i), 1000 if i == 777 else i % 10) for i in range(1001))
    thin = thin_curve(points, 50)
    assert len(thin) <= 50
    assert (777.0, 1000) in thin
    assert thin[-1] == points[-1]
    assert list(thin) == sorted(thin)
    assert thin_curve(points[:50], 50) == points[:50]


# ---- content


class Elements(HTMLParser):
    """Tags with their attributes, and the text of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def content_of(page: str) -> dict[str, Any]:
    return json.loads(Elements(page).scripts[0])


PLANS = {"plan": PLAN, "medium": medium(), "hostile": hostile()}


@pytest.mark.parametrize("name", PLANS)
def test_the_page_holds_the_plan(name: str) -> None:
    plan = PLANS[name]
    content = content_of(report_html(plan))
    spans = [lane["spans"] for lane in content["timeline"]["lanes"]]
    assert sum(map(len, spans)) == 8 * len(plan.timeline.spans)
    assert sum(len(f["numbers"]) for f in content["folds"]) == len(plan.inputs) + len(plan.outputs)
    assert content["folds_left_out"] == 0
    assert len(content["alternatives"]["rows"]) == len(plan.alternatives)
    assert content["memory"] == dataclasses.asdict(plan.memory)


def test_names_never_become_markup() -> None:
    page = report_html(hostile())
    plain = report_html(PLAN)
    for found in (Elements(page), Elements(plain)):
        assert [tag for tag, _ in found.tags].count("script") == 2
        assert not {"img", "svg", "iframe", "link", "object", "base", "form"} & {tag for tag, _ in found.tags}
    assert Elements(page).scripts[1] == Elements(plain).scripts[1]
    assert html.escape(HOSTILE[0]) in page
    assert HOSTILE[0] not in page
    assert HOSTILE[1] not in page


def test_embedded_json_cannot_end_its_element() -> None:
    text = embed({"a": list(HOSTILE)})
    assert not re.search("[<>&]", text)
    assert json.loads(text) == {"a": list(HOSTILE)}


def test_only_our_script_and_style_may_run() -> None:
    page = report_html(hostile())
    (policy,) = [
        a["content"] or "" for tag, a in Elements(page).tags if a.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert set(rules) == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 2


def test_nothing_outside_is_named() -> None:
    page = report_html(medium())
    assert not re.search(r"""https?://|\burl\(|@import|<link|\bsrc=|\bfetch\(|XMLHttp|innerHTML|eval\(""", page)
    assert all((attrs.get("href") or "#").startswith("#") for _, attrs in Elements(page).tags)


def test_header_says_what_was_planned() -> None:
    page = report_html(medium())
    for text in ("0123456789abcdef", "h100x8", "data 2 × model 4", "42 ms", "8 ms of both at once", "57.25 GiB"):
        assert text in page
    assert "72.4% of 79.11 GiB" in page
    assert "elimination: optimal, gap 0.00%" in page
    assert all(html.escape(line) in page for line in medium().why)


def test_a_plan_over_its_limit_says_so() -> None:
    assert "does not fit</dd>" in report_html(dataclasses.replace(PLAN, memory_limit=1 << 20))
    assert "no limit" in report_html(dataclasses.replace(PLAN, memory_limit=0))


@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
def test_times_without_a_number(value: float) -> None:
    never = Alternative("data parallel", value, 0, "does not fit")
    plan = dataclasses.replace(PLAN, alternatives=(never,), time_s=value)
    content = content_of(report_html(plan))
    assert content["alternatives"]["rows"][0]["time_s"] is None
    assert content["plan"]["time_s"] is None


def test_long_tables_and_texts_say_what_is_left_out() -> None:
    plan = dataclasses.replace(
        PLAN,
        alternatives=(Alternative("x" * 9000, 1.0, 1, ""),) * (MOST_ROWS + 5),
        why=tuple(f"line {i}" for i in range(600)),
    )
    page = report_html(plan)
    table = content_of(page)["alternatives"]
    assert (len(table["rows"]), table["total"]) == (MOST_ROWS, MOST_ROWS + 5)
    assert table["rows"][0]["name"].endswith("x…")
    assert "100 more lines are in the plan's file." in page


def test_a_plan_without_anything() -> None:
    empty = dataclasses.replace(
        PLAN, mesh=(), inputs=(), outputs=(), collectives=(), reshardings=(), alternatives=(), why=(), time_s=0.0
    )
    page = report_html(empty)
    assert "one device" in page
    assert "The plan gives no reasons." in page
    assert content_of(page)["timeline"]["end_s"] == 1.0


def test_the_page_of_a_large_plan_is_small() -> None:
    plan = large()
    assert (len(plan.inputs), len(plan.timeline.spans)) == (5_000, 20_000)
    assert len(report_html(plan).encode()) < 2_000_000


def test_the_page_of_a_huge_plan_is_no_larger() -> None:
    page = report_html(large(1100, spans=40_000))
    times = content_of(page)["timeline"]
    assert times["spans"] == 40_000
    assert 0 < times["blocks"] <= MOST_SPANS
    assert len(page.encode()) < 3_000_000


def test_the_same_page_twice() -> None:
    assert report_html(medium()) == report_html(medium())
    assert report_html(Plan.from_json(medium().to_json())) == report_html(medium())


def test_files_of_the_page_are_in_the_package() -> None:
    folder = importlib.resources.files("autoshard.report")
    assert all((folder / name).is_file() for name in ("page.html", "page.css", *SCRIPTS))


# ---- writing


def test_write_report(tmp_path: Path) -> None:
    write_report(hostile(), tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes().decode() == report_html(hostile())
    with pytest.raises(ArgumentError, match="there is no folder"):
        write_report(PLAN, tmp_path / "missing" / "page.html")
    with pytest.raises(ArgumentError, match="expected: a file that can be written"):
        write_report(PLAN, tmp_path)


def run_cli(*words: str) -> Any:
    return CliRunner().invoke(cli.app, ["report", *words])


def test_command_writes_beside_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    file.write_text(PLAN.to_json())
    assert run_cli(str(file)).exit_code == 0
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == report_html(PLAN)
    assert run_cli(str(file), "-o", str(tmp_path / "other.htm")).exit_code == 0
    assert (tmp_path / "other.htm").is_file()


def test_command_says_where_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(cli.console, "print", lambda text, **_: told.append(text))
    (tmp_path / "plan.json").write_text(PLAN.to_json())
    run_cli(str(tmp_path / "plan.json"))
    assert told == [f"written to {tmp_path / 'plan.html'}"]


@pytest.mark.parametrize(
    ("name", "given", "output", "kind", "message"),
    [
        ("plan.json", b"no plan", "", PlanError, "not JSON"),
        ("plan.json", b"\xff\xfe\x00", "", PlanError, "a plan written by"),
        ("plan.json", None, "", PlanError, "a plan written by `autoshard plan -o`"),
        ("plan.json", PLAN.to_json().encode(), "missing/page.html", ArgumentError, "there is no folder"),
        ("plan.html", PLAN.to_json().encode(), "", ArgumentError, "is the plan itself"),
    ],
)
def test_command_refuses(
    tmp_path: Path, name: str, given: bytes | None, output: str, kind: type[Exception], message: str
) -> None:
    file = tmp_path / name
    if given is not None:
        file.write_bytes(given)
    result = run_cli(str(file), *(("-o", str(tmp_path / output)) if output else ()))
    assert isinstance(result.exception, kind)
    assert message in " ".join(str(result.exception).split())
    assert [p.name for p in tmp_path.iterdir()] == ([name] if given is not None else [])
    if given is not None:
        assert file.read_bytes() == given
