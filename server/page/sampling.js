// How answers are drawn, as a conversation may set it: what the fields of the settings are, what a kept
// conversation may hold, and what is sent.

export const FIELDS = [
  { name: "temperature", label: "Temperature", least: 0, most: 2, step: 0.05 },
  { name: "top_p", label: "Top p", least: 0.01, most: 1, step: 0.01 },
  { name: "top_k", label: "Top k", least: 0, most: 1000, step: 1 },
  { name: "min_p", label: "Min p", least: 0, most: 1, step: 0.01 },
  { name: "max_tokens", label: "Most tokens", least: 1, most: 10_000_000, step: 1 },
  { name: "seed", label: "Seed", least: 0, most: Number.MAX_SAFE_INTEGER, step: 1 },
];

// What of a value can be sent; the server's own default stands for all else.
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

// As fields of a request.
export function samplingBody({ thinking, ...numbers }) {
  return thinking === false ? { ...numbers, enable_thinking: false } : numbers;
}
