// Two finished answers to one question, beside each other.

import { element, figure, seconds, shape } from "./dom.js";

const ORDER = {
  after: "One after the other, so that neither slows the other.",
  together: "Both at once: they shared the machine, so each was slower than alone.",
};

/** Fill `root` with what can be said of two runs; hide it where one of them did not finish. */
export function compare(root, runs, order) {
  const finished = runs.length === 2 && runs.every((run) => run.state === "done" && Number.isFinite(run.rate));
  root.hidden = !finished;
  if (!finished) return;
  const [first, second] = runs;
  const fastest = Math.max(...runs.map((run) => run.rate));
  root.replaceChildren(
    element("h2", { id: "comparison-title" }, verdict(first, second)),
    element("table", {},
      element("thead", {}, element("tr", {},
        element("th", { scope: "col" }, "Method"),
        element("th", { scope: "col", class: "number" }, "Tokens per second"),
        element("td", { class: "bar-cell" }),
        element("th", { scope: "col", class: "number" }, "First token"),
        element("th", { scope: "col", class: "number" }, "Whole time"))),
      element("tbody", {}, ...runs.map((run) => element("tr", {},
        element("th", { scope: "row" }, run.title),
        element("td", { class: "number" }, figure(run.rate)),
        element("td", { class: "bar-cell" }, bar(run.rate / fastest)),
        element("td", { class: "number" }, seconds(run.wait)),
        element("td", { class: "number" }, seconds(run.total)))))),
    element("p", { class: "hint" }, `${sameness(first, second)} ${ORDER[order]} `,
      "One question on one machine is an example, no measurement; specrag bench measures."));
}

function verdict(first, second) {
  const [fast, slow] = first.rate >= second.rate ? [first, second] : [second, first];
  const ratio = fast.rate / slow.rate;
  return ratio < 1.03 ? `${fast.title} and ${slow.title} wrote equally fast`
    : `${fast.title} wrote ${ratio.toFixed(2)} times as fast as ${slow.title}`;
}

function sameness(first, second) {
  return first.answer.text === second.answer.text ? "Both wrote the same text."
    : "The texts differ: the methods answer differently, or round differently (batch_invariant on the server prevents that).";
}

function bar(share) {
  return shape("svg", { class: "rate", height: 10, width: "100%", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
    shape("rect", { width: 100 * share, height: 10 }));
}
