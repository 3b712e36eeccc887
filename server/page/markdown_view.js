// Shows Markdown while it is being written. What can no longer change is not parsed again, and blocks
// that stay the same keep their elements, so that nothing flickers.

import { CodeBlock } from "./code.js";
import { made } from "./element.js";
import { blocksOf } from "./markdown.js";
import { safe } from "./safe.js";

function element(block) {
  if (block.kind === "plain") return made("p", "plain", block.text);
  const part = made("div", "block");
  part.append(safe(block.text));
  for (const code of part.querySelectorAll("pre > code")) nested(code);
  for (const table of part.querySelectorAll("table")) {
    const frame = made("div", "wide");
    frame.tabIndex = 0;
    table.replaceWith(frame);
    frame.append(table);
  }
  return part;
}

// Code in a list or a quotation.
function nested(code) {
  const language = /^language-(.*)$/.exec(code.className)?.[1] ?? "";
  const block = new CodeBlock(language);
  code.parentElement.replaceWith(block.element);
  block.show(code.textContent.replace(/\n$/, ""), false);
}

export class MarkdownView {
  #target;
  #shown = [];
  #settledChars = 0;
  #settledBlocks = 0;

  constructor(target) {
    this.#target = target;
  }

  // A text that begins with the one before.
  write(text) {
    const rest = text.slice(this.#settledChars);
    const blocks = blocksOf(rest);
    this.#reconcile(this.#settledBlocks, blocks, true);
    this.#settle(rest, blocks);
  }

  // The whole of it: links whose addresses stand further below are links now.
  end(text) {
    this.#reconcile(0, blocksOf(text), false);
  }

  // All blocks but the last one stay, once a whole line has shown that the last one is another.
  #settle(rest, blocks) {
    const last = blocks.at(-1);
    if (blocks.length < 2 || rest.includes("\r")) return;
    let place = 0;
    for (let line = 0; line < last.line; line += 1) place = rest.indexOf("\n", place) + 1;
    if (!rest.includes("\n", place)) return;
    this.#settledChars += place;
    this.#settledBlocks += blocks.length - 1;
  }

  #reconcile(first, blocks, isOpen) {
    blocks.forEach((block, number) => {
      const place = first + number;
      const open = isOpen && number === blocks.length - 1;
      const shown = this.#shown[place];
      const same = shown?.kind === block.kind && shown.language === block.language;
      if (same && block.kind === "code") shown.code.show(block.text, open);
      else if (!same || shown.text !== block.text) this.#put(place, block, open);
    });
    for (const old of this.#shown.splice(first + blocks.length)) old.element.remove();
  }

  #put(place, block, open) {
    const code = block.kind === "code" ? new CodeBlock(block.language) : null;
    code?.show(block.text, open);
    const made = code?.element ?? element(block);
    const old = this.#shown[place];
    if (old) old.element.replaceWith(made);
    else this.#target.append(made);
    this.#shown[place] = { ...block, code, element: made };
  }
}
