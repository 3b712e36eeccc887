// The conversation that is open: its turns on the page, what is asked, and what may be asked again.

import { ServerError } from "./api.js";
import { Answer } from "./answer.js";
import { Answering } from "./answering.js";
import { titleOf } from "./conversation.js";
import { made } from "./element.js";
import { Question } from "./question.js";
import { inWords } from "./words.js";

const NEAR_END_PX = 80;
const KEPT_EVERY_MS = 2000;
// Of the time, so much is left for everything else when drawing takes long.
const REST = 4;

export class Chat {
  #answering = null;
  #views = [];
  #drawing = false;
  #drawAfter = 0;
  #keptAt = 0;

  // onChange(conversation): it has changed, and is to be kept. onTurns: other turns are shown. look: as
  // of Answering. loads: whether the chosen model has to be loaded first. waitsFor: what its first token
  // waits for, in words.
  constructor(page, { onChange, onTurns, look, loads, waitsFor }) {
    this.page = page;
    this.conversation = null;
    Object.assign(this, { onChange, onTurns, look, loads, waitsFor });
  }

  get isBusy() {
    return this.#answering !== null;
  }

  open(conversation) {
    this.stop();
    this.#answering = null;
    this.conversation = conversation;
    this.#busy();
    this.#drawAll();
    this.#scroll(true);
  }

  stop() {
    this.#answering?.stop();
  }

  #drawAll() {
    const { messages, welcome } = this.page;
    this.#views = [];
    messages.replaceChildren(...(this.conversation.turns.length ? [] : [welcome]));
    this.conversation.turns.forEach((turn) => this.#addViews(turn.question).answer.end(turn));
    this.onTurns(this.conversation);
  }

  #addViews(text) {
    const place = this.#views.length;
    const question = new Question(text, (edited) => this.#again(place, edited));
    const answer = new Answer(() => this.#again(place, this.conversation.turns[place].question));
    this.#views.push({ question, answer });
    this.page.welcome.remove();
    this.page.messages.append(question.element, answer.element);
    return { question, answer };
  }

  // Whether it could be sent.
  send(text) {
    if (!text || this.isBusy) return false;
    this.#clearUnsent();
    this.#ask(text, []);
    return true;
  }

  editLast() {
    if (!this.isBusy && this.#views.length) this.#views.at(-1).question.edit();
  }

  regenerate() {
    const last = this.conversation.turns.length - 1;
    if (last >= 0) this.#again(last, this.conversation.turns[last].question);
  }

  // Asks in the place of a turn; those from there on are dropped, once there is an answer.
  #again(place, text) {
    if (this.isBusy) return false;
    const dropped = this.conversation.turns.splice(place);
    this.#drawAll();
    this.#ask(text, dropped);
    return true;
  }

  // Views of questions that were not answered; they are no turns.
  #clearUnsent() {
    if (this.#views.length > this.conversation.turns.length) this.#drawAll();
  }

  async #ask(text, dropped) {
    const { conversation } = this;
    const views = this.#addViews(text);
    const answering = new Answering(conversation, conversation.turns, text, {
      look: this.look,
      loads: this.loads(),
    });
    this.#answering = answering;
    this.#busy();
    const says = () => views.answer.wait(answering.waited_s, this.waitsFor());
    says();
    const waiting = setInterval(() => (answering.hasBegun ? clearInterval(waiting) : says()), 1000);
    this.#scroll(true);
    let error = null;
    try {
      await answering.run(() => this.#changed(conversation, answering, views.answer));
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
    views.answer.end(answering.turn);
    if (!hasAnswer) this.#unanswered(views, text, dropped, error);
    if (error) this.#problem(error);
    this.#busy();
    this.onTurns(conversation);
    this.#scroll();
  }

  #changed(conversation, answering, view) {
    if (!answering.hasBegun) return;
    const { turn } = answering;
    const now = performance.now();
    if (now - this.#keptAt > KEPT_EVERY_MS) this.#keep(conversation, turn);
    if (this.#drawing || this.#answering !== answering) return;
    this.#drawing = true;
    // At most once a frame, and less often where a long answer takes long to draw.
    setTimeout(() => requestAnimationFrame(() => this.#draw(answering, view)), Math.max(0, this.#drawAfter - now));
  }

  #draw(answering, view) {
    this.#drawing = false;
    if (this.#answering !== answering) return;
    const began = performance.now();
    const near = this.#isNearEnd();
    view.draw(answering.turn);
    if (near) this.#scroll(true);
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

  // Nothing was answered: what was there before is there again, and the question can be sent again.
  #unanswered({ question, answer }, text, dropped, error) {
    question.tools.hidden = answer.tools.hidden = true;
    if (dropped.length) this.#drawAll();
    else if (error instanceof ServerError) question.element.classList.add("unsent");
    if (error instanceof ServerError && !this.page.prompt.value) {
      this.page.prompt.value = text;
      this.page.prompt.dispatchEvent(new Event("input"));
    }
  }

  #problem(error) {
    const problem = made("p", "problem", inWords(error));
    problem.setAttribute("role", "alert");
    this.page.messages.lastElementChild.append(problem);
    if (!(error instanceof ServerError)) console.error(error);
  }

  #busy() {
    this.page.stop.hidden = !this.isBusy;
    this.page.send.hidden = this.isBusy;
    this.page.messages.classList.toggle("busy", this.isBusy);
    this.page.messages.setAttribute("aria-busy", String(this.isBusy));
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
