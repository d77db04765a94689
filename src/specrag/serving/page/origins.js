// Where a token came from: the drafters' names in families, each with a colour and a pattern of its own.

import { element } from "./dom.js";

const FAMILIES = {
  target: { label: "Written by the model", hint: "no guess was involved, or the guess was wrong" },
  copied: { label: "Copied from the prompt, its passages, or the answer", hint: "drafted by a suffix automaton or a look-up" },
  passage: { label: "Copied from a passage", hint: "drafted from a passage that the search found, in the prompt or not" },
  corpus: { label: "Copied from the corpus", hint: "drafted from the static corpus" },
  drafter: { label: "Guessed by a drafter", hint: "a small model, a head, or recycled tokens" },
  draft: { label: "The chosen draft", hint: "one of the drafts below" },
  given: { label: "Given", hint: "text that no model wrote, such as the sentence that nothing was found" },
};

const FAMILY_OF = {
  target: "target", suffix: "copied", lookup: "copied", reference: "passage", corpus: "corpus", given: "given",
  draft: "draft",
};

/** The family of a source that the server names; any name not known here is a drafter's. */
export const familyOf = (source) => FAMILY_OF[source] ?? "drafter";

/** What a reader is told of a token: "Copied from a passage (reference)". */
export function originInWords(source, relaxed) {
  const family = familyOf(source);
  const name = ["target", "given", "draft"].includes(family) ? "" : ` (${source})`;
  return `${FAMILIES[family].label}${name}${relaxed ? ", near enough to the model's choice" : ""}`;
}

/** A swatch, words and, where there is one, how many tokens, for each family in `counts` (a Map), in the usual order. */
export function legendItems(counts, relaxed = 0) {
  const total = [...counts.values()].reduce((sum, value) => sum + value, 0);
  const items = Object.entries(FAMILIES).filter(([family]) => counts.has(family)).map(([family, { label, hint }]) => {
    const share = total ? ` ${counts.get(family)} (${Math.round((100 * counts.get(family)) / total)} %)` : "";
    return element("li", { title: hint },
      element("span", { class: `swatch token ${family}`, "aria-hidden": "true" }, "Abc"),
      element("span", {}, label, share ? element("span", { class: "muted" }, share) : null));
  });
  if (relaxed) {
    items.push(element("li", { title: "the model would have chosen another token, by a small margin" },
      element("span", { class: "swatch token relaxed", "aria-hidden": "true" }, "Abc"),
      element("span", {}, "Relaxed", element("span", { class: "muted" }, ` ${relaxed}`))));
  }
  return items;
}

/** The families that any method may show, for the page before the first answer. */
export const everyFamily = () => new Map(["target", "copied", "passage", "corpus", "drafter"].map((name) => [name, 0]));
