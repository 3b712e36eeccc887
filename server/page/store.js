// Conversations in this browser: IndexedDB, a limited number of them. Where a browser keeps nothing (a
// private window) they are kept until the tab ends, and that is said.

import { NotAConversation, readConversation } from "./conversation.js";

export const MOST_CONVERSATIONS = 200;
const DATABASE = "quire";
const TABLE = "conversations";

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

export class Store {
  #database = null;
  #kept = new Map();

  // Whether conversations outlive the tab.
  get lasts() {
    return this.#database !== null;
  }

  async open() {
    try {
      const opening = indexedDB.open(DATABASE, 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore(TABLE, { keyPath: "id" });
      this.#database = await done(opening);
      await done(this.#table("readonly").count());
      // Another tab may want a newer form; this one goes on without.
      this.#database.onversionchange = () => this.#forget();
    } catch {
      this.#forget();
    }
  }

  #forget() {
    this.#database?.close();
    this.#database = null;
  }

  // The newest first: id, title and time of each.
  async list() {
    const all = (await this.#all()).map(({ id, title, changed }) => ({ id, title, changed }));
    return all.sort((one, other) => other.changed - one.changed);
  }

  async #all() {
    const values = this.lasts ? await done(this.#table("readonly").getAll()) : [...this.#kept.values()];
    return values.flatMap((value) => {
      try {
        return [readConversation(value)];
      } catch (error) {
        if (error instanceof NotAConversation) return [];
        throw error;
      }
    });
  }

  async all() {
    return (await this.#all()).sort((one, other) => other.changed - one.changed);
  }

  // null where there is none.
  async get(id) {
    const value = this.lasts ? await done(this.#table("readonly").get(id)) : this.#kept.get(id);
    return value ? readConversation(value) : null;
  }

  // Whether there was room for it. The oldest one goes for what is one too many.
  async put(conversation) {
    const copy = structuredClone(conversation);
    if (!this.lasts) {
      this.#kept.set(copy.id, copy);
      return true;
    }
    try {
      await done(this.#table("readwrite").put(copy));
    } catch {
      return false;
    }
    if ((await done(this.#table("readonly").count())) > MOST_CONVERSATIONS) await this.#makeRoom();
    return true;
  }

  async #makeRoom() {
    for (const { id } of (await this.list()).slice(MOST_CONVERSATIONS)) await this.delete(id);
  }

  async delete(id) {
    if (this.lasts) await done(this.#table("readwrite").delete(id));
    else this.#kept.delete(id);
  }

  async clear() {
    if (this.lasts) await done(this.#table("readwrite").clear());
    else this.#kept.clear();
  }

  #table(mode) {
    return this.#database.transaction(TABLE, mode).objectStore(TABLE);
  }
}
