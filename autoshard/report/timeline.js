// The timeline: lanes of spans on a canvas. Spans narrower than a pixel are drawn as one, and the page says so.

/* What part of the step is seen, in ticks; timeline and memory share it. */
const view = { from: 0, to: content.timeline.ticks, end: content.timeline.ticks };
const tickSeconds = content.timeline.end_s / content.timeline.ticks;
const atTick = (tick) => seconds(tick * tickSeconds);

function show(from, to) {
  const width = Math.max(Math.min(to - from, view.end), view.end / 1e6);
  view.from = Math.max(0, Math.min(from, view.end - width));
  view.to = view.from + width;
  redrawAll();
}
function zoom(factor, at) {
  const middle = at === undefined ? (view.from + view.to) / 2 : at;
  show(middle - (middle - view.from) * factor, middle + (view.to - middle) * factor);
}
const pan = (part) => show(view.from + (view.to - view.from) * part, view.to + (view.to - view.from) * part);

function unpack(lane) {
  const FIELDS = 8;
  const n = lane.spans.length / FIELDS;
  const made = { ...lane, n, start: new Float64Array(n), end: new Float64Array(n), busy: new Float64Array(n) };
  for (const name of ["name_", "kind", "source", "count", "joined"]) made[name] = new Int32Array(n);
  for (let i = 0; i < n; i++) {
    const at = i * FIELDS;
    made.start[i] = lane.spans[at];
    made.end[i] = lane.spans[at] + lane.spans[at + 1];
    made.busy[i] = lane.spans[at + 2];
    made.name_[i] = lane.spans[at + 3];
    made.kind[i] = lane.spans[at + 4];
    made.source[i] = lane.spans[at + 5];
    made.count[i] = lane.spans[at + 6];
    made.joined[i] = lane.spans[at + 7];
  }
  return made;
}
/* The first span of a lane that ends after `tick`; spans of a lane do not overlap. */
function firstAfter(lane, tick) {
  let low = 0;
  let high = lane.n;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.end[middle] > tick) high = middle;
    else low = middle + 1;
  }
  return low;
}

const AXIS = 24;
const LANE = 34;
const gutterOf = (width) => (width < 560 ? 92 : 168);
const colours = () => {
  const style = getComputedStyle(root);
  return (variable) => style.getPropertyValue(variable).trim();
};
function sizeCanvas(canvas, width, height) {
  const ratio = Math.min(devicePixelRatio || 1, 3);
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.textBaseline = "middle";
  return pen;
}
const FONT = (size) => `${size}px ${getComputedStyle(document.body).fontFamily}`;
function fitText(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let keep = Math.floor((text.length * room) / pen.measureText(text).width);
  while (keep > 0 && pen.measureText(`${text.slice(0, keep)}…`).width > room) keep--;
  return keep > 0 ? `${text.slice(0, keep)}…` : "";
}
/* Black or white, whichever is read better on a colour #rrggbb. */
function inkOn(fill) {
  const [r, g, b] = [1, 3, 5].map((k) => (parseInt(fill.slice(k, k + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.25 ? "#0d1218" : "#ffffff";
}
function niceStep(range, most) {
  const rough = range / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((n) => n * power >= rough);
}
/* Heading of a chart: times at round places. */
function drawAxis(pen, colour, gutter, width, height) {
  const range = (view.to - view.from) * tickSeconds;
  const step = niceStep(range, (width - gutter) / 90);
  const digits = Math.max(0, Math.ceil(Math.log10((view.to * tickSeconds) / step)) + 1);
  const [unit, scale] = [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]].find(([, s]) => view.to * tickSeconds >= s) || ["ns", 1e-9];
  pen.font = FONT(11);
  pen.fillStyle = colour("--muted");
  pen.strokeStyle = colour("--faint");
  pen.textAlign = "center";
  for (let at = Math.ceil((view.from * tickSeconds) / step) * step; at <= view.to * tickSeconds * (1 + 1e-12); at += step) {
    const x = gutter + ((at / tickSeconds - view.from) / (view.to - view.from)) * (width - gutter);
    pen.beginPath();
    pen.moveTo(Math.round(x) + 0.5, AXIS - 4);
    pen.lineTo(Math.round(x) + 0.5, height);
    pen.stroke();
    const text = `${Number((at / scale).toPrecision(Math.min(15, digits + 1)))} ${unit}`;
    const half = pen.measureText(text).width / 2;
    pen.fillText(text, Math.max(gutter + half + 3, Math.min(width - half - 3, x)), 11);
  }
}
/* Drag, wheel and keys that timeline and memory share. */
function navigate(canvas, gutter, width, onMove, onClick) {
  const tickAt = (event) => {
    const x = event.clientX - canvas.getBoundingClientRect().left;
    return view.from + ((x - gutter()) / (width() - gutter())) * (view.to - view.from);
  };
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, from: view.from, to: view.to, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag === null) return onMove(event, tickAt(event));
    if (Math.abs(event.clientX - drag.x) > 3) drag.moved = true;
    if (!drag.moved) return undefined;
    hideTip();
    const shift = ((event.clientX - drag.x) / (width() - gutter())) * (drag.to - drag.from);
    return show(drag.from - shift, drag.to - shift);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved && onClick) onClick(event, tickAt(event));
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    // A page that cannot be scrolled past its chart is a trap: the plain wheel zooms only a chart that was clicked.
    if (!sideways && !event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return;
    event.preventDefault();
    if (sideways) pan(((event.deltaX || event.deltaY) / (width() - gutter())) * 1);
    else zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), tickAt(event));
  }, { passive: false });
}
function zoomButtons() {
  const button = (text, label, run) => el("button", { type: "button", "aria-label": label, title: label, on: { click: run } }, text);
  return el(
    "span",
    { class: "buttons", role: "group", "aria-label": "Zoom and pan" },
    button("+", "Zoom in", () => zoom(0.5)),
    button("−", "Zoom out", () => zoom(2)),
    button("←", "Earlier", () => pan(-0.5)),
    button("→", "Later", () => pan(0.5)),
    button("All", "Show the whole step", () => show(0, view.end)),
  );
}
function zoomKey(event) {
  const run = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => show(0, view.end), Home: () => show(0, view.end),
  }[event.key];
  if (!run || event.ctrlKey || event.metaKey || event.altKey) return false;
  event.preventDefault();
  run();
  return true;
}

function drawTimeline() {
  const host = byId("timeline-view");
  const data = content.timeline;
  if (!data.lanes.length) return nothing(host, "This plan has no timeline: it was made without a simulated step.");
  if (!data.spans) nothing(host, "Nothing runs in this timeline: its lanes have no spans.");
  const lanes = data.lanes.map(unpack);
  const active = new Set();
  const legend = el("ul", { class: "legend", "aria-label": "Kinds of work; press one to see it alone" });
  content.kinds.forEach((kind, number) => {
    if (!kind.time_s) return;
    const key = el("button", { type: "button", "aria-pressed": "false" }, swatch(kindColour[number]), kind.name, " ", el("small", {}, seconds(kind.time_s)));
    key.addEventListener("click", () => {
      if (!active.delete(number)) active.add(number);
      key.setAttribute("aria-pressed", String(active.has(number)));
      draw();
    });
    legend.append(el("li", {}, key));
  });
  const canvas = el("canvas", { tabindex: "0", role: "img" });
  const sizer = el("div", {}, canvas);
  const chart = el("div", { class: "chart" }, sizer);
  const details = el("p", { class: "details", role: "status" }, el("span", { class: "note" }, "Point at a span for its operator and source line; click to keep them here."));
  const blocks = el("p", { class: "note" });
  host.append(
    legend,
    el("div", { class: "row" }, zoomButtons(), el("span", { class: "note hint" }, "Drag to pan; Ctrl and wheel to zoom, or the wheel alone after a click. Keys: ", el("kbd", {}, "←"), " ", el("kbd", {}, "→"), " next span, ", el("kbd", {}, "↑"), " ", el("kbd", {}, "↓"), " lane, ", el("kbd", {}, "+"), " ", el("kbd", {}, "−"), " ", el("kbd", {}, "0"), " zoom")),
    chart,
    details,
    blocks,
  );
  if (data.blocks < data.spans) {
    host.append(el("p", { class: "note", id: "joined-note" }, `${whole(data.spans)} spans are kept on this page as ${whole(data.blocks)}: neighbours of a lane were joined, each joined span in the colour of its longest. The plan's file has them all.`));
  }
  canvas.setAttribute("aria-label", `Timeline of ${lanes.length} lanes and ${whole(data.spans)} spans. Arrow keys go from span to span; the table below has the busy time of each lane.`);
  const state = { lane: lanes.findIndex((lane) => lane.n), index: -1 };
  let size = { width: 0, height: 0, gutter: 0 };

  function draw() {
    const width = Math.max(chart.clientWidth, 200);
    const full = AXIS + lanes.length * LANE + 4;
    const height = Math.min(full, 520);
    const gutter = gutterOf(width);
    size = { width, height, gutter };
    sizer.style.height = `${full}px`;
    chart.style.maxHeight = `${height + 2}px`;
    const pen = sizeCanvas(canvas, width, height);
    const colour = colours();
    const palette = kindColour.map(colour);
    const scale = (width - gutter) / (view.to - view.from);
    const scrolled = chart.scrollTop;
    drawAxis(pen, colour, gutter, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(0, AXIS, width, height - AXIS);
    pen.clip();
    let seen = 0;
    let drawn = 0;
    const ink = new Map([...new Set(palette)].map((fill) => [fill, inkOn(fill)]));
    lanes.forEach((lane, number) => {
      const top = AXIS + number * LANE - scrolled;
      if (top > height || top + LANE < AXIS) return;
      pen.strokeStyle = colour("--faint");
      pen.beginPath();
      pen.moveTo(0, top + LANE - 0.5);
      pen.lineTo(width, top + LANE - 0.5);
      pen.stroke();
      pen.font = FONT(11);
      pen.textAlign = "left";
      for (let i = firstAfter(lane, view.from); i < lane.n && lane.start[i] < view.to; ) {
        // Take together what would share a pixel.
        const left = gutter + (lane.start[i] - view.from) * scale;
        let right = gutter + (lane.end[i] - view.from) * scale;
        let longest = i;
        let next = i + 1;
        if (right - left < 1) {
          while (next < lane.n && gutter + (lane.end[next] - view.from) * scale < left + 1.5) {
            if (lane.busy[next] > lane.busy[longest]) longest = next;
            right = Math.max(right, gutter + (lane.end[next] - view.from) * scale);
            next++;
          }
        }
        seen += next - i;
        drawn++;
        const x = Math.max(left, gutter);
        const w = Math.max(Math.min(right, width) - x, 1);
        pen.globalAlpha = active.size && !active.has(lane.kind[longest]) ? 0.15 : 1;
        pen.fillStyle = palette[lane.kind[longest]];
        const gap = w > 4 ? 0.75 : 0;
        pen.fillRect(x, top + 4, w - gap, LANE - 8);
        if (lane.joined[longest] > 1 && w > 3) {
          // Joined spans have a light edge.
          pen.fillStyle = ink.get(palette[lane.kind[longest]]);
          pen.globalAlpha *= 0.45;
          pen.fillRect(x, top + LANE - 7, w - gap, 3);
        }
        if (w > 26) {
          pen.globalAlpha = active.size && !active.has(lane.kind[longest]) ? 0.4 : 1;
          pen.fillStyle = ink.get(palette[lane.kind[longest]]);
          pen.fillText(fitText(pen, data.names[lane.name_[longest]], w - 8), x + 4, top + LANE / 2 + 0.5);
        }
        if (state.lane === number && state.index >= i && state.index < next) {
          pen.globalAlpha = 1;
          pen.strokeStyle = colour("--text");
          pen.lineWidth = 2;
          pen.strokeRect(x, top + 4, Math.max(w, 2), LANE - 8);
          pen.lineWidth = 1;
        }
        i = next;
      }
      pen.globalAlpha = 1;
      pen.fillStyle = colour("--card");
      pen.fillRect(0, top, gutter, LANE - 1);
      pen.fillStyle = colour("--text");
      pen.font = FONT(12);
      pen.fillText(fitText(pen, lane.name, gutter - 14), 8, lane.devices ? top + 11 : top + LANE / 2);
      pen.fillStyle = colour("--muted");
      pen.font = FONT(11);
      if (lane.devices) pen.fillText(fitText(pen, `device ${lane.devices}`.replace(/^device (.*[-,])/, "devices $1"), gutter - 14), 8, top + 24);
    });
    pen.restore();
    pen.strokeStyle = colour("--line");
    pen.beginPath();
    pen.moveTo(gutter - 0.5, 0);
    pen.lineTo(gutter - 0.5, height);
    pen.stroke();
    blocks.textContent = `${whole(seen)} spans from ${atTick(view.from)} to ${atTick(view.to)}`
      + (drawn < seen ? `, drawn as ${whole(drawn)}: those narrower than a pixel are joined. Zoom in to part them.` : ".");
    root.dataset.drawn = String(drawn);
    root.dataset.seen = String(seen);
  }
  redraws.push(draw);

  function spanLines(lane, i) {
    const ops = lane.count[i] === 1 ? "1 operator" : `${whole(lane.count[i])} operators`;
    const joined = lane.joined[i] > 1;
    const busy = seconds(lane.busy[i] * tickSeconds);
    return [
      `${content.kinds[lane.kind[i]].name}, ${joined ? `${busy} busy in ${seconds((lane.end[i] - lane.start[i]) * tickSeconds)}` : busy}, from ${atTick(lane.start[i])}`,
      joined ? `${whole(lane.joined[i])} spans joined, ${ops}; named by the longest` : ops,
      data.sources[lane.source[i]] || "source line unknown",
    ];
  }
  function under(event, tick) {
    const y = event.clientY - canvas.getBoundingClientRect().top;
    const x = event.clientX - canvas.getBoundingClientRect().left;
    const number = Math.floor((y - AXIS + chart.scrollTop) / LANE);
    const lane = lanes[number];
    if (y < AXIS || !lane) return null;
    if (x < size.gutter) return { number, lane, index: -1, shared: 0 };
    const reach = ((view.to - view.from) / (size.width - size.gutter)) * 1.5;
    let index = -1;
    let shared = 0;
    for (let i = firstAfter(lane, tick - reach); i < lane.n && lane.start[i] <= tick + reach; i++) {
      shared++;
      if (lane.start[i] <= tick && tick < lane.end[i] && lane.end[i] - lane.start[i] > reach) return { number, lane, index: i, shared: 1 };
      if (index < 0 || lane.busy[i] > lane.busy[index]) index = i;
    }
    return index < 0 ? null : { number, lane, index, shared };
  }
  function select(number, index) {
    state.lane = number;
    state.index = index;
    const lane = lanes[number];
    details.replaceChildren(el("strong", {}, data.names[lane.name_[index]]), ` in ${lane.name} ${lane.devices}: ${spanLines(lane, index).join("; ")}`);
    if (lane.end[index] < view.from || lane.start[index] > view.to) {
      const half = (view.to - view.from) / 2;
      show(lane.start[index] - half, lane.start[index] + half);
    } else draw();
    const top = number * LANE;
    if (top < chart.scrollTop) chart.scrollTop = top;
    if (top + LANE + AXIS > chart.scrollTop + size.height) chart.scrollTop = top + LANE + AXIS - size.height;
  }
  navigate(canvas, () => size.gutter, () => size.width, (event, tick) => {
    const hit = under(event, tick);
    if (hit === null) return hideTip();
    if (hit.index < 0) return showTip(event, `${hit.lane.name} ${hit.lane.devices}`, [`busy ${seconds(hit.lane.busy_s)}`, `${whole(hit.lane.n)} spans`]);
    const more = hit.shared > 1 ? `${whole(hit.shared)} spans share this pixel; this is the longest` : "";
    return showTip(event, data.names[hit.lane.name_[hit.index]], [...spanLines(hit.lane, hit.index), more]);
  }, (event, tick) => {
    const hit = under(event, tick);
    if (hit && hit.index >= 0) select(hit.number, hit.index);
  });
  canvas.addEventListener("keydown", (event) => {
    if (zoomKey(event)) return;
    const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const lane = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (side === undefined && lane === undefined) return;
    event.preventDefault();
    if (side && event.shiftKey) return void pan(side * 0.25);
    if (state.lane < 0) return;
    if (side) {
      const here = lanes[state.lane];
      const from = state.index < 0 ? firstAfter(here, view.from) - (side > 0 ? 1 : 0) : state.index;
      return void select(state.lane, Math.max(0, Math.min(here.n - 1, from + side)));
    }
    let number = state.lane + lane;
    while (lanes[number] && !lanes[number].n) number += lane;
    if (!lanes[number]) return;
    const tick = state.index < 0 ? view.from : lanes[state.lane].start[state.index];
    select(number, Math.min(firstAfter(lanes[number], tick), lanes[number].n - 1));
  });
  chart.addEventListener("scroll", draw);
  new ResizeObserver(draw).observe(chart);
  draw();

  const total = content.plan.time_s || content.timeline.end_s;
  const lanesHost = el("details", {}, el("summary", { class: "note" }, "Busy time of each lane"));
  host.append(lanesHost);
  table(lanesHost, {
    caption: "Lanes and how much of the step something runs in them",
    rows: lanes,
    first: 40,
    columns: [
      { title: "lane", cell: (lane) => lane.name, value: (lane) => lane.name },
      { title: "devices", cell: (lane) => lane.devices || "link", value: (lane) => lane.devices },
      { title: "spans", number: true, cell: (lane) => whole(lane.joined.reduce((a, b) => a + b, 0)), value: (lane) => lane.n },
      { title: "busy", number: true, cell: (lane) => seconds(lane.busy_s), value: (lane) => lane.busy_s, bar: (lane) => (lane.busy_s === null ? null : lane.busy_s / total) },
      { title: "of the step", number: true, cell: (lane) => percent((lane.busy_s || 0) / total), value: (lane) => lane.busy_s },
    ],
  });
}
