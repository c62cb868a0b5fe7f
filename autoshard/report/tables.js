// Tables: sortable by their headings, a first stretch of rows drawn, the rest on request.

/* A column is {title, cell(row) -> text or node, value(row) -> what to sort by, css, number, bar(row), colour(row)};
   `after(row)` gives further rows of the table that stand below a row. */
let tables = 0;
function table(host, options) {
  const { columns, caption, first = 60 } = options;
  let rows = options.rows;
  let shown = first;
  let sorted = options.sorted || null;
  const body = el("tbody");
  const heads = columns.map((column, k) => {
    const button = column.value ? el("button", { type: "button", on: { click: () => sortBy(k) } }, column.title) : column.title;
    return el("th", { scope: "col", class: column.number ? "number" : null }, button);
  });
  const more = el("div", { class: "row" });
  // Not a caption element: it would be as wide as the table, and cut off in a narrow window.
  const title = el("p", { class: "note", id: `table-${++tables}` }, caption);
  const frame = el(
    "div",
    { class: "scroll", role: "region", tabindex: "0", "aria-labelledby": title.id },
    el("table", { "aria-labelledby": title.id }, el("thead", {}, el("tr", {}, ...heads)), body),
  );
  host.append(title, frame, more);

  function sortBy(k) {
    const down = sorted && sorted.column === k ? !sorted.down : Boolean(columns[k].number);
    sorted = { column: k, down };
    draw();
  }
  function ordered() {
    if (!sorted) return rows;
    const value = columns[sorted.column].value;
    const keyed = rows.map((row, i) => [value(row), i, row]);
    const sign = sorted.down ? -1 : 1;
    // What has no value stands last either way.
    keyed.sort((a, b) => {
      if (a[0] === null || b[0] === null) return (a[0] === null) - (b[0] === null) || a[1] - b[1];
      return (a[0] < b[0] ? -1 : a[0] > b[0] ? 1 : 0) * sign || a[1] - b[1];
    });
    return keyed.map((each) => each[2]);
  }
  function line(row) {
    const cells = columns.map((column) => {
      const inner = column.bar ? barCell(column.cell(row), column.bar(row), column.colour ? column.colour(row) : "--k0") : column.cell(row);
      return el("td", { class: `${column.number ? "number " : ""}${column.css || ""}` }, inner);
    });
    return el("tr", { class: options.css ? options.css(row) : null }, ...cells);
  }
  function draw() {
    heads.forEach((head, k) => {
      if (sorted && sorted.column === k) head.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    const lines = [];
    for (const row of ordered().slice(0, shown)) {
      const made = line(row);
      lines.push(made);
      if (options.after) lines.push(...options.after(row, made));
    }
    body.replaceChildren(...lines);
    more.replaceChildren();
    const left = rows.length - shown;
    if (left <= 0) return;
    const next = Math.min(left, 200);
    more.append(
      el("span", { class: "note" }, `${whole(shown)} of ${whole(rows.length)} rows are shown.`),
      el("button", { type: "button", on: { click: () => { shown += next; draw(); } } }, `Show ${whole(next)} more`),
    );
    if (left > next) more.append(el("button", { type: "button", on: { click: () => { shown = rows.length; draw(); } } }, "Show all"));
  }
  draw();
  return { draw, set: (found) => { rows = found; shown = first; draw(); }, ordered };
}

function barCell(text, bar, variable) {
  const state = bar === null ? "track none-there" : bar > 1 ? "track cut" : "track";
  const track = el("span", { class: state, "aria-hidden": "true" }, bar === null ? null : part(bar, variable));
  return el("span", { class: "cell-bar" }, track, el("span", {}, text));
}
/* Short ones on one line; long ones break anywhere. */
const codeCell = (text) => el("code", { class: text.length < 40 ? "keep" : null }, text);
function kindCell(name) {
  return el("span", { class: "keep" }, swatch(colourOfKind(name)), ` ${name}`);
}
function sourceCell(line) {
  return line ? el("code", { title: line, class: shortSource(line).length < 40 ? "keep" : null }, shortSource(line)) : el("span", { class: "whole" }, "unknown");
}
function leftOut(host, table, what) {
  const left = table.total - table.rows.length;
  if (left > 0) host.append(el("p", { class: "note" }, `${whole(left)} more ${what} are in the plan's file, not on this page.`));
}

function drawCosts() {
  const host = byId("costs-view");
  const { rows } = content.costs;
  if (!rows.length) return nothing(host, "This plan has no costs by operator: it was made without a simulated step.");
  const most = Math.max(...rows.map((r) => r.time_s || 0), 1e-30);
  const sum = rows.reduce((total, r) => total + (r.time_s || 0), 0) || 1;
  const rate = (r) => (r.flops && r.time_s ? r.flops / r.time_s : null);
  table(host, {
    caption: `${whole(content.costs.total)} operators of a step on one device; bytes are of device memory, of collectives those of whole buffers`,
    rows,
    first: 25,
    sorted: { column: 3, down: true },
    columns: [
      { title: "operator", cell: (r) => el("code", {}, r.name), value: (r) => r.name, css: "path" },
      { title: "kind", cell: (r) => kindCell(r.kind), value: (r) => r.kind },
      { title: "count", number: true, cell: (r) => whole(r.count), value: (r) => r.count },
      { title: "time", number: true, cell: (r) => seconds(r.time_s), value: (r) => r.time_s, bar: (r) => (r.time_s === null ? null : r.time_s / most), colour: (r) => colourOfKind(r.kind) },
      { title: "share", number: true, cell: (r) => percent((r.time_s || 0) / sum), value: (r) => r.time_s },
      { title: "flops", number: true, cell: (r) => flops(r.flops), value: (r) => r.flops },
      { title: "bytes", number: true, cell: (r) => bytes(r.nbytes), value: (r) => r.nbytes },
      { title: "flops/s", number: true, cell: (r) => flops(rate(r)), value: rate },
      { title: "source", cell: (r) => sourceCell(r.source_line), value: (r) => shortSource(r.source_line) },
    ],
  });
  leftOut(host, content.costs, "operators");
}

function drawTraffic() {
  const host = byId("collectives-view");
  const { rows } = content.collectives;
  if (rows.length) {
    const most = Math.max(...rows.map((r) => r.time_s || 0), 1e-30);
    table(host, {
      caption: "By kind and mesh axes; bytes of whole buffers",
      rows,
      sorted: { column: 4, down: true },
      columns: [
        { title: "kind", cell: (r) => kindCell(r.kind), value: (r) => r.kind },
        { title: "axes", cell: (r) => codeCell(r.axes), value: (r) => r.axes },
        { title: "count", number: true, cell: (r) => whole(r.count), value: (r) => r.count },
        { title: "bytes", number: true, cell: (r) => bytes(r.nbytes), value: (r) => r.nbytes },
        { title: "time", number: true, cell: (r) => seconds(r.time_s), value: (r) => r.time_s, bar: (r) => (r.time_s === null ? null : r.time_s / most), colour: (r) => colourOfKind(r.kind) },
      ],
    });
    leftOut(host, content.collectives, "collectives");
  } else nothing(host, "No collectives: the devices do not talk to each other in a step.");

  const place = byId("reshardings-view");
  const points = content.reshardings.rows;
  if (!points.length) return nothing(place, "No resharding points: every value is read in the sharding in which it is made.");
  const dearest = Math.max(...points.map((r) => r.time_s || 0), 1e-30);
  table(place, {
    caption: `${whole(content.reshardings.total)} points at which a value moves from one sharding to another`,
    rows: points,
    first: 20,
    sorted: { column: 6, down: true },
    columns: [
      { title: "value", cell: (r) => el("code", {}, r.what), value: (r) => r.what, css: "prose" },
      { title: "from", cell: (r) => codeCell(r.source), value: (r) => r.source },
      { title: "to", cell: (r) => codeCell(r.target), value: (r) => r.target },
      { title: "by", cell: (r) => r.kinds || "slicing", value: (r) => r.kinds },
      { title: "times", number: true, cell: (r) => whole(r.times), value: (r) => r.times },
      { title: "bytes", number: true, cell: (r) => bytes(r.nbytes), value: (r) => r.nbytes },
      { title: "time", number: true, cell: (r) => seconds(r.time_s), value: (r) => r.time_s, bar: (r) => (r.time_s === null ? null : r.time_s / dearest), colour: () => "--c0" },
      { title: "source", cell: (r) => sourceCell(r.source_line), value: (r) => shortSource(r.source_line) },
    ],
  });
  leftOut(place, content.reshardings, "resharding points");
}

// Bars of times far beyond the plan's would leave the others without length: they end in a notch.
const LONGEST = 5;

function drawAlternatives() {
  const host = byId("alternatives-view");
  const found = content.alternatives.rows;
  const own = { name: "this plan", note: "", chosen: true, ...content.plan };
  if (!found.length) nothing(host, "No alternatives were kept with this plan.");
  const rows = [own, ...found];
  const finite = rows.map((r) => r.time_s).filter((t) => t !== null);
  const base = own.time_s || Math.min(...finite) || 1e-30;
  const scale = Math.min(Math.max(...finite, 1e-30), LONGEST * base);
  const limit = content.limit;
  const most = Math.max(limit, ...rows.map((r) => r.peak_bytes).filter((peak) => peak <= 3 * limit), 1);
  const fits = (r) => limit <= 0 || r.peak_bytes <= limit;
  const memoryNeeded = Math.max(...rows.map((r) => r.peak_bytes));
  const span = memoryNeeded < limit / 20 ? Math.max(memoryNeeded, 1) : most;
  const REFUSAL = "does not fit";
  const remark = (r) => {
    if (fits(r)) return r.note;
    const rest = r.note.startsWith(REFUSAL) ? r.note.slice(REFUSAL.length) : ` ${r.note}`;
    return el("span", {}, el("span", { class: "badge bad" }, REFUSAL), rest);
  };
  table(host, {
    caption: `Step time and peak memory of a device, best first; the limit is ${bytes(limit)}`,
    rows,
    first: 40,
    css: (r) => (r.chosen ? "chosen" : null),
    columns: [
      { title: "plan", cell: (r) => (r.chosen ? el("span", {}, r.name, " ", el("span", { class: "badge good" }, "chosen")) : r.name), css: "prose" },
      { title: "step time", number: true, cell: (r) => (r.time_s === null ? "no time" : seconds(r.time_s)), value: (r) => r.time_s, bar: (r) => (r.time_s === null ? null : r.time_s / scale), colour: (r) => (r.chosen ? "--k0" : "--k3") },
      { title: "of the plan's", number: true, cell: (r) => (r.time_s === null || !own.time_s ? "–" : `${times(r.time_s / own.time_s)}×`), value: (r) => r.time_s },
      { title: "peak memory", number: true, cell: (r) => (r.peak_bytes ? bytes(r.peak_bytes) : "none"), value: (r) => r.peak_bytes, bar: (r) => (r.peak_bytes ? r.peak_bytes / span : null), colour: (r) => (fits(r) ? (r.chosen ? "--k0" : "--k3") : "--bad") },
      { title: "note", cell: remark, css: "prose" },
    ],
  });
  const remarks = [];
  if (rows.some((r) => r.time_s > scale || r.peak_bytes > span)) {
    remarks.push(`Bars that end in a notch are cut: times at ${times(scale / base)} times the plan's, memory at ${bytes(span)}.`);
  }
  if (rows.some((r) => r.time_s === null)) remarks.push("Hatched: there is no estimate.");
  if (remarks.length) host.append(el("p", { class: "note" }, remarks.join(" ")));
  leftOut(host, content.alternatives, "alternatives");
}

// ---- shardings

const axisColour = new Map(content.mesh.map(([axis], k) => [axis, ["--k0", "--c0", "--k4", "--c2", "--k1"][k % 5]]));

function specCell(spec) {
  const made = el("code", { class: "keep" }, "(");
  spec.forEach((axes, dim) => {
    if (dim) made.append(", ");
    if (!axes.length) made.append(el("span", { class: "whole" }, "-"));
    axes.forEach((axis, k) => {
      const name = el("b", {}, axis);
      name.style.color = `var(${axisColour.get(axis) || "--text"})`;
      made.append(k ? "+" : "", name);
    });
  });
  made.append(")");
  return made;
}
const specText = (spec) => `(${spec.map((axes) => axes.join("+") || "-").join(",")})`;
const pathOf = (fold, row) => fold.texts.reduce((text, piece, k) => text + row[k - 1] + piece);

function rangeText(numbers) {
  const found = [...new Set(numbers)];
  if (found.length === 1) return null;
  const sorted = found.map(Number).sort((a, b) => a - b);
  const dense = sorted[sorted.length - 1] - sorted[0] === sorted.length - 1;
  if (dense || found.length > 4) return `{${sorted[0]}–${sorted[sorted.length - 1]}}${dense ? "" : "*"}`;
  return `{${sorted.join(",")}}`;
}
function patternCell(fold) {
  const made = el("code", {}, fold.texts[0]);
  fold.texts.slice(1).forEach((text, k) => {
    const range = rangeText(fold.numbers.map((row) => row[k]));
    made.append(range === null ? fold.numbers[0][k] : el("span", { class: "range" }, range), text);
  });
  return made;
}

function drawShardings() {
  const host = byId("shardings-view");
  const folds = content.folds;
  if (!folds.length) return nothing(host, "This plan has no arguments and no results.");
  for (const fold of folds) {
    fold.paths = fold.numbers.map((row) => pathOf(fold, row));
    fold.pattern = fold.paths[0];
    fold.rest = `${fold.type} ${specText(fold.spec)} ${fold.role}`;
    fold.found = fold.paths;
    fold.open = 0;
  }
  const all = folds.reduce((total, fold) => total + fold.paths.length, 0);
  const filter = el("input", { type: "search", id: "filter", placeholder: "kernel   layers/*/mlp   bf16   data", autocomplete: "off", spellcheck: "false" });
  const role = el("select", { id: "role" }, ...["all", "state", "input", "output"].map((name) => el("option", { value: name }, name)));
  const count = el("span", { class: "note", role: "status" });
  host.append(
    el("div", { class: "row" }, el("label", { for: "filter" }, "Filter"), filter, el("span", { class: "keep" }, el("label", { for: "role" }, "Role "), role), count),
  );
  const share = (fold) => (fold.local === fold.bytes || !fold.local ? "whole" : `1/${times(fold.bytes / fold.local)}`);
  const sum = (fold) => fold.local * fold.found.length;
  const most = Math.max(...folds.map((fold) => fold.local * fold.paths.length), 1);
  let view = null;
  function toggle(fold) {
    fold.open = fold.open ? 0 : 50;
    view.draw();
    const button = host.querySelector(`[data-fold="${folds.indexOf(fold)}"]`);
    if (button) button.focus();
  }
  function pathCell(fold) {
    if (fold.found.length < 2) return el("span", {}, el("span", { class: "nofold" }), el("code", {}, fold.found[0]));
    const button = el(
      "button",
      { type: "button", class: "fold", "aria-expanded": String(fold.open > 0), "aria-label": `paths of ${fold.pattern} and ${fold.found.length - 1} like it`, "data-fold": String(folds.indexOf(fold)), on: { click: () => toggle(fold) } },
      fold.open ? "▾" : "▸",
    );
    const some = fold.found.length < fold.paths.length ? `${whole(fold.found.length)} of ${whole(fold.paths.length)}` : whole(fold.found.length);
    return el("span", {}, button, patternCell(fold), " ", el("span", { class: "count" }, `× ${some}`));
  }
  function members(fold) {
    if (!fold.open || fold.found.length < 2) return [];
    const lines = fold.found.slice(0, fold.open).map((path) => el("tr", { class: "member" }, el("td", { colspan: "7" }, el("code", {}, path))));
    const left = fold.found.length - fold.open;
    if (left > 0) {
      const more = el("button", { type: "button", on: { click: () => { fold.open += 500; view.draw(); } } }, `Show ${whole(Math.min(left, 500))} more of ${whole(left)}`);
      lines.push(el("tr", { class: "member" }, el("td", { colspan: "7" }, more)));
    }
    return lines;
  }
  view = table(host, {
    caption: "Arguments and results; those that differ only in numbers are one row",
    rows: folds,
    first: 60,
    sorted: { column: 5, down: true },
    after: members,
    columns: [
      { title: "path", cell: pathCell, value: (f) => f.pattern, css: "path" },
      { title: "type", cell: (f) => codeCell(f.type), value: (f) => f.type },
      { title: "sharding", cell: (f) => specCell(f.spec), value: (f) => specText(f.spec) },
      { title: "each, whole", number: true, cell: (f) => bytes(f.bytes), value: (f) => f.bytes },
      { title: "each, on a device", number: true, cell: (f) => el("span", {}, bytes(f.local), " ", el("span", { class: "whole" }, share(f))), value: (f) => f.local },
      { title: "all, on a device", number: true, cell: (f) => bytes(sum(f)), value: sum, bar: (f) => sum(f) / most, colour: (f) => (f.role.startsWith("state") ? "--state" : f.role.startsWith("input") ? "--inputs" : "--outputs") },
      { title: "role", cell: (f) => f.role, value: (f) => f.role, css: "keep" },
    ],
  });
  function words() {
    return filter.value.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
      if (!word.includes("*")) return (text) => text.includes(word);
      const parts = word.split("*").map((piece) => piece.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
      const made = new RegExp(parts.join(".*"));
      return (text) => made.test(text);
    });
  }
  function apply() {
    const tests = words();
    let left = 0;
    const rows = [];
    for (const fold of folds) {
      const there = role.value === "all" || fold.role.startsWith(role.value);
      fold.found = !there ? [] : tests.length ? fold.paths.filter((path) => {
        const text = `${path} ${fold.rest}`.toLowerCase();
        return tests.every((test) => test(text));
      }) : fold.paths;
      left += fold.found.length;
      if (fold.found.length) rows.push(fold);
    }
    view.set(rows);
    count.textContent = `${left === all ? whole(all) : `${whole(left)} of ${whole(all)}`} arguments and results in ${whole(rows.length)} rows`;
    root.dataset.rows = String(rows.length);
    root.dataset.matched = String(left);
  }
  filter.addEventListener("input", apply);
  role.addEventListener("change", apply);
  apply();
  if (content.folds_left_out) {
    host.append(el("p", { class: "note" }, `${whole(content.folds_left_out)} more, which take least of a device, are in the plan's file, not on this page.`));
  }
}
