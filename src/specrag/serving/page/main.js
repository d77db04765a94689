// The page: choose, ask, watch, compare.

import { getJson, hindrances } from "./api.js";
import { compare } from "./comparison.js";
import { setUpDialogs } from "./dialogs.js";
import { Documents } from "./documents.js";
import { byId, counted, element } from "./dom.js";
import { everyFamily, legendItems } from "./origins.js";
import { Run } from "./run.js";
import { Fields, Settings } from "./settings.js";
import { Scale } from "./timeline.js";

const NOTHING = "";
const LOADING_POLL = 500;

class Page {
  constructor() {
    this.methods = [];
    this.runs = [];
    this.abort = null;
    this.model = "";
    const changed = () => this.sumUpSettings();
    this.settings = new Settings(changed);
    this.options = [1, 2].map((place) =>
      new Fields(byId(`options-${place}`).querySelector(".settings-grid"), `option-${place}`, changed));
    this.documents = new Documents((bases, added) => this.showBases(bases, added));
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    byId("question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId("ask").requestSubmit();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("kb").addEventListener("change", () => this.showMethods());
    for (const place of [1, 2]) byId(`method-${place}`).addEventListener("change", () => this.showOptions());
    byId("empty-legend").replaceChildren(...legendItems(everyFamily()));
  }

  /** Learn what the server has; waits for one that still loads its model. */
  async load() {
    try {
      while ((await hindrances()).model === "loading") {
        say("The server is still loading its model.");
        await new Promise((resolve) => setTimeout(resolve, LOADING_POLL));
      }
      say("");
      const [models, methods] = await Promise.all([getJson("v1/models"), getJson("v1/specrag/methods"), this.documents.refresh()]);
      this.model = models.data[0].id;
      this.methods = methods;
      byId("model").textContent = this.model;
      this.showMethods();
    } catch (error) {
      notice(error.message);
    }
  }

  // -- choices ------------------------------------------------------------------------------------------------

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
      byId(`about-${index + 1}`).textContent = aboutOf(method);
      group.hidden = !Object.keys(described).length;
      group.querySelector("legend").textContent = method ? `${method.name}${index ? ", compared" : ""}` : "";
      if (fields.method !== method?.name) fields.described = {}; // another method's values are not kept
      fields.method = method?.name;
      fields.show(described);
    });
    this.sumUpSettings();
  }

  method(name) {
    return this.methods.find((method) => method.name === name);
  }

  sumUpSettings() {
    const changed = [this.settings, ...this.options].reduce((sum, fields) => sum + Object.keys(fields.values()).length, 0);
    byId("settings-changed").textContent = changed ? `${changed} changed` : "";
  }

  // -- asking -------------------------------------------------------------------------------------------------

  async ask() {
    const question = byId("question").value.trim();
    if (this.abort || !question) return;
    const names = [byId("method-1").value, byId("method-2").value].filter((name) => name !== NOTHING);
    if (!names.length) return;
    const { order = "after", ...general } = this.settings.values();
    const titles = titlesOf(names);
    const scale = new Scale();
    for (const run of this.runs) run.close();
    this.runs = names.map((name, index) => new Run(
      `run-${index + 1}`, titles[index], this.request(question, name, general, this.options[index].values()), scale, say));
    this.abort = new AbortController();
    byId("notices").replaceChildren();
    byId("empty").hidden = true;
    byId("comparison").hidden = true;
    byId("runs").className = names.length > 1 ? "runs two" : "runs";
    byId("runs").replaceChildren(...this.runs.map((run) => run.root));
    this.setBusy(true);
    const { signal } = this.abort;
    if (order === "together") {
      await Promise.all(this.runs.map((run) => run.start(signal)));
    } else {
      for (const run of this.runs) await run.start(signal); // a stopped one ends at once
    }
    this.abort = null;
    this.setBusy(false);
    compare(byId("comparison"), this.runs, order);
  }

  request(question, method, { k, abstain, ...sampling }, options) {
    const kb = byId("kb").value;
    const specrag = { method, events: true };
    if (Object.keys(options).length) specrag.options = options;
    if (kb !== NOTHING) Object.assign(specrag, { kb }, defined({ k, abstain }));
    return {
      model: this.model, messages: [{ role: "user", content: question }], max_tokens: 256, temperature: 0, seed: 0,
      ...sampling, stream: true, stream_options: { include_usage: true }, specrag,
    };
  }

  stop() {
    this.abort?.abort();
  }

  setBusy(busy) {
    const stop = byId("stop");
    // The button that was pressed goes away under the keyboard: hand its focus on.
    const hadFocus = [stop, byId("submit")].includes(document.activeElement);
    stop.hidden = !busy;
    byId("submit").hidden = busy;
    if (hadFocus) (busy ? stop : byId("submit")).focus();
    if (busy) say("Asked.");
  }
}

/** What a method does, as a sentence. */
const aboutOf = (method) => method ? `${method.title}.` : "";

/** What the runs are called; the same method twice gets two names. */
function titlesOf(names) {
  return names[0] === names[1] ? [`${names[0]}, first`, `${names[1]}, second`] : names;
}

const defined = (values) => Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined));

function say(text) {
  byId("status").textContent = text;
}

function notice(text) {
  byId("notices").append(element("p", { class: "notice error", role: "alert" }, text));
}

setUpDialogs();
await new Page().load();
