// Views of messages: questions, which a person can edit, and answers, which grow during generation.

import { make, makeButton, makeCopyButton } from "./element.js";
import { makeChip } from "./files.js";
import { count, decimal, rate, seconds } from "./format.js";
import { MarkdownView } from "./markdown.js";

const SAYS_WAITING_AFTER_S = 2;
const ENDS = { length: "ended at the limit", stopped: "stopped", error: "ended by an error" };

// Returns true for Enter without Shift, unless Enter confirms an input method's text (in Safari: keyCode 229).
export function isSendKey(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;
}

export class Question {
  #form = null;

  // onEdited(text): asks the edited question, or returns false if the page cannot ask now.
  constructor(text, files, onEdited) {
    Object.assign(this, { value: text, onEdited });
    this.text = make("div", { className: "text", hidden: !text }, text);
    const chips = make("ul", "files", ...files.map((file) => makeChip(file)));
    this.edits = makeButton("Edit", "edit", () => this.edit());
    this.tools = make("div", "message-tools", makeCopyButton("Copy message", () => text), this.edits);
    this.element = make("article", { className: "message asked", ariaLabel: "You" }, chips, this.text, this.tools);
  }

  markUnsent() {
    this.element.classList.add("unsent");
    this.element.append(make("p", "not-sent", "Not sent"));
  }

  edit() {
    if (this.#form) return;
    const rows = Math.min(12, this.value.split("\n").length + 1);
    const field = make("textarea", { value: this.value, rows, ariaLabel: "Edit message" });
    const note = make("p", "figures", "What follows it is dropped.");
    const cancel = makeButton("Cancel", "quiet", () => this.#close());
    const tools = make("div", "edit-tools", note, cancel, make("button", "primary", "Send again"));
    this.#form = make("form", "edit-form", field, tools);
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = field.value.trim();
      if (text && this.onEdited(text)) this.#close();
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        this.#close();
      } else if (isSendKey(event)) {
        event.preventDefault();
        this.#form.requestSubmit();
      }
    });
    this.text.hidden = this.tools.hidden = true;
    this.element.append(this.#form);
    field.focus();
  }

  #close() {
    this.#form?.remove();
    this.#form = null;
    this.text.hidden = !this.value;
    this.tools.hidden = false;
    this.edits.focus();
  }
}

export class Answer {
  #turn = null;

  constructor(onRegenerate) {
    this.waiting = make("span", "away", "Waiting for the first token");
    this.summary = make("summary", {}, "Thinking");
    this.thought = make("div", "thought");
    this.details = make("details", { className: "thinking", hidden: true }, this.summary, this.thought);
    this.text = make("div", "text");
    this.markdown = new MarkdownView(this.text);
    this.facts = make("ul", "facts");
    const copy = makeCopyButton("Copy answer", () => this.#turn.answer);
    this.tools = make("div", "message-tools", this.facts, copy, makeButton("Regenerate", "regenerate", onRegenerate));
    const waits = make("p", "waiting", this.waiting);
    const parts = [waits, this.details, this.text, this.tools];
    this.element = make("article", { className: "message answer", ariaLabel: "Answer" }, ...parts);
  }

  // Shows that the answer has not begun. reason is a text about the cause of the wait.
  wait(waited_s, reason) {
    this.element.ariaBusy = "true";
    this.tools.hidden = true;
    if (waited_s < SAYS_WAITING_AFTER_S) return;
    this.waiting.className = "";
    this.waiting.textContent = `${reason}: ${count(Math.floor(waited_s), "second")}`;
  }

  draw(turn) {
    this.#turn = turn;
    this.waiting.parentElement.hidden = Boolean(turn.thoughts || turn.answer);
    if (turn.thoughts && this.details.hidden) {
      this.details.hidden = false;
      // Thoughts stay closed if they ended before they were first shown.
      this.details.open = !turn.answer;
    }
    if (turn.answer && this.summary.textContent === "Thinking") this.#endThinking();
    if (this.thought.textContent.length !== turn.thoughts.length) this.thought.textContent = turn.thoughts;
    this.markdown.write(turn.answer);
  }

  #endThinking() {
    if (this.summary.textContent === "Thinking") this.details.open = false;
    const took = this.#turn.facts?.thought_s ?? null;
    this.summary.textContent = took === null ? "Thoughts" : `Thought for ${seconds(took)}`;
  }

  end(turn) {
    this.draw(turn);
    this.markdown.end(turn.answer);
    this.waiting.parentElement.hidden = true;
    if (turn.thoughts) this.#endThinking();
    this.tools.hidden = false;
    this.element.ariaBusy = "false";
    this.showFacts(turn);
  }

  showFacts(turn) {
    this.facts.replaceChildren(...describeFacts(turn).map(([text, title]) => make("li", { title }, text)));
  }
}

// Returns the known figures of a turn as texts, each with an explanation.
function describeFacts({ facts, ended }) {
  const parts = [];
  if (facts?.tokens) parts.push([count(facts.tokens, "token"), "Tokens of the answer, thoughts included"]);
  if (facts?.per_s) parts.push([`${rate(facts.per_s)}/s`, "Tokens a second after the first one, by the server"]);
  if (facts?.first_s) parts.push([seconds(facts.first_s), "Until the first token, by the server"]);
  if (facts?.prompt) parts.push([`${decimal(facts.cached)}/${decimal(facts.prompt)} cached`, "Tokens of the prompt that came from the cache"]);
  if (ENDS[ended]) parts.push([ENDS[ended], "How the answer ended"]);
  return parts;
}
