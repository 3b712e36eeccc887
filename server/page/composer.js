// Where messages are written: Enter sends, and the box is as high as its text.

export class Composer {
  constructor(page, { onSend, onEditLast }) {
    this.page = page;
    this.onSend = onSend;
    page.composer.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    page.prompt.addEventListener("keydown", (event) => {
      // While an input method composes, the keys are its own.
      if (event.isComposing || event.keyCode === 229) return;
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        this.#send();
      } else if (event.key === "ArrowUp" && !page.prompt.value && !event.altKey) {
        event.preventDefault();
        onEditLast();
      }
    });
    page.prompt.addEventListener("input", () => this.#fit());
  }

  #send() {
    const { prompt } = this.page;
    const text = prompt.value.trim();
    if (!text) return;
    prompt.value = "";
    if (!this.onSend(text)) prompt.value = text;
    this.#fit();
  }

  #fit() {
    const { prompt } = this.page;
    prompt.style.height = "auto";
    prompt.style.height = `${prompt.scrollHeight + 2}px`;
  }
}
