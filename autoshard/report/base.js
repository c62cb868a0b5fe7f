"use strict";
// Everything below is one script. Text from the plan reaches the page as text nodes only, never as markup.
const began = performance.now();
const root = document.documentElement;
root.dataset.errors = "0";
root.dataset.violations = "0";

function trouble(text) {
  const place = document.getElementById("trouble");
  place.hidden = false;
  place.textContent = text;
}
addEventListener("error", (event) => {
  root.dataset.errors = String(Number(root.dataset.errors) + 1);
  root.dataset.error = String(event.message);
  trouble(`A part of this page could not be drawn: ${event.message}`);
});
addEventListener("securitypolicyviolation", () => {
  root.dataset.violations = String(Number(root.dataset.violations) + 1);
});

const content = JSON.parse(document.getElementById("content").textContent);

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, run] of Object.entries(value)) made.addEventListener(event, run);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
const byId = (id) => document.getElementById(id);

// Units as in the printed plan.
function three(value, digits = 3) {
  const text = value >= 10 ** digits ? value.toFixed(0) : value.toPrecision(digits);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}
function seconds(value) {
  if (value === null) return "none";
  const size = Math.abs(value);
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]]) {
    if (size >= scale) return `${three(value / scale)} ${unit}`;
  }
  return value ? `${three(value / 1e-9)} ns` : "0 s";
}
function scaled(value, base, units, unit, digits) {
  if (value === null) return "none";
  for (let power = units.length; power > 0; power--) {
    if (value >= base ** power) return `${three(value / base ** power, digits)} ${units[power - 1]}${unit}`;
  }
  return `${three(value, digits)} ${unit}`.trim();
}
const bytes = (value) => (value === 0 ? "0 B" : scaled(value, 1024, ["Ki", "Mi", "Gi", "Ti"], "B", 4));
const flops = (value) => (value ? scaled(value, 1000, ["k", "M", "G", "T", "P", "E"], "") : "–");
const whole = (value) => Math.round(value).toLocaleString("en-US");
const times = (value) => (value >= 100 ? whole(value) : three(value));
const percent = (value) => (value > 0 && value < 0.001 ? "<0.1%" : `${(100 * value).toFixed(1)}%`);
const shortSource = (line) => line.replace(/^.*[\\/]/, "");

// Kinds that most plans have keep their colour; others take what is left, the dearest first.
const FIXED = {
  matmul: "k0", elementwise: "k1", reduce: "k2", move: "k3",
  all_reduce: "c0", all_gather: "c1", reduce_scatter: "c2", all_to_all: "c3", permute: "c4",
};
const kindColour = (() => {
  const taken = new Set(content.kinds.map((kind) => FIXED[kind.name]));
  return content.kinds.map((kind) => {
    if (Object.hasOwn(FIXED, kind.name)) return `--${FIXED[kind.name]}`;
    const names = kind.collective ? ["c5", "c4", "c3"] : ["k4", "k5", "k6", "k7", "k3", "k2"];
    const free = names.find((name) => !taken.has(name));
    taken.add(free);
    return free ? `--${free}` : "--other";
  });
})();
const kindNumber = new Map(content.kinds.map((kind, number) => [kind.name, number]));
const colourOfKind = (name) => (kindNumber.has(name) ? kindColour[kindNumber.get(name)] : "--other");

function swatch(variable, line) {
  const made = el("span", { class: line ? "swatch line" : "swatch", "aria-hidden": "true" });
  if (line) made.style.borderColor = `var(${variable})`;
  else made.style.background = `var(${variable})`;
  return made;
}
function part(fraction, variable, title) {
  const made = el("i", { title });
  made.style.width = `${Math.max(0, Math.min(1, fraction)) * 100}%`;
  made.style.background = `var(${variable})`;
  return made;
}
function nothing(host, text) {
  host.append(el("p", { class: "none" }, text));
}

// One floating box for whatever the pointer is over.
const tip = el("div", { id: "tip", hidden: true, role: "tooltip" });
document.body.append(tip);
function showTip(event, title, lines) {
  tip.replaceChildren(el("b", {}, title), ...lines.filter(Boolean).map((line) => el("span", {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - 14 - box.width : event.clientX + 14;
  const top = event.clientY + 16 + box.height > innerHeight ? event.clientY - 12 - box.height : event.clientY + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}
function hideTip() {
  tip.hidden = true;
}

// Canvases have no style sheet: they are drawn anew when the colours change.
const redraws = [];
const redrawAll = () => redraws.forEach((draw) => draw());
const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
dark.addEventListener("change", () => { showTheme(); redrawAll(); });
function showTheme() {
  byId("theme").setAttribute("aria-pressed", String(isDark()));
}
byId("theme").addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  showTheme();
  redrawAll();
});
showTheme();
