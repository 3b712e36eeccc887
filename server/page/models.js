// The models that the server has, to choose from.

import { ask } from "./api.js";
import { made } from "./element.js";

export class Models {
  #entries = [];

  constructor(select, onChoice) {
    this.select = select;
    select.addEventListener("change", () => onChoice(select.value));
    // What is loaded changes, and so may what there is.
    select.addEventListener("focus", () => this.refresh().catch(() => {}));
  }

  get chosen() {
    return this.select.value || null;
  }

  get several() {
    return this.#entries.length > 1;
  }

  // Whether models come and go: then each has a memory of its own.
  get comeAndGo() {
    return this.several || this.#entries.some((entry) => "loaded" in entry);
  }

  // Raises ServerError.
  async refresh() {
    const { data } = await (await ask("/v1/models")).json();
    this.#entries = data;
    const chosen = this.chosen;
    const shown = [...this.select.options].map((option) => option.value);
    if (shown.join("\n") !== data.map(({ id }) => id).join("\n")) {
      this.select.replaceChildren(...data.map(({ id }) => made("option", "", id)));
    }
    this.select.hidden = data.length === 0;
    this.choose(chosen);
  }

  // Another one than the server has is the first of its models: true where it was found.
  choose(id) {
    const found = this.#entries.some((entry) => entry.id === id);
    if (found) this.select.value = id;
    else if (!this.select.value && this.#entries.length) this.select.selectedIndex = 0;
    return found;
  }

  // Whether the chosen one is known not to be loaded.
  get isAway() {
    return this.#entries.some(({ id, loaded }) => id === this.chosen && loaded === false);
  }

  // What the first token of an answer may wait for.
  waitsFor() {
    if (this.isAway) return `Loading ${this.chosen}`;
    return this.comeAndGo ? "Waiting for the first token; the model may be loading" : "Waiting for the first token";
  }
}
