// What went wrong, for people: what it means, and what to do.

import { ServerError } from "./api.js";
import { FIELDS } from "./sampling.js";

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

export function inWords(error) {
  if (!(error instanceof ServerError)) return "Something on this page went wrong. Reload it.";
  const meaning = MEANINGS[error.code] ?? ofField(error) ?? error.message;
  if (error.retryAfter === null) return meaning;
  const unit = error.retryAfter === 1 ? "second" : "seconds";
  // The server says that it passes, and we say when.
  return `${meaning.replace(/; try again later\.$/, ".")} Try again in ${error.retryAfter} ${unit}.`;
}

function ofField({ param, message }) {
  const field = FIELDS.find(({ name }) => name === param);
  if (!field) return null;
  const said = message.replace(/^\w+: /, "").replace(/^Input should be /, "It should be ");
  return `The server does not take this ${field.label.toLowerCase()}. ${said} Change it in Settings.`.replace(/([^.])( Change)/, "$1.$2");
}
