// Requests one answer from the server, and stores the answer's text and figures in a turn of the conversation.

import { ask, events } from "./api.js";
import { messagesOf, readFacts } from "./conversation.js";

export class Answering {
  #abort = new AbortController();
  #began = performance.now();
  #first = null;
  #newest = null;

  // turns are earlier turns. look() returns the server's memory map, or null. loads is true for an unloaded model.
  constructor({ system, sampling, model }, turns, question, { look, loads }) {
    const { thinking = true, ...numbers } = sampling;
    this.look = look;
    this.body = {
      model: model ?? undefined,
      messages: messagesOf(system, turns, question),
      stream: true,
      stream_options: { include_usage: true },
      cache_report: true,
      ...numbers,
      ...(thinking ? {} : { enable_thinking: false }),
    };
    const facts = readFacts({ model, system, loads, thinking });
    this.turn = { question, answer: "", thoughts: "", ended: "stopped", facts };
  }

  get waited_s() {
    return (performance.now() - this.#began) / 1000;
  }

  get hasBegun() {
    return this.#first !== null;
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
      for await (const chunk of events(response)) {
        this.#take(chunk);
        onChange();
      }
    } catch (error) {
      if (!this.wasStopped) this.turn.ended = "error";
      throw error;
    } finally {
      this.#measure();
    }
  }

  #take({ usage, choices }) {
    const { turn } = this;
    this.#lookAround();
    if (usage) {
      const { cached_tokens: cached = 0, cache_miss: miss = null } = usage.prompt_tokens_details ?? {};
      Object.assign(turn.facts, { prompt: usage.prompt_tokens, tokens: usage.completion_tokens, cached, miss });
    }
    const choice = choices?.[0];
    if (choice?.finish_reason) turn.ended = choice.finish_reason;
    const thought = choice?.delta?.reasoning_content ?? "";
    const content = choice?.delta?.content ?? "";
    if (!thought && !content) return;
    this.#newest = performance.now();
    this.#first ??= this.#newest;
    if (content && !turn.answer && turn.thoughts) turn.facts.thought_s = (this.#newest - this.#first) / 1000;
    turn.thoughts += thought;
    turn.answer += content;
  }

  // Stores the largest number of other sequences that run on the server during this answer.
  #lookAround() {
    const { facts } = this.turn;
    const map = this.look();
    if (!map) return;
    facts.block = map.geometry.tokens_per_block;
    facts.beside = Math.max(facts.beside ?? 0, map.running - 1);
    if (!this.hasBegun && map.waiting > 0) facts.waited = true;
  }

  #measure() {
    const { facts, thoughts, answer } = this.turn;
    if (this.#first === null) return;
    facts.first_s = (this.#first - this.#began) / 1000;
    const took = (this.#newest - this.#first) / 1000;
    if (thoughts && !answer) facts.thought_s = took;
    if (facts.tokens > 1 && took > 0) facts.per_s = (facts.tokens - 1) / took;
  }
}
