// The dialogs' buttons, and the one that asks for a key.

import { currentKey, onKeyWanted, setKey } from "./api.js";
import { byId } from "./dom.js";

/** @param changed called when another key was given than the one before. */
export function setUpDialogs(changed = () => {}) {
  for (const button of document.querySelectorAll("[data-close]")) {
    button.addEventListener("click", () => button.closest("dialog").close());
  }
  const dialog = byId("key-dialog");
  let waiting = null;
  const open = (reason) => {
    if (reason) byId("key-reason").textContent = reason;
    if (dialog.open) return; // a key may be half typed
    byId("key").value = "";
    dialog.showModal();
  };
  // Several requests may be refused at once: one dialog answers all of them.
  onKeyWanted((reason) => {
    byId("open-key").hidden = false;
    open(reason);
    waiting ??= Promise.withResolvers();
    return waiting.promise;
  });
  byId("open-key").addEventListener("click", () => open(""));
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = byId("key").value.trim();
    const isOther = currentKey() && key !== currentKey();
    setKey(key);
    if (isOther) changed();
    waiting?.resolve(true);
    waiting = null;
    dialog.close();
  });
  dialog.addEventListener("close", () => {
    waiting?.resolve(false);
    waiting = null;
  });
}
