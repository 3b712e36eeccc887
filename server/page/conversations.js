// The list of stored conversations: opens, renames, exports, imports and deletes them.

import { readTab, writeTab } from "./api.js";
import { NotAConversation, newConversation } from "./conversation.js";
import { at, make, makeButton, setList, setText } from "./element.js";
import { asJson, asMarkdown, download, fileName, MOST_CONVERSATIONS, readFile, Store } from "./store.js";

const OPEN = "quire-open-conversation";

export class Conversations {
  #store = new Store();
  #current = null;
  #changing = null;

  // onOpen(conversation) shows a conversation.
  constructor(onOpen) {
    this.onOpen = onOpen;
    at("new-chat").addEventListener("click", () => this.begin());
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
    const id = readTab(OPEN);
    const stored = id ? await this.#store.get(id) : null;
    if (stored) this.#open(stored);
    else this.begin();
  }

  begin() {
    this.#open(newConversation(this.#current?.model, { ...this.#current?.sampling }));
  }

  #open(conversation) {
    this.#current = conversation;
    writeTab(OPEN, conversation.id);
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
    const items = stored.map(({ id, title, changed }) => ({ id, title, changed, isOpen: id === this.#current.id }));
    setList(at("conversations"), items, (item) => this.#makeItem(item));
    at("conversations-empty").hidden = items.length > 0;
    const rule = this.#store.lasts
      ? `Kept in this browser only, the newest ${MOST_CONVERSATIONS}.`
      : "This browser keeps nothing: they end with the tab.";
    setText(at("conversations-note"), problem || rule);
  }

  #makeItem({ id, title, changed, isOpen }) {
    const open = makeButton(title || "Without a title", "open", async () => {
      if (id === this.#current.id) return this.onOpen(this.#current);
      const conversation = await this.#store.get(id);
      if (conversation) this.#open(conversation);
    });
    open.title = new Date(changed).toLocaleString();
    if (isOpen) open.ariaCurrent = "true";
    const more = makeButton("⋯", "more quiet", () => this.#change(id));
    more.ariaLabel = `Rename, export or delete ${title || "this conversation"}`;
    return make("li", {}, open, more);
  }

  async #change(id) {
    // The open conversation may be newer than its stored copy.
    this.#changing = id === this.#current.id ? this.#current : await this.#store.get(id);
    if (!this.#changing) return;
    at("actions-name").value = this.#changing.title;
    at("actions").showModal();
  }

  #export(type, ending, write) {
    download(fileName(this.#changing.title, ending), type, write(this.#changing));
  }

  async #delete(id) {
    await this.#store.delete(id);
    if (id === this.#current.id) this.begin();
    else await this.show();
  }

  async #deleteAll() {
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

function confirmThen(question, act) {
  at("confirm-text").textContent = question;
  at("confirm").returnValue = "";
  at("confirm").onclose = () => at("confirm").returnValue === "yes" && act();
  at("confirm").showModal();
}
