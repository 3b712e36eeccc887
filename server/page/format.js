// Numbers as people read them, and the lists of GET /memory as blocks. Nothing here touches the page.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let unit = 0;
  let value = count;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toLocaleString("en", { maximumFractionDigits: digits })} ${UNITS[unit]}`;
}

export function mib(count) {
  const value = count / 1024 ** 2;
  return `${value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 2 : 1 })} MiB`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.95) return `${value.toFixed(2)} s`;
  if (value < 99.5) return `${value.toFixed(1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function rate(value) {
  return value === null || value === undefined ? "–" : value.toFixed(value < 100 ? 1 : 0);
}

export function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

// [owner, count, owner, count, ...] as an owner for each block; -1 is nobody.
export function expandOwners(runs, blocks) {
  const owners = new Int32Array(blocks).fill(-1);
  let place = 0;
  for (let i = 0; i < runs.length; i += 2) {
    owners.fill(runs[i], place, place + runs[i + 1]);
    place += runs[i + 1];
  }
  return owners;
}

// [gap, count, sequences, gap, ...] as the number of sequences that share each block; else 0.
export function expandSharers(runs, blocks) {
  const sharers = new Int32Array(blocks);
  let place = 0;
  for (let i = 0; i < runs.length; i += 3) {
    place += runs[i];
    sharers.fill(runs[i + 2], place, place + runs[i + 1]);
    place += runs[i + 1];
  }
  return sharers;
}

// Numbers that follow each other are far apart on the circle of colours, and a sequence keeps its own.
export function hue(number) {
  return (number * 137.508 + 20) % 360;
}

// The parts that capacity is made of, in the order of a block's life.
export const PARTS = [
  ["live", "Live tokens", "K and V of open sequences"],
  ["partial_tail", "Partial tails", "unused ends of their blocks"],
  ["mapped_ahead", "Mapped ahead", "blocks that hold no token yet"],
  ["cached", "Cached", "kept for prompts that begin alike"],
  ["quarantined", "Quarantined", "waiting for the device or for their return"],
  ["free", "Free", "can be handed out"],
];

export const STATES = {
  f: "free, without memory",
  d: "free, still holding memory",
  o: "being written",
  s: "sealed",
  q: "quarantined",
  c: "cached",
  r: "on its way back to the system",
};
