// Elements without markup: text becomes text nodes.

export function made(kind, name = "", text = "") {
  const element = document.createElement(kind);
  if (name) element.className = name;
  if (text) element.textContent = text;
  return element;
}

export function button(text, name, onClick) {
  const element = made("button", name, text);
  element.type = "button";
  element.addEventListener("click", onClick);
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
