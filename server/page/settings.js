// The settings of a conversation: the model, and the dialog for the system prompt and sampling.

import { askJson } from "./api.js";
import { FIELDS, readSampling } from "./conversation.js";
import { at, make, setList, setText } from "./element.js";

const select = at("model");
let models = [];

export const chosenModel = () => select.value || null;

// Returns true if the server loads and unloads models, each of which has a memory map of its own.
export const comeAndGo = () => models.length > 1 || models.some((model) => "loaded" in model);

export const isAway = () => models.some(({ id, loaded }) => id === select.value && loaded === false);

export function describeWait() {
  if (isAway()) return `Loading ${select.value}`;
  return comeAndGo() ? "Waiting for the first token; the model may be loading" : "Waiting for the first token";
}

// Reads the list of models from the server. Throws ServerError.
export async function refreshModels() {
  models = (await askJson("/v1/models")).data;
  const chosen = chosenModel();
  const loaded = models.filter((model) => model.loaded);
  const others = models.filter((model) => !model.loaded);
  const groups = [["Loaded", loaded], [comeAndGo() ? "On this disk" : "", others]].filter(([, { length }]) => length);
  setList(select, groups.map(([label, list]) => [label, list.map(describeModel)]), ([label, list]) => {
    const options = list.map(([value, text]) => make("option", { value }, text));
    return label ? make("optgroup", { label }, ...options) : options[0];
  });
  select.hidden = models.length === 0;
  if (!chosen) select.value = (loaded.toSorted((one, other) => one.loaded_s - other.loaded_s)[0] ?? models[0])?.id;
  chooseModel(chosen);
}

// Returns a model's id, and the text of its option: the id with the context's length.
function describeModel({ id, context_length: tokens }) {
  const length = tokens >= 1024 ? `${Math.floor(tokens / 1024)}k` : tokens;
  return [id, tokens ? `${id} · ${length}` : id];
}

// Selects a model. If the server lacks that model, keeps the selected one.
export function chooseModel(id) {
  if (models.some((model) => model.id === id)) select.value = id;
}

// The list of models is read again when a person opens it, since it may have changed.
select.addEventListener("focus", () => refreshModels().catch(() => {}));

// --- the settings dialog --------------------------------------------------------------------------

const inputs = new Map(FIELDS.map(({ name, label, least, most, step }) => {
  const isWhole = step >= 1;
  const kind = isWhole ? { step: "1", inputMode: "numeric" } : { step: "any", inputMode: "decimal" };
  const input = make("input", { type: "number", min: least, max: most, placeholder: "default", ...kind });
  at("sampling").append(make("label", {}, label, input));
  return [name, input];
}));

// Opens the dialog. onClose() is called once the conversation has the new settings.
export function openSettings(conversation, onClose) {
  at("system").value = conversation.system;
  at("thinking").checked = conversation.sampling.thinking !== false;
  for (const [name, input] of inputs) input.value = conversation.sampling[name] ?? "";
  at("settings").onclose = () => {
    const given = { thinking: at("thinking").checked };
    for (const [name, input] of inputs) {
      if (input.value !== "" && input.checkValidity()) given[name] = input.valueAsNumber;
    }
    conversation.system = at("system").value;
    conversation.sampling = readSampling(given);
    onClose();
  };
  at("settings").showModal();
}

// Shows the settings of the conversation that differ from the server's defaults.
export function sumUpSettings({ system, sampling }) {
  const parts = system.trim() ? ["system prompt"] : [];
  for (const [name, value] of Object.entries(sampling)) {
    parts.push(name === "thinking" ? "no thoughts" : `${name.replace("_", " ")} ${value}`);
  }
  setText(at("settings-sum"), parts.join(" · "));
}
