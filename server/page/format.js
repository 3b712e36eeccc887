// Formats numbers as texts, and chooses colours for numbers.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export const decimal = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });

export const percent = (part, whole) => `${Math.min(100, (100 * part) / whole)}%`;

export function bytes(size) {
  const power = Math.min(Math.floor(Math.log2(Math.max(size, 1)) / 10), UNITS.length - 1);
  const value = size / 1024 ** power;
  return `${decimal(value, value >= 100 ? 0 : value >= 10 ? 1 : 2)} ${UNITS[power]}`;
}

export function mib(size) {
  const value = size / 1024 ** 2;
  return `${decimal(value, value < 10 ? 2 : 1)} MiB`;
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

export function count(number, noun) {
  return `${decimal(number)} ${noun}${number === 1 ? "" : "s"}`;
}

// Returns a hue in degrees for a number. Numbers that are next to each other get very different hues.
export function hue(number) {
  return (number * 137.508 + 20) % 360;
}
