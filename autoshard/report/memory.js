// Memory of a device over the step, under the same zoom as the timeline.

const PARTS = [
  ["state", "state_bytes", "--state"],
  ["inputs", "inputs_bytes", "--inputs"],
  ["outputs", "outputs_bytes", "--outputs"],
  ["temporaries", "temporary_bytes", "--temporary"],
];
const peakOf = (curve) => curve.points.reduce((most, value, k) => (k % 2 && value > most ? value : most), 0);

function drawParts(host) {
  const sum = content.plan.peak_bytes;
  const bar = el("div", { class: "bar", "aria-hidden": "true" });
  const legend = el("ul", { class: "legend" });
  for (const [name, field, variable] of PARTS) {
    const value = content.memory[field];
    if (sum) bar.append(part(value / sum, variable, `${name} ${bytes(value)}`));
    legend.append(el("li", {}, el("span", { class: "key" }, swatch(variable), name, " ", el("small", {}, bytes(value)))));
  }
  host.append(el("p", { class: "note" }, `The plan's peak, ${bytes(sum)}, by part; the limit is ${bytes(content.limit)}:`), bar, legend);
}

function drawMemory() {
  const host = byId("memory-view");
  drawParts(host);
  const curves = content.timeline.curves.filter((curve) => curve.points.length);
  if (!curves.length) return nothing(host, "This plan has no memory over time: it was made without a simulated step. The parts above are those at the peak.");
  curves.forEach((curve) => { curve.peak = peakOf(curve); });
  // State and inputs are those of the fullest devices; other groups may hold other amounts.
  const fullest = curves.reduce((best, curve) => (curve.peak > best.peak ? curve : best));
  let chosen = fullest;
  const need = Math.max(...curves.map((curve) => curve.peak));
  const nameOf = (curve) => (/[-,]/.test(curve.devices) ? `devices ${curve.devices}` : `device ${curve.devices}`);

  const limitBox = el("input", { type: "checkbox", id: "limit-box" });
  limitBox.checked = content.limit > 0 && need > content.limit * 0.2;
  const controls = el("div", { class: "row" });
  if (curves.length > 1) {
    const pick = el("select", { id: "group" }, ...curves.map((curve, k) => el("option", { value: String(k) }, `${nameOf(curve)}: ${bytes(curve.peak)}`)));
    pick.value = String(curves.indexOf(chosen));
    pick.addEventListener("change", () => { chosen = curves[Number(pick.value)]; draw(); });
    controls.append(el("label", { for: "group" }, "Devices and peak"), pick);
  }
  controls.append(zoomButtons());
  if (content.limit > 0) controls.append(el("span", {}, limitBox, " ", el("label", { for: "limit-box" }, "up to the limit")));
  limitBox.addEventListener("change", draw);
  const canvas = el("canvas", { tabindex: "0", role: "img" });
  const chart = el("div", { class: "chart" }, canvas);
  const note = el("p", { class: "note" });
  host.append(controls, chart, note);
  let size = { width: 0, height: 0, gutter: 0 };

  function draw() {
    const width = Math.max(chart.clientWidth, 200);
    const height = 250;
    const gutter = gutterOf(width);
    size = { width, height, gutter };
    const pen = sizeCanvas(canvas, width, height);
    const colour = colours();
    drawAxis(pen, colour, gutter, width, height);
    const toLimit = limitBox.checked;
    const top = Math.max(need, toLimit ? content.limit : 0, 1) * 1.06;
    const y = (value) => height - 8 - (value / top) * (height - AXIS - 16);
    const x = (tick) => gutter + ((tick - view.from) / (view.to - view.from)) * (width - gutter);
    pen.font = FONT(11);
    pen.textAlign = "right";
    const unit = 1024 ** Math.floor(Math.log2(top) / 10);
    const step = niceStep(top / unit, 5) * unit;
    for (let value = 0; value <= top; value += step) {
      pen.strokeStyle = colour("--faint");
      pen.beginPath();
      pen.moveTo(gutter, Math.round(y(value)) + 0.5);
      pen.lineTo(width, Math.round(y(value)) + 0.5);
      pen.stroke();
      pen.fillStyle = colour("--muted");
      pen.fillText(bytes(value), gutter - 8, y(value));
    }
    pen.save();
    pen.beginPath();
    pen.rect(gutter, AXIS - 6, width - gutter, height - AXIS + 6);
    pen.clip();
    const area = (curve, below, above) => {
      const points = curve.points;
      const cap = (value) => Math.max(below, Math.min(value, above));
      pen.beginPath();
      pen.moveTo(x(points[0]), y(below));
      for (let k = 0; k < points.length; k += 2) {
        pen.lineTo(x(points[k]), y(cap(points[k + 1])));
        pen.lineTo(x(k + 2 < points.length ? points[k + 2] : view.end), y(cap(points[k + 1])));
      }
      pen.lineTo(x(view.end), y(below));
      pen.closePath();
      pen.fill();
    };
    const line = (curve) => {
      const points = curve.points;
      pen.beginPath();
      for (let k = 0; k < points.length; k += 2) {
        if (k === 0) pen.moveTo(x(points[0]), y(points[1]));
        else pen.lineTo(x(points[k]), y(points[k + 1]));
        pen.lineTo(x(k + 2 < points.length ? points[k + 2] : view.end), y(points[k + 1]));
      }
      pen.stroke();
    };
    pen.globalAlpha = 0.8;
    if (chosen === fullest) {
      const state = content.memory.state_bytes;
      const inputs = state + content.memory.inputs_bytes;
      pen.fillStyle = colour("--state");
      area(chosen, 0, state);
      pen.fillStyle = colour("--inputs");
      area(chosen, state, inputs);
      pen.fillStyle = colour("--temporary");
      area(chosen, inputs, Infinity);
    } else {
      pen.fillStyle = colour("--k3");
      area(chosen, 0, Infinity);
    }
    pen.globalAlpha = 1;
    if (curves.length <= 32) {
      pen.strokeStyle = colour("--muted");
      pen.globalAlpha = 0.4;
      curves.forEach((curve) => { if (curve !== chosen) line(curve); });
      pen.globalAlpha = 1;
    }
    pen.strokeStyle = colour("--text");
    pen.lineWidth = 1.25;
    line(chosen);
    if (content.limit > 0 && content.limit <= top) {
      pen.strokeStyle = colour("--bad");
      pen.lineWidth = 1.5;
      pen.setLineDash([6, 4]);
      pen.beginPath();
      pen.moveTo(gutter, y(content.limit));
      pen.lineTo(width, y(content.limit));
      pen.stroke();
      pen.setLineDash([]);
      pen.textAlign = "right";
      pen.fillStyle = colour("--bad");
      pen.fillText(`limit ${bytes(content.limit)}`, width - 8, y(content.limit) + (y(content.limit) < AXIS + 16 ? 10 : -9));
    }
    pen.restore();
    pen.lineWidth = 1;
    const bands = chosen === fullest
      ? "Blue and cyan are state and inputs, as at the plan's peak; above them are temporaries and outputs."
      : "State and inputs are known for the fullest devices only, so this curve has no parts.";
    const parts = [`${nameOf(chosen)}: peak ${bytes(chosen.peak)}`];
    if (content.limit > 0) parts[0] += `, ${percent(chosen.peak / content.limit)} of the limit of ${bytes(content.limit)}`;
    parts[0] += chosen.peak > content.limit && content.limit > 0 ? ": does not fit." : ".";
    parts.push(bands);
    if (curves.length > 1 && curves.length <= 32) parts.push("Faint lines are the other groups of devices.");
    const kept = chosen.points.length / 2;
    if (kept < chosen.total) parts.push(`${whole(chosen.total)} points are drawn as ${whole(kept)}, of each stretch the highest.`);
    note.textContent = parts.join(" ");
    canvas.setAttribute("aria-label", `Memory over time of ${parts[0]}`);
  }
  redraws.push(draw);
  navigate(canvas, () => size.gutter, () => size.width, (event, tick) => {
    if (tick < view.from || tick > view.to) return hideTip();
    const points = chosen.points;
    let k = 0;
    while (k + 2 < points.length && points[k + 2] <= tick) k += 2;
    const used = points[k + 1];
    return showTip(event, bytes(used), [`at ${atTick(tick)}, ${nameOf(chosen)}`, content.limit > 0 ? `${percent(used / content.limit)} of the limit` : ""]);
  });
  canvas.addEventListener("keydown", (event) => {
    if (zoomKey(event)) return;
    const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!side) return;
    event.preventDefault();
    pan(side * 0.25);
  });
  new ResizeObserver(draw).observe(chart);
  draw();
}
