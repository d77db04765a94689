// The reference at /docs, made from the server's own description of its API.

import { getJson, headers } from "./api.js";
import { setUpDialogs } from "./dialogs.js";
import { byId, element } from "./dom.js";

const VERBS = ["get", "post", "put", "patch", "delete"];

class Reference {
  constructor(description) {
    this.description = description;
  }

  show() {
    const { info, paths } = this.description;
    byId("version").textContent = info.version;
    const groups = new Map();
    for (const [path, operations] of Object.entries(paths)) {
      for (const verb of VERBS.filter((name) => operations[name])) {
        const route = { path, verb, operation: operations[verb], id: `${verb}${path.replace(/[^a-z0-9]+/gi, "-")}` };
        const tag = route.operation.tags?.[0] ?? "others";
        groups.set(tag, [...(groups.get(tag) ?? []), route]);
      }
    }
    for (const [tag, routes] of groups) {
      byId("contents").append(element("h2", {}, tag), ...routes.map((route) =>
        element("a", { href: `#${route.id}` }, `${route.verb.toUpperCase()} ${route.path}`)));
      byId("routes").append(...routes.map((route) => this.route(route)));
    }
    // The browser looked for the address's fragment before there was anything to find.
    if (location.hash) byId(location.hash.slice(1))?.scrollIntoView();
  }

  route({ path, verb, operation, id }) {
    const [kind, body] = Object.entries(operation.requestBody?.content ?? {})[0] ?? [];
    const parameters = operation.parameters ?? [];
    const statuses = Object.keys(operation.responses ?? {});
    return element("section", { class: "route", id },
      element("h3", {}, element("span", { class: "verb" }, verb.toUpperCase()), path),
      element("p", {}, ...worded(operation.description ?? operation.summary ?? "")),
      ...(parameters.length ? [element("h4", {}, "Parameters"), this.parameters(parameters)] : []),
      ...(body ? [element("h4", {}, `Body (${kind})`), this.fields(this.resolved(body.schema))] : []),
      element("h4", {}, "Example"),
      element("pre", {}, element("code", {}, this.example(path, verb, kind, body && this.resolved(body.schema)))),
      element("p", { class: "hint" }, `Answers with ${statuses.join(", ")}.`));
  }

  parameters(parameters) {
    const properties = Object.fromEntries(parameters.map(({ name, schema, description }) => [name, { description, ...schema }]));
    const required = parameters.filter((parameter) => parameter.required).map(({ name }) => name);
    return this.fields({ properties, required });
  }

  /** A schema's fields; what they hold is shown once it is opened, for schemas may hold themselves. */
  fields(schema) {
    const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
      const needed = schema.required?.includes(name) ? element("span", { class: "needed" }, " required") : null;
      return element("tr", {},
        element("th", { scope: "row" }, name, needed),
        element("td", {}, element("div", { class: "kind" }, this.kind(field)), ...worded(field.description ?? ""),
          ...this.inner(field).map((inner) => this.opened(inner))));
    });
    if (!rows.length) return element("p", { class: "hint" }, this.kind(schema));
    const head = element("thead", {}, element("tr", {},
      element("th", { scope: "col" }, "Field"), element("th", { scope: "col" }, "What it takes")));
    const table = element("table", { class: "fields" }, head, element("tbody", {}, ...rows));
    const choices = (schema.oneOf ?? []).filter(({ properties }) => properties?.method?.const);
    return choices.length ? element("div", {}, table, ...choices.map((choice) => this.options(choice))) : table;
  }

  /** What ``options`` may hold where a method is named. */
  options({ properties: { method, options } }) {
    return this.opened(options, `options of ${method.const}`);
  }

  opened(reference, title) {
    const schema = this.resolved(reference);
    const details = element("details", {}, element("summary", {}, title ?? nameOf(reference)));
    details.addEventListener("toggle", () => details.append(this.fields(schema)), { once: true });
    return details;
  }

  resolved(schema) {
    return schema.$ref ? this.description.components.schemas[nameOf(schema)] : schema;
  }

  /** References to schemas with fields inside of one. */
  inner(schema) {
    if (schema.$ref) return this.resolved(schema).properties ? [schema] : [];
    const parts = [...(schema.anyOf ?? []), schema.items, schema.additionalProperties];
    return parts.filter((part) => part && typeof part === "object").flatMap((part) => this.inner(part));
  }

  kind(schema) {
    return [this.type(schema), ...limits(schema),
      "default" in schema && schema.default !== null ? `default ${JSON.stringify(schema.default)}` : ""]
      .filter(Boolean).join(", ");
  }

  type(schema) {
    if (schema.$ref) return nameOf(schema);
    if ("const" in schema) return JSON.stringify(schema.const);
    if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
    const either = schema.anyOf?.filter(({ type }) => type !== "null");
    if (either?.length) return either.map((part) => [this.type(part), ...limits(part)].join(", ")).join(" | ");
    if (schema.type === "array") return `list of ${this.type(schema.items ?? {})}`;
    return schema.type ?? "any";
  }

  example(path, verb, kind, schema) {
    const words = [`curl ${verb === "get" ? "" : `-X ${verb.toUpperCase()} `}${new URL(`.${path}`, document.baseURI).href}`,
      "-H 'Authorization: Bearer KEY'"];
    if (kind === "multipart/form-data") words.push("-F files=@FILE");
    else if (kind) words.push("-H 'Content-Type: application/json'", `-d '${JSON.stringify(this.sample(schema))}'`);
    return words.join(" \\\n  ");
  }

  /** The example that a schema gives; else its fields that are required. */
  sample(schema) {
    if (schema.examples) return schema.examples[0];
    return Object.fromEntries((schema.required ?? []).map((name) => [name, this.type(schema.properties[name])]));
  }
}

const nameOf = ({ $ref }) => $ref.split("/").pop();

function limits(schema) {
  const names = {
    minimum: "at least", exclusiveMinimum: "above", maximum: "at most", minLength: "characters from", maxLength: "characters up to",
    minItems: "entries from", maxItems: "entries up to", pattern: "like",
  };
  // A limit of 64 bits is none that a reader looks for, and no number of JavaScript's.
  return Object.entries(names).filter(([key]) => key in schema && !(Math.abs(schema[key]) > Number.MAX_SAFE_INTEGER)).map(([key, words]) => `${words} ${schema[key]}`);
}

/** A docstring as text and code. */
function worded(text) {
  return text.split(/(``.*?``)/s).map((part) => part.startsWith("``") ? element("code", {}, part.slice(2, -2)) : part);
}

setUpDialogs();
try {
  new Reference(await getJson("openapi.json")).show();
  byId("source").hidden = Boolean(headers().Authorization); // which a link does not send
} catch (error) {
  byId("routes").append(element("p", { class: "notice error", role: "alert" }, error.message));
}
