// Puts the page together.

import { ask, onKeyNeeded, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { Memory } from "./memory.js";

const at = (id) => document.getElementById(id);

function show(view) {
  document.querySelector("main").dataset.view = view;
  for (const name of ["chat", "memory"]) {
    at(`show-${name}`).setAttribute("aria-pressed", String(name === view));
  }
}

function state(kind, text, note) {
  const element = at("state");
  const words = element.querySelector("span");
  if (element.dataset.kind !== kind) element.dataset.kind = kind;
  if (words.textContent !== text) words.textContent = text;
  const shown = at("memory-note");
  shown.hidden = !note;
  if (shown.textContent !== note) shown.textContent = note;
}

const chat = new Chat({
  messages: at("messages"),
  welcome: at("welcome"),
  composer: at("composer"),
  prompt: at("prompt"),
  send: at("send"),
  stop: at("stop"),
  newChat: at("new-chat"),
  temperature: at("temperature"),
  maxTokens: at("max-tokens"),
  thinking: at("thinking"),
});

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
    curves: at("curves"),
    requests: at("requests"),
    requestsEmpty: at("requests-empty"),
  },
  state,
);

async function begin() {
  memory.start();
  try {
    const models = await (await ask("/v1/models")).json();
    chat.model = models.data[0].id;
    at("model").textContent = chat.model;
    at("key-form").hidden = true;
    at("key-note").textContent = "";
  } catch {
    at("model").textContent = "";
  }
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

for (const name of ["chat", "memory"]) at(`show-${name}`).addEventListener("click", () => show(name));
at("prompt").focus({ preventScroll: true });
begin();
