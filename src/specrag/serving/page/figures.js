// What an answer took: the whole time first, and where it went; then the counts.

import { count, element, figure, percent, seconds } from "./dom.js";

const SPENT = {
  queue: "waiting for others", rewrite: "rewriting the question", retrieval: "searching", prefill: "reading", decode: "writing",
};
// These are inside of others.
const INSIDE = new Set(["drafting", "verifying", "total"]);
// A part of the time that is told is at least this share of it.
const TOLD = 0.01;

/** One sentence about a run's whole time, from the question to the last word; empty while there is none. */
export function headline(run) {
  if (run.state === "stopped") return `Stopped after ${seconds(run.total)}.`;
  if (run.state !== "done") return "";
  const spent = run.usage?.seconds ?? {};
  const parts = Object.entries(spent).filter(([name, time]) => time > TOLD * run.total && !INSIDE.has(name))
    .map(([name, time]) => `${seconds(time)} ${SPENT[name] ?? name}`);
  return `${run.abstained ? "Ended after" : "Answered in"} ${seconds(run.total)}${parts.length ? `: ${parts.join(", ")}` : ""}.`;
}

export function figureItems(run) {
  const { passes } = run.timeline;
  const told = run.usage ?? {};
  const drafted = told.drafted ?? passes.reduce((sum, pass) => sum + pass.drafted, 0);
  const accepted = told.accepted ?? passes.reduce((sum, pass) => sum + pass.accepted, 0);
  const tokens = told.completion_tokens ?? run.tokens;
  const items = [
    ["First token after", seconds(run.wait)],
    ...(told.cached_tokens ? [["Prompt tokens known", `${count(told.cached_tokens)} of ${count(told.prompt_tokens)}`]] : []),
    ["Tokens", tokens ? count(tokens) : "–"],
    ["Drafts accepted", drafted ? percent(accepted / drafted) : "–"],
    ["Tokens a pass (MAT)", figure(told.mat ?? (run.passes ? run.tokens / run.passes : NaN))],
    ["Decoding, tokens/s", figure(run.rate)],
  ];
  return items.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
}
