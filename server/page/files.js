// Conversations as files: Markdown to read, JSON to keep and to bring back.

import { MOST_CHARS, NotAConversation, newId, readConversation } from "./conversation.js";

const FORMAT = "quire-conversations";
const NAME_CHARS = 60;

export function asJson(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 2);
}

export function asMarkdown({ title, system, turns }) {
  const parts = [`# ${title || "Conversation"}`];
  if (system.trim()) parts.push("## System", system);
  for (const { question, answer } of turns) parts.push("## You", question, "## Answer", answer);
  return `${parts.join("\n\n")}\n`;
}

// What a file holds, each under an id of its own. Raises NotAConversation.
export async function readFile(file) {
  if (file.size > 4 * MOST_CHARS) throw new NotAConversation();
  let value;
  try {
    value = JSON.parse(await file.text());
  } catch {
    throw new NotAConversation();
  }
  if (value?.format !== FORMAT || !Array.isArray(value.conversations)) throw new NotAConversation();
  return value.conversations.map((one) => ({ ...readConversation(one), id: newId() }));
}

export function download(name, kind, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

export function fileName(title, ending) {
  const plain = title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, NAME_CHARS).replace(/^-|-$/g, "");
  return `${plain || "conversation"}.${ending}`;
}
