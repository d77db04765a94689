// The dialog about knowledge bases: what there is, and adding documents with progress.

import { getJson, upload } from "./api.js";
import { byId, count, counted, element } from "./dom.js";

const NEW = "";
const POLL = 300;
const STAGES = {
  waiting: "Waiting for other uploads", running: "Preparing", reading: "Reading documents", encoding: "Encoding passages",
  indexing: "Indexing",
};

export class Documents {
  /** @param changed called with all knowledge bases, and the name of one that was just added to or null. */
  constructor(changed) {
    this.changed = changed;
    this.bases = [];
    this.busy = false;
    this.dialog = byId("documents");
    this.files = byId("files");
    byId("open-documents").addEventListener("click", () => this.open());
    byId("upload-kb").addEventListener("change", () => this.showName());
    byId("upload").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.letDrop(byId("drop"));
  }

  async refresh(added = null) {
    this.bases = (await getJson("v1/kb")).data;
    this.show(added);
    this.changed(this.bases, added);
  }

  open() {
    this.dialog.showModal();
    this.refresh().catch((error) => this.tell(error.message, true));
  }

  show(added) {
    const rows = this.bases.map((base) => element("tr", {},
      element("th", { scope: "row" }, base.id, base.problem ? element("p", { class: "hint" }, base.problem) : null),
      element("td", { class: "number" }, size(base.documents)),
      element("td", { class: "number" }, size(base.passages))));
    byId("bases").replaceChildren(this.bases.length
      ? element("table", { class: "bases" },
        element("caption", { class: "hidden-text" }, "Knowledge bases"),
        element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Knowledge base"),
          element("th", { scope: "col", class: "number" }, "Documents"), element("th", { scope: "col", class: "number" }, "Passages"))),
        element("tbody", {}, ...rows))
      : element("p", { class: "hint" }, "There is no knowledge base yet."));
    const select = byId("upload-kb");
    const chosen = added ?? (select.options.length ? select.value : null);
    const open = this.bases.filter(({ writable }) => writable !== false);
    select.replaceChildren(
      ...open.map(({ id }) => element("option", { value: id }, id)),
      element("option", { value: NEW }, "A new one"));
    const isThere = chosen === NEW || open.some(({ id }) => id === chosen);
    select.value = isThere ? chosen : open[0]?.id ?? NEW;
    this.showName();
  }

  showName() {
    const isNew = byId("upload-kb").value === NEW;
    byId("new-name-field").hidden = !isNew;
    byId("new-name").required = isNew;
  }

  letDrop(place) {
    const over = (isOver) => (event) => {
      event.preventDefault();
      place.classList.toggle("over", isOver);
    };
    place.addEventListener("dragover", over(true));
    place.addEventListener("dragleave", over(false));
    place.addEventListener("drop", (event) => {
      over(false)(event);
      if (event.dataTransfer.files.length) this.files.files = event.dataTransfer.files;
    });
  }

  async submit() {
    if (this.busy) return;
    if (!this.files.files.length) {
      this.tell("Choose at least one file.", true);
      this.files.focus();
      return;
    }
    this.setBusy(true);
    try {
      const chosen = byId("upload-kb").value;
      const name = chosen === NEW ? byId("new-name").value.trim() : chosen;
      // A name with a slash would be another address.
      if (!/^[a-z0-9][a-z0-9_-]{0,63}$/.test(name)) throw new Error("Give a name of 1 to 64 of a-z, 0-9, - and _.");
      // A new one is made by the upload itself: if that fails, its name stays free.
      const path = `v1/kb/${encodeURIComponent(name)}/documents${chosen === NEW ? "?create=true" : ""}`;
      const { job } = await upload(path, this.files.files,
        (share) => this.progress("Sending", share, 1));
      const report = await this.follow(job);
      await this.refresh(name);
      this.files.value = "";
      byId("new-name").value = "";
      this.tell(inWords(name, report), false);
    } catch (error) {
      this.tell(error.message, true);
    } finally {
      this.setBusy(false);
    }
  }

  /** Wait for an indexing job and show how far it is; its last report. */
  async follow(job) {
    for (;;) {
      const report = await getJson(`v1/kb/jobs/${encodeURIComponent(job)}`);
      if (report.status === "failed") throw new Error(report.error.message);
      if (report.status === "cancelled") throw new Error("The upload was cancelled.");
      if (report.status === "done") return report;
      this.progress(STAGES[report.stage ?? report.status], report.done, report.total);
      await new Promise((resolve) => setTimeout(resolve, POLL));
    }
  }

  progress(stage, done, total) {
    const bar = byId("upload-bar");
    byId("upload-stage").textContent = total > 1 ? `${stage}: ${count(done)} of ${count(total)}` : stage;
    if (total) {
      bar.max = total;
      bar.value = done;
    } else {
      bar.removeAttribute("value");
    }
  }

  setBusy(busy) {
    this.busy = busy;
    byId("upload-progress").hidden = !busy;
    byId("upload-submit").disabled = busy;
    if (busy) byId("upload-result").hidden = true;
  }

  tell(text, failed) {
    const place = byId("upload-result");
    place.hidden = false;
    place.className = failed ? "notice error" : "notice";
    place.textContent = text;
  }
}

const size = (number) => (Number.isFinite(number) ? count(number) : "");

function inWords(name, report) {
  const { added = 0, updated = 0, unchanged = 0, skipped = [], passages } = report.report;
  const parts = [[added, "added"], [updated, "updated"], [unchanged, "unchanged"]]
    .filter(([number]) => number).map(([number, what]) => `${count(number)} ${what}`);
  const left = skipped.map(({ source, reason }) => ` Left out: ${source} (${reason}).`).join("");
  const size = passages === undefined ? "" : ` It now has ${counted(passages, "passage")}.`;
  return `${name}: ${parts.join(", ") || "nothing new"}.${size}${left}`;
}
