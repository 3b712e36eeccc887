// Shows the turns (questions with answers) of the open conversation, and sends new and edited questions.

import { describe, ServerError } from "./api.js";
import { Answering } from "./answering.js";
import { titleOf } from "./conversation.js";
import { at, make } from "./element.js";
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
  #answering = null;
  #views = [];
  #drawing = false;
  #drawAfter = 0;
  #keptAt = 0;

  // onChange(conversation) stores the conversation. onTurns(conversation) is called when other turns are shown.
  // look and loads() are passed to Answering. describeWait() returns the reason for a slow first token.
  constructor({ onChange, onTurns, look, loads, describeWait }) {
    Object.assign(this, { onChange, onTurns, look, loads, describeWait });
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

  get isBusy() {
    return this.#answering !== null;
  }

  open(conversation) {
    this.stop();
    this.#answering = null;
    this.conversation = conversation;
    this.#showBusy();
    this.#drawAll();
    scrollToEnd();
  }

  stop() {
    this.#answering?.stop();
  }

  #drawAll() {
    const { turns } = this.conversation;
    this.#views = [];
    messages.replaceChildren(...(turns.length ? [] : [welcome]));
    for (const turn of turns) this.#addViews(turn.question).answer.end(turn);
    this.onTurns(this.conversation);
  }

  #addViews(text) {
    const place = this.#views.length;
    const question = new Question(text, (edited) => this.#askAgain(place, edited));
    const answer = new Answer(() => this.#askAgain(place, text));
    this.#views.push({ question, answer });
    welcome.remove();
    messages.append(question.element, answer.element);
    return { question, answer };
  }

  #send() {
    const text = prompt.value.trim();
    if (!text || this.isBusy) return;
    prompt.value = "";
    fitPrompt();
    // A question without an answer is shown, but is no turn of the conversation. It is removed here.
    if (this.#views.length > this.conversation.turns.length) this.#drawAll();
    this.#ask(text, []);
  }

  #editLast() {
    if (!this.isBusy) this.#views.at(-1)?.question.edit();
  }

  regenerate() {
    const { turns } = this.conversation;
    if (turns.length) this.#askAgain(turns.length - 1, turns.at(-1).question);
  }

  // Sends a question in place of an earlier turn. That turn and later ones are deleted once the answer begins.
  #askAgain(place, text) {
    if (this.isBusy) return false;
    const dropped = this.conversation.turns.splice(place);
    this.#drawAll();
    this.#ask(text, dropped);
    return true;
  }

  async #ask(text, dropped) {
    const { conversation } = this;
    const views = this.#addViews(text);
    const circumstances = { look: this.look, loads: this.loads() };
    const answering = new Answering(conversation, conversation.turns, text, circumstances);
    this.#answering = answering;
    this.#showBusy();
    const wait = () => views.answer.wait(answering.waited_s, this.describeWait());
    wait();
    const waiting = setInterval(() => (answering.hasBegun ? clearInterval(waiting) : wait()), 1000);
    scrollToEnd();
    let error = null;
    try {
      await answering.run(() => this.#change(conversation, answering, views.answer));
    } catch (caught) {
      error = answering.wasStopped ? null : caught;
    }
    clearInterval(waiting);
    const isOpen = this.#answering === answering;
    const hasAnswer = answering.hasBegun;
    if (hasAnswer) this.#keep(conversation, answering.turn);
    else conversation.turns.push(...dropped);
    if (!isOpen) return;
    this.#answering = null;
    const wasNear = isNearEnd();
    views.answer.end(answering.turn);
    if (!hasAnswer) this.#showUnanswered(views, text, dropped, error);
    if (error) showProblem(error);
    this.#showBusy();
    this.onTurns(conversation);
    if (wasNear) scrollToEnd();
  }

  #change(conversation, answering, view) {
    if (!answering.hasBegun) return;
    const now = performance.now();
    if (now - this.#keptAt > KEPT_EVERY_MS) this.#keep(conversation, answering.turn);
    if (this.#drawing || this.#answering !== answering) return;
    this.#drawing = true;
    // The answer is drawn at most once per animation frame, and less often if drawing is slow.
    setTimeout(() => requestAnimationFrame(() => this.#draw(answering, view)), Math.max(0, this.#drawAfter - now));
  }

  #draw(answering, view) {
    this.#drawing = false;
    if (this.#answering !== answering) return;
    const began = performance.now();
    const wasNear = isNearEnd();
    view.draw(answering.turn);
    if (wasNear) scrollToEnd();
    const now = performance.now();
    this.#drawAfter = now + REST * (now - began);
  }

  #keep(conversation, turn) {
    this.#keptAt = performance.now();
    if (!conversation.turns.includes(turn)) conversation.turns.push(turn);
    conversation.title ||= titleOf(turn.question);
    conversation.changed = Date.now();
    this.onChange(conversation);
  }

  // Restores the turns that the failed question would have replaced, and puts the question back into the input box.
  #showUnanswered({ question, answer }, text, dropped, error) {
    question.tools.hidden = answer.tools.hidden = true;
    if (dropped.length) this.#drawAll();
    if (!(error instanceof ServerError)) return;
    question.element.classList.add("unsent");
    if (prompt.value) return;
    prompt.value = text;
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
