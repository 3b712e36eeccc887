// Requests one answer from the server, and stores the answer's text and figures in a turn of the conversation.

import { ask, askJson, events } from "./api.js";
import { messagesOf, readFacts } from "./conversation.js";

// Maximum number of lookups of a stopped request's figures. The server lists them once the engine has ended it.
const LOOKS = 8;
const LOOK_EVERY_MS = 250;

export class Answering {
  #abort = new AbortController();
  #began = performance.now();
  #id = null;
  // The view that shows the answer; null while another conversation is open, and after the end.
  view = null;
  keptAt = 0;
  hasBegun = false;

  // question, files: see contentOf(). look(): returns the newest memory map, or null. loads is true if the model must
  // be loaded first.
  constructor(conversation, { question, files }, { look, loads }) {
    const { system, sampling, model, turns } = conversation;
    const { thinking = true, ...numbers } = sampling;
    this.conversation = conversation;
    this.look = look;
    this.body = {
      model: model ?? undefined,
      messages: messagesOf(system, turns, { question, files }),
      stream: true,
      stream_options: { include_usage: true },
      cache_report: true,
      ...numbers,
      ...(thinking ? {} : { enable_thinking: false }),
    };
    const facts = readFacts({ model, system, loads, thinking });
    this.turn = { question, files, answer: "", thoughts: "", ended: "stopped", facts };
  }

  get waited_s() {
    return (performance.now() - this.#began) / 1000;
  }

  get wasStopped() {
    return this.#abort.signal.aborted;
  }

  stop() {
    this.#abort.abort();
  }

  // Reads the whole answer, and calls onChange for each piece. Throws ServerError, and AbortError after stop().
  async run(onChange) {
    try {
      const response = await ask("/v1/chat/completions", { body: this.body, signal: this.#abort.signal });
      this.#id = response.headers.get("X-Request-Id");
      for await (const chunk of events(response)) {
        this.#take(chunk);
        onChange();
      }
    } catch (error) {
      if (!this.wasStopped) this.turn.ended = "error";
      throw error;
    }
  }

  #take({ usage, choices }) {
    const { turn } = this;
    this.#lookAround();
    if (usage) {
      const { cached_tokens: cached = 0, cache_miss: miss = null } = usage.prompt_tokens_details ?? {};
      this.#note(usage.prompt_tokens, cached, usage.completion_tokens, usage.timings ?? {});
      const { reasoning_tokens: reasoning = 0 } = usage.completion_tokens_details ?? {};
      const thought_s = reasoning && turn.facts.per_s ? reasoning / turn.facts.per_s : null;
      Object.assign(turn.facts, { miss, thought_s });
    }
    const choice = choices?.[0];
    if (choice?.finish_reason) turn.ended = choice.finish_reason;
    const thought = choice?.delta?.reasoning_content ?? "";
    const content = choice?.delta?.content ?? "";
    if (!thought && !content) return;
    this.hasBegun = true;
    turn.thoughts += thought;
    turn.answer += content;
  }

  // Stores the figures that the server measured. Their times exclude the loading of the model.
  #note(prompt, cached, tokens, { first_token_s: first_s = null, tokens_per_s: per_s = null }) {
    Object.assign(this.turn.facts, { prompt, cached, tokens, first_s, per_s });
  }

  // Stores the largest number of other sequences that ran on the server at one time during this answer.
  #lookAround() {
    const { facts } = this.turn;
    const map = this.look();
    if (!map) return;
    facts.block = map.geometry.tokens_per_block;
    facts.beside = Math.max(facts.beside ?? 0, map.running - 1);
    if (!this.hasBegun && map.waiting > 0) facts.waited = true;
  }

  // Asks the server for the figures of the stopped request. Resolves to true if the server lists that request.
  async lookUp() {
    const path = `/memory?model=${encodeURIComponent(this.body.model ?? "")}`;
    for (let looks = 0; this.#id && looks < LOOKS; looks += 1) {
      await new Promise((resolve) => setTimeout(resolve, LOOK_EVERY_MS));
      const { requests } = await askJson(path).catch(() => ({ requests: [] }));
      const seen = requests.find(({ id }) => id === this.#id);
      if (!seen) continue;
      this.#note(seen.prompt_tokens, seen.cached_tokens, seen.generated_tokens, seen);
      return true;
    }
    return false;
  }
}
