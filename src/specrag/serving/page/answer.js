// The text of an answer, each part marked by where it came from.

import { element } from "./dom.js";
import { familyOf, originInWords } from "./origins.js";
import { citations, segments } from "./quotes.js";

export class AnswerText {
  /** @param root where the text goes. */
  constructor(root) {
    this.root = root;
    this.parts = []; // {text, source, relaxed, pass}: neighbours of one origin and one pass are one part
    this.waiting = 0; // parts from here on are not on the page yet
  }

  get text() {
    return this.parts.map(({ text }) => text).join("");
  }

  /** Tokens by family, as a Map, and how many were relaxed. */
  counts() {
    const families = new Map();
    let relaxed = 0;
    for (const part of this.parts) {
      if (!part.tokens) continue;
      const family = familyOf(part.source);
      families.set(family, (families.get(family) ?? 0) + part.tokens);
      if (part.relaxed) relaxed += part.tokens;
    }
    return { families, relaxed };
  }

  /** Add the text of `tokens` tokens of one origin; with `pass` null a text that no pass made. */
  add(text, source, relaxed, pass, tokens = 1) {
    const last = this.parts.at(-1);
    if (last && this.waiting < this.parts.length && last.source === source && last.relaxed === relaxed && last.pass === pass) {
      last.text += text;
      last.tokens += tokens;
    } else {
      this.parts.push({ text, source, relaxed, pass, tokens });
    }
  }

  /** Take back everything behind the first `length` characters. */
  cut(length) {
    const kept = [];
    let at = 0;
    for (const part of this.parts) {
      if (at >= length) break;
      const text = part.text.slice(0, length - at);
      const whole = text.length === part.text.length;
      kept.push({ ...part, text, tokens: whole ? part.tokens : Math.min(part.tokens, text.length) });
      at += part.text.length;
    }
    this.parts = kept;
    this.waiting = 0;
    this.root.replaceChildren();
  }

  /** Put what was added on the page. */
  render() {
    this.root.append(...this.parts.slice(this.waiting).flatMap((part) => nodesOf(part, part.text)));
    this.waiting = this.parts.length;
  }

  /** The whole text anew, its citations as links to the passages. @param idOf the id of a source's place, or null. */
  finish(idOf) {
    const { text } = this;
    const found = citations(text);
    let at = 0;
    const places = this.parts.map((part) => {
      at += part.text.length;
      return { part, start: at - part.text.length, end: at };
    });
    const cuts = segments(text.length, {
      part: places.map(({ start, end }) => [start, end]),
      cited: found.map(({ start, end }) => [start, end]),
    });
    const nodes = [];
    let link = null;
    for (const { start, end } of cuts) {
      const place = places.find((each) => each.start <= start && start < each.end);
      if (!place) continue;
      const pieces = nodesOf(place.part, text.slice(start, end));
      const citation = found.find((each) => each.start <= start && start < each.end);
      const target = citation?.numbers.map(idOf).find((id) => id !== null);
      if (!target) {
        link = null;
        nodes.push(...pieces);
      } else if (link?.citation === citation) {
        link.node.append(...pieces);
      } else {
        link = { citation, node: element("a", { class: "citation", href: `#${target}` }, ...pieces) };
        link.node.setAttribute("aria-label", `Source ${citation.numbers.join(", ")}`);
        nodes.push(link.node);
      }
    }
    this.root.replaceChildren(...nodes);
    this.waiting = this.parts.length;
  }
}

/** A part as nodes: the blank in front of its first word stays outside the mark. */
function nodesOf({ source, relaxed, pass, tokens }, text) {
  const word = text.trimStart();
  const blank = text.slice(0, text.length - word.length);
  if (!word) return [blank];
  const behind = pass === null ? "" : `, round ${pass}${tokens > 1 ? `, ${tokens} tokens at once` : ""}`;
  const title = originInWords(source, relaxed) + behind;
  const mark = element("span", { class: `token ${familyOf(source)}${relaxed ? " relaxed" : ""}`, title }, word);
  return blank ? [blank, mark] : [mark];
}
