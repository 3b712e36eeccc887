// Sends requests with this tab's API key. Turns server-sent events into objects, and errors into sentences.

import { FIELDS } from "./conversation.js";

export const RETRY_MS = 2000;
const KEY = "quire-api-key";
const MEANINGS = {
  missing_api_key: "This server wants an API key: enter it above.",
  invalid_api_key: "The server does not know this API key: enter another one above.",
  context_length_exceeded:
    "The conversation is longer than the model can read. Edit an earlier message to shorten it, or begin a new one.",
  model_not_found: "The server does not have this model any more: choose another one above.",
  queue_full: "The server has as much to do as it takes on.",
  key_share_full: "Your API key has as many requests running as one key may have.",
  body_too_large: "The conversation is larger than the server reads at once: begin a new one.",
  too_many_values: "The conversation is larger than the server reads at once: begin a new one.",
  shutting_down: "The server is shutting down.",
  request_time_over: "The server did not get to it in the time that a request may take.",
  host_not_allowed: "The server does not answer at this address: open it by a name that its settings allow.",
  origin_not_allowed: "The server does not answer pages from this address: its settings say which it does.",
};

export class ServerError extends Error {
  constructor(message, status, { retryAfter = null, code = null, param = null } = {}) {
    super(message);
    Object.assign(this, { status, retryAfter, code, param });
  }
}

// Reads a stored value: this tab's ("sessionStorage"), or one that all tabs share ("localStorage"). Returns null if
// there is no such value or the browser forbids storage.
export function readStored(name, storage = "sessionStorage") {
  try {
    return window[storage].getItem(name);
  } catch {
    return null;
  }
}

export function writeStored(name, value, storage = "sessionStorage") {
  try {
    window[storage].setItem(name, value);
  } catch {
    return;
  }
}

let key = readStored(KEY);
let askForKey = () => {};

export function useKey(value) {
  key = value;
  writeStored(KEY, value);
}

export function onKeyNeeded(listener) {
  askForKey = listener;
}

// Sends a request. Throws ServerError, or AbortError once the signal aborts.
export async function ask(path, { body = null, signal = null } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, cache: "no-store", credentials: "omit" };
  if (body !== null) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?", 0);
  }
  if (response.ok) return response;
  if (response.status === 401) askForKey();
  const error = (await response.json().catch(() => null))?.error;
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  const message = error?.message || `The server answered ${response.status}.`;
  throw new ServerError(message, response.status, { ...error, retryAfter });
}

export async function askJson(path, options) {
  return (await ask(path, options)).json();
}

// Yields the objects of server-sent events. Throws an error if the stream does not end with [DONE].
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ServerError("The answer was cut off: the server is gone, or restarts.", 0);
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        if (!block.startsWith("data: ")) continue;
        const data = block.slice(6);
        if (data === "[DONE]") return;
        const object = JSON.parse(data);
        if (object.error) throw new ServerError(object.error.message, 200, object.error);
        yield object;
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

// Returns a function that starts polling, which pauses while the page is hidden. askOnce() sends one request, and
// resolves to the milliseconds until the next request, or to null to end polling.
export function poll(askOnce) {
  let timer = null;
  let isAsking = false;
  let isBlocked = true;
  async function wake() {
    clearTimeout(timer);
    if (document.hidden || isAsking || isBlocked) return;
    isAsking = true;
    let pause = RETRY_MS;
    try {
      pause = await askOnce();
    } finally {
      isAsking = false;
      isBlocked = pause === null;
      if (!isBlocked) timer = setTimeout(wake, pause);
    }
  }
  document.addEventListener("visibilitychange", wake);
  return function start() {
    isBlocked = false;
    wake();
  };
}

export function describe(error) {
  if (!(error instanceof ServerError)) return "Something on this page went wrong. Reload it.";
  const meaning = MEANINGS[error.code] ?? describeField(error) ?? error.message;
  if (error.retryAfter === null) return meaning;
  const unit = error.retryAfter === 1 ? "second" : "seconds";
  // The server's text only says "later", so the page replaces that word by the number of seconds.
  return `${meaning.replace(/; try again later\.$/, ".")} Try again in ${error.retryAfter} ${unit}.`;
}

function describeField({ param, message }) {
  const field = FIELDS.find(({ name }) => name === param);
  if (!field) return null;
  const rule = message.replace(/^\w+: /, "").replace(/^Input should be /, "It should be ");
  const sentence = rule.endsWith(".") ? rule : `${rule}.`;
  return `The server does not take this ${field.label.toLowerCase()}. ${sentence} Change it in Settings.`;
}
