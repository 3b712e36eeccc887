// Asks the server for one answer, and keeps what comes of it as a turn.

import { ask, events } from "./api.js";
import { messagesOf } from "./conversation.js";
import { samplingBody } from "./sampling.js";

export class Answering {
  #abort = new AbortController();
  #began = performance.now();
  #first = null;
  #newest = null;

  // turns: those before. look: what runs on the server at this moment, as GET /memory has it; or null.
  // loads: whether the model has to be loaded first.
  constructor({ system, sampling, model }, turns, question, { look, loads }) {
    this.look = look;
    this.body = {
      model: model ?? undefined,
      messages: messagesOf(system, turns, question),
      stream: true,
      stream_options: { include_usage: true },
      cache_report: true,
      ...samplingBody(sampling),
    };
    const asked = { model, system, loads, thinking: sampling.thinking !== false };
    this.turn = { question, answer: "", thoughts: "", ended: "stopped", facts: { ...NOTHING, ...asked } };
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

  // Calls onChange for each piece. Raises ServerError, and AbortError when it was stopped.
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

  #take(chunk) {
    this.#lookAround();
    if (chunk.usage) this.#usage(chunk.usage);
    const choice = chunk.choices?.[0];
    if (choice?.finish_reason) this.turn.ended = choice.finish_reason;
    const thought = choice?.delta?.reasoning_content ?? "";
    const content = choice?.delta?.content ?? "";
    if (!thought && !content) return;
    this.#newest = performance.now();
    this.#first ??= this.#newest;
    if (content && !this.turn.answer && this.turn.thoughts) {
      this.turn.facts.thought_s = (this.#newest - this.#first) / 1000;
    }
    this.turn.thoughts += thought;
    this.turn.answer += content;
  }

  #usage({ prompt_tokens: prompt, completion_tokens: tokens, prompt_tokens_details: details }) {
    const found = { prompt, tokens, cached: details?.cached_tokens ?? 0, miss: details?.cache_miss ?? null };
    Object.assign(this.turn.facts, found);
  }

  // How many others are there: the most that were seen.
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

const NOTHING = {
  prompt: 0, cached: 0, tokens: 0, first_s: null, thought_s: null, per_s: null, block: null,
  beside: null, waited: false, miss: null,
};
