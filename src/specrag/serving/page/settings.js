// The settings of an answer and the options of the chosen methods, as the server describes them.

import { byId, element } from "./dom.js";

const GENERAL = {
  k: { label: "Passages", type: "integer", min: 1, help: "how many the search finds" },
  max_tokens: { label: "Longest answer", type: "integer", min: 1, default: 256, help: "in tokens" },
  temperature: { label: "Temperature", type: "number", min: 0, max: 2, step: 0.1, default: 0, help: "0 always takes the likeliest token" },
  seed: { label: "Seed", type: "integer", min: 0, default: 0, help: "the same seed draws the same text" },
  abstain: { label: "Say so where nothing fits", type: "boolean", default: true, help: "no answer from passages that are not about the question" },
  order: { label: "Two methods run", type: "string", default: "after",
    choices: { after: "one after the other", together: "at the same time" },
    help: "only one after the other is fair: at once they share the machine" },
};

/** The settings that are the same for every method. */
export class Settings {
  constructor(changed) {
    this.fields = new Fields(byId("general-settings"), "setting", changed);
    this.fields.show(GENERAL);
  }

  /** The values that are not the default, and those that are always sent. */
  values() {
    return this.fields.values();
  }
}

/** Inputs for described values; gives back what was changed. */
export class Fields {
  constructor(root, prefix, changed) {
    this.root = root;
    this.prefix = prefix;
    this.described = {};
    root.addEventListener("input", changed);
  }

  show(described) {
    const kept = this.values();
    this.described = described;
    this.root.replaceChildren(...Object.entries(described).map(([name, field]) => this.field(name, field, kept[name])));
  }

  field(name, field, kept) {
    const id = `${this.prefix}-${name}`;
    const label = field.label ?? (field.symbol ? `${inWords(name)} (${field.symbol})` : inWords(name));
    const hint = field.help ? element("p", { class: "hint", id: `${id}-hint` }, field.help) : null;
    const value = kept ?? field.default;
    const described = field.help ? `${id}-hint` : null;
    if (isSwitch(field)) {
      const box = element("input", { type: "checkbox", id, "aria-describedby": described });
      box.checked = Boolean(value);
      return element("div", { class: "field" }, element("label", { class: "check", for: id }, box, label), hint);
    }
    const choices = choicesOf(field);
    // Numbers with names for some of them are written, and so are lists.
    const input = choices && !isNumber(field) && field.type !== "array"
      ? element("select", { id, "aria-describedby": described },
        ...choices.map(([choice, words]) => element("option", { value: choice }, words)))
      : element("input", {
        id, type: isNumber(field) && !choices ? "number" : "text", min: field.min, max: field.max,
        step: field.type === "integer" ? 1 : field.step ?? (isNumber(field) ? "any" : null),
        spellcheck: "false", autocomplete: "off", "aria-describedby": described,
        placeholder: placeholderOf(field, choices),
      });
    // What has no default is chosen: its first choice is sent.
    if (input.tagName !== "SELECT" || value !== null) input.value = value ?? "";
    return element("div", { class: "field" }, element("label", { for: id }, label), input, hint);
  }

  /** The values that differ from the defaults. */
  values() {
    const values = {};
    for (const [name, field] of Object.entries(this.described)) {
      const input = byId(`${this.prefix}-${name}`);
      if (!input) continue;
      if (isSwitch(field)) {
        if (input.checked !== Boolean(field.default)) values[name] = input.checked;
      } else if (input.value.trim() !== "" && input.value !== String(field.default ?? "")) {
        values[name] = valueOf(field, input.value);
      }
    }
    return values;
  }
}

const isNumber = ({ type }) => type === "integer" || type === "number";

/** Yes or no; one that is neither by default is chosen among three. */
const isSwitch = ({ type, default: usual }) => type === "boolean" && usual !== null;

function valueOf(field, text) {
  if (field.type === "boolean") return text === "true";
  if (field.type === "array") return text.split(",").map((part) => part.trim()).filter(Boolean);
  return isNumber(field) && !Number.isNaN(Number(text)) ? Number(text) : text;
}

function choicesOf({ type, choices, default: usual, enum: values }) {
  if (type === "boolean") return [["", "automatic"], ["true", "yes"], ["false", "no"]];
  if (type === "choice" && usual === null) return [["", "automatic"], ...choices.map((value) => [value, value])];
  if (Array.isArray(choices ?? values)) return (choices ?? values).map((value) => [value, value]);
  return choices ? Object.entries(choices) : null;
}

function placeholderOf(field, choices) {
  if (field.type === "array") return choices ? choices.map(([choice]) => choice).join(", ") : "separated by commas";
  return field.default === null || field.default === undefined ? "automatic" : null;
}

function inWords(name) {
  const words = name.replaceAll(/[_-]/g, " ");
  return words[0].toUpperCase() + words.slice(1);
}
