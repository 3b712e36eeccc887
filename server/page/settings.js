// The dialog with what a conversation is asked with: its system prompt, and how answers are drawn.

import { made } from "./element.js";
import { FIELDS, readSampling } from "./sampling.js";

export class Settings {
  #fields = new Map();
  #conversation = null;

  // page: dialog, form, system, sampling, thinking, close. onChange(conversation) when it is closed.
  constructor(page, onChange) {
    this.page = page;
    for (const field of FIELDS) {
      const input = made("input");
      Object.assign(input, { type: "number", min: field.least, max: field.most, placeholder: "default" });
      input.step = field.step < 1 ? "any" : 1;
      input.inputMode = field.step < 1 ? "decimal" : "numeric";
      const label = made("label", "", field.label);
      label.append(input);
      page.sampling.append(label);
      this.#fields.set(field.name, input);
    }
    page.form.addEventListener("submit", (event) => {
      event.preventDefault();
      page.dialog.close();
    });
    page.dialog.addEventListener("close", () => {
      this.#read();
      onChange(this.#conversation);
    });
  }

  open(conversation) {
    this.#conversation = conversation;
    this.page.system.value = conversation.system;
    this.page.thinking.checked = conversation.sampling.thinking !== false;
    for (const [name, input] of this.#fields) input.value = conversation.sampling[name] ?? "";
    this.page.dialog.showModal();
  }

  #read() {
    const given = { thinking: this.page.thinking.checked };
    for (const [name, input] of this.#fields) {
      if (input.value !== "" && input.checkValidity()) given[name] = input.valueAsNumber;
    }
    this.#conversation.system = this.page.system.value;
    this.#conversation.sampling = readSampling(given);
  }
}
