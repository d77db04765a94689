// Adding documents: each file by itself, so that one that cannot be read keeps none of the others out.

import { upload } from "./api.js";
import { byId, count, element } from "./dom.js";
import { follow } from "./jobs.js";

export const NEW = "";

export class Uploads {
  /** @param ended called with the knowledge base's name when something was added, and waited for. */
  constructor(ended) {
    this.ended = ended;
    this.busy = false;
    this.files = byId("files");
    byId("upload").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.letDrop(byId("drop"));
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
    const files = [...this.files.files];
    const chosen = byId("upload-kb").value;
    const name = chosen === NEW ? byId("new-name").value.trim() : chosen;
    this.results = [];
    // A name with a slash would be another address.
    if (!/^[a-z0-9][a-z0-9_-]{0,63}$/.test(name)) return this.tell("Give a name of 1 to 64 of a-z, 0-9, - and _.", true);
    if (!files.length) {
      this.files.focus();
      return this.tell("Choose at least one file.", true);
    }
    this.setBusy(true);
    const added = await this.addAll(files, name, chosen === NEW);
    if (added) {
      await this.ended(name).catch((error) => this.add("", error.message, true));
      this.files.value = "";
      byId("new-name").value = "";
    }
    this.tell(`${name}: ${count(added)} of ${count(files.length)} added.`, !added);
    this.setBusy(false);
  }

  /** Add the files one after the other; how many were. */
  async addAll(files, name, isNew) {
    let added = 0;
    for (const file of files) {
      const progress = (stage, done, total) => this.progress(`${file.name}: ${stage}`, done, total);
      try {
        // A new knowledge base is made by the first file that it can hold: where none is, its name stays free.
        const create = isNew && !added ? "?create=true" : "";
        const { job } = await upload(`v1/kb/${encodeURIComponent(name)}/documents${create}`, file,
          (share) => progress("sending", share, 1));
        const { report } = await follow(job, progress);
        this.add(file.name, inWords(report), false);
        added += 1;
      } catch (error) {
        this.add(file.name, error.message.replace(/^files: .* is not usable: /, ""), true); // its name stands in front
      }
    }
    return added;
  }

  progress(stage, done, total) {
    const bar = byId("upload-bar");
    byId("upload-stage").textContent = total > 1 ? `${stage}, ${count(done)} of ${count(total)}` : stage;
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

  /** What became of one file. */
  add(name, said, failed) {
    this.results.push(element("li", { class: failed ? "failed" : "done" },
      name ? element("strong", {}, name) : null, name ? `: ${said}` : said));
  }

  /** What became of all of them. */
  tell(text, failed) {
    const place = byId("upload-result");
    place.hidden = false;
    place.className = failed ? "notice error" : "notice";
    place.replaceChildren(element("p", {}, text), this.results.length ? element("ul", { class: "results" }, ...this.results) : "");
  }
}

function inWords({ added = 0, updated = 0, skipped = [] }) {
  const [left] = skipped;
  return left ? `left out, ${left.reason}` : added ? "added" : updated ? "put in the place of the one before" : "nothing new";
}
