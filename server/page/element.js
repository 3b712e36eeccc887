// Finds and makes HTML elements. Text is never parsed as markup.

const SAID_MS = 1600;
const drawn = new WeakMap();

export const at = (id) => document.getElementById(id);

// Makes an element. properties is an object of properties, or a string with the class.
export function make(kind, properties = {}, ...content) {
  const element = document.createElement(kind);
  Object.assign(element, typeof properties === "string" ? { className: properties } : properties);
  element.append(...content);
  return element;
}

export function makeButton(text, className, onclick) {
  return make("button", { type: "button", className, onclick }, text);
}

export function makeRow(texts, lastClass, lastText) {
  return make("tr", {}, ...texts.map((text) => make("td", {}, text)), make("td", lastClass, lastText));
}

// Sets a text only if it differs, so that selections stay and screen readers do not repeat the text.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setList(list, values, makeItem) {
  const signature = JSON.stringify(values);
  if (drawn.get(list) === signature) return;
  drawn.set(list, signature);
  list.replaceChildren(...values.map(makeItem));
}

export function makeCopyButton(label, getText) {
  const show = (textContent, ariaLabel = textContent) => Object.assign(button, { textContent, ariaLabel });
  const button = makeButton("", "copy", async () => {
    show((await copy(getText())) ? "Copied" : "Not copied");
    setTimeout(show, SAID_MS, "Copy", label);
  });
  return show("Copy", label);
}

// Copies text. An insecure context (HTTP) has no navigator.clipboard, so execCommand copies a selection instead.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const before = document.activeElement;
    const field = make("textarea", { className: "away", value: text });
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    before?.focus();
    return isCopied;
  }
}
