// The dialog about knowledge bases: what there is, the documents of one, and taking some out.

import { getJson, remove } from "./api.js";
import { byId, counted, element } from "./dom.js";
import { follow } from "./jobs.js";
import { NEW, Uploads } from "./uploads.js";

const PAGE = 100;

export class Documents {
  /** @param changed called with all knowledge bases, and the name of one that was just added to or null. */
  constructor(changed) {
    this.changed = changed;
    this.bases = [];
    this.dialog = byId("documents");
    this.uploads = new Uploads((name) => this.refresh(name));
    byId("open-documents").addEventListener("click", () => this.open());
    byId("upload-kb").addEventListener("change", () => this.showBase());
  }

  async refresh(added = null) {
    this.bases = (await getJson("v1/kb")).data;
    this.show(added);
    this.changed(this.bases, added);
    if (this.dialog.open) await this.list();
  }

  open() {
    this.dialog.showModal();
    this.refresh().catch((error) => this.tell(error.message));
  }

  show(added) {
    const select = byId("upload-kb");
    const chosen = added ?? (select.options.length ? select.value : null);
    select.replaceChildren(
      ...this.bases.map((base) => element("option", { value: base.id }, sizeOf(base))),
      element("option", { value: NEW }, "A new one"));
    const isThere = chosen === NEW || this.bases.some(({ id }) => id === chosen);
    select.value = isThere ? chosen : this.bases[0]?.id ?? NEW;
    this.showForm();
  }

  get base() {
    return this.bases.find(({ id }) => id === byId("upload-kb").value);
  }

  showBase() {
    this.showForm();
    this.list().catch((error) => this.tell(error.message));
  }

  showForm() {
    const isNew = byId("upload-kb").value === NEW;
    byId("new-name-field").hidden = !isNew;
    byId("new-name").required = isNew;
    const closed = this.base?.writable === false;
    byId("upload-fields").hidden = closed;
    byId("upload-closed").hidden = !closed;
    byId("base-problem").textContent = this.base?.problem ?? "";
  }

  /** Show the documents of the chosen knowledge base; `after` is the last one that is shown already. */
  async list(after = "") {
    const place = byId("document-list");
    const { base } = this;
    byId("more-documents").replaceChildren();
    if (!after) place.replaceChildren();
    this.told("");
    if (!base || base.kind === "table") {
      if (base) this.told("The documents of a table are not listed.");
      return;
    }
    const listed = await getJson(`v1/kb/${encodeURIComponent(base.id)}/documents?limit=${PAGE}&after=${encodeURIComponent(after)}`);
    if (base !== this.base) return; // another one was chosen meanwhile
    place.append(...listed.data.map((document) => this.item(base, document)));
    if (!place.childElementCount) this.told("It holds no documents yet.");
    const last = listed.data.at(-1)?.id;
    if (listed.has_more) {
      byId("more-documents").append(element("button", { type: "button", class: "link", click: () => this.list(last) }, "Show more"));
    }
  }

  item(base, { id, passages, uploaded }) {
    const canGo = uploaded && base.writable !== false;
    const button = element("button", {
      type: "button", class: "quiet", "aria-label": `Remove ${id}`, click: () => this.remove(base, id, button),
    }, "Remove");
    return element("li", {},
      element("span", { class: "document-name" }, id),
      element("span", { class: "hint" }, counted(passages, "passage")),
      canGo ? button : null);
  }

  async remove(base, id, button) {
    if (!confirm(`Remove ${id} from ${base.id}?`)) return;
    button.disabled = true;
    button.textContent = "Removing";
    try {
      const { job } = await remove(`v1/kb/${encodeURIComponent(base.id)}/documents/${encodeURIComponent(id)}`);
      await follow(job, () => {});
      await this.refresh();
      this.told(`${id} was removed.`);
      byId("upload-kb").focus();
    } catch (error) {
      button.disabled = false;
      button.textContent = "Remove";
      this.tell(`${id}: ${error.message}`);
    }
  }

  /** What is to be known of the list. */
  told(text) {
    byId("documents-note").className = "hint";
    byId("documents-note").textContent = text;
  }

  tell(text) {
    byId("documents-note").className = "notice error";
    byId("documents-note").textContent = text;
  }
}

function sizeOf({ id, documents, passages }) {
  const parts = [[documents, "document"], [passages, "passage"]].filter(([number]) => Number.isFinite(number));
  return parts.length ? `${id} (${parts.map(([number, noun]) => counted(number, noun)).join(", ")})` : id;
}
