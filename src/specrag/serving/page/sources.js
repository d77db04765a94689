// The passages behind an answer, with the parts that the answer uses marked.

import { element, figure, percent } from "./dom.js";
import { citations, matching, quoted, segments, supporting } from "./quotes.js";

// Characters of a passage that are shown at first, and of a quotation that opens a passage which nothing cites.
const PREVIEW = 280;
// Passages that are listed at first; those that are cited always are.
const LISTED = 5;
const TELLING = 30;

export class Sources {
  /** @param root where the list goes. @param prefix makes the ids of two runs differ. */
  constructor(root, prefix) {
    this.root = root;
    this.prefix = prefix;
    this.sources = [];
    this.opened = new Map();
    this.answer = "";
    this.all = false;
    this.note = "";
    this.badge = "cited";
    this.sought = null; // {number, sentence}: the passage that was opened from the answer, and what led there
  }

  /** Show the passage behind a sentence of the answer, at the words that they share. */
  open(number, sentence) {
    this.sought = { number, sentence };
    this.opened.set(number, true);
    this.render();
    const item = document.getElementById(this.idOf(number));
    const fold = item.closest("details");
    if (fold) fold.open = true;
    item.focus({ preventScroll: true });
    (item.querySelector("mark.sought") ?? item).scrollIntoView({ block: "center" });
  }

  /** @param note about all of them; the one before stays where none is given. */
  show(sources, note = this.note) {
    this.sources = sources;
    this.note = note;
    this.render();
  }

  /** Mark what an answer uses. */
  mark(answer) {
    if (answer === this.answer || !this.sources.length) return;
    this.answer = answer;
    this.render();
  }

  idOf(number) {
    return this.sources.some((source) => source.number === number) ? `${this.prefix}-source-${number}` : null;
  }

  render() {
    // A key press on a button must find it again after the list has been made anew.
    const focused = this.root.contains(document.activeElement) ? document.activeElement.id : "";
    const cited = citations(this.answer);
    const listed = this.sources.filter((source, index) => this.all || index < LISTED || this.isCited(source, cited));
    const items = listed.map((source) => this.item(source, cited));
    this.root.replaceChildren(
      ...(this.note && items.length ? [element("p", { class: "hint note" }, this.note)] : []),
      items.length ? element("ol", { class: "sources" }, ...items)
        : element("p", { class: "hint" }, "No passage was found."),
      ...(listed.length < this.sources.length ? [this.more(this.sources.length - listed.length)] : []));
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  }

  more(number) {
    const showAll = () => {
      this.all = true;
      this.render();
    };
    return element("button", { type: "button", class: "link", id: `${this.prefix}-all`, click: showAll }, `Show ${number} more`);
  }

  isCited(source, cited) {
    return source.cited || cited.some(({ numbers }) => numbers.includes(source.number));
  }

  item(source, cited) {
    const text = source.text;
    const naming = cited.filter(({ numbers }) => numbers.includes(source.number));
    const sentence = naming.map((citation) => supporting(text, citation.sentence)).filter((span) => span !== null);
    const quotes = quoted(text, this.answer);
    const isCited = this.isCited(source, cited);
    const used = isCited ? quotes.length + sentence.length > 0 : quotes.some(([start, end]) => end - start >= TELLING);
    const isLong = text.length > PREVIEW;
    const isOpen = !isLong || (this.opened.get(source.number) ?? used);
    const id = `${this.prefix}-source-${source.number}`;
    const sought = this.sought?.number === source.number ? matching(text, this.sought.sentence) : [];
    const body = element("p", { class: `source-text${isOpen ? "" : " preview"}`, id: `${id}-text` },
      ...marked(text, { sentence, quote: quotes, sought }));
    const facts = [
      source.place,
      Number.isFinite(source.score) ? `score ${figure(source.score)}` : null,
      Number.isFinite(source.support) ? `holds ${percent(source.support)} of the answer's words` : null,
    ].filter(Boolean);
    return element("li", { class: isCited ? "source cited" : "source", id, tabindex: "-1" },
      element("p", { class: "source-head" },
        element("span", { class: "source-number", "aria-hidden": "true" }, String(source.number)),
        element("span", { class: "source-title" }, source.title || source.source || "Untitled"),
        isCited ? element("span", { class: "badge" }, this.badge) : null),
      element("p", { class: "hint" }, facts.join(" · ")),
      body,
      isLong ? element("button", {
        type: "button", class: "link", id: `${id}-more`, "aria-expanded": String(isOpen), "aria-controls": `${id}-text`,
        click: () => {
          this.opened.set(source.number, !isOpen);
          this.render();
        },
      }, isOpen ? "Show less" : "Show the whole passage") : null);
  }
}

function marked(text, spans) {
  return segments(text.length, spans).map(({ start, end, kinds }) => {
    const part = text.slice(start, end);
    return kinds.length ? element("mark", { class: kinds.join(" ") }, part) : part;
  });
}
