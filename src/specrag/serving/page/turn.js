// A question and its answers: one method, or two beside each other.

import { compare } from "./comparison.js";
import { counted, element } from "./dom.js";
import { Run } from "./run.js";
import { Scale } from "./timeline.js";

export class Turn {
  /**
   * @param number of the turn, makes ids differ.
   * @param asked {question, order, context}: `order` in which two methods run, `context` how long the long text is that
   * goes with it.
   * @param say tells a screen reader. @param again called with this turn and a run that is to answer all the same.
   */
  constructor(number, asked, { say, again }) {
    this.asked = asked;
    this.prefix = `turn-${number}`;
    this.around = { question: asked.question, scale: new Scale(), say, again: (run) => again(this, run) };
    this.runs = [];
    this.places = element("div", { class: "runs" });
    this.comparison = element("div", { class: "comparison", hidden: true });
    this.root = element("div", { class: "turn" },
      element("h2", { class: "asked" }, asked.question),
      asked.context ? element("p", { class: "hint" }, `About a text of ${counted(asked.context, "character")}.`) : null,
      this.places, this.comparison);
  }

  /** As it was kept. */
  static of(number, { runs, ...asked }, around) {
    const turn = new Turn(number, asked, around);
    turn.around.paired = runs.length > 1;
    turn.show(runs.map((run, index) => Run.of(turn.idOf(index), run, turn.around)));
    compare(turn.comparison, turn.runs, asked.order);
    return turn;
  }

  record() {
    return { ...this.asked, runs: this.runs.map((run) => run.record()) };
  }

  /** What was said, for what is asked next: the first method's words. */
  get answer() {
    return this.runs[0]?.answer.text ?? "";
  }

  /**
   * Ask.
   *
   * @param bodies {title, body, messages} a method. @param signal ends it.
   */
  async ask(bodies, signal) {
    this.around.paired = bodies.length > 1;
    this.show(bodies.map(({ title, body }, index) => new Run(this.idOf(index), title, body, this.around)));
    await this.start(this.runs, bodies.map(({ messages }) => messages), signal);
  }

  /** Ask again in the place of a run, with something changed. */
  async replace(run, { body, messages }, signal) {
    const other = new Run(this.idOf(this.runs.indexOf(run)), run.title, body, this.around);
    run.close();
    this.show(this.runs.map((each) => (each === run ? other : each)));
    await this.start([other], [messages], signal);
  }

  /** Tell something about the question as a whole. */
  note(text) {
    this.places.before(element("p", { class: "hint" }, text));
  }

  close() {
    for (const run of this.runs) run.close();
  }

  /** Fold what is not the answer: the conversation has gone on. */
  fold() {
    for (const run of this.runs) run.how.open = false;
  }

  idOf(index) {
    return `${this.prefix}-run-${index + 1}`;
  }

  show(runs) {
    this.runs = runs;
    this.places.className = runs.length > 1 ? "runs two" : "runs";
    this.places.replaceChildren(...runs.map((run) => run.root));
  }

  async start(runs, messages, signal) {
    this.comparison.hidden = true;
    if (this.asked.order === "together") {
      await Promise.all(runs.map((run, index) => run.start(messages[index], signal)));
    } else {
      for (const [index, run] of runs.entries()) await run.start(messages[index], signal); // a stopped one ends at once
    }
    compare(this.comparison, this.runs, this.asked.order);
  }
}
