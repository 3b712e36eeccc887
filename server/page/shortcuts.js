// Keys that work wherever one is on the page. By their place on the keyboard: with Alt a Mac's letters
// are others.

import { made } from "./element.js";

const COMMAND = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘" : "Ctrl";
const ALT = COMMAND === "⌘" ? "⌥" : "Alt";

export const SHORTCUTS = [
  { keys: ["Enter"], does: "Send the message" },
  { keys: ["Shift", "Enter"], does: "Begin a new line" },
  { keys: ["Esc"], does: "Stop the answer", code: "Escape", name: "stop" },
  { keys: ["↑"], does: "Edit the last message, in the empty box" },
  { keys: [ALT, "N"], does: "New chat", code: "KeyN", alt: true, name: "newChat" },
  { keys: [ALT, "R"], does: "Regenerate the last answer", code: "KeyR", alt: true, name: "regenerate" },
  { keys: [ALT, "S"], does: "Settings of this conversation", code: "KeyS", alt: true, name: "settings" },
  { keys: [ALT, "M"], does: "Go to the message box", code: "KeyM", alt: true, name: "message" },
  { keys: [COMMAND, "/"], does: "Show these shortcuts", code: "Slash", command: true, name: "help" },
];

// actions: by the shortcuts' names.
export function listen(actions) {
  document.addEventListener("keydown", (event) => {
    // A dialog has keys of its own.
    if (document.querySelector("dialog[open]") || event.isComposing || event.defaultPrevented) return;
    const found = SHORTCUTS.find(
      ({ code, alt = false, command = false }) =>
        code === event.code && alt === event.altKey && command === (event.ctrlKey || event.metaKey),
    );
    if (!found || event.shiftKey) return;
    if (actions[found.name]() !== false) event.preventDefault();
  });
}

export function showHelp(list) {
  for (const { keys, does } of SHORTCUTS) {
    const term = made("dt");
    term.append(...keys.map((key) => made("kbd", "", key)));
    list.append(term, made("dd", "", does));
  }
}
