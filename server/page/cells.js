// The states of recurrent layers: what cells are for, and where those of each conversation stand. A model
// without such layers has none, and no such part of the page.

import { made, setText } from "./element.js";
import { bytes, count, hue } from "./format.js";

const LISTED_CONVERSATIONS = 64;
const KEEPS = { system: "system prompt", user: "question", end: "end of a turn", waypoint: "on the way" };

export function sumOf({ cells, free, held, cached, waiting, cell_bytes: size }) {
  const kept = Object.values(cached).reduce((total, number) => total + number, 0);
  const parts = [count(cells, "cell"), `${held} held`, `${kept} cached`, `${waiting} waiting`, `${free} free`];
  return [...parts, `${bytes(size)} each`].join(" · ");
}

// Cells of each conversation in the order of their positions; the newest conversation comes first.
export function conversationsOf(cells) {
  const found = new Map();
  for (const cell of [...cells].sort((one, other) => one.position - other.position)) {
    found.set(cell.conversation, [...(found.get(cell.conversation) ?? []), cell]);
  }
  return [...found].sort(([one], [other]) => other - one);
}

export class Cells {
  #drawn = "";

  constructor({ article, sum, list }) {
    Object.assign(this, { article, sum, list });
  }

  show({ pool, cells }) {
    this.article.hidden = !pool?.cells.cells;
    if (this.article.hidden) return;
    setText(this.sum, sumOf(pool.cells));
    const signature = JSON.stringify(cells);
    if (signature === this.#drawn) return;
    this.#drawn = signature;
    const longest = Math.max(1, ...cells.map((cell) => cell.position));
    const rows = conversationsOf(cells).slice(0, LISTED_CONVERSATIONS);
    this.list.replaceChildren(...rows.map(([number, its]) => row(number, its, longest)));
  }
}

function row(number, cells, longest) {
  const element = made("li");
  element.dataset.id = number;
  const swatch = made("i", "swatch owner");
  const track = made("span", "track");
  track.setAttribute("aria-hidden", "true");
  for (const { position, holders } of cells) {
    const tick = made("i", holders ? "tick held" : "tick");
    tick.style.left = `calc(${(position / longest) * 100}% - 4px)`;
    track.append(tick);
  }
  for (const coloured of [swatch, track]) coloured.style.setProperty("--hue", hue(number));
  const places = cells.map(({ position, keep }) => `${position.toLocaleString("en")} ${KEEPS[keep]}`);
  element.append(swatch, made("span", "title", `${number}`), track, made("span", "facts", places.join(" · ")));
  return element;
}
