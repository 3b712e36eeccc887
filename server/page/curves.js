// Budget, committed, live and cached over the last minutes: what this page has seen, and no more.

import { bytes } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const WINDOW_S = 180;
const SHORTEST_WINDOW_S = 30;
const GAP_S = 5;
const HEIGHT = 168;
const MARGIN = { top: 10, right: 148, bottom: 20, left: 8 };
const LABEL_GAP = 15;
// A budget that is far above everything else would press the rest to the ground.
const BUDGET_FITS = 2.5;
const CURVES = [
  ["capacity", "Budget"],
  ["committed", "Committed"],
  ["live", "Live"],
  ["cached", "Cached"],
];

function svg(kind, attributes, text = "") {
  const element = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

// A round number of bytes that three or four lines fit under.
export function gridStep(most) {
  const unit = 1024 ** Math.floor(Math.log(Math.max(most, 1)) / Math.log(1024));
  for (const factor of [0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 256, 512]) {
    if (factor * unit * 4 >= most) return factor * unit;
  }
  return 1024 * unit;
}

export class Curves {
  samples = [];
  #target;

  constructor(target) {
    this.#target = target;
    new ResizeObserver(() => this.draw()).observe(target);
  }

  clear() {
    this.samples = [];
  }

  add(time, pool) {
    const [capacity, committed, cached] = [pool.capacity_bytes, pool.committed_bytes, pool.cached_bytes];
    this.samples.push({ time, capacity, committed, live: pool.live_bytes, cached });
    while (this.samples[0].time < time - WINDOW_S) this.samples.shift();
  }

  draw() {
    const width = this.#target.clientWidth;
    if (width === 0 || this.samples.length === 0) return;
    const newest = this.samples[this.samples.length - 1];
    const highest = Math.max(1, ...this.samples.map((s) => Math.max(s.committed, s.live, s.cached)));
    const budgetFits = newest.capacity <= highest * BUDGET_FITS;
    const most = (budgetFits ? newest.capacity : highest) * 1.08;
    const right = width - MARGIN.right;
    // As long as there is something to show, in steps, so that the picture moves calmly.
    const seen = newest.time - this.samples[0].time;
    const span = [SHORTEST_WINDOW_S, 60, 120, WINDOW_S].find((s) => s >= seen) ?? WINDOW_S;
    const x = (time) => MARGIN.left + (1 - (newest.time - time) / span) * (right - MARGIN.left);
    const y = (value) => HEIGHT - MARGIN.bottom - (value / most) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    const picture = svg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}` });
    const step = gridStep(most);
    for (let value = 0; value <= most; value += step) {
      picture.append(svg("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y(value), y2: y(value) }));
      if (value > 0) {
        picture.append(svg("text", { class: "tick", x: MARGIN.left, y: y(value) - 4 }, bytes(value)));
      }
    }
    const foot = HEIGHT - 5;
    picture.append(svg("text", { class: "tick", x: MARGIN.left, y: foot }, span < 60 ? `${span} s ago` : `${span / 60} min ago`));
    picture.append(svg("text", { class: "tick end", x: right, y: foot }, "now"));
    const labels = [];
    for (const [name, title] of CURVES) {
      const above = name === "capacity" && !budgetFits;
      if (!above) picture.append(svg("path", { class: `curve ${name}`, d: this.#path(name, x, y) }));
      const place = above ? MARGIN.top : y(newest[name]);
      labels.push({ name, place, text: `${title} ${bytes(newest[name])}${above ? " ↑" : ""}` });
    }
    labels.sort((one, other) => one.place - other.place);
    let lowest = -Infinity;
    for (const label of labels) lowest = label.at = Math.max(label.place, lowest + LABEL_GAP);
    let highestFree = HEIGHT - MARGIN.bottom + 4;
    for (const label of labels.reverse()) {
      label.at = Math.min(label.at, highestFree);
      highestFree = label.at - LABEL_GAP;
      picture.append(
        svg("path", { class: `curve ${label.name}`, d: `M${right + 5} ${label.at}H${right + 19}` }),
        svg("text", { class: "label", x: right + 24, y: label.at + 4 }, label.text),
      );
    }
    this.#target.replaceChildren(picture);
    const words = CURVES.map(([name, title]) => `${title} ${bytes(newest[name])}`).join(", ");
    this.#target.setAttribute("aria-label", `Memory over the last three minutes; now: ${words}`);
  }

  #path(name, x, y) {
    let path = "";
    let before = -Infinity;
    for (const sample of this.samples) {
      const kind = sample.time - before > GAP_S ? "M" : "L";
      path += `${kind}${x(sample.time).toFixed(1)} ${y(sample[name]).toFixed(1)}`;
      before = sample.time;
    }
    return path;
  }
}
