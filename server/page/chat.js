// A conversation: what was said is kept here and sent along, and nothing is kept anywhere else.

import { ask, events, sentence, ServerError } from "./api.js";
import { count, rate, seconds } from "./format.js";
import { Markdown } from "./markdown.js";

const NEAR_END_PX = 80;

function made(kind, name, text = "") {
  const element = document.createElement(kind);
  if (name) element.className = name;
  if (text) element.textContent = text;
  return element;
}

// One answer on its way.
class Answer {
  constructor(log) {
    this.content = "";
    this.thoughts = "";
    this.usage = null;
    this.finish = null;
    this.began = performance.now();
    this.first = null;
    this.newest = null;
    this.element = made("article", "message answer");
    this.element.setAttribute("aria-label", "Answer");
    this.element.setAttribute("aria-busy", "true");
    this.waiting = made("p", "waiting");
    this.waiting.append(made("span", "away", "Waiting for the first token"));
    this.details = made("details", "thinking");
    this.details.hidden = true;
    this.summary = made("summary", "", "Thinking");
    this.thought = made("div", "thought");
    this.details.append(this.summary, this.thought);
    this.text = made("div", "text");
    this.markdown = new Markdown(this.text);
    this.facts = made("p", "facts");
    this.element.append(this.waiting, this.details, this.text, this.facts);
    log.append(this.element);
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    if (choice.finish_reason) this.finish = choice.finish_reason;
    const thought = choice.delta?.reasoning_content ?? "";
    const content = choice.delta?.content ?? "";
    if (!thought && !content) return;
    this.newest = performance.now();
    this.first ??= this.newest;
    this.thoughts += thought;
    if (content && !this.content && this.thoughts) this.#endThinking();
    this.content += content;
  }

  #endThinking() {
    this.summary.textContent = `Thought for ${seconds((performance.now() - this.first) / 1000)}`;
    this.details.open = false;
  }

  draw() {
    this.waiting.hidden = this.first !== null;
    if (this.thoughts && this.details.hidden) {
      this.details.hidden = false;
      // Unless they ended before they could be shown.
      this.details.open = !this.content;
    }
    if (this.thought.textContent.length !== this.thoughts.length) {
      this.thought.textContent = this.thoughts;
    }
    this.markdown.show(this.content);
  }

  end(note = "") {
    this.draw();
    this.waiting.remove();
    if (this.thoughts && !this.content) this.#endThinking();
    this.element.setAttribute("aria-busy", "false");
    this.facts.textContent = [...this.#facts(), note].filter(Boolean).join(" · ");
  }

  #facts() {
    if (this.first === null) return [];
    const facts = [`first token after ${seconds((this.first - this.began) / 1000)}`];
    if (!this.usage) return facts;
    const { prompt_tokens: prompt, completion_tokens: tokens } = this.usage;
    const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
    const took = (this.newest - this.first) / 1000;
    if (tokens > 1 && took > 0) facts.unshift(`${rate((tokens - 1) / took)} tokens/s`);
    facts.unshift(count(tokens, "token"));
    facts.push(`${cached.toLocaleString("en")} of ${count(prompt, "prompt token")} cached`);
    if (this.finish === "length") facts.push("ended at the limit");
    return facts;
  }
}

export class Chat {
  #messages = [];
  #abort = null;
  #drawing = false;

  constructor(page) {
    this.page = page;
    this.model = null;
    page.composer.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    page.prompt.addEventListener("keydown", (event) => {
      // While an input method composes, Enter is its own.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
      event.preventDefault();
      this.send();
    });
    page.prompt.addEventListener("input", () => this.#fit());
    page.stop.addEventListener("click", () => this.#abort?.abort());
    page.newChat.addEventListener("click", () => this.reset());
  }

  reset() {
    this.#abort?.abort();
    this.#messages = [];
    this.page.messages.replaceChildren(this.page.welcome);
    this.page.prompt.focus();
  }

  #fit() {
    const { prompt } = this.page;
    prompt.style.height = "auto";
    prompt.style.height = `${prompt.scrollHeight + 2}px`;
  }

  #body() {
    const { temperature, maxTokens, thinking } = this.page;
    const body = {
      model: this.model ?? undefined,
      messages: this.#messages,
      stream: true,
      stream_options: { include_usage: true },
    };
    if (temperature.value !== "") body.temperature = temperature.valueAsNumber;
    if (maxTokens.value !== "") body.max_tokens = maxTokens.valueAsNumber;
    if (!thinking.checked) body.enable_thinking = false;
    return body;
  }

  async send() {
    const { prompt, messages, welcome } = this.page;
    const text = prompt.value.trim();
    if (!text || this.#abort) return;
    welcome.remove();
    const asked = made("article", "message asked");
    asked.setAttribute("aria-label", "You");
    asked.append(made("div", "text", text));
    messages.append(asked);
    prompt.value = "";
    this.#fit();
    const history = this.#messages;
    history.push({ role: "user", content: text });
    const answer = new Answer(messages);
    this.#scroll(true);
    const abort = new AbortController();
    this.#busy(abort);
    try {
      const response = await ask("/v1/chat/completions", { body: this.#body(), signal: abort.signal });
      for await (const chunk of events(response)) {
        answer.take(chunk);
        this.#draw(answer);
      }
      answer.end();
    } catch (error) {
      this.#failed(error, abort, answer, asked, text);
    }
    if (history === this.#messages) {
      // What was not answered is not part of the conversation.
      if (answer.content) history.push({ role: "assistant", content: answer.content });
      else history.pop();
    }
    if (this.#abort === abort) this.#busy(null);
    this.#scroll();
  }

  #failed(error, abort, answer, asked, text) {
    if (abort.signal.aborted) {
      answer.end("stopped");
      return;
    }
    answer.end();
    const problem = made("p", "problem", sentence(error));
    problem.setAttribute("role", "alert");
    answer.element.append(problem);
    if (error instanceof ServerError && !answer.content && !this.page.prompt.value) {
      // Nothing was answered: the question can be sent again.
      this.page.prompt.value = text;
      this.#fit();
      asked.classList.add("unsent");
    }
  }

  #busy(abort) {
    this.#abort = abort;
    this.page.stop.hidden = abort === null;
    this.page.send.hidden = abort !== null;
    this.page.messages.setAttribute("aria-busy", String(abort !== null));
  }

  #draw(answer) {
    if (this.#drawing) return;
    this.#drawing = true;
    requestAnimationFrame(() => {
      this.#drawing = false;
      const near = this.#isNearEnd();
      answer.draw();
      if (near) this.#scroll(true);
    });
  }

  #isNearEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.page.messages;
    return scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
  }

  #scroll(always = false) {
    const { messages } = this.page;
    if (always || this.#isNearEnd()) messages.scrollTop = messages.scrollHeight;
  }
}
