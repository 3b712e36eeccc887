// Why a turn was slow, in sentences: what had to be computed and why, and who else was there. Nothing
// here touches the page.

import { count, rate, seconds } from "./format.js";

const ONE_BLOCK = 64;

// facts: of a turn; before: of the one before it, or null; hadThoughts: whether its answer had thoughts.
export function reasons(facts, before, hadThoughts) {
  const computed = facts.prompt - facts.cached;
  const said = [`${count(computed, "token")} of the prompt had to be computed, ${count(facts.cached, "token")} came from the cache.`];
  said.push(missed(facts, before, hadThoughts, computed));
  if (facts.first_s) {
    const speed = computed > ONE_BLOCK && !facts.loads ? `: about ${rate(computed / facts.first_s)} prompt tokens a second` : "";
    said.push(`The first token took ${seconds(facts.first_s)}${speed}.`);
  }
  if (facts.loads) said.push("The model had to be loaded first: that is most of this time.");
  if (facts.waited) said.push("It had to wait, as others waited too.");
  if (facts.beside) said.push(`Up to ${count(facts.beside, "other")} ran beside it, and shared the machine.`);
  return said;
}

function missed({ miss, cached, block }, before, hadThoughts, computed) {
  const slack = block ?? ONE_BLOCK;
  if (!miss) return computed <= slack ? "That is as little as can be." : "Nothing more of it could be shared.";
  if (miss.reason === "evicted") return "What is missing had been cached, and was evicted since: memory was short, or it was idle for too long.";
  if (miss.reason === "state_evicted") return `Its text is cached up to token ${miss.left_at.toLocaleString("en")}, but the model's state there was evicted since: what follows an earlier one was computed again.`;
  if (miss.reason === "no_state") return `Its text is cached up to token ${miss.left_at.toLocaleString("en")}, but no state of the model was kept there: what follows an earlier one was computed again.`;
  if (!before) return cached ? "Its beginning was known from elsewhere; the rest was new." : "It is the first turn, and nothing of it had been seen before.";
  if (miss.left_at + slack < before.prompt) {
    return `It does not begin as the turn before: at token ${miss.left_at.toLocaleString("en")} of what were ${count(before.prompt, "token")} something has changed, and all behind it was computed again.`;
  }
  if (hadThoughts && miss.left_at + slack < before.prompt + before.tokens) return "The turn before was cached up to its answer. The answer's thoughts are no longer part of the prompt, so that the answer was computed again without them, and your message.";
  return "The turn before was cached; what was computed is what is new.";
}
