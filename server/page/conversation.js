// A conversation has settings, and turns with a question and an answer each. Stored and imported conversations are
// untrusted: known fields are checked one by one, and unknown fields are dropped.

const MOST_TURNS = 2000;
export const MOST_CHARS = 8_000_000;
const TITLE_CHARS = 80;
const NAME_CHARS = 200;
const ENDS = new Set(["stop", "length", "stopped", "error", "tool_calls"]);
// The largest total size of the text files that go with one message.
export const MOST_FILE_BYTES = 2 ** 20;

// The sampling settings that are numbers. Each has the limits and the step of its input field.
export const FIELDS = [
  { name: "temperature", label: "Temperature", least: 0, most: 2, step: 0.05 },
  { name: "top_p", label: "Top p", least: 0.01, most: 1, step: 0.01 },
  { name: "top_k", label: "Top k", least: 0, most: 1000, step: 1 },
  { name: "min_p", label: "Min p", least: 0, most: 1, step: 0.01 },
  { name: "max_tokens", label: "Max tokens", least: 1, most: 10_000_000, step: 1 },
  { name: "seed", label: "Seed", least: 0, most: Number.MAX_SAFE_INTEGER, step: 1 },
];

export class NotAConversation extends Error {}

// Returns 32 random hexadecimal digits. crypto.randomUUID would need a secure context (HTTPS).
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation(model = null, sampling = {}) {
  return { id: newId(), title: "", changed: Date.now(), model, system: "", sampling, turns: [] };
}

export function titleOf({ question, files }) {
  const line = (question || files[0]?.name || "").trim().split("\n")[0];
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1)}…` : line;
}

// Returns the text of a message: the files, then the question. A file's fences are longer than any fence inside it.
export function contentOf({ question, files = [] }) {
  const parts = files.map(({ name, text }) => {
    const longest = (text.match(/`+/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, question].filter(Boolean).join("\n\n");
}

// Returns the messages of a request. Turns without an answer are left out. asked: the question, and its files.
export function messagesOf(system, turns, asked) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    if (!turn.answer.trim()) continue;
    messages.push({ role: "user", content: contentOf(turn) }, { role: "assistant", content: turn.answer });
  }
  return [...messages, { role: "user", content: contentOf(asked) }];
}

// Checks a conversation and returns its known fields. Throws NotAConversation.
export function readConversation(value) {
  const text = (given) => {
    if (typeof given !== "string") throw new NotAConversation();
    return given;
  };
  if (!Array.isArray(value?.turns) || value.turns.length > MOST_TURNS) throw new NotAConversation();
  const changed = Number.isFinite(value.changed) ? value.changed : Date.now();
  const conversation = {
    id: /^[0-9a-f]{32}$/.test(value.id) ? value.id : newId(),
    title: text(value.title ?? "").slice(0, TITLE_CHARS),
    changed: Math.min(Math.max(changed, 0), Date.now()),
    model: typeof value.model === "string" ? value.model.slice(0, NAME_CHARS) : null,
    system: text(value.system ?? ""),
    sampling: readSampling(value.sampling),
    turns: value.turns.map((turn) => ({
      question: text(turn?.question),
      files: readFiles(turn?.files ?? [], text),
      answer: text(turn?.answer ?? ""),
      thoughts: text(turn?.thoughts ?? ""),
      ended: ENDS.has(turn?.ended) ? turn.ended : "stop",
      facts: readFacts(turn?.facts),
    })),
  };
  const chars = (turn) => contentOf(turn).length + turn.answer.length + turn.thoughts.length;
  const sum = conversation.turns.reduce((total, turn) => total + chars(turn), conversation.system.length);
  if (sum > MOST_CHARS) throw new NotAConversation();
  return conversation;
}

function readFiles(value, text) {
  if (!Array.isArray(value)) throw new NotAConversation();
  return value.map((file) => ({ name: text(file?.name).slice(0, NAME_CHARS), text: text(file?.text) }));
}

// Returns the valid sampling settings. Invalid settings are dropped, so that the server's defaults apply.
export function readSampling(value) {
  const sampling = {};
  for (const { name, least, most, step } of FIELDS) {
    const given = value?.[name];
    const fits = typeof given === "number" && given >= least && given <= most;
    if (fits && (step < 1 || Number.isInteger(given))) sampling[name] = given;
  }
  if (value?.thinking === false) sampling.thinking = false;
  return sampling;
}

// Returns the known figures of a turn. Most invalid figures become null. Times are in seconds.
export function readFacts(value) {
  if (typeof value !== "object" || value === null) return null;
  const number = (given) => (Number.isFinite(given) && given >= 0 ? given : null);
  const text = (given, most) => (typeof given === "string" ? given.slice(0, most) : null);
  const reason = text(value.miss?.reason, NAME_CHARS);
  const message = text(value.miss?.message, NAME_CHARS);
  const miss = reason && message ? { reason, message, left_at: number(value.miss.left_at) ?? 0 } : null;
  return {
    prompt: number(value.prompt) ?? 0,
    cached: number(value.cached) ?? 0,
    tokens: number(value.tokens) ?? 0,
    first_s: number(value.first_s),
    thought_s: number(value.thought_s),
    per_s: number(value.per_s),
    block: number(value.block),
    beside: number(value.beside),
    waited: value.waited === true,
    loads: value.loads === true,
    miss,
    model: text(value.model, NAME_CHARS),
    system: text(value.system, MOST_CHARS) ?? "",
    thinking: value.thinking !== false,
  };
}
