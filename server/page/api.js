// The server, as the page sees it: one key, errors, events as objects.

const KEY = "quire-api-key";
const left = new EventTarget();

export class ServerError extends Error {
  constructor(message, status, { retryAfter = null, code = null, param = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
    this.code = code;
    this.param = param;
  }
}

export const onKeyNeeded = (listener) => left.addEventListener("key", listener);

export function key() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null;
  }
}

export function useKey(value) {
  sessionStorage.setItem(KEY, value);
}

export async function ask(path, { body = null, signal = null } = {}) {
  const headers = {};
  const known = key();
  if (known) headers.Authorization = `Bearer ${known}`;
  if (body !== null) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === null ? "GET" : "POST",
      headers,
      body: body === null ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?", 0);
  }
  if (response.ok) return response;
  if (response.status === 401) left.dispatchEvent(new Event("key"));
  throw await failure(response);
}

async function failure(response) {
  let error = {};
  try {
    error = (await response.json()).error;
  } catch {
    error = {};
  }
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  const message = error.message || `The server answered ${response.status}.`;
  return new ServerError(message, response.status, { ...error, retryAfter });
}

// The objects of server-sent events, until [DONE]. A stream that ends without it was cut.
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
