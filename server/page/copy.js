// A button that copies a text. Without a secure context there is no clipboard but the old one.

import { button } from "./element.js";

const SAID_MS = 1600;

export function copyButton(label, text) {
  const element = button("Copy", "copy", async () => {
    const said = (await copy(text())) ? "Copied" : "Not copied";
    name(said, said);
    setTimeout(() => name("Copy", label), SAID_MS);
  });
  const name = (shown, spoken) => {
    element.textContent = shown;
    element.setAttribute("aria-label", spoken);
  };
  name("Copy", label);
  return element;
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

function copyBySelection(text) {
  const before = document.activeElement;
  const field = document.createElement("textarea");
  field.className = "away";
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  before?.focus();
  return copied;
}
