// One answer by one method: the request, what comes back, and where it is shown.

import { AnswerText } from "./answer.js";
import { events } from "./api.js";
import { Drafts } from "./drafts.js";
import { count, counted, element, figure, percent, seconds } from "./dom.js";
import { legendItems } from "./origins.js";
import { Sources } from "./sources.js";
import { Timeline } from "./timeline.js";

// Marking the sources compares every passage with the answer, so not at every token.
const MARKING_PERIOD = 300;

export class Run {
  /**
   * @param prefix makes ids differ. @param title of the method. @param body of the request.
   * @param scale of timelines. @param say tells a screen reader.
   */
  constructor(prefix, title, body, scale, say) {
    this.title = title;
    this.body = body;
    this.say = say;
    this.state = "waiting"; // waiting, running, done, stopped, failed
    this.passes = 0;
    this.tokens = 0;
    this.usage = null;
    this.finishReason = null;
    this.firstToken = NaN;
    this.firstText = NaN;
    this.lastToken = NaN;
    this.total = NaN;

    const answer = element("div", { class: "answer", id: `${prefix}-answer` });
    this.place = element("p", { class: "run-state" });
    this.figures = element("dl", { class: "figures" });
    this.legend = element("ul", { class: "legend" });
    this.failure = element("div", {});
    const drafts = element("div", {});
    const timeline = element("div", { class: "timeline-place" });
    const sources = element("div", { class: "sources-place" });
    this.answerPlace = answer;
    this.timelinePlace = timeline;
    this.answer = new AnswerText(answer);
    this.drafts = new Drafts(drafts);
    this.timeline = new Timeline(timeline, scale, title);
    this.sources = new Sources(sources, prefix);
    this.root = element("article", { class: "run", "aria-labelledby": `${prefix}-title` },
      element("div", { class: "run-main" },
        element("div", { class: "run-head" },
          element("h2", { id: `${prefix}-title` }, title), this.place),
        this.figures, this.failure, answer, this.legend, drafts, timeline),
      sources);
    this.show();
  }

  get ended() {
    return ["done", "stopped", "failed"].includes(this.state);
  }

  close() {
    this.timeline.close();
  }

  /** Ask, and show what comes until it has ended. Never throws: a failure is shown. */
  async start(signal) {
    this.state = "running";
    this.answerPlace.setAttribute("aria-busy", "true");
    this.show();
    this.started = performance.now();
    try {
      for await (const chunk of events("v1/chat/completions", this.body, signal)) {
        this.take(chunk);
        this.later();
      }
      this.state = "done";
    } catch (error) {
      if (signal.aborted) {
        this.state = "stopped";
      } else {
        this.state = "failed";
        this.failure.replaceChildren(element("p", { class: "notice error", role: "alert" }, error.message));
      }
    }
    this.total = this.elapsed();
    this.finish();
  }

  elapsed() {
    return (performance.now() - this.started) / 1000;
  }

  // -- what comes ---------------------------------------------------------------------------------------------

  take(chunk) {
    const choice = chunk.choices?.[0];
    const event = chunk.specrag ?? {};
    const content = choice?.delta?.content ?? "";
    if (choice?.finish_reason) this.finishReason = choice.finish_reason;
    if (chunk.usage) this.usage = { ...this.usage, ...chunk.usage };
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
        break;
      default:
    }
    if (event.event === "step") this.takeStep(event, content);
    else if (content) this.addGiven(content);
  }

  takeSources(event) {
    this.sources.show(event.sources, event.abstained ? "None is near enough to the question to answer from." : "");
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
    this.figures.replaceChildren(...this.figureItems());
    // A refused request has nothing to show but the reason.
    for (const place of [this.figures, this.answerPlace, this.timelinePlace]) place.hidden = this.state === "failed" && !this.answer.text;
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
    this.answer.finish((number) => this.sources.idOf(number));
    this.answerPlace.removeAttribute("aria-busy");
    this.timeline.describe();
    if (this.state === "done" && this.finishReason === "length") {
      this.failure.replaceChildren(element("p", { class: "hint" }, "Ended at the longest answer that the settings allow."));
    }
    if (this.state === "failed") {
      this.say(`${this.title}: failed.`);
    } else {
      const tokens = this.usage?.completion_tokens ?? this.tokens;
      const rate = Number.isFinite(this.rate) ? `, ${figure(this.rate)} tokens per second` : "";
      this.say(`${this.title}: ${this.state}${tokens ? `, ${counted(tokens, "token")}` : ""}${rate}.`);
    }
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

  figureItems() {
    const { passes } = this.timeline;
    const told = this.usage ?? {};
    const drafted = told.drafted ?? passes.reduce((sum, pass) => sum + pass.drafted, 0);
    const accepted = told.accepted ?? passes.reduce((sum, pass) => sum + pass.accepted, 0);
    const tokens = told.completion_tokens ?? this.tokens;
    const items = [
      ["Tokens per second", figure(this.rate)],
      ["First token after", seconds(this.wait)],
      ["Tokens a pass (MAT)", figure(told.mat ?? (this.passes ? this.tokens / this.passes : NaN))],
      ["Drafts accepted", drafted ? percent(accepted / drafted) : "–"],
      ["Tokens", tokens ? count(tokens) : "–"],
      ["Whole time", seconds(this.total)],
    ];
    return items.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  }
}
