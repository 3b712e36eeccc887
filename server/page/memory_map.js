// The memory map: one cell for each KV cache block. A colour stands for a sequence, a shape for a block's state.

import { at, make } from "./element.js";
import { count, hue } from "./format.js";

const LARGEST_PX = 22;
const SMALLEST_PX = 3;
const SHAPES_FROM_PX = 7;
const COMFORTABLE_PX = 400;
const LABEL_PX = 30;
const LABEL_HIGH_PX = 12;
// When the cells fill the width, a gap between two cells grows by at most this many pixels.
const WIDER_PX = 2;
const SAMPLE_PX = 14;

// Matches a heap whose blocks are all free. The map leaves such heaps out, so it grows as heaps come into use.
export const IDLE_HEAP = /^[fd]*$/;

// Letters of block states in GET /memory -> words for the legend. A second text, if given, describes a single block.
const STATES = {
  o: ["being written"],
  s: ["sealed"],
  shared: ["shared by several"],
  c: ["cached"],
  q: ["quarantined"],
  r: ["going back", "on its way back to the system"],
  d: ["free, holds memory", "free, still holding memory"],
  f: ["free", "free, without memory"],
};
const PLAIN = { s: "In use", c: "Kept for reuse", f: "Free" };
// Letters of block states -> the lines that mark a cell of that state, as points in a cell of size 1.
const MARKS = {
  c: [[[0, 1], [1, 0]]],
  q: [[[0, 0], [1, 1]], [[1, 0], [0, 1]]],
  r: [[[0.2, 0.6], [0.5, 0.25], [0.8, 0.6]]],
};

// CSS properties with colours. They are registered so that light-dark() becomes one colour, as a canvas needs.
const COLOURS = {
  f: "--cell-free",
  r: "--cell-free",
  d: "--cell-dirty",
  c: "--cell-cached",
  q: "--cell-quarantined",
  mark: "--cell-mark",
  notch: "--surface",
  text: "--muted",
};
for (const name of new Set(Object.values(COLOURS))) {
  CSS.registerProperty({ name, syntax: "<color>", inherits: true, initialValue: "transparent" });
}

const map = at("map");
const canvas = at("map-canvas");
const cursor = at("map-cursor");
const tip = at("tip");

let data = null;
let signature = "";
// The indices of the drawn heaps, and for each block in them the state, the owner and the number of sharers.
let drawn = [];
let letters = "";
let owners = [];
let sharers = [];
let grid = null;
let chosen = null;
let highlighted = null;

export function updateMap(newest) {
  data = newest;
  const before = signature;
  signature = JSON.stringify([data.heaps, data.owners, data.sharers, data.owner_ids]);
  if (signature === before) return;
  const perHeap = data.geometry.blocks_per_heap;
  drawn = [...data.heaps.keys()].filter((heap) => !IDLE_HEAP.test(data.heaps[heap]));
  const pick = (all) => drawn.flatMap((heap) => [...all.subarray(heap * perHeap, (heap + 1) * perHeap)]);
  letters = drawn.map((heap) => data.heaps[heap]).join("");
  owners = pick(expandOwners(data.owners, data.heaps.length * perHeap));
  sharers = pick(expandSharers(data.sharers, data.heaps.length * perHeap));
  drawMap();
  if (document.activeElement === map && chosen !== null) choose(chosen, true);
}

// Highlights the blocks of a sequence. An unknown id highlights no block.
export function highlight(id) {
  if (Object.is(id, highlighted)) return;
  highlighted = id;
  drawMap();
}

// Turns [owner, number of blocks, owner, ...] into an array with the owner of each block, or -1 for no owner.
export function expandOwners(runs, blocks) {
  const expanded = new Int32Array(blocks).fill(-1);
  let place = 0;
  for (let i = 0; i < runs.length; i += 2) {
    expanded.fill(runs[i], place, place + runs[i + 1]);
    place += runs[i + 1];
  }
  return expanded;
}

// Turns [unshared blocks, shared blocks, sharers per shared block, ...] (counts) into each block's number of sharers.
export function expandSharers(runs, blocks) {
  const expanded = new Int32Array(blocks);
  let place = 0;
  for (let i = 0; i < runs.length; i += 3) {
    place += runs[i];
    expanded.fill(runs[i + 2], place, place + runs[i + 1]);
    place += runs[i + 1];
  }
  return expanded;
}

// --- positions of the cells ----------------------------------------------------------------------

// Returns the grid that fits all heaps (large pieces of memory) and has the largest cells. A heap has one row or a
// few rows, of equal length if possible. Small heaps stand side by side. If no grid fits, the map scrolls.
function layOut() {
  const perHeap = data.geometry.blocks_per_heap;
  const width = map.clientWidth - LABEL_PX - 2;
  const rowsOf = (cell) => Math.ceil(perHeap / Math.floor(width / cell));
  for (const isEven of [true, false]) {
    for (let cell = LARGEST_PX; cell >= SMALLEST_PX; cell -= 1) {
      const rows = rowsOf(cell);
      if (isEven && perHeap % rows) continue;
      const fitting = makeGrid(cell, rows, width, perHeap, drawn.length);
      if (fitting.height <= COMFORTABLE_PX) return fitting;
    }
  }
  return makeGrid(SMALLEST_PX, rowsOf(SMALLEST_PX), width, perHeap, drawn.length);
}

// A cell's size is a whole number of pixels. The rest of the width becomes gaps between cells or heaps. The top margin
// has room for the label of the first heap if the label is taller than a row of cells.
function makeGrid(cell, rows, width, perHeap, heaps) {
  const columns = Math.ceil(perHeap / rows);
  const between = cell < SHAPES_FROM_PX ? 6 : LABEL_PX;
  const fitting = Math.max(1, Math.floor((width + between) / (columns * cell + between)));
  const across = rows > 1 ? 1 : Math.min(fitting, heaps);
  const share = (width - (across - 1) * between) / across;
  const wide = Math.min(share / columns, cell + WIDER_PX);
  const isFull = fitting <= heaps;
  const pitchX = isFull && across > 1 ? (width + between) / across : columns * wide + between;
  const pitchY = rows * cell + (rows > 1 ? 9 : 3);
  const top = Math.max(0, Math.ceil((LABEL_HIGH_PX - cell) / 2));
  const height = top + Math.ceil(heaps / across) * pitchY + 3;
  return { cell, wide, columns, across, pitchX, pitchY, top, height, perHeap, heaps };
}

function placeOf(block) {
  const { cell, wide, columns, across, pitchX, pitchY, top, perHeap } = grid;
  const heap = Math.floor(block / perHeap);
  const within = block % perHeap;
  return [
    LABEL_PX + Math.round((heap % across) * pitchX + (within % columns) * wide),
    top + Math.floor(heap / across) * pitchY + Math.floor(within / columns) * cell,
  ];
}

// Returns the number of the block at a point of the canvas, or null if the point is between cells.
function blockAt(x, y) {
  const { cell, wide, columns, across, pitchX, pitchY, top, perHeap } = grid;
  const [acrossAt, down] = [Math.floor((x - LABEL_PX) / pitchX), Math.floor((y - top) / pitchY)];
  const column = Math.floor((x - LABEL_PX - acrossAt * pitchX) / wide);
  const row = Math.floor((y - top - down * pitchY) / cell);
  const within = row * columns + column;
  const block = (down * across + acrossAt) * perHeap + within;
  const inside = acrossAt >= 0 && acrossAt < across && column < columns && row >= 0 && within < perHeap;
  return inside && block >= 0 && block < letters.length ? block : null;
}

// --- drawing the map and its legend ---------------------------------------------------------------

function drawMap() {
  if (!data) return;
  map.hidden = drawn.length === 0;
  if (map.clientWidth === 0) return;
  grid = layOut();
  const context = sizeCanvas(canvas, map.clientWidth, grid.height);
  const colours = readColours();
  const brush = new Brush();
  const isHighlighted = data.owner_ids.includes(highlighted);
  const gap = grid.cell >= 10 ? 2 : grid.cell >= 4 ? 1 : 0;
  for (let block = 0; block < letters.length; block += 1) {
    const owner = data.owner_ids[owners[block]];
    const faded = isHighlighted && owner !== highlighted;
    const look = { state: letters[block], owner, faded, shared: sharers[block] > 1 };
    drawBlock(brush, colours, look, ...placeOf(block), grid.cell - gap);
  }
  brush.paint(context);
  context.fillStyle = colours.text;
  context.font = "11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";
  context.textBaseline = "middle";
  context.textAlign = "right";
  const middle = Math.min(grid.cell, 16) / 2;
  const every = Math.ceil(13 / grid.pitchY);
  for (let heap = 0; heap < grid.heaps; heap += 1) {
    const across = heap % grid.across;
    if ((across && grid.cell < SHAPES_FROM_PX) || Math.floor(heap / grid.across) % every) continue;
    const [x, y] = placeOf(heap * grid.perHeap);
    context.fillText(String(drawn[heap]), x - 7, y + middle);
  }
  if (chosen !== null) point();
}

// Draws the samples in the legend in grey, which is no sequence's colour.
function drawLegend() {
  const colours = readColours(0);
  const draw = ([kind, title]) => {
    const sample = make("canvas", { className: "sample", ariaHidden: "true" });
    const shared = kind === "shared";
    const brush = new Brush();
    drawBlock(brush, colours, { state: shared ? "s" : kind, owner: 1, shared, faded: false }, 0, 0, SAMPLE_PX);
    brush.paint(sizeCanvas(sample, SAMPLE_PX, SAMPLE_PX));
    return make("li", {}, sample, make("span", {}, title));
  };
  at("map-groups").replaceChildren(...Object.entries(PLAIN).map(draw));
  at("map-legend").replaceChildren(...Object.entries(STATES).map(([kind, [title]]) => draw([kind, title])));
}

// Reads the colours from the style sheet. If chroma is given, it replaces the chroma of the sequences' colours.
function readColours(chroma = null) {
  const style = getComputedStyle(document.documentElement);
  const [lightness, usual] = ["--owner-lightness", "--owner-chroma"].map((name) => style.getPropertyValue(name));
  const colours = Object.entries(COLOURS).map(([use, name]) => [use, style.getPropertyValue(name)]);
  const owner = (id, alpha) => `oklch(${lightness} ${chroma ?? usual} ${hue(id)} / ${alpha})`;
  return { owner, ...Object.fromEntries(colours) };
}

// Collects all shapes of one style in one path, so that few draw calls are needed. Draws marks above filled cells.
class Brush {
  #fields = new Map();
  #marks = new Map();

  field(style) {
    return pathOf(this.#fields, "fill", style, 1);
  }

  mark(style, kind = "fill", width = 1) {
    return pathOf(this.#marks, kind, style, width);
  }

  paint(context) {
    for (const { kind, style, width, path } of [...this.#fields.values(), ...this.#marks.values()]) {
      context.fillStyle = context.strokeStyle = style;
      context.lineWidth = width;
      context[kind](path);
    }
  }
}

function pathOf(paths, kind, style, width) {
  const name = `${kind} ${width} ${style}`;
  if (!paths.has(name)) paths.set(name, { kind, style, width, path: new Path2D() });
  return paths.get(name).path;
}

// Draws the cell of a block at x and y. size is the side length of the cell without the gap around it.
function drawBlock(brush, colours, { state, owner, shared, faded }, x, y, size) {
  const roomy = size >= SHAPES_FROM_PX;
  const alpha = faded ? 0.18 : 1;
  if (state === "s") {
    brush.field(colours.owner(owner, alpha)).rect(x, y, size, size);
  } else if (state === "o") {
    brush.field(colours.owner(owner, alpha * 0.28)).rect(x, y, size, size);
    const border = roomy ? 2 : 1;
    const inside = size - border;
    brush.mark(colours.owner(owner, alpha), "stroke", border).rect(x + border / 2, y + border / 2, inside, inside);
  } else {
    brush.field(colours[state]).rect(x, y, size, size);
  }
  if (state === "d") {
    const dot = Math.max(1, Math.round(size / 5));
    brush.mark(colours.mark).rect(x + (size - dot) / 2, y + (size - dot) / 2, dot, dot);
  }
  const inset = state === "q" && roomy ? size * 0.25 : 0;
  for (const [begin, ...points] of MARKS[state] ?? []) {
    const mark = brush.mark(colours.mark, "stroke", roomy ? 1.4 : 1);
    const place = ([across, down]) => [x + inset + across * (size - 2 * inset), y + inset + down * (size - 2 * inset)];
    mark.moveTo(...place(begin));
    for (const point of points) mark.lineTo(...place(point));
  }
  if (!shared) return;
  const notch = brush.mark(colours.notch);
  if (!roomy) return notch.rect(x + Math.floor(size / 2), y, 1, size);
  const side = Math.round(size * 0.55);
  notch.moveTo(x + size - side, y);
  notch.lineTo(x + size, y);
  notch.lineTo(x + size, y + side);
  notch.closePath();
}

// Clears the canvas, and sets its resolution to that of the screen.
function sizeCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) {
    Object.assign(canvas, { width: wide, height: high });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// --- the description of one block -----------------------------------------------------------------

function describeBlock(block) {
  const perHeap = data.geometry.blocks_per_heap;
  const words = [STATES[letters[block]].at(-1)];
  const owner = data.owner_ids[owners[block]];
  if (owner !== undefined) words.push(`sequence ${owner}`);
  if (sharers[block] > 1) words.push(`first of ${count(sharers[block], "sequence")} that share it`);
  return `Heap ${drawn[Math.floor(block / perHeap)]}, block ${block % perHeap}: ${words.join(", ")}`;
}

// Selects a block to describe. If isSpoken is true, screen readers announce the block and the map scrolls to it.
function choose(block, isSpoken) {
  if (!letters || !grid || map.hidden) return;
  chosen = Math.max(0, Math.min(block, letters.length - 1));
  point();
  if (!isSpoken) return;
  at("map-fact").textContent = describeBlock(chosen);
  const [, y] = placeOf(chosen);
  const lowest = y + grid.cell - map.clientHeight;
  map.scrollTop = Math.max(lowest, Math.min(map.scrollTop, y));
}

function point() {
  const [x, y] = placeOf(Math.min(chosen, letters.length - 1));
  cursor.style.transform = `translate(${x - 2}px, ${y - 2}px)`;
  cursor.style.width = cursor.style.height = `${grid.cell + 2}px`;
  cursor.hidden = false;
}

function hover(event) {
  if (!grid) return;
  const box = canvas.getBoundingClientRect();
  const block = blockAt(event.clientX - box.left, event.clientY - box.top);
  tip.hidden = block === null;
  if (block === null) return;
  choose(block, false);
  tip.textContent = describeBlock(block);
  const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18 + tip.offsetHeight < window.innerHeight;
  const top = below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10;
  tip.style.transform = `translate(${Math.max(8, left)}px, ${top}px)`;
}

function leave() {
  tip.hidden = true;
  if (document.activeElement === map) return;
  cursor.hidden = true;
  at("map-fact").textContent = "";
  chosen = null;
}

function moveByKey(event) {
  const columns = grid?.columns ?? 1;
  const block = chosen ?? 0;
  const targets = {
    ArrowRight: block + 1,
    ArrowLeft: block - 1,
    ArrowDown: block + columns,
    ArrowUp: block - columns,
    Home: 0,
    End: letters.length - 1,
  };
  if (!(event.key in targets)) return;
  event.preventDefault();
  tip.hidden = true;
  choose(targets[event.key], true);
}

map.addEventListener("pointermove", hover);
map.addEventListener("pointerleave", leave);
map.addEventListener("keydown", moveByKey);
map.addEventListener("blur", leave);
map.addEventListener("focus", () => choose(chosen ?? 0, true));
new ResizeObserver(drawMap).observe(map);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  drawLegend();
  drawMap();
});
drawLegend();
