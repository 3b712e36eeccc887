// The open conversation: shows its turns, sends the text of the input box, and asks edited questions again. Answers
// of other conversations go on.

import { describe, ServerError } from "./api.js";
import { Answering } from "./answering.js";
import { titleOf } from "./conversation.js";
import { at, make } from "./element.js";
import { Attachments } from "./files.js";
import { Answer, isSendKey, Question } from "./messages.js";

const NEAR_END_PX = 80;
const KEPT_EVERY_MS = 2000;
// After drawing, the page waits this many times as long as the drawing took, so that it stays responsive.
const REST = 4;

const messages = at("messages");
const welcome = at("welcome");
const prompt = at("prompt");

export class Chat {
  conversation = null;
  // Conversations with a running answer, or with a question that was not answered: id -> { conversation, answering }
  // or { conversation, unsent, error }.
  pending = new Map();
  #files = new Attachments();
  #views = [];
  #drawing = false;
  #drawAfter = 0;

  // onChange(conversation): stores the conversation. onTurns(conversation): called when other turns are shown.
  // onPending(): called when an answer begins or ends. look, loads(): see Answering. describeWait(): returns the
  // reason for a slow first token.
  constructor({ onChange, onTurns, onPending, look, loads, describeWait }) {
    Object.assign(this, { onChange, onTurns, onPending, look, loads, describeWait });
    at("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    prompt.addEventListener("keydown", (event) => {
      const isEdit = event.key === "ArrowUp" && !prompt.value && !event.altKey && !event.isComposing;
      if (!isEdit && !isSendKey(event)) return;
      event.preventDefault();
      if (isEdit) this.#editLast();
      else this.#send();
    });
    prompt.addEventListener("input", fitPrompt);
  }

  get #answering() {
    return this.pending.get(this.conversation?.id)?.answering ?? null;
  }

  get isBusy() {
    return this.#answering !== null;
  }

  open(conversation) {
    for (const { answering } of this.pending.values()) if (answering) answering.view = null;
    this.conversation = conversation;
    this.#drawAll();
    scrollToEnd();
  }

  stop() {
    this.#answering?.stop();
  }

  // Stops the answer of a deleted conversation, and drops its unanswered question.
  forget(id) {
    const answering = this.pending.get(id)?.answering;
    this.pending.delete(id);
    answering?.stop();
  }

  #drawAll() {
    const { turns, id } = this.conversation;
    const { answering = null, unsent = null, error = null } = this.pending.get(id) ?? {};
    this.#views = [];
    messages.replaceChildren(welcome);
    for (const turn of turns) if (turn !== answering?.turn) this.#addViews(turn).answer.end(turn);
    if (answering) this.#show(answering);
    if (unsent) this.#showUnsent(unsent, error);
    this.#showBusy();
    this.onTurns(this.conversation);
  }

  #addViews({ question: text, files }) {
    const place = this.#views.length;
    const question = new Question(text, files, (edited) => this.#askAgain(place, edited, files));
    const answer = new Answer(() => this.#askAgain(place, text, files));
    this.#views.push({ question, answer });
    welcome.remove();
    messages.append(question.element, answer.element);
    return { question, answer };
  }

  #show(answering) {
    answering.view = this.#addViews(answering.turn).answer;
    answering.view.wait(answering.waited_s, this.describeWait());
    if (answering.hasBegun) answering.view.draw(answering.turn);
  }

  #send() {
    const text = prompt.value.trim();
    if ((!text && this.#files.isEmpty) || this.isBusy) return;
    prompt.value = "";
    fitPrompt();
    if (this.pending.delete(this.conversation.id)) this.#drawAll();
    this.#ask(text, this.#files.take(), []);
  }

  #editLast() {
    if (!this.isBusy) this.#views.at(-1)?.question.edit();
  }

  regenerate() {
    const { turns } = this.conversation;
    if (turns.length) this.#askAgain(turns.length - 1, turns.at(-1).question, turns.at(-1).files);
  }

  // Asks a question in place of an earlier turn. That turn and later ones are dropped once the answer begins.
  #askAgain(place, text, files) {
    if (this.isBusy) return false;
    const dropped = this.conversation.turns.splice(place);
    this.pending.delete(this.conversation.id);
    this.#drawAll();
    this.#ask(text, files, dropped);
    return true;
  }

  async #ask(question, files, dropped) {
    const { conversation } = this;
    const answering = new Answering(conversation, { question, files }, { look: this.look, loads: this.loads() });
    this.pending.set(conversation.id, { conversation, answering });
    this.#show(answering);
    this.#showBusy();
    this.onPending();
    const wait = () => answering.view?.wait(answering.waited_s, this.describeWait());
    const waiting = setInterval(() => (answering.hasBegun ? clearInterval(waiting) : wait()), 1000);
    scrollToEnd();
    let error = null;
    try {
      await answering.run(() => this.#change(answering));
    } catch (caught) {
      error = answering.wasStopped ? null : caught;
    }
    clearInterval(waiting);
    if (this.pending.get(conversation.id)?.answering !== answering) return;
    this.pending.delete(conversation.id);
    this.#end(answering, dropped, error);
    this.onPending();
  }

  #end(answering, dropped, error) {
    const { conversation, turn, view, hasBegun } = answering;
    answering.view = null;
    if (hasBegun) this.#keep(answering);
    else conversation.turns.push(...dropped);
    const isLost = error !== null && dropped.length === 0;
    if (!hasBegun && isLost) this.pending.set(conversation.id, { conversation, unsent: turn, error });
    if (!view) return;
    if (hasBegun && answering.wasStopped && !turn.facts.prompt) this.#lookUp(answering, view);
    const wasNear = isNearEnd();
    if (hasBegun) {
      view.end(turn);
      if (error) showProblem(error);
      this.#showBusy();
      this.onTurns(conversation);
    } else {
      this.#drawAll();
      this.#giveBack(turn);
      if (error && !isLost) showProblem(error);
    }
    if (wasNear) scrollToEnd();
  }

  async #lookUp(answering, view) {
    // Another conversation may be open by now, and this one may be deleted.
    if (!(await answering.lookUp()) || this.conversation !== answering.conversation) return;
    this.onChange(this.conversation);
    this.onTurns(this.conversation);
    view.showFacts(answering.turn);
  }

  #change(answering) {
    if (!answering.hasBegun || answering.wasStopped) return;
    const now = performance.now();
    if (now - answering.keptAt > KEPT_EVERY_MS) this.#keep(answering);
    if (this.#drawing || !answering.view) return;
    this.#drawing = true;
    // Draw at most once per animation frame, and less often if drawing is slow.
    setTimeout(() => requestAnimationFrame(() => this.#draw(answering)), Math.max(0, this.#drawAfter - now));
  }

  #draw(answering) {
    this.#drawing = false;
    if (!answering.view) return;
    const began = performance.now();
    const wasNear = isNearEnd();
    answering.view.draw(answering.turn);
    if (wasNear) scrollToEnd();
    const now = performance.now();
    this.#drawAfter = now + REST * (now - began);
  }

  #keep(answering) {
    const { conversation, turn } = answering;
    answering.keptAt = performance.now();
    if (!conversation.turns.includes(turn)) conversation.turns.push(turn);
    conversation.title ||= titleOf(turn);
    conversation.changed = Date.now();
    this.onChange(conversation);
  }

  // Shows a question that was not answered, below the turns.
  #showUnsent(turn, error) {
    const { question, answer } = this.#addViews(turn);
    answer.end({ ...turn, ended: "" });
    question.tools.hidden = answer.tools.hidden = true;
    if (error instanceof ServerError) question.markUnsent();
    showProblem(error);
    this.#giveBack(turn);
  }

  // Puts a question and its files back into the input box, unless the box has text or files by now.
  #giveBack({ question, files }) {
    if (prompt.value || !this.#files.isEmpty) return;
    prompt.value = question;
    this.#files.put(files);
    fitPrompt();
  }

  #showBusy() {
    at("stop").hidden = !this.isBusy;
    at("send").hidden = this.isBusy;
    messages.classList.toggle("busy", this.isBusy);
    messages.ariaBusy = String(this.isBusy);
  }
}

function showProblem(error) {
  messages.lastElementChild.append(make("p", { className: "problem", role: "alert" }, describe(error)));
  if (!(error instanceof ServerError)) console.error(error);
}

function isNearEnd() {
  return messages.scrollHeight - messages.scrollTop - messages.clientHeight < NEAR_END_PX;
}

function scrollToEnd() {
  messages.scrollTop = messages.scrollHeight;
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}
