// The memory view: asks twice a second while somebody looks, and draws what has changed.

import { ask, ServerError } from "./api.js";
import { drawSample, LEGEND } from "./block_shapes.js";
import { Cells } from "./cells.js";
import { Curves } from "./curves.js";
import { made, setText } from "./element.js";
import { bytes, count, hue, mib, PARTS, rate, seconds } from "./format.js";
import { MemoryMap } from "./memory_map.js";

const POLL_MS = 500;
const RETRY_MS = 2000;
const OLD_S = 2.5;
const LISTED_SEQUENCES = 64;

export class Memory {
  #timer = null;
  #asking = false;
  #blocked = false;
  #frame = 0;
  #rows = new Map();
  #newestRequest = null;

  constructor(page, onState) {
    this.page = page;
    this.onState = onState;
    this.told = null;
    // The model whose memory is shown; null where there is but one.
    this.model = null;
    this.map = new MemoryMap(page);
    this.curves = new Curves(page.curves);
    this.cells = new Cells(page.cells);
    this.#legends();
    document.addEventListener("visibilitychange", () => this.#wake());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.#samples();
      this.map.draw();
    });
  }

  start() {
    this.#blocked = false;
    this.#wake();
  }

  // Another model's memory is another picture.
  watch(model) {
    if (model === this.model) return;
    this.model = model;
    this.told = null;
    this.curves.clear();
    this.page.memory.classList.add("unknown");
  }

  #wake() {
    clearTimeout(this.#timer);
    if (!document.hidden && !this.#asking && !this.#blocked) this.#poll();
  }

  async #poll() {
    this.#asking = true;
    let pause = POLL_MS;
    const { model } = this;
    const path = model === null ? "/memory" : `/memory?model=${encodeURIComponent(model)}`;
    try {
      const told = await (await ask(path)).json();
      if (model !== this.model) return;
      this.told = told;
      const pool = told.map.pool;
      if (pool && told.age_s < OLD_S) this.curves.add(performance.now() / 1000 - told.age_s, pool);
      this.#state(told);
      this.#show();
    } catch (error) {
      pause = RETRY_MS;
      this.#blocked = error instanceof ServerError && error.status === 401;
      this.#failed(error);
    } finally {
      this.#asking = false;
      if (!document.hidden && !this.#blocked) this.#timer = setTimeout(() => this.#wake(), pause);
    }
  }

  #state(told) {
    const age = seconds(told.age_s);
    if (!told.engine_alive) {
      this.onState("dead", "Engine ended", `The engine has ended. What is shown is ${age} old; restart the server.`);
    } else if (told.age_s > OLD_S) {
      this.onState("old", "No answer", `The engine does not answer: it is in a long step, or stuck. What is shown is ${age} old.`);
    } else if (told.map.running + told.map.waiting > 0) {
      const waits = told.map.waiting ? `, ${told.map.waiting} waiting` : "";
      this.onState("busy", `${told.map.running} running${waits}`, "");
    } else {
      this.onState("idle", "Idle", "");
    }
  }

  #failed(error) {
    const shown = this.told ? " What is shown is from before." : "";
    if (this.#blocked) this.onState("key", "Key needed", "");
    else if (error instanceof ServerError) {
      const kind = error.status === 0 ? "Not reachable" : this.model === null ? "No figures" : "Not loaded";
      this.onState(error.status === 0 || this.model === null ? "dead" : "idle", kind, error.message + shown);
    } else {
      this.onState("dead", "Page error", "Something on this page went wrong.");
      throw error;
    }
  }

  #show() {
    if (this.#frame) return;
    this.#frame = requestAnimationFrame(() => {
      this.#frame = 0;
      // Another model may be looked at by now.
      if (!this.told) return;
      this.page.memory.classList.remove("unknown");
      this.#pool();
      this.map.update(this.told.map);
      this.#mapSum();
      this.#sequences();
      this.cells.show(this.told.map);
      this.curves.draw();
      this.#requests();
    });
  }

  #legends() {
    const { poolBar, poolLegend, mapLegend } = this.page;
    this.parts = PARTS.map(([name, title, meaning]) => {
      const segment = made("i", name);
      poolBar.append(segment);
      const item = made("li");
      const value = made("b");
      item.append(made("i", `swatch ${name}`), made("span", "", title), value);
      item.title = meaning;
      poolLegend.append(item);
      return { name, title, segment, value };
    });
    for (const [kind, title] of LEGEND) {
      const item = made("li");
      const sample = made("canvas", "sample");
      sample.dataset.kind = kind;
      sample.setAttribute("aria-hidden", "true");
      item.append(sample, made("span", "", title));
      mapLegend.append(item);
    }
    this.#samples();
  }

  #samples() {
    for (const sample of this.page.mapLegend.querySelectorAll("canvas")) {
      drawSample(sample, sample.dataset.kind);
    }
  }

  #pool() {
    const { pool, shared_saved_bytes: saved } = this.told.map;
    if (!pool) return;
    for (const { name, segment, value } of this.parts) {
      const size = pool[`${name}_bytes`];
      segment.style.flexGrow = size / pool.capacity_bytes;
      segment.classList.toggle("none", size === 0);
      setText(value, mib(size));
      value.dataset.bytes = size;
    }
    const words = this.parts.map(({ name, title }) => `${title} ${mib(pool[`${name}_bytes`])}`);
    this.page.poolBar.setAttribute("aria-label", `Of ${mib(pool.capacity_bytes)}: ${words.join(", ")}`);
    const parts = [`${mib(pool.capacity_bytes)} budget`, `${mib(pool.committed_bytes)} committed`];
    if (saved) parts.push(`${mib(saved)} saved by sharing`);
    setText(this.page.poolSum, parts.join(" · "));
  }

  #mapSum() {
    const { geometry, heaps } = this.told.map;
    const unmade = geometry.max_heaps - heaps.length;
    const parts = [
      `${heaps.length} of ${count(geometry.max_heaps, "heap")}`,
      `${count(geometry.blocks_per_heap, "block")} each`,
      `${geometry.tokens_per_block} tokens, ${bytes(geometry.block_bytes)} a block`,
    ];
    setText(this.page.mapSum, parts.join(" · "));
    this.page.mapEmpty.hidden = heaps.length > 0;
    this.page.map.setAttribute("aria-label", `Blocks of ${count(heaps.length, "heap")}; ${unmade} not made yet`);
  }

  #sequences() {
    const { map } = this.told;
    const shown = map.sequences.slice(0, LISTED_SEQUENCES);
    const ids = new Set(shown.map((sequence) => sequence.id));
    for (const [id, row] of this.#rows) {
      if (ids.has(id)) continue;
      row.element.remove();
      this.#rows.delete(id);
      this.map.highlight(null);
    }
    const longest = Math.max(1, ...shown.map((sequence) => sequence.most_tokens));
    shown.forEach((sequence, place) => {
      const row = this.#rows.get(sequence.id) ?? this.#newRow(sequence.id);
      const list = this.page.sequences;
      if (list.children[place] !== row.element) list.insertBefore(row.element, list.children[place] ?? null);
      this.#fill(row, sequence, longest);
    });
    this.page.sequencesEmpty.hidden = shown.length > 0;
    const total = map.running + map.waiting;
    const more = total > shown.length ? ` · the first ${shown.length} shown` : "";
    const sum = total ? `${map.running} running · ${map.waiting} waiting${more}` : "";
    setText(this.page.sequencesSum, sum);
  }

  #newRow(id) {
    const element = made("li");
    element.dataset.id = id;
    const row = { element, title: made("span", "title"), track: made("span", "track"), facts: made("span", "facts") };
    for (const name of ["mapped", "computed", "borrowed"]) {
      row[name] = made("i", name);
      row.track.append(row[name]);
    }
    const swatch = made("i", "swatch owner");
    for (const coloured of [swatch, row.mapped, row.computed]) coloured.style.setProperty("--hue", hue(id));
    row.track.setAttribute("aria-hidden", "true");
    element.append(swatch, row.title, row.track, row.facts);
    element.addEventListener("pointerenter", () => this.map.highlight(id));
    element.addEventListener("pointerleave", () => this.map.highlight(null));
    this.#rows.set(id, row);
    return row;
  }

  #fill(row, sequence, longest) {
    const size = this.told.map.geometry.tokens_per_block;
    const percent = (tokens) => `${Math.min(100, (tokens / longest) * 100)}%`;
    const waiting = sequence.status === "waiting";
    row.element.classList.toggle("waits", waiting);
    setText(row.title, `${sequence.id}`);
    row.track.style.width = percent(sequence.most_tokens);
    const share = (tokens) => `${Math.min(100, (tokens / sequence.most_tokens) * 100)}%`;
    row.mapped.style.width = share(sequence.mapped_blocks * size);
    row.computed.style.width = share(sequence.computed_tokens);
    row.borrowed.style.width = share(sequence.borrowed_blocks * size);
    const facts = waiting
      ? [`waits with ${count(sequence.tokens, "token")}`]
      : [
          `${sequence.computed_tokens.toLocaleString("en")} computed`,
          `${(sequence.mapped_blocks * size).toLocaleString("en")} mapped`,
          `limit ${sequence.most_tokens.toLocaleString("en")}`,
        ];
    if (sequence.borrowed_blocks) facts.push(`${count(sequence.borrowed_blocks, "block")} shared`);
    if (sequence.preemptions) facts.push(`preempted ${count(sequence.preemptions, "time")}`);
    setText(row.facts, facts.join(" · "));
  }

  #requests() {
    const { requests } = this.told;
    const newest = requests[0]?.number ?? 0;
    this.page.requestsEmpty.hidden = requests.length > 0;
    if (newest === this.#newestRequest) return;
    this.#newestRequest = newest;
    const rows = requests.map((request) => {
      const row = made("tr");
      const number = (value) => value.toLocaleString("en");
      row.append(
        made("td", "", number(request.number)),
        made("td", "", number(request.prompt_tokens)),
        made("td", "", number(request.cached_tokens)),
        made("td", "", number(request.generated_tokens)),
        made("td", "", seconds(request.first_token_s)),
        made("td", "", rate(request.tokens_per_s)),
        made("td", "", seconds(request.duration_s)),
        made("td", `finish ${request.finish}`, request.finish),
      );
      return row;
    });
    this.page.requests.replaceChildren(...rows);
  }
}
