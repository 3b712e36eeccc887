// Explains turns (questions with answers): their tokens and times, and where prompts stopped matching the prefix cache.

import { askJson, describe } from "./api.js";
import { messagesOf } from "./conversation.js";
import { at, make } from "./element.js";
import { count, decimal, percent, rate, seconds } from "./format.js";

const SHOWN_TOKENS = 40;
const ONE_BLOCK = 64;

export function showTurns({ turns }) {
  const list = at("turns");
  const known = turns.filter((turn) => turn.facts?.prompt);
  const open = new Set([...list.querySelectorAll("details[open]")].map((row) => row.dataset.turn));
  const longest = Math.max(...known.map(({ facts }) => facts.prompt));
  list.replaceChildren(...known.map((turn) => makeTurn(turns, turns.indexOf(turn), longest, open)));
  at("turns-empty").hidden = known.length > 0;
  at("turns-empty").textContent = turns.length ? "The server has no figures of these turns." : "Nothing has been asked yet.";
  const sum = (name) => known.reduce((total, { facts }) => total + facts[name], 0);
  const cached = Math.round((100 * sum("cached")) / sum("prompt"));
  at("turns-sum").textContent = known.length
    ? `${count(known.length, "turn")} · ${cached} % of the prompts from the cache`
    : "";
}

function makeTurn(turns, place, longest, open) {
  const { facts } = turns[place];
  const computed = facts.prompt - facts.cached;
  const bar = make("span", { className: "turn-bar", ariaHidden: "true" }, make("i", "kept"), make("i", "computed"));
  bar.firstChild.style.width = percent(facts.cached, longest);
  bar.lastChild.style.width = percent(computed, longest);
  const words = [`${decimal(facts.cached)} cached`, `${decimal(computed)} computed`];
  if (facts.first_s) words.push(`first token ${seconds(facts.first_s)}`);
  if (facts.per_s) words.push(`${rate(facts.per_s)} tokens/s`);
  const name = make("span", "turn-name", `Turn ${place + 1}`);
  const summary = make("summary", {}, name, bar, make("span", "turn-facts", words.join(" · ")));
  const why = make("div", "why");
  const row = make("details", "turn", summary, why);
  row.dataset.turn = place + 1;
  row.addEventListener("toggle", () => {
    if (row.open && !why.hasChildNodes()) explain(why, turns, place);
  });
  row.open = open.has(row.dataset.turn);
  return row;
}

function explain(why, turns, place) {
  const { facts } = turns[place];
  const before = turns.slice(0, place).findLast((turn) => turn.answer.trim());
  const sentences = explainFacts(facts, before?.facts ?? null, Boolean(before?.thoughts));
  why.append(...sentences.map((sentence) => make("p", {}, sentence)));
  if (facts.miss) showMiss(why, turns, place);
}

// Returns sentences that explain a turn. before has the figures of the previous turn, or is null.
export function explainFacts(facts, before, hadThoughts) {
  const computed = facts.prompt - facts.cached;
  const sentences = [`${count(computed, "token")} of the prompt had to be computed, ${count(facts.cached, "token")} came from the cache.`];
  sentences.push(explainMiss(facts, before, hadThoughts, computed));
  if (facts.first_s) {
    const speed = computed > ONE_BLOCK ? `: about ${rate(computed / facts.first_s)} prompt tokens a second` : "";
    sentences.push(`The first token took ${seconds(facts.first_s)}${speed}.`);
  }
  if (facts.loads) sentences.push("The model had to be loaded first, for which no time is counted here.");
  if (facts.waited) sentences.push("It waited in the queue behind others.");
  if (facts.beside) sentences.push(`Up to ${count(facts.beside, "other")} ran beside it and shared the machine.`);
  return sentences;
}

function explainMiss({ miss, cached, block }, before, hadThoughts, computed) {
  const slack = block ?? ONE_BLOCK;
  if (!miss) return computed <= slack ? "Less cannot be computed." : "No more of it could come from the cache.";
  const left = decimal(miss.left_at);
  if (miss.reason !== "never_cached") return `The prompt is cached up to token ${left}: ${miss.message}.`;
  if (!before) return cached ? "Another conversation had put its beginning into the cache; the rest was new." : "It is the first turn, and none of it was cached.";
  if (miss.left_at + slack < before.prompt) {
    return `The prompt does not begin like that of the turn before, which had ${count(before.prompt, "token")}: it differs from token ${left} on, and all from there was computed again.`;
  }
  if (hadThoughts && miss.left_at + slack < before.prompt + before.tokens) return "The turn before was cached up to its answer. The prompt no longer has that answer's thoughts, so the answer had to be computed again without them, and then your message.";
  return "The turn before was cached, so only the new part was computed.";
}

// Shows the text where the cached part of the prompt ends. The server stores no prompts, so the prompt is made again.
async function showMiss(why, turns, place) {
  const { facts } = turns[place];
  const note = make("p", "figures", "Looking for the text …");
  why.append(note);
  const model = facts.model ?? undefined;
  const messages = messagesOf(facts.system, turns.slice(0, place), turns[place]);
  const thinking = facts.thinking ? {} : { enable_thinking: false };
  try {
    const prompt = await askJson("/tokenize", { body: { model, messages, ...thinking } });
    if (prompt.count !== facts.prompt) {
      note.textContent = "The prompt cannot be shown: the model or the conversation has changed since.";
      return;
    }
    const left = facts.miss.left_at;
    const [kept, rest] = await Promise.all([
      readTokens(model, prompt.tokens.slice(Math.max(0, left - SHOWN_TOKENS), left)),
      readTokens(model, prompt.tokens.slice(left, left + SHOWN_TOKENS)),
    ]);
    note.textContent = `The prompt differs from the cached tokens from token ${decimal(left)} on, marked here:`;
    const before = make("span", "kept", left > SHOWN_TOKENS ? `…${kept}` : kept);
    why.append(make("p", "leaves", before, make("mark", {}, rest)));
  } catch (error) {
    note.textContent = describe(error);
  }
}

async function readTokens(model, tokens) {
  return tokens.length ? (await askJson("/detokenize", { body: { model, tokens } })).content : "";
}
