// Jobs of a knowledge base: uploads and deletions, until they have ended.

import { getJson } from "./api.js";

const POLL = 300;
const STAGES = {
  waiting: "Waiting for other uploads", running: "Preparing", reading: "Reading documents", encoding: "Encoding passages",
  indexing: "Indexing",
};

/** Wait for a job and tell `progress(stage, done, total)`; its last report. Throws what the server says of a failure. */
export async function follow(job, progress) {
  for (;;) {
    const report = await getJson(`v1/kb/jobs/${encodeURIComponent(job)}`);
    if (report.status === "failed") throw new Error(report.error.message);
    if (report.status === "cancelled") throw new Error("It was cancelled.");
    if (report.status === "done") return report;
    progress(STAGES[report.stage ?? report.status], report.done, report.total);
    await new Promise((resolve) => setTimeout(resolve, POLL));
  }
}
