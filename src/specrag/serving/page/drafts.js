// Speculative RAG's drafts as they come: rationale, answer, which passages each saw, its scores, and the winner.

import { element, figure } from "./dom.js";

const FACTORS = {
  draft: "Drafter's own", self_consistency: "Self-containment", self_reflection: "Self-reflection", total: "Together",
};

export class Drafts {
  /** @param root where the cards go. */
  constructor(root) {
    this.root = root;
    this.drafts = new Map();
    this.scores = new Map();
    this.winner = null;
    this.fallback = "";
  }

  get empty() {
    return !this.drafts.size;
  }

  /** Show a draft: {index, passages, rationale, answer, malformed}. */
  add(draft) {
    this.drafts.set(draft.index, draft);
    this.render();
  }

  /** Show the factors of each draft's score: {index, draft, self_consistency, self_reflection, total}. */
  score(scores) {
    for (const score of scores) this.scores.set(score.index, score);
    this.render();
  }

  /** Mark the draft that is the answer; `fallback` says why none is. */
  choose(winner, fallback) {
    this.winner = winner;
    this.fallback = fallback ?? "";
    this.render();
  }

  render() {
    const cards = [...this.drafts.values()].sort((a, b) => a.index - b.index).map((draft) => this.card(draft));
    const notes = [this.scores.size ? "Scores are logarithms of probabilities: larger is better." : "", this.fallback];
    this.root.replaceChildren(
      element("h4", {}, "Drafts"),
      element("ol", { class: "drafts" }, ...cards),
      ...notes.filter(Boolean).map((note) => element("p", { class: "hint" }, note)));
  }

  card(draft) {
    const won = draft.index === this.winner;
    const read = draft.passages?.length ? `from ${draft.passages.join(", ")}` : null;
    return element("li", { class: won ? "draft-card won" : "draft-card" },
      element("p", { class: "draft-head" },
        element("span", {}, `Draft ${draft.index + 1}`),
        read ? element("span", { class: "hint" }, read) : null,
        won ? element("span", { class: "badge" }, "chosen") : null),
      draft.malformed
        ? element("p", { class: "hint" }, `No draft: ${draft.malformed}`)
        : element("p", { class: "draft-answer" }, draft.answer ?? ""),
      draft.rationale ? element("p", { class: "draft-rationale" }, draft.rationale) : null,
      factors(this.scores.get(draft.index)));
  }
}

function factors(scores) {
  if (!scores) return null;
  const rows = Object.entries(FACTORS).filter(([name]) => Number.isFinite(scores[name]));
  return element("dl", { class: "factors" }, ...rows.map(([name, label]) =>
    element("div", { class: name === "total" ? "total" : null }, element("dt", {}, label), element("dd", {}, figure(scores[name])))));
}
