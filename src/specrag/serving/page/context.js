// The long text that some methods read: pasted, or from a file.

import { byId, count } from "./dom.js";

export class LongText {
  constructor() {
    this.text = byId("context");
    this.file = byId("context-file");
    this.file.addEventListener("change", () => this.read());
    this.text.addEventListener("input", () => this.sumUp());
  }

  /** Show the field where a chosen method reads a long text. */
  show(methods) {
    this.wanted = methods.some((method) => method.needs_context);
    byId("context-field").hidden = !this.wanted;
  }

  /** The text that goes with the question; empty where no method wants one. */
  get value() {
    return this.wanted ? this.text.value.trim() : "";
  }

  set value(text) {
    this.text.value = text;
    this.file.value = "";
    this.sumUp();
  }

  async read() {
    const [file] = this.file.files;
    if (!file) return;
    const text = await file.text();
    // What holds a NUL, or characters that UTF-8 has not, is a picture or a program.
    if (/[\0\uFFFD]/.test(text)) {
      this.file.value = "";
      byId("context-size").textContent = `${file.name} is no text.`;
      return;
    }
    this.text.value = text;
    this.sumUp();
  }

  sumUp() {
    const { length } = this.text.value.trim();
    byId("context-size").textContent = length ? `${count(length)} characters.` : "";
  }
}

/**
 * The messages of a conversation as the server takes them.
 *
 * @param turns {question, answer}, oldest first. @param question that is asked now. @param text a long text in front of
 * everything, the first question behind it as a paragraph of its own.
 */
export function messagesOf(turns, question, text) {
  const messages = turns.filter(({ answer }) => answer.trim())
    .flatMap((turn) => [{ role: "user", content: turn.question }, { role: "assistant", content: turn.answer }]);
  messages.push({ role: "user", content: question });
  if (text) messages[0].content = `${text}\n\n${messages[0].content.replace(/\n\s*\n/g, "\n")}`;
  return messages;
}
