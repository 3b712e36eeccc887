// The list of stored conversations: opens, renames, exports, imports and deletes them.

import { readStored, writeStored } from "./api.js";
import { contentOf, NotAConversation, newConversation, titleOf } from "./conversation.js";
import { at, make, makeButton, setList, setText } from "./element.js";
import { asJson, asMarkdown, download, fileName, MOST_CONVERSATIONS, readFile, Store } from "./store.js";

const OPEN = "quire-open-conversation";

export class Conversations {
  #store = new Store();
  #current = null;
  #changing = null;

  // onOpen(conversation): shows a conversation. pending, forget: see Chat.
  constructor(onOpen, pending, forget) {
    Object.assign(this, { onOpen, pending, forget });
    for (const id of ["new-chat", "new-chat-here"]) at(id).addEventListener("click", () => this.begin());
    at("search").addEventListener("input", () => this.show());
    at("import").addEventListener("click", () => at("import-file").click());
    at("import-file").addEventListener("change", () => this.#import());
    at("export-all").addEventListener("click", async () => {
      download("conversations.json", "application/json", asJson(await this.#store.all()));
    });
    at("delete-all").addEventListener("click", () => confirmThen("Delete all conversations?", () => this.#deleteAll()));
    at("actions-markdown").addEventListener("click", () => this.#export("text/markdown", "md", asMarkdown));
    at("actions-json").addEventListener("click", () => this.#export("application/json", "json", (one) => asJson([one])));
    at("actions-delete").addEventListener("click", () => {
      at("actions").close();
      confirmThen("Delete this conversation?", () => this.#delete(this.#changing.id));
    });
    at("actions-form").addEventListener("submit", () => {
      this.#changing.title = at("actions-name").value.trim();
      this.keep(this.#changing);
    });
    // The list is shown again on focus, since another tab may have changed the conversations.
    window.addEventListener("focus", () => this.show());
  }

  // Opens the conversation that this tab showed last, or a new one.
  async start() {
    await this.#store.open();
    const id = readStored(OPEN);
    const stored = id ? await this.#store.get(id) : null;
    if (stored) this.#open(stored);
    else this.begin();
  }

  begin() {
    this.#open(newConversation(this.#current?.model, { ...this.#current?.sampling }));
  }

  #open(conversation) {
    this.#current = conversation;
    writeStored(OPEN, conversation.id);
    this.onOpen(conversation);
    this.show();
  }

  // Stores a conversation unless it is empty.
  async keep(conversation) {
    if (!conversation.turns.length) return;
    const hasRoom = await this.#store.put(conversation);
    await this.show(hasRoom ? "" : "This browser has no room for it: delete some conversations.");
  }

  async show(problem = "") {
    const stored = await this.#store.all();
    const ids = new Set(stored.map(({ id }) => id));
    // A new conversation is not in the store before its first answer begins, but the list must show it.
    const others = [...this.pending.values()].filter(({ conversation: { id } }) => !ids.has(id));
    const begun = others.map(({ conversation, answering, unsent }) => {
      return { ...conversation, title: titleOf(answering?.turn ?? unsent) };
    });
    const all = [...begun, ...stored];
    const words = at("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const items = all.filter((one) => matches(one, words)).map(({ id, title, changed }) => {
      return { id, title, changed, isOpen: id === this.#current.id, runs: Boolean(this.pending.get(id)?.answering) };
    });
    setList(at("conversations"), items, (item) => this.#makeItem(item));
    at("conversations-empty").hidden = items.length > 0;
    setText(at("conversations-empty"), all.length ? "No conversation has these words." : "No conversations yet.");
    const rule = this.#store.lasts
      ? `Kept in this browser only, the newest ${MOST_CONVERSATIONS}.`
      : "This browser keeps nothing: they end with the tab.";
    setText(at("conversations-note"), problem || rule);
  }

  // Returns a conversation. While it is open or being answered, the object in memory may be newer than the stored copy.
  async #find(id) {
    if (id === this.#current.id) return this.#current;
    return this.pending.get(id)?.conversation ?? this.#store.get(id);
  }

  #makeItem({ id, title, changed, isOpen, runs }) {
    const open = makeButton(title || "Without a title", "open", async () => {
      const conversation = await this.#find(id);
      if (conversation === this.#current) this.onOpen(conversation);
      else if (conversation) this.#open(conversation);
    });
    open.title = new Date(changed).toLocaleString();
    if (isOpen) open.ariaCurrent = "true";
    const more = makeButton("⋯", "more quiet", () => this.#change(id));
    more.ariaLabel = `Rename, export or delete ${title || "this conversation"}`;
    const dot = make("span", { className: "runs", role: "img", ariaLabel: "Being answered", title: "Being answered" });
    return make("li", {}, open, ...(runs ? [dot] : []), more);
  }

  async #change(id) {
    this.#changing = await this.#find(id);
    if (!this.#changing) return;
    at("actions-name").value = this.#changing.title;
    at("actions").showModal();
  }

  #export(type, ending, write) {
    download(fileName(this.#changing.title, ending), type, write(this.#changing));
  }

  async #delete(id) {
    this.forget(id);
    await this.#store.delete(id);
    if (id === this.#current.id) this.begin();
    else await this.show();
  }

  async #deleteAll() {
    for (const id of [...this.pending.keys()]) this.forget(id);
    await this.#store.clear();
    this.begin();
  }

  async #import() {
    let problem = "";
    let newest = null;
    try {
      for (const conversation of await readFile(at("import-file").files[0])) {
        if (!(await this.#store.put(conversation))) problem = "This browser has no room for all of them.";
        newest ??= conversation;
      }
    } catch (error) {
      if (!(error instanceof NotAConversation)) throw error;
      problem = "This file holds no conversations that were exported here.";
    }
    at("import-file").value = "";
    if (newest) this.#open(newest);
    await this.show(problem);
  }
}

// Returns true if a conversation contains all the words. They must be in lower case.
function matches({ title, system, turns }, words) {
  if (!words.length) return true;
  const texts = turns.flatMap((turn) => [contentOf(turn), turn.answer]);
  const text = [title, system, ...texts].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

function confirmThen(question, act) {
  at("confirm-text").textContent = question;
  at("confirm").returnValue = "";
  at("confirm").onclose = () => at("confirm").returnValue === "yes" && act();
  at("confirm").showModal();
}
