"""The page of a plan in a real browser: what its script made of it, how quickly, and that it fetched nothing."""

from __future__ import annotations

import dataclasses
import html
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from autoshard.plan import Plan
from autoshard.report import report_html
from autoshard.report.content import MOST_SPANS
from autoshard.timeline import NO_TIMELINE
from tests.problems import mlp
from tests.report_plans import hostile, large, medium
from tests.test_plan import PLAN

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")


def chromium(folder: Path, page: str, *options: str) -> bytes:
    """What Chromium prints for a page; no host can be reached."""
    assert BROWSER is not None
    (folder / "page.html").write_text(page, encoding="utf-8")
    command = [
        BROWSER,
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--host-resolver-rules=MAP * ~NOTFOUND", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}"),
        *options,
        (folder / "page.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return done.stdout


def loaded(folder: Path, page: str, *options: str) -> tuple[dict[str, str], str]:
    """Data attributes that the page's script left, and the page's document after it ran."""
    document = chromium(folder, page, "--dump-dom", *options).decode()
    found = re.search("<html[^>]*>", document)
    assert found is not None
    data = dict(re.findall(r'data-([a-z-]+)="([^"]*)"', found[0]))
    assert data.get("errors") == "0", data
    assert data["ready"] == "yes"
    return data, document


def driven(folder: Path, plan: Plan, script: str) -> tuple[dict[str, str], str]:
    """The page after a test's script, which its policy would not allow."""
    page = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", report_html(plan))
    return loaded(folder, page.replace("</body>", f"<script>{script}</script></body>"))


def picture(data: bytes) -> tuple[int, int, set[bytes]]:
    """Width, height and colours of a PNG of 8 bits a channel."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed, head = 8, b"", b""
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + size]
        head = body if kind == b"IHDR" else head
        packed += body if kind == b"IDAT" else b""
        at += 12 + size
    width, height, depth, colour = struct.unpack(">IIBB", head[:10])
    assert depth == 8
    step = {2: 3, 6: 4}[colour]
    raw, stride = zlib.decompress(packed), width * step
    colours: set[bytes] = set()
    before = bytearray(stride)
    for row in range(height):
        start = row * (stride + 1)
        line = _unfilter(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), before, step)
        colours.update(bytes(line[i : i + 3]) for i in range(0, stride, step))
        before = line
    return width, height, colours


def _unfilter(kind: int, line: bytearray, before: bytearray, step: int) -> bytearray:
    for i in range(len(line)) if kind else ():
        left = line[i - step] if i >= step else 0
        up, corner = before[i], before[i - step] if i >= step else 0
        guess = left + up - corner
        paeth = min((left, up, corner), key=lambda v: abs(guess - v))
        line[i] = (line[i] + (left, up, (left + up) // 2, paeth)[kind - 1]) & 255
    return line


def shown(document: str) -> str:
    """The text of the page itself; the scripts hold all messages, shown or not."""
    return html.unescape(re.sub("<[^>]*>", "", document[document.index("<main") : document.index("application/json")]))


NOTHING = ("This plan has no timeline", "This plan has no memory over time", "This plan has no costs by operator")


@browser
def test_a_real_plan_in_a_browser(tmp_path: Path) -> None:
    plan = mlp().plan((2, 4))
    data, document = loaded(tmp_path, report_html(plan))
    assert (data["lanes"], data["spans"]) == ("2", str(len(plan.timeline.spans)))
    assert len(plan.timeline.spans) > 0
    assert data["violations"] == data["requests"] == "0"
    text = shown(document)
    assert "dot_general" in text
    assert not any(message in text for message in NOTHING)


@browser
def test_a_plan_without_a_timeline_in_a_browser(tmp_path: Path) -> None:
    plan = dataclasses.replace(mlp().plan((2, 4)), timeline=NO_TIMELINE)
    data, document = loaded(tmp_path, report_html(plan))
    assert data["lanes"] == "0"
    assert data["violations"] == data["requests"] == "0"
    text = shown(document)
    assert all(message in text for message in NOTHING)


@browser
def test_a_timeline_in_a_browser(tmp_path: Path) -> None:
    plan = medium()
    data, document = loaded(tmp_path, report_html(plan))
    assert (data["lanes"], data["spans"], data["seen"]) == ("5", str(len(plan.timeline.spans)), data["spans"])
    assert data["arguments"] == data["matched"] == str(len(plan.inputs) + 1)
    assert data["violations"] == data["requests"] == "0"
    text = shown(document)
    for piece in ("params/layers/{0–11}/mlp/up/kernel", "NVLink, node 0", "model.py:61", "no time", "does not fit"):
        assert piece in text
    assert "Bars that end in a notch are cut" in text


@browser
def test_a_plan_for_1024_devices_loads_quickly(tmp_path: Path) -> None:
    data, document = loaded(tmp_path, report_html(large()))
    assert (data["spans"], data["seen"]) == ("20000", "20000")
    assert int(data["drawn"]) < 5000
    assert data["arguments"] == "5001"
    assert 0 < float(data["ms"]) < 2000
    assert re.search(
        r"20,000 spans from 0 s to 1.4 s, drawn as [\d,]+: those narrower than a pixel are joined", document
    )
    assert re.search(r"20,000 points are drawn as [\d,]+", document)


@browser
def test_joined_spans_are_announced(tmp_path: Path) -> None:
    data, document = loaded(tmp_path, report_html(large(1100, 40_000)))
    assert data["spans"] == "40000"
    assert int(data["blocks"]) <= MOST_SPANS
    assert f"40,000 spans are kept on this page as {int(data['blocks']):,}" in document


@browser
def test_hostile_names_in_a_browser(tmp_path: Path) -> None:
    log = tmp_path / "net.json"
    data, document = loaded(tmp_path, report_html(hostile()), f"--log-net-log={log}")
    assert data["violations"] == data["requests"] == "0"
    assert document.count("<script") == 2
    assert "<img" not in document
    assert "<svg" not in document
    assert "<title>Plan &lt;/script&gt;" in document
    assert "evil.example" not in log.read_text(errors="replace")


@browser
def test_the_policy_holds_against_markup_that_got_in(tmp_path: Path) -> None:
    """If escaping ever failed: neither scripts run nor pictures load."""
    bad = '<img src="https://evil.example/x"><script>document.documentElement.dataset.pwned = "yes"</script>'
    late = report_html(PLAN).replace("<footer", f"{bad}<footer")
    data, _ = loaded(tmp_path, late.replace("<script type", "<wbr><script type"))
    assert "pwned" not in data


@browser
def test_filter_folds_and_sorting(tmp_path: Path) -> None:
    script = """
    const set = (id, value, kind) => { byId(id).value = value; byId(id).dispatchEvent(new Event(kind)); };
    set("filter", "layers/1*/MLP up", "input");
    root.dataset.up = root.dataset.matched;
    set("role", "output", "change");
    root.dataset.outputs = root.dataset.matched;
    set("role", "all", "change");
    set("filter", "", "input");
    root.dataset.again = root.dataset.matched;
    const before = document.querySelectorAll("#shardings tr").length;
    document.querySelector("#shardings .fold").click();
    root.dataset.opened = document.querySelectorAll("#shardings tr").length - before;
    root.dataset.expanded = document.querySelector("#shardings .fold").getAttribute("aria-expanded");
    root.dataset.focus = document.activeElement.className;
    const heads = document.querySelectorAll("#costs thead button");
    const column = () => [...document.querySelectorAll("#costs tbody tr")].map((r) => Number(r.cells[2].textContent));
    heads[2].click();
    root.dataset.down = column().every((n, i, all) => !i || n <= all[i - 1]);
    heads[2].click();
    root.dataset.rising = column().every((n, i, all) => !i || n >= all[i - 1]);
    root.dataset.sorted = document.querySelectorAll("#costs th")[2].getAttribute("aria-sort");
    """
    data, _ = driven(tmp_path, medium(), script)
    assert data["up"] == "9"  # layers 1, 10 and 11 of the weights and of the two moments
    assert data["outputs"] == "0"
    assert data["again"] == "185"
    assert data["opened"] == "12"
    assert (data["expanded"], data["focus"]) == ("true", "fold")
    assert (data["down"], data["rising"], data["sorted"]) == ("true", "true", "ascending")


@browser
def test_zoom_and_keys(tmp_path: Path) -> None:
    script = """
    const canvas = document.querySelector("#timeline canvas");
    const key = (name) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key: name, cancelable: true }));
    key("+"); key("+"); key("+");
    root.dataset.zoomed = root.dataset.seen;
    root.dataset.note = document.querySelector("#timeline > div > .note:not(#joined-note)").textContent;
    key("0");
    root.dataset.all = root.dataset.seen;
    key("ArrowRight");
    root.dataset.first = document.querySelector(".details").textContent;
    key("ArrowRight"); key("ArrowDown");
    root.dataset.second = document.querySelector(".details").textContent;
    canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -300, ctrlKey: true, clientX: 600, cancelable: true }));
    root.dataset.wheel = root.dataset.seen;
    const box = canvas.getBoundingClientRect();
    canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 175, clientY: box.top + 40 }));
    root.dataset.tip = byId("tip").textContent;
    document.querySelector(".legend button").click();
    byId("theme").click();
    """
    plan = medium()
    data, document = driven(tmp_path, plan, script)
    total = len(plan.timeline.spans)
    assert int(data["all"]) == total
    assert int(data["zoomed"]) < total / 4
    assert int(data["wheel"]) < total
    assert f"{plan.timeline.spans[0].name} in compute 0-3" in data["first"]
    assert plan.timeline.spans[0].source_line in data["first"]
    assert "in collectives 0-3" in data["second"]
    assert "/home/me/model.py:" in data["tip"]
    assert data["theme"] == "dark"
    assert 'aria-pressed="true"' in document


@browser
@pytest.mark.parametrize("size", [(1000, 640), (390, 640)], ids=["wide", "narrow"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pictures(tmp_path: Path, size: tuple[int, int], dark: bool) -> None:
    file = tmp_path / "page.png"
    options = [f"--window-size={size[0]},{size[1]}", f"--screenshot={file}"]
    chromium(tmp_path, report_html(medium()), *options, *(["--blink-settings=preferredColorScheme=0"] if dark else []))
    width, height, colours = picture(file.read_bytes())
    assert (width, height) == size
    assert len(colours) > 100
    page, matmul = (("12161b", "6d9bf5"), ("f6f7f9", "3a6fd8"))[not dark]
    assert {bytes.fromhex(page), bytes.fromhex(matmul)} <= colours


@browser
def test_a_narrow_window_does_not_scroll_sideways(tmp_path: Path) -> None:
    script = "root.dataset.wide = document.documentElement.scrollWidth - innerWidth;"
    page = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", report_html(hostile()))
    page = page.replace("</body>", f"<script>{script}</script></body>")
    data, _ = loaded(tmp_path, page, "--window-size=390,900")
    assert int(data["wide"]) <= 0
