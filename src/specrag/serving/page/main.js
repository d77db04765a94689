// The page: a conversation, and what it is asked with.

import { getJson, hindrances } from "./api.js";
import { forget, forgetAll, forgetTab, keep, keptChats, lastChat, newChat, showing, titleOf } from "./chats.js";
import { Choices } from "./choices.js";
import { LongText, messagesOf } from "./context.js";
import { setUpDialogs } from "./dialogs.js";
import { Documents } from "./documents.js";
import { byId, element } from "./dom.js";
import { everyFamily, legendItems } from "./origins.js";
import { Turn } from "./turn.js";

const LOADING_POLL = 500;
const ROOM_FOR_CHATS = "(min-width: 1101px)";
const ROOM_FOR_CHOICES = "(min-width: 861px)";

class Page {
  constructor() {
    this.chat = newChat();
    this.turns = [];
    this.abort = null;
    this.asking = Promise.resolve();
    this.longText = new LongText();
    this.choices = new Choices((methods) => this.longText.show(methods));
    this.documents = new Documents((bases, added) => this.choices.showBases(bases, added));
    this.around = { say, again: (turn, run) => this.answerAnyway(turn, run) };
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    byId("question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId("ask").requestSubmit();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-chat").addEventListener("click", () => this.open(newChat()));
    byId("open-chats").addEventListener("click", () => this.showChats(byId("chats").hidden));
    byId("forget-all").addEventListener("click", () => this.forgetAll());
    window.addEventListener("storage", () => this.listChats()); // another tab's chats
    byId("empty-legend").replaceChildren(...legendItems(everyFamily()));
    byId("choices").open = matchMedia(ROOM_FOR_CHOICES).matches;
    this.showChats(matchMedia(ROOM_FOR_CHATS).matches);
  }

  /** Learn what the server has; waits for one that still loads its model. */
  async load() {
    try {
      while ((await hindrances()).model === "loading") {
        say("The server is still loading its model.");
        await new Promise((resolve) => setTimeout(resolve, LOADING_POLL));
      }
      say("");
      const [models, methods] = await Promise.all([getJson("v1/models"), getJson("v1/specrag/methods"), this.documents.refresh()]);
      const writers = models.data.filter(({ specrag }) => specrag?.kind !== "embedding" && !specrag?.kb).map(({ id }) => id);
      this.choices.show(writers, methods);
      await this.open(lastChat() ?? this.chat); // only now, since it may lie behind a key
    } catch (error) {
      notice(error.message);
    }
  }

  // -- chats --------------------------------------------------------------------------------------------------

  async open(chat) {
    await this.stop();
    for (const turn of this.turns) turn.close();
    this.chat = chat;
    showing(chat);
    this.longText.value = chat.context ?? "";
    byId("notices").replaceChildren();
    try {
      this.turns = chat.turns.map((turn, index) => Turn.of(index + 1, turn, this.around));
    } catch {
      this.turns = [];
      notice("This chat cannot be shown: another version of the page kept it.");
    }
    this.turns.slice(0, -1).forEach((turn) => turn.fold());
    byId("thread").replaceChildren(...this.turns.map((turn) => turn.root));
    byId("empty").hidden = this.turns.length > 0;
    this.turns.at(-1)?.root.scrollIntoView();
    if (!matchMedia(ROOM_FOR_CHATS).matches) this.showChats(false);
    this.listChats();
  }

  showChats(shown) {
    byId("chats").hidden = !shown;
    byId("open-chats").setAttribute("aria-expanded", String(shown));
  }

  listChats() {
    const chats = keptChats();
    byId("chat-list").replaceChildren(...chats.map((chat) => element("li", {},
      element("button", {
        type: "button", class: "chat", "aria-current": chat.id === this.chat.id ? "true" : null, click: () => this.open(chat),
      }, titleOf(chat)),
      element("button", {
        type: "button", class: "quiet", "aria-label": `Delete the chat: ${titleOf(chat)}`, click: () => this.forget(chat),
      }, "×"))));
    byId("no-chats").hidden = chats.length > 0;
    byId("forget-all").hidden = !chats.length;
  }

  async forget(chat) {
    forget(chat.id);
    if (chat.id === this.chat.id) await this.open(newChat());
    this.listChats();
    byId("new-chat").focus();
  }

  async forgetAll() {
    if (!confirm("Delete every chat that this browser keeps?")) return;
    await this.stop();
    forgetAll();
    await this.open(newChat());
    byId("new-chat").focus();
  }

  /** Another key reads here now: nothing of the one before stays, and nothing of it is kept any more. */
  startAnew() {
    forgetTab();
    for (const turn of this.turns) turn.close();
    this.turns = [];
    return this.open(newChat());
  }

  keep() {
    if (!this.turns.length) return;
    this.chat.at = Date.now();
    this.chat.turns = this.turns.map((turn) => turn.record());
    if (!keep(this.chat)) notice("The browser has no room for this chat; it is gone when the page is closed.");
    this.listChats();
  }

  // -- asking -------------------------------------------------------------------------------------------------

  ask() {
    const question = byId("question").value.trim();
    const requests = this.choices.requests();
    if (this.abort || !question || !requests.length) return;
    const context = this.longText.value;
    const turn = new Turn(this.turns.length + 1, { question, order: this.choices.order, context: context.length }, this.around);
    const bodies = requests.map((request) => ({ ...request, messages: this.messages(this.turns, question, request.method, context) }));
    const alone = requests.filter(({ method }) => this.turns.length && method.reads_history === false).map(({ title }) => title);
    if (alone.length) turn.note(`${alone.join(" and ")} answers each question by itself: what was said before is not read.`);
    this.turns.at(-1)?.fold();
    this.turns.push(turn);
    this.chat.context = context;
    byId("notices").replaceChildren();
    byId("empty").hidden = true;
    byId("thread").append(turn.root);
    byId("question").value = "";
    byId("choices").open = false; // the answer needs the room
    this.work((signal) => turn.ask(bodies, signal));
    turn.root.scrollIntoView();
  }

  /** Ask again what the server found nothing about, and have it answered from what it found. */
  answerAnyway(turn, run) {
    if (this.abort) return;
    const body = { ...run.body, specrag: { ...run.body.specrag, abstain: false } };
    const before = this.turns.slice(0, this.turns.indexOf(turn));
    const method = this.choices.method(run.body.specrag.method);
    const messages = this.messages(before, turn.asked.question, method, "");
    this.work((signal) => turn.replace(run, { body, messages }, signal));
  }

  messages(turns, question, method, context) {
    const earlier = method?.reads_history === false ? [] : turns.map(({ asked, answer }) => ({ question: asked.question, answer }));
    return messagesOf(earlier, question, context);
  }

  /** Do something that can be stopped; what came of it is kept. */
  work(task) {
    this.abort = new AbortController();
    this.setBusy(true);
    const { signal } = this.abort;
    this.asking = task(signal).then(() => {
      this.abort = null;
      this.setBusy(false);
      this.keep();
    });
  }

  /** Stop what is asked, and wait until it has ended. */
  async stop() {
    this.abort?.abort();
    await this.asking;
  }

  setBusy(busy) {
    const stop = byId("stop");
    // The button that was pressed goes away under the keyboard: hand its focus on.
    const hadFocus = [stop, byId("submit")].includes(document.activeElement);
    stop.hidden = !busy;
    byId("submit").hidden = busy;
    if (hadFocus) (busy ? stop : byId("submit")).focus();
    if (busy) say("Asked.");
  }
}

function say(text) {
  byId("status").textContent = text;
}

function notice(text) {
  byId("notices").append(element("p", { class: "notice error", role: "alert" }, text));
}

const page = new Page();
setUpDialogs(() => page.startAnew());
await page.load();
