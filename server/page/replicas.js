// The replicas of a cluster: asked for while somebody looks. A server that is alone has none, and no such
// part of the page.

import { ask, ServerError } from "./api.js";
import { made, setText } from "./element.js";
import { count, seconds } from "./format.js";

const POLL_MS = 2000;
const ALONE = "";

export class Replicas {
  #timer = null;
  #asking = false;
  #blocked = false;
  // Where the list is; null until that is known.
  #path = null;

  constructor({ article, sum, rows }) {
    Object.assign(this, { article, sum, rows });
    document.addEventListener("visibilitychange", () => this.#wake());
  }

  start() {
    this.#blocked = false;
    this.#wake();
  }

  #wake() {
    clearTimeout(this.#timer);
    const wanted = this.#path !== ALONE && !document.hidden;
    if (wanted && !this.#asking && !this.#blocked) this.#poll();
  }

  async #poll() {
    this.#asking = true;
    try {
      this.#path ??= (await (await ask("/version")).json()).replicas ?? ALONE;
      if (this.#path !== ALONE) this.#show((await (await ask(this.#path)).json()).replicas);
    } catch (error) {
      if (!(error instanceof ServerError)) throw error;
      this.#blocked = error.status === 401;
      setText(this.sum, "What is shown is from before.");
    } finally {
      this.#asking = false;
      this.#timer = setTimeout(() => this.#wake(), POLL_MS);
    }
  }

  #show(replicas) {
    this.article.hidden = false;
    this.rows.replaceChildren(...replicas.map(row));
    setText(this.sum, sumOf(replicas));
  }
}

// The memory that the page shows is that of the first one that answers.
export function sumOf(replicas) {
  const up = replicas.filter(({ state }) => state === "up");
  const parts = [`${up.length} of ${count(replicas.length, "replica")} answer`];
  if (up.length) parts.push(`the memory below is that of ${up[0].name}`);
  return parts.join(" · ");
}

function row(replica) {
  const { name, host, running, waiting, state } = replica;
  const element = made("tr");
  const known = state !== "starting";
  const cells = [
    host ?? "–",
    name,
    known ? running.toLocaleString("en") : "–",
    known ? waiting.toLocaleString("en") : "–",
    known ? `${replica.free_blocks.toLocaleString("en")} of ${replica.total_blocks.toLocaleString("en")}` : "–",
    replica.prompt_tokens ? `${Math.round((100 * replica.cached_tokens) / replica.prompt_tokens)} %` : "–",
  ];
  element.append(...cells.map((text) => made("td", "", text)), made("td", `replica ${state}`, inWords(replica)));
  return element;
}

function inWords({ state, heard_s_ago: age }) {
  if (state === "up") return "answers";
  return state === "silent" ? `silent for ${seconds(age)}` : "starts";
}
