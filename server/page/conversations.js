// The list of kept conversations, and what can be done with one.

import { NotAConversation, newConversation } from "./conversation.js";
import { button, made, setText } from "./element.js";
import { asJson, asMarkdown, download, fileName, readFile } from "./files.js";
import { MOST_CONVERSATIONS } from "./store.js";

const OPEN = "quire-open-conversation";

// Where a browser keeps nothing, a tab begins anew.
function openBefore() {
  try {
    return sessionStorage.getItem(OPEN);
  } catch {
    return null;
  }
}

function rememberOpen(id) {
  try {
    sessionStorage.setItem(OPEN, id);
  } catch {
    return;
  }
}

export class Conversations {
  #current = null;
  #changing = null;

  // onOpen(conversation) when another one is to be shown.
  constructor(page, store, onOpen) {
    Object.assign(this, { page, store, onOpen });
    page.newChat.addEventListener("click", () => this.begin());
    page.exportAll.addEventListener("click", async () => {
      download("conversations.json", "application/json", asJson(await store.all()));
    });
    page.import.addEventListener("click", () => page.file.click());
    page.file.addEventListener("change", () => this.#import());
    page.deleteAll.addEventListener("click", () => this.#confirm("Delete all conversations?", () => this.#deleteAll()));
    this.#actions();
    // Another tab may have changed what is kept.
    window.addEventListener("focus", () => this.show());
  }

  // The one that this tab had open, or a new one.
  async start() {
    await this.store.open();
    const id = openBefore();
    const kept = id ? await this.#get(id) : null;
    if (kept) this.#open(kept);
    else this.begin();
  }

  async #get(id) {
    try {
      return await this.store.get(id);
    } catch (error) {
      if (error instanceof NotAConversation) return null;
      throw error;
    }
  }

  begin() {
    this.#open(newConversation(this.#current?.model, { ...this.#current?.sampling }));
  }

  #open(conversation) {
    this.#current = conversation;
    rememberOpen(conversation.id);
    this.onOpen(conversation);
    this.show();
  }

  // Keeps it, once there is something in it.
  async keep(conversation) {
    if (!conversation.turns.length) return;
    const kept = await this.store.put(conversation);
    await this.show(kept ? "" : "This browser has no room for it: delete some conversations.");
  }

  async show(problem = "") {
    const listed = await this.store.list();
    this.page.list.replaceChildren(...listed.map((one) => this.#item(one)));
    this.page.empty.hidden = listed.length > 0;
    const rule = this.store.lasts
      ? `Kept in this browser only, the newest ${MOST_CONVERSATIONS}.`
      : "This browser keeps nothing: they end with the tab.";
    setText(this.page.note, problem || rule);
  }

  #item({ id, title, changed }) {
    const item = made("li");
    const open = button(title || "Without a title", "open", async () => {
      const conversation = await this.#get(id);
      if (conversation && id !== this.#current.id) this.#open(conversation);
      else if (conversation) this.onOpen(this.#current);
    });
    open.title = new Date(changed).toLocaleString();
    if (id === this.#current.id) open.setAttribute("aria-current", "true");
    const more = button("⋯", "more quiet", () => this.#change(id));
    more.setAttribute("aria-label", `Rename, export or delete ${title || "this conversation"}`);
    item.append(open, more);
    return item;
  }

  #actions() {
    const { dialog, form, title, markdown, json, remove } = this.page.actions;
    const file = (kind, ending, text) => () => {
      download(fileName(this.#changing.title, ending), kind, text(this.#changing));
    };
    markdown.addEventListener("click", file("text/markdown", "md", asMarkdown));
    json.addEventListener("click", file("application/json", "json", (one) => asJson([one])));
    remove.addEventListener("click", () => {
      dialog.close();
      this.#confirm("Delete this conversation?", () => this.#delete(this.#changing.id));
    });
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      this.#changing.title = title.value.trim();
      dialog.close();
      await this.keep(this.#changing);
    });
  }

  async #change(id) {
    // The open one may have changed since it was kept.
    this.#changing = id === this.#current.id ? this.#current : await this.#get(id);
    if (!this.#changing) return;
    this.page.actions.title.value = this.#changing.title;
    this.page.actions.dialog.showModal();
  }

  async #delete(id) {
    await this.store.delete(id);
    if (id === this.#current.id) this.begin();
    else await this.show();
  }

  async #deleteAll() {
    await this.store.clear();
    this.begin();
  }

  #confirm(question, then) {
    const { dialog, text, yes } = this.page.confirm;
    text.textContent = question;
    yes.onclick = () => {
      dialog.close();
      then();
    };
    dialog.showModal();
  }

  async #import() {
    const { file } = this.page;
    let problem = "";
    let newest = null;
    try {
      for (const conversation of await readFile(file.files[0])) {
        if (!(await this.store.put(conversation))) problem = "This browser has no room for all of them.";
        newest ??= conversation;
      }
    } catch (error) {
      if (!(error instanceof NotAConversation)) throw error;
      problem = "This file holds no conversations that were exported here.";
    }
    file.value = "";
    if (newest) this.#open(newest);
    await this.show(problem);
  }
}
