// One answer by one method: the request, what comes back, and where it is shown. What came is kept, so that it can be shown
// again: the same news in the same order.

import { AnswerText } from "./answer.js";
import { events } from "./api.js";
import { Drafts } from "./drafts.js";
import { counted, element, seconds } from "./dom.js";
import { figureItems, headline } from "./figures.js";
import { legendItems } from "./origins.js";
import { Sources } from "./sources.js";
import { Timeline } from "./timeline.js";

// Marking the sources compares every passage with the answer, so not at every token.
const MARKING_PERIOD = 300;
// Where there is no room, what is not the answer is folded away.
const ROOMY = matchMedia("(min-width: 861px)");

// What of a browser's clock is kept of a run: seconds since the request.
const TIMES = ["firstToken", "firstText", "lastToken", "total"];

export class Run {
  /**
   * @param prefix makes ids differ. @param title of the method. @param body of the request, without its messages.
   * @param question that is asked. @param paired whether another run stands beside it. @param scale of timelines. @param say tells a screen reader.
   * @param again called with this run by the reader who wants an answer where the server gave none.
   */
  constructor(prefix, title, body, { question, paired, scale, say, again }) {
    this.title = title;
    this.body = body;
    this.question = question;
    this.say = say;
    this.again = again;
    this.state = "waiting"; // waiting, running, done, stopped, failed
    this.news = []; // {content, reason, usage, event}, as they came
    this.error = "";
    this.abstained = false;
    this.unheld = []; // names and numbers of the answer that no cited passage has
    this.passes = 0;
    this.tokens = 0;
    this.usage = null;
    this.finishReason = null;
    for (const name of TIMES) this[name] = NaN;

    const answer = element("div", { class: "answer", id: `${prefix}-answer` });
    this.place = element("p", { class: "run-state" });
    this.headline = element("p", { class: "headline" });
    this.figures = element("dl", { class: "figures" });
    this.legend = element("ul", { class: "legend" });
    this.notes = element("div", { class: "run-notes" });
    const drafts = element("div", {});
    const timeline = element("div", { class: "timeline-place" });
    const sources = element("div", {});
    this.answerPlace = answer;
    this.answer = new AnswerText(answer);
    this.drafts = new Drafts(drafts);
    this.timeline = new Timeline(timeline, scale, title);
    this.sources = new Sources(sources, prefix);
    this.sourcesPlace = element("details", { class: "sources-place", open: ROOMY.matches && !paired, hidden: true },
      element("summary", {}, "Sources"), sources);
    this.how = element("details", { class: "how", open: ROOMY.matches },
      element("summary", {}, "How it was answered"), this.figures, this.legend, drafts, timeline);
    this.more = element("div", { class: "run-more" }, this.headline, this.how);
    this.root = element("article", { class: "run", "aria-labelledby": `${prefix}-title` },
      element("div", { class: "run-main" },
        element("div", { class: "run-head" },
          element("h3", { id: `${prefix}-title` }, title), this.place),
        answer, this.notes),
      this.sourcesPlace,
      this.more);
    this.show();
  }

  /** As it was kept. */
  static of(prefix, { title, body, state, error, news, times }, around) {
    const run = new Run(prefix, title, body, { ...around, say: () => {} }); // it was told when it happened
    for (const each of news) run.apply(each);
    for (const name of TIMES) run[name] = times[name] ?? NaN;
    run.error = error;
    run.state = state;
    run.finish();
    return run;
  }

  /** What is needed to show it again. */
  record() {
    const { title, body, state, error, news } = this;
    const times = Object.fromEntries(TIMES.filter((name) => Number.isFinite(this[name])).map((name) => [name, this[name]]));
    return { title, body, state, error, news, times };
  }

  get ended() {
    return ["done", "stopped", "failed"].includes(this.state);
  }

  close() {
    this.timeline.close();
  }

  /** Ask, and show what comes until it has ended. Never throws: a failure is shown. */
  async start(messages, signal) {
    this.state = "running";
    this.answerPlace.setAttribute("aria-busy", "true");
    this.show();
    this.started = performance.now();
    try {
      for await (const chunk of events("v1/chat/completions", { ...this.body, messages }, signal)) {
        const [choice] = chunk.choices ?? [];
        const news = { content: choice?.delta?.content, reason: choice?.finish_reason, usage: chunk.usage, event: chunk.specrag };
        this.news.push(news);
        this.apply(news);
        this.later();
      }
      this.state = "done";
    } catch (error) {
      if (signal.aborted) {
        this.state = "stopped";
      } else {
        this.state = "failed";
        this.error = error.message;
      }
    }
    this.total = this.elapsed();
    this.finish();
  }

  elapsed() {
    return (performance.now() - this.started) / 1000;
  }

  // -- what comes ---------------------------------------------------------------------------------------------

  apply({ content, reason, usage, event = {} }) {
    if (reason) this.finishReason = reason;
    if (usage) this.usage = { ...this.usage, ...usage };
    switch (event.event) {
      case "sources":
        this.takeSources(event);
        break;
      case "draft":
        this.drafts.add(event);
        this.drafted = event.at;
        break;
      case "scores":
        this.takeScores(event);
        break;
      case "verdict":
        if (!this.drafts.empty) this.drafts.choose(event.winner, event.fallback);
        break;
      case "correction":
        this.takeCorrection(event);
        break;
      case "done":
        this.usage = { ...this.usage, ...event.usage };
        if (event.sources) this.sources.show(event.sources);
        this.unheld = event.unheld ?? [];
        break;
      default:
    }
    if (event.event === "step") this.takeStep(event, content ?? "");
    else if (content) this.addGiven(content);
  }

  takeSources(event) {
    this.abstained = event.abstained;
    this.least = event.least_similarity;
    this.sources.show(event.sources, searchedFor(event.question, this.question));
    this.sourcesPlace.hidden = false;
    this.timeline.addPhase("searching", Math.max(event.at - event.retrieval_seconds, 0), event.at);
    this.say(`${this.title}: ${counted(event.sources.length, "source")} found.`);
  }

  takeScores(event) {
    this.drafts.score(event.scores);
    this.sources.badge = "used"; // by the chosen draft, which cites nothing
    if (this.drafts.empty) return;
    this.timeline.addPhase("drafting", this.timeline.end, this.drafted);
    this.timeline.addPhase("verifying", this.drafted, event.at);
  }

  takeStep(event, content) {
    const tokens = event.tokens.filter(({ source }) => source !== "given");
    const { at } = event;
    const drafted = Object.values(event.drafted).reduce((sum, number) => sum + number, 0);
    if (tokens.length) {
      if (!this.tokens) this.firstToken = this.elapsed();
      this.lastToken = this.elapsed();
    }
    this.addText(tokens, content);
    this.tokens += tokens.length;
    const { drafting_seconds: drafting, verifying_seconds: verifying, accepted } = event;
    if (tokens.length || drafting + verifying > 0) {
      this.passes += 1;
      const before = this.timeline.end;
      const start = Math.max(at - drafting - verifying, before);
      if (this.passes === 1) this.timeline.addPhase("reading", before, start);
      this.timeline.addPass({ start, end: at, drafting, verifying, drafted, accepted, tokens });
    }
  }

  addText(tokens, content) {
    const pass = this.passes + 1;
    if (tokens.map(({ text }) => text).join("") === content) {
      for (const { text, source, relaxed } of tokens) this.answer.add(text, source, Boolean(relaxed), pass);
    } else if (tokens.length) {
      // Held back for a character or a stop text that was not complete: it cannot be told which token made which part.
      const [{ source, relaxed }] = tokens;
      this.answer.add(content, source, Boolean(relaxed), pass, tokens.length);
    } else if (content) {
      this.addGiven(content);
    }
  }

  /** Text that no pass made: a lead, an abstention, or the draft that was chosen. */
  addGiven(content) {
    if (Number.isNaN(this.firstText)) this.firstText = this.elapsed();
    this.answer.add(content, this.drafts.empty ? "given" : "draft", false, null, 0);
  }

  /** Text that was shown early was wrong: its last characters go. */
  takeCorrection(event) {
    this.answer.cut(this.answer.text.length - event.text.length);
    this.tokens -= event.tokens;
  }

  // -- what is shown ------------------------------------------------------------------------------------------

  later() {
    if (this.planned) return;
    this.planned = true;
    requestAnimationFrame(() => {
      this.planned = false;
      if (!this.ended) this.show();
    });
  }

  show() {
    this.answer.render();
    const words = { waiting: "Waiting", running: this.tokens ? "Answering" : "Searching and reading", done: "Done",
      stopped: "Stopped", failed: "Failed" };
    this.place.textContent = words[this.state];
    this.place.dataset.state = this.state;
    this.headline.textContent = headline(this);
    this.figures.replaceChildren(...figureItems(this));
    // A refused request has nothing to show but the reason.
    for (const place of [this.more, this.answerPlace]) place.hidden = this.state === "failed" && !this.answer.text;
    const { families, relaxed } = this.answer.counts();
    this.legend.replaceChildren(...legendItems(families, relaxed));
    const now = performance.now();
    if (now - (this.marked ?? 0) > MARKING_PERIOD) {
      this.marked = now;
      this.sources.mark(this.answer.text);
    }
  }

  finish() {
    this.marked = 0;
    this.show();
    this.answer.render((number) => this.sources.idOf(number), (number, sentence) => this.sources.open(number, sentence), this.unheld);
    this.answerPlace.removeAttribute("aria-busy");
    this.timeline.describe();
    this.notes.replaceChildren(...this.noteItems());
    if (this.state === "failed") {
      this.say(`${this.title}: failed.`);
    } else {
      const tokens = this.usage?.completion_tokens ?? this.tokens;
      this.say(`${this.title}: ${this.state}${tokens ? `, ${counted(tokens, "token")}` : ""} in ${seconds(this.total)}.`);
    }
  }

  /** What a reader should know of an answer that has ended. */
  noteItems() {
    const hint = (text) => element("p", { class: "hint" }, text);
    if (this.state === "failed") return [element("p", { class: "notice error", role: "alert" }, this.error)];
    if (this.abstained) return [this.abstention()];
    const notes = [];
    if (this.state === "done" && this.finishReason === "length") notes.push(hint("Ended at the longest answer that the settings allow."));
    if (this.unheld.length) notes.push(hint(`In no cited passage: ${this.unheld.join(", ")}.`));
    if (this.body.specrag.abstain === false) notes.push(hint("Answered whether or not a passage is about the question."));
    return notes;
  }

  /** Why the server gave no answer, and what can be done about it. */
  abstention() {
    const best = Math.max(...this.sources.sources.map(({ similarity }) => similarity).filter(Number.isFinite));
    const below = Number.isFinite(this.least) ? `, below ${this.least.toFixed(2)}` : "";
    const reason = Number.isFinite(best)
      ? `No passage is near enough to the question: the most similar one has a similarity of ${best.toFixed(2)}${below}, and 1 is the same meaning.`
      : "The search found no passage.";
    const again = element("button", { type: "button", click: () => this.again(this) }, "Answer anyway");
    return element("div", { class: "notice abstention" }, element("p", {}, reason), Number.isFinite(best) ? again : null);
  }

  /** Tokens per second of decoding: the server's own figure, or what arrived here. */
  get rate() {
    const told = this.usage?.tokens_per_second;
    if (Number.isFinite(told)) return told;
    return this.tokens > 1 ? (this.tokens - 1) / (this.lastToken - this.firstToken) : NaN;
  }

  /** Seconds until the first token of the model's; for a chosen draft until its text. */
  get wait() {
    return Number.isNaN(this.firstToken) && this.ended ? this.firstText : this.firstToken;
  }
}

/** What was looked up, where it is not what was asked: a follow-up is made complete first. */
function searchedFor(looked, asked) {
  return looked && looked !== asked ? `Searched for: ${looked}` : "";
}
