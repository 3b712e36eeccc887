// Connects the parts of the page, and handles buttons and keyboard shortcuts.

import { onKeyNeeded, readStored, useKey, writeStored } from "./api.js";
import { Chat } from "./chat.js";
import { Conversations } from "./conversations.js";
import { at, make } from "./element.js";
import { newestMap, startMemory, startReplicas, watchMemory } from "./memory.js";
import * as settings from "./settings.js";
import { showTurns } from "./turns.js";

const VIEWS = ["list", "chat", "memory"];
const FOLDED = "quire-memory-folded";
// Matches a window that has room for chat and memory side by side. style.css has the same width.
const BESIDE = matchMedia("(min-width: 1021px)");
const main = document.querySelector("main");
const COMMAND = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘" : "Ctrl";
const ALT = COMMAND === "⌘" ? "⌥" : "Alt";

const chat = new Chat({
  onChange: (conversation) => conversations.keep(conversation),
  onTurns: (conversation) => {
    showTurns(conversation);
    // The server may have loaded and unloaded models for the new turn.
    if (settings.comeAndGo()) settings.refreshModels().catch(() => {});
  },
  onPending: () => conversations.show(),
  look: newestMap,
  loads: settings.isAway,
  describeWait: settings.describeWait,
});

function open(conversation) {
  if (conversation !== chat.conversation) chat.open(conversation);
  useModel(conversation);
  settings.sumUpSettings(conversation);
  goToPrompt();
}

const conversations = new Conversations(open, chat.pending, (id) => chat.forget(id));

at("model").addEventListener("change", () => {
  chat.conversation.model = settings.chosenModel();
  conversations.keep(chat.conversation);
  watch();
});

function useModel(conversation) {
  settings.chooseModel(conversation.model);
  // Before the list of models arrives, no model is chosen, and the conversation keeps its own model.
  conversation.model = settings.chosenModel() ?? conversation.model;
  watch();
}

function watch() {
  watchMemory(settings.comeAndGo() ? settings.chosenModel() : null);
}

function show(view) {
  main.dataset.view = view;
  for (const name of VIEWS) at(`show-${name}`).ariaPressed = String(name === view);
  if (BESIDE.matches) at("show-memory").ariaPressed = String(!main.classList.contains("folded"));
}

// Shows or hides the memory. A wide window has it beside the chat, a narrow one in place of the chat.
function foldMemory() {
  if (!BESIDE.matches) return show(main.dataset.view === "memory" ? "chat" : "memory");
  const isFolded = main.classList.toggle("folded");
  writeStored(FOLDED, isFolded ? "yes" : "", "localStorage");
  show(main.dataset.view);
}

function goToPrompt() {
  show("chat");
  at("prompt").focus({ preventScroll: true });
}

function openSettings() {
  const { conversation } = chat;
  settings.openSettings(conversation, () => {
    settings.sumUpSettings(conversation);
    conversations.keep(conversation);
  });
}

// --- keyboard shortcuts --------------------------------------------------------------------------

// code is the key's position on the keyboard, since Alt changes the letter of a key on a Mac.
const SHORTCUTS = [
  { keys: ["Enter"], does: "Send the message" },
  { keys: ["Shift", "Enter"], does: "Begin a new line" },
  { keys: ["Esc"], does: "Stop the answer", code: "Escape", act: () => (chat.isBusy ? chat.stop() : false) },
  { keys: ["↑"], does: "Edit the last message, in the empty box" },
  { keys: [ALT, "N"], does: "New chat", code: "KeyN", alt: true, act: () => conversations.begin() },
  { keys: [ALT, "R"], does: "Regenerate the last answer", code: "KeyR", alt: true, act: () => chat.regenerate() },
  { keys: [ALT, "S"], does: "Settings of this conversation", code: "KeyS", alt: true, act: openSettings },
  { keys: [ALT, "K"], does: "Show or hide the memory", code: "KeyK", alt: true, act: foldMemory },
  { keys: [ALT, "M"], does: "Go to the message box", code: "KeyM", alt: true, act: goToPrompt },
  { keys: [COMMAND, "/"], does: "Show these shortcuts", code: "Slash", command: true, act: () => at("help").showModal() },
];

for (const { keys, does } of SHORTCUTS) {
  at("shortcuts").append(make("dt", {}, ...keys.map((key) => make("kbd", {}, key))), make("dd", {}, does));
}

document.addEventListener("keydown", (event) => {
  // An open dialog handles keys itself.
  if (document.querySelector("dialog[open]") || event.isComposing || event.defaultPrevented || event.shiftKey) return;
  const shortcut = SHORTCUTS.find(
    ({ code, alt = false, command = false }) =>
      code === event.code && alt === event.altKey && command === (event.ctrlKey || event.metaKey),
  );
  if (shortcut && shortcut.act() !== false) event.preventDefault();
});

// --- the page's start, and the API key ----------------------------------------------------------

async function begin() {
  try {
    await settings.refreshModels();
    useModel(chat.conversation);
  } catch {
    return;
  } finally {
    startMemory();
  }
  startReplicas();
  at("key-form").hidden = true;
  at("key-note").textContent = "";
}

onKeyNeeded(() => {
  const form = at("key-form");
  if (form.dataset.tried) at("key-note").textContent = "The server did not accept this key.";
  if (!form.hidden) return;
  form.hidden = false;
  at("key").focus();
});

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key").value.trim());
  at("key").value = "";
  event.target.dataset.tried = "yes";
  begin();
});
at("stop").addEventListener("click", () => chat.stop());
at("open-settings").addEventListener("click", openSettings);
at("show-help").addEventListener("click", () => at("help").showModal());
for (const name of VIEWS) {
  at(`show-${name}`).addEventListener("click", () => (name === "memory" && BESIDE.matches ? foldMemory() : show(name)));
}
BESIDE.addEventListener("change", () => show(main.dataset.view));
main.classList.toggle("folded", Boolean(readStored(FOLDED, "localStorage")));
// Show stored conversations first: the server may be unreachable.
await conversations.start();
begin();
