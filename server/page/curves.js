// Draws curves of KV cache bytes (budget, committed, live, cached) that this page polled in the last three minutes.

import { at } from "./element.js";
import { bytes } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const WINDOWS_S = [30, 60, 120, 180];
const GAP_S = 5;
const HEIGHT = 168;
const MARGIN = { top: 10, right: 148, bottom: 20, left: 8 };
const LABEL_GAP = 15;
// A budget above this multiple of the highest other value is left off the scale, since it would flatten the curves.
const BUDGET_FITS = 2.5;
const CURVES = [
  ["capacity", "Budget"],
  ["committed", "Committed"],
  ["live", "Live"],
  ["cached", "Cached"],
];

const target = at("curves");
let samples = [];

new ResizeObserver(draw).observe(target);

export function clear() {
  samples = [];
}

export function add(time, pool) {
  const figures = CURVES.map(([name]) => [name, pool[`${name}_bytes`]]);
  samples.push({ time, ...Object.fromEntries(figures) });
  samples = samples.filter((sample) => sample.time >= time - WINDOWS_S.at(-1));
}

export function draw() {
  const width = target.clientWidth;
  if (width === 0 || samples.length === 0) return;
  const newest = samples.at(-1);
  const highest = Math.max(1, ...samples.flatMap(({ committed, live, cached }) => [committed, live, cached]));
  const budgetFits = newest.capacity <= highest * BUDGET_FITS;
  const most = (budgetFits ? newest.capacity : highest) * 1.08;
  const right = width - MARGIN.right;
  // The time that the chart shows grows in steps, so that the chart does not move with each sample.
  const seen = newest.time - samples[0].time;
  const span = WINDOWS_S.find((window) => window >= seen) ?? WINDOWS_S.at(-1);
  const x = (time) => MARGIN.left + (1 - (newest.time - time) / span) * (right - MARGIN.left);
  const y = (value) => HEIGHT - MARGIN.bottom - (value / most) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const picture = makeSvg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}` });
  const put = (...parts) => picture.append(makeSvg(...parts));
  const step = gridStep(most);
  for (let value = 0; value <= most; value += step) {
    put("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y(value), y2: y(value) });
    if (value > 0) put("text", { class: "tick", x: MARGIN.left, y: y(value) - 4 }, bytes(value));
  }
  const begin = span < 60 ? `${span} s ago` : `${span / 60} min ago`;
  put("text", { class: "tick", x: MARGIN.left, y: HEIGHT - 5 }, begin);
  put("text", { class: "tick end", x: right, y: HEIGHT - 5 }, "now");
  const labels = CURVES.map(([name, title]) => {
    const above = name === "capacity" && !budgetFits;
    if (!above) put("path", { class: `curve ${name}`, d: pathOf(name, x, y) });
    const place = above ? MARGIN.top : y(newest[name]);
    return { name, place, text: `${title} ${bytes(newest[name])}${above ? " ↑" : ""}` };
  });
  spread(labels);
  for (const { name, place, text } of labels) {
    put("path", { class: `curve ${name}`, d: `M${right + 5} ${place}H${right + 19}` });
    put("text", { class: "label", x: right + 24, y: place + 4 }, text);
  }
  target.replaceChildren(picture);
  const words = CURVES.map(([name, title]) => `${title} ${bytes(newest[name])}`).join(", ");
  target.ariaLabel = `Memory over the last three minutes; now: ${words}`;
}

// Moves the curves' labels apart if they overlap.
function spread(labels) {
  labels.sort((one, other) => one.place - other.place);
  let lowest = -Infinity;
  for (const label of labels) lowest = label.place = Math.max(label.place, lowest + LABEL_GAP);
  let highest = HEIGHT - MARGIN.bottom + 4 + LABEL_GAP;
  for (const label of labels.reverse()) highest = label.place = Math.min(label.place, highest - LABEL_GAP);
}

function pathOf(name, x, y) {
  let path = "";
  let before = -Infinity;
  for (const sample of samples) {
    const kind = sample.time - before > GAP_S ? "M" : "L";
    path += `${kind}${x(sample.time).toFixed(1)} ${y(sample[name]).toFixed(1)}`;
    before = sample.time;
  }
  return path;
}

// Returns the bytes between two grid lines: the smallest round number that reaches most (the top value) in four steps.
export function gridStep(most) {
  const unit = 1024 ** Math.floor(Math.log(Math.max(most, 1)) / Math.log(1024));
  const factors = [0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 256, 512, 1024];
  return unit * factors.find((factor) => factor * unit * 4 >= most);
}

function makeSvg(kind, attributes, text = "") {
  const element = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}
