// The text of an answer, each part marked by where it came from.

import { element } from "./dom.js";
import { readBlocks } from "./markdown.js";
import { familyOf, originInWords } from "./origins.js";
import { citations } from "./quotes.js";

export class AnswerText {
  /** @param root where the text goes. */
  constructor(root) {
    this.root = root;
    this.parts = []; // {text, source, relaxed, pass}: neighbours of one origin and one pass are one part
    this.shown = []; // the blocks that are on the page: {kind, start, end, node}
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
    if (last && last.source === source && last.relaxed === relaxed && last.pass === pass) {
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
    this.shown = [];
    this.root.replaceChildren();
  }

  /**
   * Put what was added on the page; blocks that are there and have not changed stay, with what is selected in them.
   *
   * @param idOf the id of a source's place, or null; with it all is made anew, its citations as links to the passages.
   * @param follow called with a source's number and the sentence that cites it.
   * @param unheld names and numbers that no cited passage has, which are marked.
   */
  render(idOf = null, follow = null, unheld = []) {
    const { text } = this;
    const blocks = readBlocks(text);
    const isSame = (block, index) => {
      const shown = this.shown[index];
      return index < this.shown.length - 1 && shown.kind === block.kind && shown.start === block.start && shown.end === block.end;
    };
    const changed = idOf ? 0 : blocks.findIndex((block, index) => !isSame(block, index));
    if (changed < 0) return;
    const leaf = this.leaves(text, idOf ? [...linksOf(text, idOf, follow), ...doubtsOf(text, unheld)] : []);
    for (const { node } of this.shown.splice(changed)) node.remove();
    for (const block of blocks.slice(changed)) {
      const node = block.build(leaf);
      this.root.append(node);
      this.shown.push({ ...block, node });
    }
  }

  /** What makes the nodes of some characters: words marked by their origin, and links where something is cited. */
  leaves(text, links) {
    let at = 0;
    const places = this.parts.map((part) => {
      at += part.text.length;
      return { part, start: at - part.text.length, end: at };
    });
    const overlap = (list, start, end) => list.filter((each) => each.start < end && start < each.end);
    return (start, end, linked) => {
      const cited = linked ? [] : overlap(links, start, end);
      const here = overlap(places, start, end);
      const edges = [...here, ...cited].flatMap((each) => [each.start, each.end]).filter((edge) => start < edge && edge < end);
      const cuts = [...new Set([start, ...edges, end])].sort((a, b) => a - b);
      const nodes = [];
      let open = null;
      cuts.slice(0, -1).forEach((from, index) => {
        const { part } = here.find((each) => each.start <= from && from < each.end);
        const pieces = nodesOf(part, text.slice(from, cuts[index + 1]));
        const link = cited.find((each) => each.start <= from && from < each.end) ?? null;
        if (!link) nodes.push(...pieces);
        else if (link === open) nodes.at(-1).append(...pieces);
        else nodes.push(link.build(pieces));
        open = link;
      });
      return nodes;
    };
  }
}

/** The citations of a text that lead somewhere: {start, end, build}. */
function linksOf(text, idOf, follow) {
  return citations(text).flatMap(({ start, end, numbers, sentence }) => {
    const number = numbers.find((each) => idOf(each) !== null);
    if (number === undefined) return [];
    const click = (event) => {
      event.preventDefault();
      follow(number, sentence);
    };
    const build = (pieces) => element("a", {
      class: "citation", href: `#${idOf(number)}`, "aria-label": `Source ${numbers.join(", ")}`, click,
    }, ...pieces);
    return [{ start, end, build }];
  });
}

/** The words of a text that no cited passage has: {start, end, build}. */
function doubtsOf(text, unheld) {
  const build = (pieces) => element("span", { class: "unheld", title: "In no cited passage" }, ...pieces);
  return Array.from(text.matchAll(/[\p{L}\p{N}]+(?:['’][\p{L}\p{N}]+)?/gu))
    .filter(([word]) => unheld.includes(word))
    .map(({ 0: word, index }) => ({ start: index, end: index + word.length, build }));
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
