// What is chosen for a question: model, knowledge base, one or two methods and their options, and the answer's settings.

import { byId, counted, element } from "./dom.js";
import { Fields, Settings } from "./settings.js";

const NOTHING = "";

export class Choices {
  /** @param changed called with the methods that are chosen, when others are. */
  constructor(changed) {
    this.changed = changed;
    this.methods = [];
    const sumUp = () => this.sumUp();
    this.settings = new Settings(sumUp);
    this.options = [1, 2].map((place) =>
      new Fields(byId(`options-${place}`).querySelector(".settings-grid"), `option-${place}`, sumUp));
    byId("kb").addEventListener("change", () => this.showMethods());
    for (const place of [1, 2]) byId(`method-${place}`).addEventListener("change", () => this.showOptions());
  }

  /** @param models those that write, by name. @param methods as the server describes them. */
  show(models, methods) {
    this.methods = methods;
    const select = byId("model");
    select.replaceChildren(...models.map((name) => element("option", { value: name }, name)));
    byId("model-field").hidden = models.length < 2;
    byId("model-name").textContent = models.length === 1 ? models[0] : "";
    this.showMethods();
  }

  showBases(bases, added) {
    const select = byId("kb");
    const chosen = added ?? (select.options.length ? select.value : (bases.find(({ passages }) => passages) ?? bases[0])?.id);
    select.replaceChildren(
      ...bases.map(({ id, passages }) => element("option", { value: id },
        Number.isFinite(passages) ? `${id} (${counted(passages, "passage")})` : id)),
      element("option", { value: NOTHING }, "None: the model alone"));
    select.value = bases.some(({ id }) => id === chosen) ? chosen : NOTHING;
    if (this.methods.length) this.showMethods();
  }

  /** The methods that can be chosen: without a knowledge base not those that need one, with it none of a long text. */
  showMethods() {
    const hasBase = byId("kb").value !== NOTHING;
    const fits = (method) => hasBase ? !method.needs_context : !method.needs_kb;
    const options = () => this.methods.map((method) =>
      element("option", { value: method.name, disabled: !fits(method) }, method.name));
    const [first, second] = [byId("method-1"), byId("method-2")];
    const chosen = [first.value, second.value];
    first.replaceChildren(...options());
    second.replaceChildren(element("option", { value: NOTHING }, "Nothing"), ...options());
    const usable = (name) => this.methods.some((method) => method.name === name && fits(method));
    const usual = this.methods.find((method) => method.default && fits(method)) ?? this.methods.find(fits);
    first.value = usable(chosen[0]) ? chosen[0] : usual?.name;
    second.value = usable(chosen[1]) ? chosen[1] : NOTHING;
    this.showOptions();
  }

  showOptions() {
    this.options.forEach((fields, index) => {
      const group = byId(`options-${index + 1}`);
      const method = this.method(byId(`method-${index + 1}`).value);
      const described = method?.options ?? {};
      byId(`about-${index + 1}`).textContent = method ? `${method.title}.` : "";
      group.hidden = !Object.keys(described).length;
      group.querySelector("legend").textContent = method ? `${method.name}${index ? ", compared" : ""}` : "";
      if (fields.method !== method?.name) fields.described = {}; // another method's values are not kept
      fields.method = method?.name;
      fields.show(described);
    });
    this.sumUp();
    this.changed(this.chosen);
  }

  method(name) {
    return this.methods.find((method) => method.name === name);
  }

  /** The methods that are chosen. */
  get chosen() {
    return [1, 2].map((place) => this.method(byId(`method-${place}`).value)).filter(Boolean);
  }

  /** How two methods run: after each other, or together. */
  get order() {
    return this.settings.values().order ?? "after";
  }

  /** The request of each chosen method: {title, method, body}, without messages. */
  requests() {
    const { order: _, k, abstain, ...sampling } = this.settings.values();
    const kb = byId("kb").value;
    const titles = titlesOf(this.chosen.map(({ name }) => name));
    return this.chosen.map((method, index) => {
      const specrag = { method: method.name, events: true };
      const options = this.options[index].values();
      if (Object.keys(options).length) specrag.options = options;
      if (kb !== NOTHING) Object.assign(specrag, { kb }, defined({ k, abstain }));
      // Else the second would find the prompt read by the first.
      if (titles.length > 1) specrag.fresh = true;
      const body = {
        model: byId("model").value, max_tokens: 256, temperature: 0, seed: 0, ...sampling,
        stream: true, stream_options: { include_usage: true }, specrag,
      };
      return { title: titles[index], method, body };
    });
  }

  sumUp() {
    const changed = [this.settings, ...this.options].reduce((sum, fields) => sum + Object.keys(fields.values()).length, 0);
    byId("settings-changed").textContent = changed ? `${changed} changed` : "";
    const names = this.chosen.map(({ name }) => name).join(" and ");
    const kb = byId("kb").value;
    byId("choice").textContent = names ? `${names}${kb ? ` over ${kb}` : ", the model alone"}` : "";
  }
}

/** What the runs are called; the same method twice gets two names. */
function titlesOf(names) {
  return names[0] === names[1] ? [`${names[0]}, first`, `${names[1]}, second`] : names;
}

const defined = (values) => Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined));
