/* What the user chooses: model, system prompt, sampling, drafter, thinking, colours. And what the model is. */

import { ask, untilBack } from "./api.js";
import { add } from "./rendering.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const THEMES = { "": "as the system", dark: "dark", light: "light" };
const FIELDS = ["temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed", "max_output_tokens", "drafter"];

/* The model that answers: its name, what it reads, its drafters, tokens of its context; and the names of all that there are. */
export const model = { name: "", names: [], reads: { vision: false, audio: false }, can: [], drafters: [], contextLength: 0 };
let choices = 0; // how often a model was chosen

/* Fields of a request for the reply of a message. */
export function requestFields(message) {
  const kept = store.settings();
  const fields = Object.fromEntries(FIELDS.filter((name) => kept[name] !== undefined).map((name) => [name, kept[name]]));
  if (!model.drafters.includes(fields.drafter)) delete fields.drafter; // that of another model
  if (kept.system) fields.instructions = kept.system;
  if (model.names.length > 1) fields.model = message.model;
  if (!$("thinking-option").hidden) fields.reasoning = { effort: $("thinking").checked ? "medium" : "none" };
  return fields;
}

/* Ask the server for its models, and show the chosen one. */
export async function load() {
  await untilBack();
  model.names = (await (await ask("v1/models")).json()).data.map(({ id }) => id);
  const chosen = store.settings().model;
  if (model.names.includes(chosen)) await choose(chosen).catch(() => choose(model.names[0]));
  else await choose(model.names[0]);
}

/* Let a model answer from now on. It is loaded if it is not in memory, so this can take minutes. Returns false if another one was
chosen meanwhile. */
export async function choose(name) {
  choices += 1;
  const choice = choices;
  const props = await (await ask(`props?model=${encodeURIComponent(name)}`)).json();
  if (choice !== choices) return false;
  Object.assign(model, {
    name: props.model_alias,
    reads: props.modalities,
    can: props.capabilities,
    drafters: props.drafters,
    contextLength: props.default_generation_settings.n_ctx,
  });
  $("thinking-option").hidden = !model.can.includes("thinking");
  $("thinking").checked = store.settings().thinking ?? false;
  const fields = $("settings-form").elements;
  for (const [field, value] of Object.entries(props.default_generation_settings.params)) {
    if (fields[field]) fields[field].placeholder = value === null ? "off" : Number(value.toFixed(4));
  }
  fields.drafter.replaceChildren(fields.drafter.options[0], ...props.drafters.map((each) => new Option(each, each)));
  showModel();
  return true;
}

function showModel() {
  const { name, names, reads } = model;
  $("model").textContent = name;
  $("model").classList.toggle("unseen", names.length > 1);
  $("models").hidden = names.length < 2;
  $("models").replaceChildren(...names.map((each) => new Option(each, each, false, each === name)));
  $("reads").replaceChildren();
  for (const kind of ["text", reads.vision && "images", reads.audio && "sound"].filter(Boolean)) add($("reads"), "li", "", kind);
}

function showTheme() {
  const theme = store.settings().theme ?? "";
  document.documentElement.dataset.theme = theme;
  $("theme").setAttribute("aria-label", `Colours: ${THEMES[theme]}`);
  $("theme").title = `Colours: ${THEMES[theme]}`;
}

function fillSettings() {
  const kept = store.settings();
  for (const field of $("settings-form").querySelectorAll("[name]")) field.value = kept[field.name] ?? "";
}

$("settings-form").addEventListener("change", ({ target }) => {
  if (!target.checkValidity()) return;
  const value = target.type === "number" && target.value ? Number(target.value) : target.value;
  store.saveSettings({ [target.name]: value === "" ? undefined : value });
});

$("settings").addEventListener("click", () => {
  fillSettings();
  $("settings-dialog").showModal();
});

$("defaults").addEventListener("click", () => {
  const names = [...$("settings-form").querySelectorAll("[name]")].map(({ name }) => [name, undefined]);
  store.saveSettings(Object.fromEntries(names));
  fillSettings();
});

$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  store.saveSettings({ theme: names[(names.indexOf(store.settings().theme ?? "") + 1) % names.length] });
  showTheme();
});

$("thinking").addEventListener("change", ({ target }) => store.saveSettings({ thinking: target.checked }));
showTheme();
