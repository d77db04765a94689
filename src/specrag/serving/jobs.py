"""Uploads and deletions become jobs: written down before they are promised, done one after the other, in any case once.

A job's record is its promise. It is on the disk before the client gets an answer; after a kill at any moment the next
start finds the jobs that have not ended and does them, and files of uploads that were never promised are removed.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
import uuid
from dataclasses import asdict, replace
from typing import Any

from specrag.errors import InputError, SpecragError
from specrag.retrieval.manifest import MANIFEST
from specrag.serving.indexing import Order
from specrag.serving.job import ENDED, Job, read_job
from specrag.serving.knowledge import KnowledgeBases, write_json
from specrag.serving.logs import Log
from specrag.serving.metrics import Metrics
from specrag.serving.places import Place, is_job
from specrag.serving.worker import Worker

_KEPT = 100  # records of ended jobs, for each knowledge base
_ATTEMPTS = 20  # while another process writes the knowledge base
_WAIT = 0.5  # seconds between them
_IDLE = 60.0  # seconds without a job that the indexing process is kept
_BUSY = "another process"


class JobFailedError(SpecragError):
    """A job cannot be done; the message is for the client."""


class Jobs:
    """The queue of jobs and the thread that does them.

    Args:
        bases: where the documents go.
        metrics, log: are told.
        most: jobs that may wait.
    """

    def __init__(self, bases: KnowledgeBases, metrics: Metrics, log: Log, most: int) -> None:
        self._bases = bases
        self._metrics = metrics
        self._log = log
        self._most = most
        self._jobs: dict[str, Job] = {}
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._worker = Worker()
        self._stopping = threading.Event()

    # -- the server's side ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Clean up behind a kill, and go on with what was promised."""
        for name in self._bases.names():
            if self._bases.kind(name) == "folder":
                self._recover(name)
        self._thread = threading.Thread(target=self._work, name="specrag-jobs", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the running job; it goes on at the next start."""
        self._stopping.set()
        self._waiting.put(None)
        self._worker.end(for_good=True)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._worker.end()

    @property
    def full(self) -> bool:
        """Whether no more can wait."""
        return self.pending >= self._most

    @property
    def pending(self) -> int:
        """Jobs that have not ended."""
        return sum(job.status not in ENDED for job in list(self._jobs.values()))

    def new_id(self) -> str:
        """The id of a job to come."""
        return uuid.uuid4().hex

    def add(self, job: Job) -> None:
        """Promise a job: write it down and put it into the queue.

        Raises:
            OSError: the disk refuses; nothing is promised.
        """
        self._write(job)
        self._jobs[job.id] = job
        self._waiting.put(job)

    def discard(self, job: Job) -> None:
        """Remove the files of a job that could not be promised, and what it has made."""
        shutil.rmtree(self._bases.place(job.kb).incoming / job.id, ignore_errors=True)
        if job.makes_kb:
            self._bases.remove_empty(job.kb)

    def find(self, identifier: str) -> Job | None:
        """A job of this run or, if it has ended, of an earlier one."""
        if not is_job(identifier):
            return None
        job = self._jobs.get(identifier)
        if job is not None:
            return job
        for name in self._bases.names():
            if self._bases.kind(name) == "folder":
                try:
                    place = self._bases.place(name)
                except InputError:
                    return None
                job = read_job(place.jobs / f"{identifier}.json")
                if job is not None:
                    return job
        return None

    # -- the disk -------------------------------------------------------------------------------------------

    def _write(self, job: Job) -> None:
        place = self._bases.place(job.kb)
        place.jobs.mkdir(parents=True, exist_ok=True)
        write_json(place.jobs / f"{job.id}.json", asdict(job))

    def _recover(self, name: str) -> None:
        try:
            place = self._bases.place(name)
        except InputError:
            return
        records = [job for path in place.jobs.glob("*.json") if (job := read_job(path)) is not None]
        records.sort(key=lambda job: job.created)
        ended = [job for job in records if job.status in ENDED]
        for job in ended[:-_KEPT]:
            (place.jobs / f"{job.id}.json").unlink(missing_ok=True)
        unfinished = {job.id for job in records} - {job.id for job in ended}
        if place.incoming.is_dir():
            for folder in place.incoming.iterdir():
                if folder.name not in unfinished:
                    shutil.rmtree(folder, ignore_errors=True)
        for job in records:
            if job.id in unfinished:
                job.status, job.stage = "waiting", None
                self._jobs[job.id] = job
                self._waiting.put(job)
                self._log.info("job resumed", job=job.id, kb=job.kb)

    # -- the thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            try:
                job = self._waiting.get(timeout=_IDLE)
            except queue.Empty:
                self._worker.end()  # and its memory is free
                continue
            if job is None or self._stopping.is_set():
                return
            self._do(job)

    def _do(self, job: Job) -> None:
        started = time.monotonic()
        job.status = "running"
        ended = self._outcome(job)
        if self._stopping.is_set() and ended.status == "failed":
            job.status, job.stage = "waiting", None  # cut off by the stop; it goes on at the next start
            return
        try:
            self._write(ended)
        except OSError as error:
            self._log.warning("job record not written", job=job.id, reason=str(error))
        shutil.rmtree(self._bases.place(job.kb).incoming / job.id, ignore_errors=True)
        if ended.makes_kb and ended.status == "failed":
            self._bases.remove_empty(job.kb)
        self._jobs[job.id] = ended  # only now, since who reads it may look at the disk
        self._forget()
        self._metrics.job(ended.status)
        seconds = round(time.monotonic() - started, 3)
        self._log.info(
            "job ended", job=job.id, kb=job.kb, status=ended.status, seconds=seconds, reason=ended.error
        )

    def _outcome(self, job: Job) -> Job:
        """Do a job; the job as it is afterwards."""
        place = self._bases.place(job.kb)
        try:
            self._move(job, place)
            return replace(job, status="done", stage=None, report=self._build(job, place))
        except JobFailedError as error:
            return replace(job, status="failed", stage=None, error=str(error))
        except Exception as error:
            self._log.error("job failed unexpectedly", error, job=job.id, kb=job.kb)
            told = "an unexpected error; the server's log has it"
            return replace(job, status="failed", stage=None, error=told)

    def _forget(self) -> None:
        ended = [job.id for job in self._jobs.values() if job.status in ENDED]
        for identifier in ended[:-_KEPT]:
            del self._jobs[identifier]

    def _move(self, job: Job, place: Place) -> None:
        """Bring the documents to where the job wants them; may be done twice."""
        try:
            place.documents.mkdir(parents=True, exist_ok=True)
            for name in job.files:
                if job.action == "remove":
                    (place.documents / name).unlink(missing_ok=True)
                    continue
                incoming = place.incoming / job.id / name
                if incoming.exists():
                    incoming.replace(place.documents / name)
        except OSError as error:
            raise JobFailedError(
                f"the documents cannot be moved: {(error.strerror or 'error').lower()}"
            ) from error

    def _build(self, job: Job, place: Place) -> dict[str, Any]:
        known = {file.path: file for file in self._bases.files(job.kb)}
        documents = os.path.realpath(place.documents)
        here = {path for path in known if os.path.dirname(path) == documents}
        gone = sorted(path for path in here if not os.path.lexists(path))
        left = any(place.documents.iterdir())
        if not left and gone and len(gone) == len(known):
            return self._empty(job, len(gone))
        if not left and not gone:
            return {"added": 0, "updated": 0, "removed": 0, "unchanged": len(known), "skipped": []}
        paths = [documents] if left else gone
        try:
            report = self._run(job, paths)
        except JobFailedError:
            self._remove_unread(job, place)
            raise
        self._remove_unread(job, place)
        return report

    def _empty(self, job: Job, removed: int) -> dict[str, Any]:
        """The last document is gone; a knowledge base that was made here is empty again."""
        if not self._bases.place(job.kb).record.is_file():
            raise JobFailedError("it would leave the knowledge base without documents")
        folder = self._bases.folder(job.kb)
        (folder / MANIFEST).unlink()  # first, so that a kill leaves no half of a knowledge base
        shutil.rmtree(folder)
        return {"added": 0, "updated": 0, "removed": removed, "unchanged": 0, "skipped": [], "passages": 0}

    def _remove_unread(self, job: Job, place: Place) -> None:
        """Documents of this job that did not get in are not tried again."""
        if job.action == "add" and not self._stopping.is_set():
            known = {file.path for file in self._bases.files(job.kb)}
            for name in job.files:
                path = place.documents / name
                if os.path.realpath(path) not in known:
                    path.unlink(missing_ok=True)

    def _run(self, job: Job, paths: list[str]) -> dict[str, Any]:
        settings = self._bases.build_settings(job.kb)
        order = Order(
            str(self._bases.folder(job.kb)),
            tuple(paths),
            settings.encoder,
            settings.chunk_tokens,
            settings.chunk_overlap,
        )

        def progress(stage: str, done: int, total: int) -> None:
            job.stage, job.done, job.total = stage, done, total

        for attempt in range(_ATTEMPTS):
            outcome = self._worker.run(order, progress)
            # Also the process of a server that was killed a moment ago.
            busy = outcome.report is None and _BUSY in outcome.message
            if not busy or attempt == _ATTEMPTS - 1 or self._stopping.is_set():
                break
            self._stopping.wait(_WAIT)
        if outcome.report is not None:
            return outcome.report
        self._log.warning("indexing failed", job=job.id, kb=job.kb, reason=outcome.message)
        if outcome.bad_input:
            raise JobFailedError(outcome.message)
        if "no space is left" in outcome.message:
            raise JobFailedError("no space is left on the server's disk; what was there is intact")
        raise JobFailedError("the documents could not be indexed; the server's log says why")
