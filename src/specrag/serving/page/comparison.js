// Two finished answers to one question, beside each other, by their whole time.

import { counted, element, figure, seconds, shape } from "./dom.js";

const ORDER = {
  after: "One after the other, so that neither slows the other; each read its prompt anew.",
  together: "Both at once: they shared the machine, so each was slower than alone.",
};
// Times that are nearer to each other than this are equal.
const EQUAL = 1.03;

/** Fill `root` with what can be said of two runs; hide it where one of them did not finish. */
export function compare(root, runs, order) {
  const finished = runs.length === 2 && runs.every((run) => run.state === "done" && run.tokens + run.passes > 0);
  root.hidden = !finished;
  if (!finished) return;
  const slowest = Math.max(...runs.map((run) => run.total));
  root.replaceChildren(
    element("h3", {}, verdict(...runs)),
    element("table", {},
      element("thead", {}, element("tr", {},
        element("th", { scope: "col" }, "Method"),
        element("th", { scope: "col", class: "number" }, "Whole time"),
        element("td", { class: "bar-cell" }),
        element("th", { scope: "col", class: "number" }, "First token"),
        element("th", { scope: "col", class: "number" }, "Tokens per second"))),
      element("tbody", {}, ...runs.map((run) => element("tr", {},
        element("th", { scope: "row" }, run.title),
        element("td", { class: "number" }, seconds(run.total)),
        element("td", { class: "bar-cell" }, bar(run.total / slowest)),
        element("td", { class: "number" }, seconds(run.wait)),
        element("td", { class: "number" }, figure(run.rate)))))),
    element("p", { class: "hint" }, `${sameness(...runs)} ${ORDER[order]} `,
      "One question on one machine is an example, no measurement; specrag bench measures."));
}

/** What the first took against the second, whichever way it went. */
function verdict(first, second) {
  const ratio = second.total / first.total;
  if (Math.max(ratio, 1 / ratio) < EQUAL) return `${first.title} and ${second.title} took equally long`;
  return ratio > 1 ? `${first.title} answered ${ratio.toFixed(2)} times as fast as ${second.title}`
    : `${first.title} was slower than ${second.title}: ${seconds(first.total)} against ${seconds(second.total)}`;
}

function sameness(first, second) {
  if (first.answer.text === second.answer.text) return "Both wrote the same text.";
  const [one, other] = [first, second].map((run) => counted(run.usage?.completion_tokens ?? run.tokens, "token"));
  return `The texts differ (${one} and ${other}), and so does the work: the methods answer differently, or round ` +
    "differently (batch_invariant on the server prevents that).";
}

function bar(share) {
  return shape("svg", { class: "rate", height: 10, width: "100%", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
    shape("rect", { width: 100 * share, height: 10 }));
}
