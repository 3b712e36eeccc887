// Every block of every heap as a cell: who has it by colour, and what it is for by shape.

import { Brush, colours, drawBlock, SHAPES_FROM_PX, sharp } from "./block_shapes.js";
import { count, expandOwners, expandSharers, STATES } from "./format.js";

const LARGEST_PX = 22;
const SMALLEST_PX = 3;
const COMFORTABLE_PX = 400;
const LABEL_PX = 30;
const LABEL_HIGH_PX = 12;
// By how much cells stand further apart at most, to fill the width.
const WIDER_PX = 2;

// Cells of whole pixels, with what is left of the width between them, or between heaps that stand side by
// side. There is room above for the first number where rows are lower than it.
function grid(cell, rows, width, perHeap, heaps) {
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
  return { cell, wide, rows, columns, across, pitchX, pitchY, top, height, perHeap, heaps };
}

export class MemoryMap {
  #data = null;
  #letters = "";
  #owners = new Int32Array(0);
  #sharers = new Int32Array(0);
  #grid = null;
  #chosen = null;
  #highlighted = null;
  #drawn = "";

  constructor(page) {
    this.page = page;
    page.map.addEventListener("pointermove", (event) => this.#hover(event));
    page.map.addEventListener("pointerleave", () => this.#leave());
    page.map.addEventListener("keydown", (event) => this.#key(event));
    page.map.addEventListener("blur", () => this.#leave());
    page.map.addEventListener("focus", () => this.choose(this.#chosen ?? 0, true));
    new ResizeObserver(() => this.draw()).observe(page.map);
  }

  get blocks() {
    return this.#letters.length;
  }

  update(data) {
    const signature = JSON.stringify([data.heaps, data.owners, data.sharers, data.owner_ids]);
    this.#data = data;
    if (signature === this.#drawn) return;
    this.#drawn = signature;
    this.#letters = data.heaps.join("");
    this.#owners = expandOwners(data.owners, this.blocks);
    this.#sharers = expandSharers(data.sharers, this.blocks);
    this.draw();
    const focused = document.activeElement === this.page.map && this.#chosen !== null;
    if (focused && this.#grid) this.choose(this.#chosen, true);
  }

  highlight(id) {
    if (id === this.#highlighted) return;
    this.#highlighted = id;
    this.draw();
  }

  // The largest cells with which all heaps are seen at once: a heap is a row, or a few rows, of the same
  // length if that can be; many small heaps stand side by side. Where nothing fits one has to scroll.
  #layOut() {
    const { heaps, geometry } = this.#data;
    const perHeap = geometry.blocks_per_heap;
    const width = this.page.map.clientWidth - LABEL_PX - 2;
    for (const isEven of [true, false]) {
      for (let cell = LARGEST_PX; cell >= SMALLEST_PX; cell -= 1) {
        const rows = Math.ceil(perHeap / Math.floor(width / cell));
        if (isEven && perHeap % rows) continue;
        const found = grid(cell, rows, width, perHeap, heaps.length);
        if (found.height <= COMFORTABLE_PX) return found;
      }
    }
    const rows = Math.ceil(perHeap / Math.floor(width / SMALLEST_PX));
    return grid(SMALLEST_PX, rows, width, perHeap, heaps.length);
  }

  draw() {
    const { map, canvas } = this.page;
    if (!this.#data || map.clientWidth === 0) return;
    map.hidden = this.#data.heaps.length === 0;
    if (map.hidden) return;
    const grid = (this.#grid = this.#layOut());
    const context = sharp(canvas, map.clientWidth, grid.height);
    const look = colours();
    const under = new Brush();
    const over = new Brush();
    const ids = this.#data.owner_ids;
    const gap = grid.cell >= 10 ? 2 : grid.cell >= 4 ? 1 : 0;
    const size = grid.cell - gap;
    for (let block = 0; block < this.blocks; block += 1) {
      const [x, y] = this.#place(block);
      const owner = ids[this.#owners[block]];
      const faded = this.#highlighted !== null && owner !== this.#highlighted;
      const shared = this.#sharers[block] > 1;
      const what = { state: this.#letters[block], owner, shared, faded };
      drawBlock(under, over, look, what, x, y, size);
    }
    under.paint(context);
    over.paint(context);
    context.fillStyle = look.text;
    context.font = "11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";
    context.textBaseline = "middle";
    context.textAlign = "right";
    const middle = Math.min(grid.cell, 16) / 2;
    const every = Math.ceil(13 / grid.pitchY);
    for (let heap = 0; heap < grid.heaps; heap += 1) {
      const across = heap % grid.across;
      if ((across && grid.cell < SHAPES_FROM_PX) || Math.floor(heap / grid.across) % every) continue;
      const [x, y] = this.#place(heap * grid.perHeap);
      context.fillText(String(heap), x - 7, y + middle);
    }
    if (this.#chosen !== null) this.#point();
  }

  #place(block) {
    const { cell, wide, columns, across, pitchX, pitchY, top, perHeap } = this.#grid;
    const heap = Math.floor(block / perHeap);
    const within = block % perHeap;
    return [
      LABEL_PX + Math.round((heap % across) * pitchX + (within % columns) * wide),
      top + Math.floor(heap / across) * pitchY + Math.floor(within / columns) * cell,
    ];
  }

  #at(x, y) {
    const { cell, wide, columns, across, pitchX, pitchY, top, perHeap } = this.#grid;
    const [acrossAt, down] = [Math.floor((x - LABEL_PX) / pitchX), Math.floor((y - top) / pitchY)];
    const column = Math.floor((x - LABEL_PX - acrossAt * pitchX) / wide);
    const row = Math.floor((y - top - down * pitchY) / cell);
    const within = row * columns + column;
    const block = (down * across + acrossAt) * perHeap + within;
    const inside = acrossAt >= 0 && acrossAt < across && column < columns && row >= 0 && within < perHeap;
    return inside && block >= 0 && block < this.blocks ? block : null;
  }

  // What is known of a block, in words.
  fact(block) {
    const { geometry, owner_ids: ids } = this.#data;
    const place = `Heap ${Math.floor(block / geometry.blocks_per_heap)}, block ${block % geometry.blocks_per_heap}`;
    const words = [STATES[this.#letters[block]]];
    const owner = ids[this.#owners[block]];
    const sharers = this.#sharers[block];
    if (owner !== undefined) words.push(`sequence ${owner}`);
    if (sharers > 1) words.push(`first of ${count(sharers, "sequence")} that share it`);
    return `${place}: ${words.join(", ")}`;
  }

  choose(block, spoken) {
    if (!this.blocks || !this.#grid) return;
    this.#chosen = Math.max(0, Math.min(block, this.blocks - 1));
    this.#point();
    const [, y] = this.#place(this.#chosen);
    const { map } = this.page;
    if (spoken) {
      this.page.fact.textContent = this.fact(this.#chosen);
      if (y < map.scrollTop) map.scrollTop = y;
      const bottom = y + this.#grid.cell - map.clientHeight;
      if (bottom > map.scrollTop) map.scrollTop = bottom;
    }
  }

  #point() {
    const [x, y] = this.#place(Math.min(this.#chosen, this.blocks - 1));
    const { cursor } = this.page;
    cursor.style.transform = `translate(${x - 2}px, ${y - 2}px)`;
    cursor.style.width = cursor.style.height = `${this.#grid.cell + 2}px`;
    cursor.hidden = false;
  }

  #hover(event) {
    if (!this.#grid) return;
    const box = this.page.canvas.getBoundingClientRect();
    const block = this.#at(event.clientX - box.left, event.clientY - box.top);
    const { tip } = this.page;
    tip.hidden = block === null;
    if (block === null) return;
    this.choose(block, false);
    tip.textContent = this.fact(block);
    const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18 + tip.offsetHeight < window.innerHeight;
    const top = below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10;
    tip.style.transform = `translate(${Math.max(8, left)}px, ${top}px)`;
  }

  #leave() {
    this.page.tip.hidden = true;
    if (document.activeElement === this.page.map) return;
    this.page.cursor.hidden = true;
    this.page.fact.textContent = "";
    this.#chosen = null;
  }

  #key(event) {
    const columns = this.#grid?.columns ?? 1;
    const at = this.#chosen ?? 0;
    const targets = {
      ArrowRight: at + 1,
      ArrowLeft: at - 1,
      ArrowDown: at + columns,
      ArrowUp: at - columns,
      Home: 0,
      End: this.blocks - 1,
    };
    if (!(event.key in targets)) return;
    event.preventDefault();
    this.page.tip.hidden = true;
    this.choose(targets[event.key], true);
  }
}
