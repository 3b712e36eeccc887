// Text files that go with a message: chosen, dropped onto the chat or pasted into the box.

import { MOST_FILE_BYTES } from "./conversation.js";
import { at, make, makeButton, setText } from "./element.js";
import { bytes } from "./format.js";

const hasFiles = (data) => data?.types.includes("Files") ?? false;

export class Attachments {
  #files = [];

  constructor() {
    at("attach").addEventListener("click", () => at("attach-files").click());
    at("attach-files").addEventListener("change", async ({ target }) => {
      await this.#add([...target.files]);
      target.value = "";
    });
    at("prompt").addEventListener("paste", (event) => {
      if (!hasFiles(event.clipboardData)) return;
      event.preventDefault();
      this.#add([...event.clipboardData.files]);
    });
    for (const kind of ["dragover", "dragleave", "drop"]) {
      document.body.addEventListener(kind, (event) => {
        if (!hasFiles(event.dataTransfer)) return;
        event.preventDefault();
        at("chat").classList.toggle("dropping", kind === "dragover");
        if (kind === "drop") this.#add([...event.dataTransfer.files]);
      });
    }
  }

  get isEmpty() {
    return this.#files.length === 0;
  }

  // Returns the files, and forgets them.
  take() {
    const files = this.#files;
    this.put([]);
    return files;
  }

  put(files, problem = "") {
    this.#files = files;
    const drop = (file) => this.put(this.#files.filter((other) => other !== file));
    at("files").replaceChildren(...files.map((file) => makeChip(file, () => drop(file))));
    setText(at("files-note"), problem);
  }

  async #add(chosen) {
    const problems = [];
    for (const file of chosen) {
      const sum = this.#files.reduce((total, { text }) => total + sizeOf(text), file.size);
      const text = sum > MOST_FILE_BYTES ? null : await readText(file);
      if (text !== null) this.#files.push({ name: file.name, text });
      else if (sum > MOST_FILE_BYTES) problems.push(`A message takes ${bytes(MOST_FILE_BYTES)}, too few for ${file.name}.`);
      else problems.push(`${file.name} is no text.`);
    }
    this.put(this.#files, problems.join(" "));
    at("prompt").focus();
  }
}

const sizeOf = (text) => new Blob([text]).size;

// Resolves to a file's text, or to null if the file is not text in UTF-8.
async function readText(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

// Makes a list item with a file's name and size. If onDrop is given, a button calls onDrop() to remove the file.
export function makeChip({ name, text }, onDrop = null) {
  const chip = make("li", {}, make("span", {}, name), make("span", "figures", bytes(sizeOf(text))));
  if (!onDrop) return chip;
  const drop = makeButton("×", "quiet", onDrop);
  drop.ariaLabel = `Leave out ${name}`;
  chip.append(drop);
  return chip;
}
