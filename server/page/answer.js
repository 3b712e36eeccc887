// One answer: on its way, or as it was.

import { copyButton } from "./copy.js";
import { button, made } from "./element.js";
import { count, rate, seconds } from "./format.js";
import { MarkdownView } from "./markdown_view.js";

const SAYS_WAITING_AFTER_S = 2;
const ENDS = { length: "ended at the limit", stopped: "stopped", error: "ended by an error" };

export class Answer {
  constructor(onRegenerate) {
    this.element = made("article", "message answer");
    this.element.setAttribute("aria-label", "Answer");
    this.waiting = made("p", "waiting");
    this.waitingText = made("span", "away", "Waiting for the first token");
    this.waiting.append(this.waitingText);
    this.details = made("details", "thinking");
    this.details.hidden = true;
    this.summary = made("summary", "", "Thinking");
    this.thought = made("div", "thought");
    this.details.append(this.summary, this.thought);
    this.text = made("div", "text");
    this.markdown = new MarkdownView(this.text);
    this.facts = made("p", "facts");
    this.tools = made("div", "message-tools");
    this.turn = null;
    const again = button("Regenerate", "regenerate", onRegenerate);
    this.tools.append(copyButton("Copy answer", () => this.turn.answer), again);
    this.element.append(this.waiting, this.details, this.text, this.facts, this.tools);
  }

  // waited: seconds; what: what it waits for.
  wait(waited, what) {
    this.element.setAttribute("aria-busy", "true");
    this.tools.hidden = true;
    if (waited < SAYS_WAITING_AFTER_S) return;
    this.waitingText.className = "";
    this.waitingText.textContent = `${what}: ${count(Math.floor(waited), "second")}`;
  }

  draw(turn) {
    this.turn = turn;
    this.waiting.hidden = Boolean(turn.thoughts || turn.answer);
    if (turn.thoughts && this.details.hidden) {
      this.details.hidden = false;
      // Unless they ended before they could be shown.
      this.details.open = !turn.answer;
    }
    if (turn.answer && this.summary.textContent === "Thinking") this.#endThinking();
    if (this.thought.textContent.length !== turn.thoughts.length) this.thought.textContent = turn.thoughts;
    this.markdown.write(turn.answer);
  }

  #endThinking() {
    const took = this.turn.facts?.thought_s;
    this.summary.textContent = took === null || took === undefined ? "Thoughts" : `Thought for ${seconds(took)}`;
    this.details.open = false;
  }

  end(turn) {
    this.turn = turn;
    this.draw(turn);
    this.markdown.end(turn.answer);
    this.waiting.hidden = true;
    if (turn.thoughts) this.#endThinking();
    this.tools.hidden = false;
    this.element.setAttribute("aria-busy", "false");
    this.facts.textContent = factsOf(turn).join(" · ");
  }
}

function factsOf({ facts, ended }) {
  const said = [];
  if (facts?.tokens) said.push(count(facts.tokens, "token"));
  if (facts?.per_s) said.push(`${rate(facts.per_s)} tokens/s`);
  if (facts?.first_s) said.push(`first token after ${seconds(facts.first_s)}`);
  if (facts?.prompt) said.push(`${facts.cached.toLocaleString("en")} of ${count(facts.prompt, "prompt token")} cached`);
  if (ENDS[ended]) said.push(ENDS[ended]);
  return said;
}
