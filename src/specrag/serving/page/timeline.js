// The rounds of one answer over time: above, tokens a round (accepted and only drafted); below, what the seconds went into.

import { count, element, figure, seconds, shape } from "./dom.js";
import { familyOf } from "./origins.js";

const HEIGHT = 132;
const BARS = { top: 10, bottom: 88 };
const TRACK = { top: 98, bottom: 110 };
const AXIS = 126;
const EDGE = { left: 28, right: 8 };
const KINDS = {
  searching: "Searching", reading: "Reading the prompt", between: "Between rounds", drafting: "Drafting", verifying: "Verifying",
};
// Share of the whole time that a gap between two rounds must have to be drawn.
const GAP = 0.003;

/** What the timelines of compared answers share, so that equal lengths are equal times. */
export class Scale {
  constructor() {
    this.seconds = 0;
    this.tokens = 0;
    this.timelines = new Set();
  }

  /** Grow to hold a time and a number of tokens; everyone who shares the scale is drawn anew. */
  hold(time, tokens) {
    if (time <= this.seconds && tokens <= this.tokens) return;
    this.seconds = Math.max(this.seconds, time);
    this.tokens = Math.max(this.tokens, tokens);
    for (const timeline of this.timelines) timeline.later();
  }
}

export class Timeline {
  /** @param root where the figure goes. @param scale shared with others. @param name of the method, for the text. */
  constructor(root, scale, name) {
    this.scale = scale;
    this.passes = []; // {start, end, drafting, verifying, drafted, accepted, tokens: [{text, source}]}
    this.phases = []; // {kind, start, end}
    this.name = name;
    this.drawn = false;
    this.drawing = shape("svg", { role: "img" });
    this.key = element("figcaption", { class: "key" });
    this.table = element("details", { class: "passes" }, element("summary", {}, "Rounds as a table"));
    this.table.addEventListener("toggle", () => this.fillTable());
    root.replaceChildren(
      element("h4", {}, "Timeline"),
      element("figure", { class: "timeline" }, this.drawing, this.key),
      this.table);
    scale.timelines.add(this);
    this.sizes = new ResizeObserver(() => this.later());
    this.sizes.observe(this.drawing);
    this.describe();
  }

  /** When the last that is known ended, in seconds. */
  get end() {
    return Math.max(this.phases.at(-1)?.end ?? 0, this.passes.at(-1)?.end ?? 0);
  }

  close() {
    this.sizes.disconnect();
    this.scale.timelines.delete(this);
  }

  /** A stretch of time before the first pass. */
  addPhase(kind, start, end) {
    if (end > start) this.phases.push({ kind, start, end });
    this.scale.hold(end, 0);
    this.later();
  }

  addPass(pass) {
    this.passes.push(pass);
    this.scale.hold(pass.end, Math.max(pass.tokens.length, pass.drafted + 1));
    this.later();
  }

  /** Draw before the next frame, however often it is asked for. */
  later() {
    if (this.drawn) return;
    this.drawn = true;
    requestAnimationFrame(() => {
      this.drawn = false;
      this.draw();
    });
  }

  /** Say in words what the drawing shows; once, at the end, since it is read aloud. */
  describe() {
    const { passes } = this;
    const tokens = sum(passes, ({ tokens: list }) => list.length);
    this.table.hidden = !passes.length;
    const spent = this.phases.map(({ kind, start, end }) => `${KINDS[kind]} ${seconds(end - start)}`).join(", ");
    const text = passes.length
      ? `${this.name}: ${count(passes.length)} rounds made ${count(tokens)} tokens in ${seconds(passes.at(-1).end)}; ` +
        `${count(sum(passes, ({ drafted }) => drafted))} tokens were drafted and ` +
        `${count(sum(passes, ({ accepted }) => accepted))} accepted.`
      : `${this.name}: ${spent || "nothing yet"}.`;
    this.drawing.setAttribute("aria-label", text);
    this.fillTable();
  }

  draw() {
    const width = Math.max(this.drawing.clientWidth, 200);
    const end = this.scale.seconds || 1;
    const most = Math.max(this.scale.tokens, 4);
    const x = (time) => EDGE.left + (time / end) * (width - EDGE.left - EDGE.right);
    const y = (tokens) => BARS.bottom - (tokens / most) * (BARS.bottom - BARS.top);
    // Without rounds there are no bars to leave room for.
    const top = this.passes.length ? 0 : TRACK.top - 2;
    this.drawing.setAttribute("viewBox", `0 ${top} ${width} ${HEIGHT - top}`);
    this.drawing.setAttribute("height", HEIGHT - top);
    const phases = [...this.phases, ...this.gaps(GAP * end)];
    this.drawing.replaceChildren(
      ...lines(x, y, end, this.passes.length ? most : null, width),
      ...phases.map((phase) => block(phase.kind, x(phase.start), x(phase.end))),
      ...this.passes.flatMap((pass) => bars(pass, x, y)));
    const kinds = new Set(phases.map(({ kind }) => kind));
    if (this.passes.some(({ drafting }) => drafting)) kinds.add("drafting");
    if (this.passes.length) kinds.add("verifying");
    this.key.replaceChildren(...keyItems(kinds, this.passes.length > 0));
  }

  /** What lies between rounds, such as another search. */
  gaps(least) {
    return this.passes.slice(1).map(({ start }, index) => ({ kind: "between", start: this.passes[index].end, end: start }))
      .filter(({ start, end }) => end - start > least);
  }

  fillTable() {
    if (!this.table.open) return;
    const head = ["Round", "At", "Drafted", "Accepted", "Drafting", "Verifying", "Text", "From"];
    const rows = this.passes.map((pass, index) => element("tr", {},
      ...[index + 1, seconds(pass.end), pass.drafted, pass.accepted, milliseconds(pass.drafting), milliseconds(pass.verifying)]
        .map((value) => element("td", { class: "number" }, String(value))),
      element("td", { class: "text" }, pass.tokens.map(({ text }) => text).join("")),
      element("td", {}, [...new Set(pass.tokens.map(({ source }) => source))].join(", "))));
    this.table.replaceChildren(
      this.table.firstChild,
      element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Rounds of ${this.name}` },
        element("table", {},
          element("thead", {}, element("tr", {}, ...head.map((text, index) =>
            element("th", { scope: "col", class: index < 6 ? "number" : null }, text)))),
          element("tbody", {}, ...rows))));
  }
}

const sum = (list, of) => list.reduce((total, each) => total + of(each), 0);

const milliseconds = (value) => `${figure(value * 1000)} ms`;

function lines(x, y, end, most, width) {
  const step = tick(end, width < 480 ? 4 : 8);
  const times = Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, index) => index * step);
  const rows = most === null ? [] : [0, Math.floor(most / 2), most];
  return [
    ...rows.map((tokens) => shape("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(tokens), y2: y(tokens) })),
    ...rows.map((tokens) => shape("text", { x: EDGE.left - 6, y: y(tokens) + 4, "text-anchor": "end" }, String(tokens))),
    ...times.map((time) => shape("line", { class: "grid", x1: x(time), x2: x(time), y1: TRACK.bottom, y2: TRACK.bottom + 4 })),
    ...times.map((time) => shape("text", { x: x(time), y: AXIS, "text-anchor": "middle" },
      `${Number(time.toFixed(3))}${time ? "" : " s"}`)),
  ];
}

/** A round length for at most `most` parts of a time. */
function tick(end, most) {
  const rough = end / most;
  const size = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * size).find((step) => step >= rough);
}

function bars(pass, x, y) {
  const left = x(pass.start);
  const width = Math.max(x(pass.end) - left, 1);
  const inner = Math.max(width - 1, 1);
  const split = pass.start + pass.drafting;
  const drawn = [
    block("drafting", left, x(split)),
    block("verifying", x(split), x(split + pass.verifying)),
  ];
  if (pass.drafted) {
    const top = y(pass.drafted + 1);
    drawn.push(shape("rect", { class: "drafted", x: left, y: top, width: inner, height: Math.max(y(0) - top, 0) }));
  }
  let at = 0;
  for (const { source } of pass.tokens) {
    const top = y(at + 1);
    drawn.push(shape("rect", { class: `kept ${familyOf(source)}`, x: left, y: top, width: inner, height: y(at) - top }));
    at += 1;
  }
  return drawn;
}

function block(kind, left, right) {
  return shape("rect", {
    class: `block ${kind}`, x: left, y: TRACK.top, width: Math.max(right - left, 0), height: TRACK.bottom - TRACK.top,
  });
}

function keyItems(kinds, hasBars) {
  const items = Object.entries(KINDS).filter(([kind]) => kinds.has(kind)).map(([kind, label]) =>
    element("span", { class: "key-item" },
      shape("svg", { width: 12, height: 12, "aria-hidden": "true" }, shape("rect", { class: `block ${kind}`, width: 12, height: 12 })),
      label));
  return hasBars ? [element("span", {}, "Bars: tokens a round; the outline is what was drafted."), ...items] : items;
}
