// The memory view: polls GET /memory and the list of a cluster's replicas, and shows the answers.

import { askJson, poll, RETRY_MS, ServerError } from "./api.js";
import * as curves from "./curves.js";
import { at, make, makeRow, setList, setText } from "./element.js";
import { bytes, count, decimal, hue, mib, percent, rate, seconds } from "./format.js";
import { highlight, IDLE_HEAP, updateMap } from "./memory_map.js";

const POLL_MS = 500;
const OLD_S = 2.5;
const LISTED = 64;
const KEEPS = { system: "system prompt", user: "question", end: "end of a turn", waypoint: "on the way" };

// The KV cache's capacity by state: GROUPS in plain words, PARTS in detail. Both follow a block from use to free.
const GROUPS = [
  ["live", "In use", ["live", "partial_tail", "mapped_ahead", "quarantined"]],
  ["cached", "Kept for reuse", ["cached"]],
  ["free", "Free", ["free"]],
].map(([name, title, parts]) => {
  const value = make("b");
  at("pool-groups").append(make("li", {}, make("i", `swatch ${name}`), make("span", {}, title), value));
  return { parts, value };
});
const PARTS = [
  ["live", "Live tokens", "K and V of open sequences and of writes to disk"],
  ["partial_tail", "Partial tails", "unused ends of their blocks"],
  ["mapped_ahead", "Mapped ahead", "blocks that hold no token yet"],
  ["cached", "Cached", "kept for prompts that begin alike"],
  ["quarantined", "Quarantined", "waiting for the device or for their return"],
  ["free", "Free", "can be handed out"],
].map(([name, title, meaning]) => {
  const segment = make("i", name);
  const value = make("b");
  at("pool-bar").append(segment);
  const words = [make("span", {}, title), value, make("span", "figures", meaning)];
  at("pool-legend").append(make("li", {}, make("i", `swatch ${name}`), ...words));
  return { name, title, segment, value };
});

// The newest answer of GET /memory, or null.
let newest = null;
// The model whose memory is shown, or null if the server has only one model.
let model = null;
let frame = 0;

export const newestMap = () => newest?.map ?? null;

export function watchMemory(watched) {
  if (watched === model) return;
  model = watched;
  newest = null;
  curves.clear();
  at("memory").classList.add("unknown");
}

export const startMemory = poll(async () => {
  const watched = model;
  try {
    const answer = await askJson(watched === null ? "/memory" : `/memory?model=${encodeURIComponent(watched)}`);
    if (watched !== model) return POLL_MS;
    if (answer.map === null) return showAway(answer);
    newest = answer;
    const { pool } = newest.map;
    if (pool && newest.age_s < OLD_S) curves.add(performance.now() / 1000 - newest.age_s, pool);
    showState();
    frame ||= requestAnimationFrame(show);
    return POLL_MS;
  } catch (error) {
    showFailure(error);
    return error.status === 401 ? null : RETRY_MS;
  }
});

function setState(kind, text, note = "") {
  at("state").dataset.kind = kind;
  setText(at("state").querySelector("span"), text);
  at("memory-note").hidden = !note;
  setText(at("memory-note"), note);
}

function showState() {
  const { engine_alive: isAlive, age_s: age, map } = newest;
  const shown = `What is shown is ${seconds(age)} old`;
  const waits = map.waiting ? `, ${map.waiting} waiting` : "";
  if (!isAlive) setState("dead", "Engine ended", `The engine has ended. ${shown}; restart the server.`);
  else if (age > OLD_S) setState("old", "No answer", `The engine does not answer: it is in a long step, or stuck. ${shown}.`);
  else if (map.running + map.waiting > 0) setState("busy", `${map.running} running${waits}`);
  else setState("idle", "Idle");
}

// Shows a model without a process. Returns the milliseconds until the next request.
function showAway({ model: name, loading_s: loading }) {
  newest = null;
  at("memory").classList.add("unknown");
  if (loading === null) setState("idle", "Not loaded", `${name} is not loaded: the next message loads it.`);
  else setState("busy", `Loading ${Math.floor(loading)} s`, `${name} is being loaded.`);
  return loading === null ? RETRY_MS : 2 * POLL_MS;
}

function showFailure(error) {
  if (!(error instanceof ServerError)) {
    setState("dead", "Page error", "Something on this page went wrong.");
    throw error;
  }
  const note = error.message + (newest ? " What is shown is from before." : "");
  if (error.status === 401) setState("key", "Key needed");
  else if (error.status === 0) setState("dead", "Not reachable", note);
  else setState("dead", "No figures", note);
}

function show() {
  frame = 0;
  // If watchMemory() has chosen another model since this frame was requested, there is no answer yet.
  if (!newest) return;
  at("memory").classList.remove("unknown");
  if (newest.map.pool) showPool(newest.map);
  updateMap(newest.map);
  showHeaps(newest.map);
  showSequences(newest.map);
  showWindows(newest.map);
  showSlots(newest.map);
  curves.draw();
  at("requests-empty").hidden = newest.requests.length > 0;
  setList(at("requests"), newest.requests, makeRequest);
}

function showPool({ pool, shared_saved_bytes: saved }) {
  const words = PARTS.map(({ name, title, segment, value }) => {
    const size = pool[`${name}_bytes`];
    segment.style.flexGrow = size / pool.capacity_bytes;
    segment.classList.toggle("none", size === 0);
    setText(value, mib(size));
    value.dataset.bytes = size;
    return `${title} ${mib(size)}`;
  });
  for (const { parts, value } of GROUPS) setText(value, mib(parts.reduce((sum, name) => sum + pool[`${name}_bytes`], 0)));
  at("pool-bar").ariaLabel = `Of ${mib(pool.capacity_bytes)}: ${words.join(", ")}`;
  const parts = [`${mib(pool.capacity_bytes)} budget`, `${mib(pool.committed_bytes)} committed`];
  if (saved) parts.push(`${mib(saved)} saved by sharing`);
  setText(at("pool-sum"), parts.join(" · "));
}

function showHeaps({ geometry, heaps, other_groups: others }) {
  const parts = [
    `${heaps.length} of ${count(geometry.max_heaps, "heap")}`,
    `${count(geometry.blocks_per_heap, "block")} each`,
    `${geometry.tokens_per_block} tokens, ${bytes(geometry.block_bytes)} a block`,
  ];
  if (others.some((group) => group.geometry.window)) parts.push(`the first of ${others.length + 1} groups of layers`);
  setText(at("map-sum"), parts.join(" · "));
  const idle = heaps.filter((heap) => IDLE_HEAP.test(heap)).length;
  at("map-idle").hidden = heaps.length > 0 && idle === 0;
  setText(at("map-idle"), heaps.length ? count(idle, "free heap") : "No heap has been made yet.");
  const unmade = geometry.max_heaps - heaps.length;
  at("map").ariaLabel = `Blocks of ${count(heaps.length, "heap")}; ${unmade} not made yet`;
}

// --- sequences, and states of conversations -----------------------------------------------------

// Makes a row for the sequence or the conversation with this number, in the number's colour.
function makeColoured(number, className, track, facts) {
  const swatch = make("i", "swatch owner");
  const title = make("span", "title", `${number}`);
  const row = make("li", className, swatch, title, track, make("span", "facts", facts.join(" · ")));
  row.style.setProperty("--hue", hue(number));
  row.dataset.id = number;
  track.ariaHidden = "true";
  return row;
}

at("sequences").addEventListener("pointerover", ({ target }) => highlight(Number(target.closest("li")?.dataset.id)));
at("sequences").addEventListener("pointerleave", () => highlight(null));

function showSequences({ sequences, running, waiting, geometry, other_groups: others }) {
  const shown = sequences.slice(0, LISTED);
  const longest = Math.max(1, ...shown.map((sequence) => sequence.most_tokens));
  const windows = others.map((group) => group.geometry.window);
  setList(at("sequences"), shown, (sequence) => makeSequence(sequence, longest, geometry.tokens_per_block, windows));
  at("sequences-empty").hidden = shown.length > 0;
  const total = running + waiting;
  const more = total > shown.length ? ` · the first ${shown.length} shown` : "";
  setText(at("sequences-sum"), total ? `${running} running · ${waiting} waiting${more}` : "");
}

// Makes a row with the sequence's blocks. windows are the windows of the other groups of layers, in tokens, 0 for none:
// below, each has a bar of its own. The first group has no window if any group has none.
function makeSequence(sequence, longest, blockTokens, windows) {
  const { id, most_tokens: most, computed_tokens: computed, borrowed_blocks: borrowed, preemptions } = sequence;
  const waits = sequence.status === "waiting";
  const facts = waits
    ? [`waits with ${count(sequence.tokens, "token")}`]
    : [`${decimal(computed)} computed`, ...mappedFacts(sequence, blockTokens), `limit ${decimal(most)}`];
  if (borrowed) facts.push(`${count(borrowed, "block")} shared`);
  if (preemptions) facts.push(`preempted ${count(preemptions, "time")}`);
  const makeBar = (blocks) => makeTrack(blocks, sequence, longest, blockTokens);
  const row = makeColoured(id, waits ? "waits" : "", makeBar(sequence), facts);
  for (const [number, window] of waits ? [] : windows.entries()) {
    if (!window) continue;
    const blocks = sequence.other_groups[number];
    const known = [...mappedFacts(blocks, blockTokens), `window ${decimal(window)}`];
    row.append(makeBar(blocks), make("span", "facts", known.join(" · ")));
  }
  return row;
}

function mappedFacts({ first_block: first, mapped_blocks: mapped }, blockTokens) {
  const facts = [`${decimal(mapped * blockTokens)} mapped`];
  return first ? [`${decimal(first * blockTokens)} let go`, ...facts] : facts;
}

// Makes the bar of a sequence's addresses. Those before a window's first block are empty again.
function makeTrack(blocks, { most_tokens: most, computed_tokens: computed }, longest, blockTokens) {
  const { first_block: first, mapped_blocks: mapped, borrowed_blocks: borrowed } = blocks;
  const begin = first * blockTokens;
  const track = make("span", { className: "track", ariaHidden: "true" });
  track.style.width = percent(most, longest);
  const parts = [["mapped", mapped * blockTokens], ["computed", computed - begin], ["borrowed", borrowed * blockTokens]];
  for (const [name, tokens] of parts) {
    const part = make("i", name);
    part.style.left = percent(begin, most);
    part.style.width = percent(tokens, most);
    track.append(part);
  }
  return track;
}

function showWindows({ geometry, heaps, other_groups: others }) {
  const groups = [{ geometry, heaps }, ...others].filter((group) => group.geometry.window);
  at("windows").hidden = groups.length === 0;
  const facts = groups.map(({ geometry: { window, regions, block_bytes: size, max_heaps: most }, heaps: made }) => [
    `${count(regions / 2, "layer")} with a window of ${count(window, "token")}`,
    `${made.length} of ${count(most, "heap")}`,
    `${bytes(size)} a block`,
  ]);
  setList(at("windows-exact"), facts, (parts) => make("li", {}, parts.join(" · ")));
}

// Shows the state slots of recurrent layers: a slot has the states of one sequence at one position.
function showSlots({ pool, slots }) {
  at("slots-part").hidden = !pool?.slots.slots;
  if (at("slots-part").hidden) return;
  const { slots: total, free, held, cached, waiting, slot_bytes: size } = pool.slots;
  const kept = Object.values(cached).reduce((sum, number) => sum + number, 0);
  const parts = [count(total, "slot"), `${held} held`, `${kept} cached`, `${waiting} waiting`, `${free} free`];
  setText(at("slots-sum"), [...parts, `${bytes(size)} each`].join(" · "));
  const longest = Math.max(1, ...slots.map((slot) => slot.position));
  // The newest conversation is listed first, and the slots of a conversation are sorted by position.
  const conversations = new Map();
  for (const slot of slots.toSorted((one, other) => one.position - other.position)) {
    conversations.set(slot.conversation, [...(conversations.get(slot.conversation) ?? []), slot]);
  }
  const shown = [...conversations].sort(([one], [other]) => other - one).slice(0, LISTED);
  setList(at("slots"), shown, ([number, ofNumber]) => makeStates(number, ofNumber, longest));
}

function makeStates(number, slots, longest) {
  const ticks = slots.map(({ position, holders }) => {
    const tick = make("i", holders ? "tick held" : "tick");
    tick.style.left = `calc(${percent(position, longest)} - 4px)`;
    return tick;
  });
  const places = slots.map(({ position, keep }) => `${decimal(position)} ${KEEPS[keep]}`);
  return makeColoured(number, "", make("span", "track", ...ticks), places);
}

function makeRequest(request) {
  const figures = [
    decimal(request.number),
    decimal(request.prompt_tokens),
    decimal(request.cached_tokens),
    decimal(request.generated_tokens),
    seconds(request.first_token_s),
    rate(request.tokens_per_s),
    seconds(request.duration_s),
  ];
  return makeRow(figures, `finish ${request.finish}`, request.finish);
}

// --- the replicas of a cluster --------------------------------------------------------------------

// The path of the list of replicas. It is undefined before the server's answer, and null if there are no replicas.
let path;

export const startReplicas = poll(async () => {
  try {
    if (path === undefined) path = (await askJson("/version")).replicas ?? null;
    if (path === null) return null;
    showReplicas((await askJson(path)).replicas);
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    setText(at("replicas-sum"), "What is shown is from before.");
    if (error.status === 401) return null;
  }
  return RETRY_MS;
});

function showReplicas(replicas) {
  at("replicas-part").hidden = false;
  setList(at("replicas"), replicas, makeReplica);
  // GET /memory shows the memory of the first replica that answers.
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
