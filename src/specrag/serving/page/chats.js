// The conversations that this browser keeps. Where the server wants a key they stay in the tab, as the key does: who opens
// the page with another key must not read them.

import { currentKey } from "./api.js";

const PREFIX = "specrag-chat-";
const CURRENT = "specrag-current-chat";
const LONGEST_TITLE = 80;

/** A conversation: {id, at, turns, context}; `context` is a long text that it is about. */
export const newChat = () => ({ id: `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`, at: Date.now(), turns: [], context: "" });

export const titleOf = (chat) => {
  const [first] = chat.turns;
  const title = (first?.question ?? "New chat").replace(/\s+/g, " ");
  return title.length > LONGEST_TITLE ? `${title.slice(0, LONGEST_TITLE)}…` : title;
};

/** All that are kept, the newest first. */
export function keptChats() {
  const chats = names().map(read).filter((chat) => Array.isArray(chat?.turns) && chat.turns.length);
  return chats.sort((first, second) => second.at - first.at);
}

/** The one that this tab showed last; null where there is none. */
export function lastChat() {
  try {
    return read(PREFIX + sessionStorage.getItem(CURRENT));
  } catch {
    return null;
  }
}

/** Remember which one this tab shows. */
export function showing(chat) {
  try {
    sessionStorage.setItem(CURRENT, chat.id);
  } catch {
    // A browser that forbids storage begins anew every time.
  }
}

/** Keep a chat, in the place of the oldest ones where there is no room; whether it is kept. */
export function keep(chat) {
  const text = JSON.stringify(chat);
  for (;;) {
    try {
      storage().setItem(PREFIX + chat.id, text);
      return true;
    } catch {
      const others = keptChats().filter(({ id }) => id !== chat.id);
      if (!others.length) return false;
      forget(others.at(-1).id);
    }
  }
}

export function forget(id) {
  storage().removeItem(PREFIX + id);
}

export function forgetAll() {
  for (const name of names()) storage().removeItem(name);
}

/** Forget what the tab keeps for a key, before another takes its place. */
export function forgetTab() {
  try {
    for (const name of Object.keys(sessionStorage)) if (name.startsWith(PREFIX)) sessionStorage.removeItem(name);
  } catch {
    // Nothing was kept.
  }
}

const storage = () => (currentKey() ? sessionStorage : localStorage);

function names() {
  try {
    return Object.keys(storage()).filter((name) => name.startsWith(PREFIX));
  } catch {
    return []; // a browser that forbids storage
  }
}

function read(name) {
  try {
    return JSON.parse(storage().getItem(name));
  } catch {
    return null;
  }
}
