// Markdown as nodes, as far as models write it. Nothing is read as markup: raw HTML and images stay the text that they
// are, and a link leads to http or https or nowhere. Where text stands in the source is kept, so that whoever shows a
// leaf knows which characters it is.

import { element } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|(\d{1,9})[.)])(?: {1,4}(?=\S)| *$)/;
const DIVIDER = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/;
const ADDRESS = /^https?:\/\/[^\s<>"]+/;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
// A text that opens this many lists, quotations or emphases within each other is no text for readers; nor is a link's
// name or address of so many characters.
const DEEPEST = 12;
const LONGEST = 2000;

/**
 * The blocks of a text: {kind, start, end, build}; `build(leaf)` makes a block's node, and `leaf(start, end, linked)` the
 * nodes of the characters from `start` to `end`, with `linked` where they are in a link already.
 */
export function readBlocks(text) {
  const lines = [];
  let at = 0;
  for (const line of text.split("\n")) {
    lines.push({ at, end: at + line.length });
    at += line.length + 1;
  }
  return blocksOf(text, lines, 0);
}

// -- blocks -----------------------------------------------------------------------------------------------------

function blocksOf(text, lines, depth) {
  const blocks = [];
  const words = (line) => text.slice(line.at, line.end);
  for (let first = 0; first < lines.length;) {
    if (!words(lines[first]).trim()) {
      first += 1;
      continue;
    }
    const { kind, count, build } = blockAt(text, lines.slice(first), words, depth);
    blocks.push({ kind, start: lines[first].at, end: lines[first + count - 1].end, build });
    first += count;
  }
  return blocks;
}

function blockAt(text, lines, words, depth) {
  const [line] = lines;
  const start = words(line);
  if (FENCE.test(start)) return code(text, lines, words);
  if (HEADING.test(start)) return heading(text, line, start);
  if (RULE.test(start)) return { kind: "rule", count: 1, build: () => element("hr") };
  if (depth < DEEPEST && QUOTE.test(start)) return quotation(text, lines, words, depth);
  if (depth < DEEPEST && ITEM.test(start)) return list(text, lines, words, depth);
  if (isTable(lines, words)) return table(text, lines, words);
  const rest = lines.slice(1).findIndex((each, index) => {
    const said = words(each);
    return !said.trim() || interrupts(said) || isTable(lines.slice(index + 1), words);
  });
  const count = rest < 0 ? lines.length : rest + 1;
  return { kind: "paragraph", count, build: (leaf) => element("p", {}, ...inline(text, lines.slice(0, count), leaf)) };
}

/** Whether a line ends the paragraph before it. */
function interrupts(said) {
  const item = ITEM.exec(said);
  return FENCE.test(said) || HEADING.test(said) || RULE.test(said) || QUOTE.test(said) ||
    (item !== null && item[0] !== said && (item[3] ?? "1") === "1");
}

function code(text, lines, words) {
  const [, fence] = FENCE.exec(words(lines[0]));
  const closing = lines.slice(1).findIndex((line) => {
    const said = words(line).trim();
    return said.length >= fence.length && said === fence[0].repeat(said.length);
  });
  const inside = lines.slice(1, closing < 0 ? undefined : closing + 1);
  const build = (leaf) => element("pre", {}, element("code", {}, ...virtual(text, inside).leaves(leaf)));
  return { kind: "code", count: inside.length + (closing < 0 ? 1 : 2), build };
}

function heading(text, line, start) {
  const [mark, signs] = HEADING.exec(start);
  const end = line.at + start.replace(/[ \t]+#*[ \t]*$/, "").length;
  const said = [{ at: Math.min(line.at + mark.length, end), end }];
  // One level whatever the model's: a page's headings may not skip any.
  return { kind: "heading", count: 1, build: (leaf) => element("h4", { class: `level-${signs.length}` }, ...inline(text, said, leaf)) };
}

function quotation(text, lines, words, depth) {
  const other = lines.findIndex((line) => !QUOTE.test(words(line)));
  const count = other < 0 ? lines.length : other;
  const inside = lines.slice(0, count).map(({ at, end }) => ({ at: at + QUOTE.exec(text.slice(at, end))[0].length, end }));
  return { kind: "quote", count, build: (leaf) => element("blockquote", {}, ...built(text, inside, depth, leaf)) };
}

function list(text, lines, words, depth) {
  const isOrdered = (item) => item[3] !== undefined;
  const ordered = isOrdered(ITEM.exec(words(lines[0])));
  const items = [];
  let count = 0;
  let indent = 0;
  while (count < lines.length) {
    const said = words(lines[count]);
    const spaces = said.length - said.trimStart().length;
    const item = ITEM.exec(said);
    if (item && !RULE.test(said) && (!items.length || spaces < indent) && isOrdered(item) === ordered) {
      indent = item[0].length;
      items.push([{ at: lines[count].at + indent, end: lines[count].end }]);
    } else if (!said.trim()) {
      const next = lines.slice(count).map(words).find((each) => each.trim());
      if (next === undefined || !goesOn(next, indent, ordered)) break;
      items.at(-1).push(lines[count]);
    } else if (spaces >= indent || (words(lines[count - 1]).trim() && !interrupts(said) && !item)) {
      items.at(-1).push({ at: lines[count].at + Math.min(spaces, indent), end: lines[count].end });
    } else {
      break;
    }
    count += 1;
  }
  const build = (leaf) => element(ordered ? "ol" : "ul", ordered ? { start: Number(ITEM.exec(words(lines[0]))[3]) } : {},
    ...items.map((inside) => element("li", {}, ...built(text, inside, depth, leaf, true))));
  return { kind: "list", count, build };
}

/** Whether a line behind a blank one belongs to the list before it. */
function goesOn(said, indent, ordered) {
  const item = ITEM.exec(said);
  return said.length - said.trimStart().length >= indent || (item !== null && !RULE.test(said) && (item[3] !== undefined) === ordered);
}

/** The nodes of what a list's item or a quotation holds; an item of a single paragraph is its words alone. */
function built(text, lines, depth, leaf, isItem = false) {
  const blocks = blocksOf(text, lines, depth + 1);
  return blocks.flatMap((block, index) => {
    const node = block.build(leaf);
    return isItem && index === 0 && block.kind === "paragraph" ? [...node.childNodes] : [node];
  });
}

function isTable(lines, words) {
  if (lines.length < 2 || !words(lines[0]).includes("|")) return false;
  const divider = words(lines[1]).trim();
  return divider.includes("|") && DIVIDER.test(divider);
}

function table(text, lines, words) {
  const blank = lines.findIndex((line, index) => index > 1 && !words(line).includes("|"));
  const count = blank < 0 ? lines.length : blank;
  const [head, , ...rows] = lines.slice(0, count).map((line) => cellsOf(text, line));
  const row = (cells, tag, leaf) => element("tr", {}, ...head.map((_, index) =>
    element(tag, tag === "th" ? { scope: "col" } : {}, ...(cells[index] ? inline(text, [cells[index]], leaf) : []))));
  const build = (leaf) => element("table", {},
    element("thead", {}, row(head, "th", leaf)),
    element("tbody", {}, ...rows.map((cells) => row(cells, "td", leaf))));
  return { kind: "table", count, build };
}

/** The cells of a table's row as lines, without the blanks around them. */
function cellsOf(text, { at, end }) {
  const cells = [];
  let from = at;
  for (let place = at; place <= end; place += 1) {
    if (place < end && (text[place] !== "|" || text[place - 1] === "\\")) continue;
    const said = text.slice(from, place);
    const left = from + said.length - said.trimStart().length;
    cells.push({ at: left, end: Math.max(from + said.trimEnd().length, left) });
    from = place + 1;
  }
  const isEmpty = (cell) => cell.at === cell.end;
  if (isEmpty(cells[0])) cells.shift();
  if (cells.length && isEmpty(cells.at(-1))) cells.pop();
  return cells;
}

// -- words ------------------------------------------------------------------------------------------------------

/** Lines as one text, which a list's or a quotation's marks may interrupt in the source. */
function virtual(text, lines) {
  const said = lines.map(({ at, end }) => text.slice(at, end)).join("\n");
  const places = lines.flatMap(({ at, end }) => Array.from({ length: end - at + 1 }, (_, index) => at + index));
  const leaves = (leaf, from = 0, to = said.length, linked = false) => {
    const nodes = [];
    for (let start = from; start < to;) {
      let end = start + 1;
      while (end < to && places[end] === places[end - 1] + 1) end += 1;
      nodes.push(...leaf(places[start], places[end - 1] + 1, linked));
      start = end;
    }
    return nodes;
  };
  return { said, leaves };
}

function inline(text, lines, leaf) {
  const { said, leaves } = virtual(text, lines);
  const words = (from, to, linked) => leaves(leaf, from, to, linked);
  return spans(said, 0, said.length, words, { depth: 0, linked: false });
}

/** The nodes of a stretch of text: emphasis, code and links, and words between them. */
function spans(said, from, to, words, { depth, linked }) {
  const nodes = [];
  let plain = from;
  for (let at = from; at < to;) {
    const found = depth < DEEPEST ? spanAt(said, at, to, linked) : null;
    if (!found) {
      at += 1;
      continue;
    }
    nodes.push(...words(plain, at, linked));
    const inside = { depth: depth + 1, linked: linked || found.tag === "a" };
    if (found.tag) {
      nodes.push(element(found.tag, found.attributes ?? {}, ...(found.isPlain ? words(found.from, found.to, inside.linked)
        : spans(said, found.from, found.to, words, inside))));
    } else {
      nodes.push(...words(found.from, found.to, linked));
    }
    at = found.end;
    plain = at;
  }
  nodes.push(...words(plain, to, linked));
  return nodes;
}

/** What begins at a place: {tag, from, to, end}, without `tag` for words that are no mark-up; null for nothing. */
function spanAt(said, at, to, linked) {
  const sign = said[at];
  if (sign === "\\" && at + 1 < to && PUNCTUATION.test(said[at + 1])) return { from: at + 1, to: at + 2, end: at + 2 };
  if (sign === "`") return codeAt(said, at, to);
  if (sign === "*" || sign === "_" || sign === "~") return emphasisAt(said, at, to);
  if (sign === "!" && said[at + 1] === "[") return imageAt(said, at, to);
  if (linked) return null;
  if (sign === "[") return linkAt(said, at, to);
  if (sign === "h" && !/[\p{L}\p{N}]/u.test(said[at - 1] ?? "")) return addressAt(said, at, to);
  return null;
}

/** How often the sign at a place is repeated, before `to`. */
function runAt(said, at, to) {
  let end = at + 1;
  while (end < to && said[end] === said[at]) end += 1;
  return end - at;
}

function codeAt(said, at, to) {
  const size = runAt(said, at, to);
  for (let end = said.indexOf("`", at + size); end >= 0 && end + size <= to; end = said.indexOf("`", end + runAt(said, end, to))) {
    if (runAt(said, end, to) === size) return { tag: "code", isPlain: true, from: at + size, to: end, end: end + size };
  }
  return { from: at, to: at + size, end: at + size };
}

function emphasisAt(said, at, to) {
  const sign = said[at];
  const run = runAt(said, at, to);
  const size = Math.min(run, 2);
  const asWords = { from: at, to: at + run, end: at + run };
  const isWord = (place) => /[\p{L}\p{N}]/u.test(said[place] ?? "");
  if (run > 3 || (sign === "~" && run !== 2) || !/\S/.test(said[at + run] ?? "") || (sign === "_" && isWord(at - 1))) return asWords;
  const mark = sign.repeat(size);
  for (let end = said.indexOf(mark, at + run); end >= 0 && end + size <= to; end = said.indexOf(mark, end + runAt(said, end, to))) {
    const closing = runAt(said, end, to);
    const closes = /\S/.test(said[end - 1]) && !(sign === "_" && isWord(end + closing)) && (closing === size || closing === 3);
    // Of three signs that close, the inner ones are somebody else's.
    const behind = end + closing - size;
    if (closes) return { tag: sign === "~" ? "del" : ["em", "strong"][size - 1], from: at + size, to: behind, end: behind + size };
  }
  return asWords;
}

/** [words](address), where the address is one that may be followed. */
function linkAt(said, at, to) {
  const bounds = bracketsAt(said, at, to);
  if (!bounds || !ADDRESS.test(bounds.address) || !URL.canParse(bounds.address)) return null;
  return { tag: "a", attributes: outward(bounds.address), from: at + 1, to: bounds.close, end: bounds.end };
}

/** An image stays the words that ask for it: nothing is fetched. */
function imageAt(said, at, to) {
  const bounds = bracketsAt(said, at + 1, to);
  return bounds ? { from: at, to: bounds.end, end: bounds.end } : null;
}

function bracketsAt(said, at, to) {
  let open = 0;
  for (let close = at; close < Math.min(to, at + LONGEST) && said[close] !== "\n"; close += 1) {
    if (said[close] === "[") open += 1;
    if (said[close] === "]") open -= 1;
    if (open) continue;
    const rest = /^\(<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+"[^"\n]*")?\)/.exec(said.slice(close + 1, Math.min(to, close + LONGEST)));
    return rest && { address: rest[1], close, end: close + 1 + rest[0].length };
  }
  return null;
}

function addressAt(said, at, to) {
  const found = ADDRESS.exec(said.slice(at, Math.min(to, at + LONGEST)));
  if (!found) return null;
  const address = found[0].replace(/[.,;:!?'*_~)\]]+$/, "");
  if (!URL.canParse(address)) return null;
  return { tag: "a", isPlain: true, attributes: outward(address), from: at, to: at + address.length, end: at + address.length };
}

/** A page that opens beside this one and learns nothing of it. */
const outward = (href) => ({ href, target: "_blank", rel: "noopener noreferrer nofollow" });
