// The table of a cluster's replicas. A single server has none, and does not show this part of the page.

import { askJson, poll, RETRY_MS, ServerError } from "./api.js";
import { at, makeRow, setList, setText } from "./element.js";
import { count, decimal, seconds } from "./format.js";

// The path of the list; undefined before the server has named it, null where it has none.
let path;

export const startReplicas = poll(async () => {
  try {
    if (path === undefined) path = (await askJson("/version")).replicas ?? null;
    if (path === null) return null;
    show((await askJson(path)).replicas);
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    setText(at("replicas-sum"), "What is shown is from before.");
    if (error.status === 401) return null;
  }
  return RETRY_MS;
});

function show(replicas) {
  at("replicas-part").hidden = false;
  setList(at("replicas"), replicas, makeReplica);
  // The shown memory is that of the first replica that answers.
  const up = replicas.filter(({ state }) => state === "up");
  const parts = [`${up.length} of ${count(replicas.length, "replica")} answer`];
  if (up.length) parts.push(`the memory below is that of ${up[0].name}`);
  setText(at("replicas-sum"), parts.join(" · "));
}

function makeReplica(replica) {
  const { state, prompt_tokens: prompt } = replica;
  const figures = [
    decimal(replica.running),
    decimal(replica.waiting),
    `${decimal(replica.free_blocks)} of ${decimal(replica.total_blocks)}`,
  ];
  const known = state === "starting" ? ["–", "–", "–"] : figures;
  const hits = prompt ? `${Math.round((100 * replica.cached_tokens) / prompt)} %` : "–";
  const silent = `silent for ${seconds(replica.heard_s_ago)}`;
  const words = { up: "answers", silent, starting: "starts" };
  return makeRow([replica.host ?? "–", replica.name, ...known, hits], `replica ${state}`, words[state]);
}
