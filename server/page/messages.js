// Views of messages: questions, which a person can edit, and answers, which grow during generation.

import { make, makeButton, makeCopyButton } from "./element.js";
import { count, decimal, rate, seconds } from "./format.js";
import { MarkdownView } from "./markdown.js";

const SAYS_WAITING_AFTER_S = 2;
const ENDS = { length: "ended at the limit", stopped: "stopped", error: "ended by an error" };

// Returns false if Enter ends a character of an input method. Safari sets keyCode 229 then, without isComposing.
export function isSendKey(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;
}

export class Question {
  #form = null;

  // onEdited(text) sends the edited question, or returns false if an answer is still running.
  constructor(text, onEdited) {
    Object.assign(this, { value: text, onEdited });
    this.text = make("div", "text", text);
    this.edits = makeButton("Edit", "edit", () => this.edit());
    this.tools = make("div", "message-tools", makeCopyButton("Copy message", () => text), this.edits);
    this.element = make("article", { className: "message asked", ariaLabel: "You" }, this.text, this.tools);
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
    this.text.hidden = this.tools.hidden = false;
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
    this.facts = make("p", "facts");
    const copy = makeCopyButton("Copy answer", () => this.#turn.answer);
    this.tools = make("div", "message-tools", copy, makeButton("Regenerate", "regenerate", onRegenerate));
    const waits = make("p", "waiting", this.waiting);
    const parts = [waits, this.details, this.text, this.facts, this.tools];
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
    const took = this.#turn.facts?.thought_s ?? null;
    this.summary.textContent = took === null ? "Thoughts" : `Thought for ${seconds(took)}`;
    this.details.open = false;
  }

  end(turn) {
    this.draw(turn);
    this.markdown.end(turn.answer);
    this.waiting.parentElement.hidden = true;
    if (turn.thoughts) this.#endThinking();
    this.tools.hidden = false;
    this.element.ariaBusy = "false";
    this.facts.textContent = describeFacts(turn).join(" · ");
  }
}

function describeFacts({ facts, ended }) {
  const parts = [];
  if (facts?.tokens) parts.push(count(facts.tokens, "token"));
  if (facts?.per_s) parts.push(`${rate(facts.per_s)} tokens/s`);
  if (facts?.first_s) parts.push(`first token after ${seconds(facts.first_s)}`);
  if (facts?.prompt) parts.push(`${decimal(facts.cached)} of ${count(facts.prompt, "prompt token")} cached`);
  if (ENDS[ended]) parts.push(ENDS[ended]);
  return parts;
}
