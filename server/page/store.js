// Stores the newest conversations in this browser's IndexedDB, and exports and imports them as files. Without
// IndexedDB, for example in a private window, the stored conversations end with the tab.

import { contentOf, MOST_CHARS, NotAConversation, newId, readConversation } from "./conversation.js";
import { make } from "./element.js";

export const MOST_CONVERSATIONS = 200;
const DATABASE = "quire";
const TABLE = "conversations";
const FORMAT = "quire-conversations";
const NAME_CHARS = 60;
const WRITES = new Set(["put", "delete", "clear"]);

const resultOf = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

// A table in the tab's memory, with the methods of an IndexedDB table that it replaces.
class TabTable extends Map {
  put(conversation) {
    this.set(conversation.id, conversation);
  }

  getAll() {
    return [...this.values()];
  }

  count() {
    return this.size;
  }
}

export class Store {
  #database = null;
  #tabTable = new TabTable();

  // True if conversations outlive the tab.
  get lasts() {
    return this.#database !== null;
  }

  async open() {
    try {
      const opening = indexedDB.open(DATABASE, 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore(TABLE, { keyPath: "id" });
      this.#database = await resultOf(opening);
      await this.#run("count");
      // If another tab upgrades the database, this tab must close it, and keeps conversations in memory.
      this.#database.onversionchange = () => this.#forget();
    } catch {
      this.#forget();
    }
  }

  #forget() {
    this.#database?.close();
    this.#database = null;
  }

  // Returns all conversations, the newest first.
  async all() {
    const all = (await this.#run("getAll")).map(readKept).filter((conversation) => conversation !== null);
    return all.sort((one, other) => other.changed - one.changed);
  }

  async get(id) {
    return readKept(await this.#run("get", id));
  }

  // Stores a conversation, and deletes the oldest ones beyond the maximum. Returns false if the browser has no room.
  async put(conversation) {
    try {
      await this.#run("put", structuredClone(conversation));
    } catch {
      return false;
    }
    if ((await this.#run("count")) > MOST_CONVERSATIONS) {
      for (const { id } of (await this.all()).slice(MOST_CONVERSATIONS)) await this.delete(id);
    }
    return true;
  }

  delete(id) {
    return this.#run("delete", id);
  }

  clear() {
    return this.#run("clear");
  }

  async #run(method, ...given) {
    if (!this.lasts) return this.#tabTable[method](...given);
    const transaction = this.#database.transaction(TABLE, WRITES.has(method) ? "readwrite" : "readonly");
    const request = transaction.objectStore(TABLE)[method](...given);
    // The transaction is committed at once, since the change could be lost when the person leaves the page.
    transaction.commit();
    return resultOf(request);
  }
}

function readKept(value) {
  try {
    return readConversation(value);
  } catch (error) {
    if (error instanceof NotAConversation) return null;
    throw error;
  }
}

// --- export to files, and import -----------------------------------------------------------------

export function asJson(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 2);
}

export function asMarkdown({ title, system, turns }) {
  const parts = [`# ${title || "Conversation"}`];
  if (system.trim()) parts.push("## System", system);
  for (const turn of turns) parts.push("## You", contentOf(turn), "## Answer", turn.answer);
  return `${parts.join("\n\n")}\n`;
}

// Reads the conversations in a file, and gives them new ids. Throws NotAConversation.
export async function readFile(file) {
  if (file.size > 4 * MOST_CHARS) throw new NotAConversation();
  const value = await file.text().then(JSON.parse).catch(() => null);
  if (value?.format !== FORMAT || !Array.isArray(value.conversations)) throw new NotAConversation();
  return value.conversations.map((one) => ({ ...readConversation(one), id: newId() }));
}

export function download(name, type, text) {
  const href = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
}

export function fileName(title, ending) {
  const plain = title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, NAME_CHARS).replace(/^-|-$/g, "");
  return `${plain || "conversation"}.${ending}`;
}
