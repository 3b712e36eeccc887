// What each turn of the open conversation cost, and the text at which it left what was cached.

import { ask } from "./api.js";
import { messagesOf } from "./conversation.js";
import { made } from "./element.js";
import { count, rate, seconds } from "./format.js";
import { reasons } from "./why.js";
import { inWords } from "./words.js";

const SHOWN_TOKENS = 40;

export class Turns {
  constructor({ list, empty, sum }) {
    Object.assign(this, { list, empty, sum });
  }

  show({ turns }) {
    const known = turns.filter((turn) => turn.facts?.prompt);
    const open = new Set([...this.list.querySelectorAll("details[open]")].map((row) => row.dataset.turn));
    this.list.replaceChildren(
      ...turns.flatMap((turn, place) => (turn.facts?.prompt ? [this.#row(turns, place, open)] : [])),
    );
    this.empty.hidden = known.length > 0;
    const sum = (name) => known.reduce((total, { facts }) => total + facts[name], 0);
    const [prompt, cached] = [sum("prompt"), sum("cached")];
    this.sum.textContent = known.length
      ? `${count(known.length, "turn")} · ${Math.round((100 * cached) / prompt)} % of the prompts from the cache`
      : "";
  }

  #row(turns, place, open) {
    const { facts } = turns[place];
    const row = made("details", "turn");
    row.dataset.turn = place + 1;
    const summary = made("summary");
    const bar = made("span", "turn-bar");
    const [kept, computed] = [made("i", "kept"), made("i", "computed")];
    const longest = Math.max(...turns.map((turn) => turn.facts?.prompt ?? 0));
    kept.style.width = `${(100 * facts.cached) / longest}%`;
    computed.style.width = `${(100 * (facts.prompt - facts.cached)) / longest}%`;
    bar.append(kept, computed);
    bar.setAttribute("aria-hidden", "true");
    const words = [
      `${facts.cached.toLocaleString("en")} cached`,
      `${(facts.prompt - facts.cached).toLocaleString("en")} computed`,
      `first token ${seconds(facts.first_s)}`,
      `${rate(facts.per_s)} tokens/s`,
    ];
    summary.append(made("span", "turn-name", `Turn ${place + 1}`), bar, made("span", "turn-facts", words.join(" · ")));
    const why = made("div", "why");
    row.append(summary, why);
    row.addEventListener("toggle", () => {
      if (row.open && !why.hasChildNodes()) this.#explain(why, turns, place);
    });
    row.open = open.has(row.dataset.turn);
    return row;
  }

  #explain(why, turns, place) {
    const { facts } = turns[place];
    const before = turns.slice(0, place).findLast((turn) => turn.answer.trim());
    const said = reasons(facts, before?.facts ?? null, Boolean(before?.thoughts));
    why.append(...said.map((sentence) => made("p", "", sentence)));
    if (facts.miss) this.#leave(why, turns, place);
  }

  // The prompt is made again, as it was: the server has kept nothing of it.
  async #leave(why, turns, place) {
    const { facts, question } = turns[place];
    const note = made("p", "figures", "Looking for the text …");
    why.append(note);
    const thinking = facts.thinking ? {} : { enable_thinking: false };
    const model = facts.model ?? undefined;
    const messages = messagesOf(facts.system, turns.slice(0, place), question);
    try {
      const prompt = await (await ask("/tokenize", { body: { model, messages, ...thinking } })).json();
      if (prompt.count !== facts.prompt) {
        note.textContent = "The prompt cannot be made again as it was: the model or the conversation is another one now.";
        return;
      }
      const at = facts.miss.left_at;
      const [kept, left] = await Promise.all([
        text(model, prompt.tokens.slice(Math.max(0, at - SHOWN_TOKENS), at)),
        text(model, prompt.tokens.slice(at, at + SHOWN_TOKENS)),
      ]);
      note.textContent = `It left what was cached at token ${at.toLocaleString("en")}, where this begins:`;
      const shown = made("p", "leaves");
      shown.append(made("span", "kept", at > SHOWN_TOKENS ? `…${kept}` : kept), made("mark", "", left));
      why.append(shown);
    } catch (error) {
      note.textContent = inWords(error);
    }
  }
}

async function text(model, tokens) {
  if (!tokens.length) return "";
  return (await (await ask("/detokenize", { body: { model, tokens } })).json()).content;
}
