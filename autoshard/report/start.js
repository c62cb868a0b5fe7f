// Draws the page, part by part: one that fails leaves the others.

function drawHeader() {
  const { compute_s: compute, traffic_s: traffic } = content.plan;
  const sum = (compute || 0) + (traffic || 0);
  const bar = byId("time-bar");
  if (sum) bar.append(part(compute / sum, "--k0", `compute ${seconds(compute)}`), part(traffic / sum, "--c0", `collectives ${seconds(traffic)}`));
  const memory = byId("memory-bar");
  const whole_ = Math.max(content.limit, content.plan.peak_bytes, 1);
  for (const [name, field, variable] of PARTS) {
    memory.append(part(content.memory[field] / whole_, variable, `${name} ${bytes(content.memory[field])}`));
  }
}
for (const draw of [drawHeader, drawTimeline, drawMemory, drawShardings, drawCosts, drawTraffic, drawAlternatives]) {
  try {
    draw();
  } catch (error) {
    dispatchEvent(new ErrorEvent("error", { message: `${draw.name}: ${error.message}`, error }));
  }
}
root.dataset.lanes = String(content.timeline.lanes.length);
root.dataset.spans = String(content.timeline.spans);
root.dataset.blocks = String(content.timeline.blocks);
root.dataset.arguments = String(content.folds.reduce((total, fold) => total + fold.numbers.length, 0));
root.dataset.requests = String(performance.getEntriesByType("resource").length);
root.dataset.dark = String(isDark());
root.dataset.ms = (performance.now() - began).toFixed(1);
root.dataset.ready = "yes";
