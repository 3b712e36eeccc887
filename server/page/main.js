// Puts the page together.

import { onKeyNeeded, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { Conversations } from "./conversations.js";
import { setText } from "./element.js";
import { Memory } from "./memory.js";
import { Models } from "./models.js";
import { Replicas } from "./replicas.js";
import { Settings } from "./settings.js";
import { listen, showHelp } from "./shortcuts.js";
import { Store } from "./store.js";
import { Turns } from "./turns.js";

const VIEWS = ["list", "chat", "memory"];
const at = (id) => document.getElementById(id);

function show(view) {
  document.querySelector("main").dataset.view = view;
  for (const name of VIEWS) at(`show-${name}`).setAttribute("aria-pressed", String(name === view));
}

function state(kind, text, note) {
  const element = at("state");
  if (element.dataset.kind !== kind) element.dataset.kind = kind;
  setText(element.querySelector("span"), text);
  const shown = at("memory-note");
  shown.hidden = !note;
  setText(shown, note);
}

const memory = new Memory(
  {
    memory: at("memory"),
    poolBar: at("pool-bar"),
    poolLegend: at("pool-legend"),
    poolSum: at("pool-sum"),
    map: at("map"),
    canvas: at("map-canvas"),
    cursor: at("map-cursor"),
    fact: at("map-fact"),
    mapSum: at("map-sum"),
    mapEmpty: at("map-empty"),
    mapLegend: at("map-legend"),
    tip: at("tip"),
    sequences: at("sequences"),
    sequencesSum: at("sequences-sum"),
    sequencesEmpty: at("sequences-empty"),
    cells: { article: at("cells-part"), sum: at("cells-sum"), list: at("cells") },
    curves: at("curves"),
    requests: at("requests"),
    requestsEmpty: at("requests-empty"),
  },
  state,
);

const replicas = new Replicas({ article: at("replicas-part"), sum: at("replicas-sum"), rows: at("replicas") });

const turns = new Turns({ list: at("turns"), empty: at("turns-empty"), sum: at("turns-sum") });

const models = new Models(at("model"), (model) => {
  chat.conversation.model = model;
  conversations.keep(chat.conversation);
  watch();
});

const chat = new Chat(
  { messages: at("messages"), welcome: at("welcome"), prompt: at("prompt"), send: at("send"), stop: at("stop") },
  {
    onChange: (conversation) => conversations.keep(conversation),
    onTurns: (conversation) => {
      turns.show(conversation);
      // It may have loaded a model, and others may have gone.
      if (models.comeAndGo) models.refresh().catch(() => {});
    },
    look: () => memory.told?.map ?? null,
    loads: () => models.isAway,
    waitsFor: () => models.waitsFor(),
  },
);

const settings = new Settings(
  {
    dialog: at("settings"),
    form: at("settings-form"),
    system: at("system"),
    sampling: at("sampling"),
    thinking: at("thinking"),
  },
  (conversation) => {
    sumUp(conversation);
    conversations.keep(conversation);
  },
);

const conversations = new Conversations(
  {
    list: at("conversations"),
    empty: at("conversations-empty"),
    note: at("conversations-note"),
    newChat: at("new-chat"),
    import: at("import"),
    file: at("import-file"),
    exportAll: at("export-all"),
    deleteAll: at("delete-all"),
    actions: {
      dialog: at("actions"),
      form: at("actions-form"),
      title: at("actions-name"),
      markdown: at("actions-markdown"),
      json: at("actions-json"),
      remove: at("actions-delete"),
    },
    confirm: { dialog: at("confirm"), text: at("confirm-text"), yes: at("confirm-yes") },
  },
  new Store(),
  (conversation) => {
    if (conversation !== chat.conversation) chat.open(conversation);
    useModel(conversation);
    sumUp(conversation);
    show("chat");
    at("prompt").focus({ preventScroll: true });
  },
);

new Composer(
  { composer: at("composer"), prompt: at("prompt") },
  { onSend: (text) => chat.send(text), onEditLast: () => chat.editLast() },
);

// What of the settings is not as the server has it.
function sumUp({ system, sampling }) {
  const parts = system.trim() ? ["system prompt"] : [];
  for (const [name, value] of Object.entries(sampling)) {
    parts.push(name === "thinking" ? "no thoughts" : `${name.replace("_", " ")} ${value}`);
  }
  setText(at("settings-sum"), parts.join(" · "));
}

function useModel(conversation) {
  models.choose(conversation.model);
  // Before it is known which there are, the one that was chosen stays.
  conversation.model = models.chosen ?? conversation.model;
  watch();
}

function watch() {
  memory.watch(models.comeAndGo ? models.chosen : null);
}

async function begin() {
  memory.start();
  try {
    await models.refresh();
  } catch {
    return;
  }
  useModel(chat.conversation);
  replicas.start();
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

function openSettings() {
  settings.open(chat.conversation);
}

function focusPrompt() {
  show("chat");
  at("prompt").focus();
}

function help() {
  at("help").showModal();
}

showHelp(at("shortcuts"));
listen({
  stop: () => (chat.isBusy ? chat.stop() : false),
  newChat: () => conversations.begin(),
  regenerate: () => chat.regenerate(),
  settings: openSettings,
  message: focusPrompt,
  help,
});
at("stop").addEventListener("click", () => chat.stop());
at("open-settings").addEventListener("click", openSettings);
at("show-help").addEventListener("click", help);
at("help-close").addEventListener("click", () => at("help").close());
at("confirm-no").addEventListener("click", () => at("confirm").close());
for (const name of VIEWS) at(`show-${name}`).addEventListener("click", () => show(name));
// With the list of what is kept, whether or not the server can be reached.
await conversations.start();
at("prompt").focus({ preventScroll: true });
begin();
