// One question, and the form in which it is edited.

import { copyButton } from "./copy.js";
import { button, made } from "./element.js";

export class Question {
  constructor(text, onEdited) {
    this.value = text;
    this.onEdited = onEdited;
    this.element = made("article", "message asked");
    this.element.setAttribute("aria-label", "You");
    this.text = made("div", "text", text);
    this.tools = made("div", "message-tools");
    this.edits = button("Edit", "edit", () => this.edit());
    this.tools.append(copyButton("Copy message", () => this.value), this.edits);
    this.element.append(this.text, this.tools);
  }

  edit() {
    if (this.form) return;
    this.form = made("form", "edit-form");
    const field = made("textarea");
    field.value = this.value;
    field.rows = Math.min(12, this.value.split("\n").length + 1);
    field.setAttribute("aria-label", "Edit message");
    const send = made("button", "primary", "Send again");
    const note = made("p", "figures", "What follows it is dropped.");
    const tools = made("div", "edit-tools");
    tools.append(note, button("Cancel", "quiet", () => this.#close()), send);
    this.form.append(field, tools);
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#take(field.value.trim());
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        this.#close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229) {
        event.preventDefault();
        this.#take(field.value.trim());
      }
    });
    this.text.hidden = this.tools.hidden = true;
    this.element.append(this.form);
    field.focus();
  }

  #take(text) {
    if (text && this.onEdited(text)) this.#close();
  }

  #close() {
    this.form?.remove();
    this.form = null;
    this.text.hidden = this.tools.hidden = false;
    this.edits.focus();
  }
}
