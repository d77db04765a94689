"""Turns uploads and deletions into jobs: recorded before they are promised, done one at a time, each exactly once.

A job's record is its promise. It is on disk before the client gets an answer. After a kill at any moment, the next
start finds the jobs that have not ended and does them; files of uploads that were never promised are removed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

from specrag.artifacts import MANIFEST, atomic_write_json, make_folder
from specrag.errors import InputError, SpecragError
from specrag.serving.knowledge.bases import KnowledgeBases
from specrag.serving.knowledge.indexing import Order
from specrag.serving.knowledge.places import Place, is_job
from specrag.serving.knowledge.staging import ENDED, Job, move, not_indexed, read_job, take_back
from specrag.serving.knowledge.worker import Bounds, Worker
from specrag.serving.operation.logs import Log
from specrag.serving.operation.metrics import Metrics
from specrag.serving.settings import Settings

_KEPT = 100  # records of ended jobs, per knowledge base
_ATTEMPTS = 20  # while another process writes the knowledge base
_WAIT = 0.5  # seconds between attempts
_IDLE = 60.0  # seconds without a job after which the indexing process is ended
_BUSY = "another process"
_TRIES = 3  # starts of a job during which the server was killed each time


class JobFailedError(SpecragError):
    """A job cannot be done; the message is for the client."""


class Jobs:
    """The queue of jobs and the thread that does them.

    Args:
        bases: where the documents go.
        metrics, log: told of every job.
        settings: the limits of jobs.
    """

    def __init__(self, bases: KnowledgeBases, metrics: Metrics, log: Log, settings: Settings) -> None:
        self._bases = bases
        self._metrics = metrics
        self._log = log
        self._settings = settings
        self._ending = threading.Lock()  # keeps a job's start and end apart from its cancellation
        self._jobs: dict[str, Job] = {}
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._worker = Worker(Bounds(settings.job_seconds, settings.job_memory_bytes))
        self._stopping = threading.Event()

    # -- the server's side ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Clean up after a kill, and resume the jobs that were promised."""
        for name in self._bases.names():
            if self._bases.kind(name) == "folder":
                self._recover(name)
        self._thread = threading.Thread(target=self._work, name="specrag-jobs", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the running job; it resumes at the next start."""
        self._stopping.set()
        self._waiting.put(None)
        self._worker.end(for_good=True)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._worker.end()

    @property
    def full(self) -> bool:
        """Whether no more jobs can wait."""
        return self.pending >= self._settings.max_jobs

    @property
    def pending(self) -> int:
        """Jobs that have not ended."""
        return sum(job.status not in ENDED for job in list(self._jobs.values()))

    def busy(self, kb: str) -> bool:
        """Whether a knowledge base has a job that has not ended."""
        return any(job.kb == kb and job.status not in ENDED for job in list(self._jobs.values()))

    def new_id(self) -> str:
        """An id for a new job."""
        return uuid.uuid4().hex

    def add(self, job: Job) -> None:
        """Promise a job: write its record and put it into the queue.

        Raises:
            OSError: the disk refuses; nothing is promised.
        """
        self._write(job)
        self._jobs[job.id] = job
        self._waiting.put(job)

    def cancel(self, job: Job) -> bool:
        """Cancel a job: a running one ends within a second, a waiting one when its turn comes.

        Returns:
            False if the job had ended already.

        Raises:
            OSError: the disk refuses.
        """
        with self._ending:
            current = self._jobs.get(job.id)
            if current is None or current.status in ENDED:
                return False
            current.cancelled = True
            self._write(current)
            return True

    def discard(self, job: Job) -> None:
        """Remove the files of a job that could not be promised, and the knowledge base that it made."""
        shutil.rmtree(self._bases.place(job.kb).incoming / job.id, ignore_errors=True)
        if job.makes_kb:
            self._bases.remove_empty(job.kb)

    def find(self, identifier: str) -> Job | None:
        """A job of this run, or one that ended in an earlier run."""
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
        make_folder(place.jobs)
        atomic_write_json(place.jobs / f"{job.id}.json", asdict(job))

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
                self._worker.end()  # which frees its memory
                continue
            if job is None or self._stopping.is_set():
                return
            self._do(job)

    def _do(self, job: Job) -> None:
        started = time.monotonic()
        job.tries += 1
        with self._ending:
            try:
                self._write(replace(job, status="running"))
            except OSError as error:
                self._log.warning("job record not written", job=job.id, reason=str(error))
            job.status = "running"  # after the record: a reader may kill the server, and this try counts
        try:
            ended = self._outcome(job)
        except OSError as error:  # some documents are moved, some not; the next start goes on
            self._log.error("documents not moved", error, job=job.id, kb=job.kb)
            self._jobs[job.id] = replace(job, status="failed", stage=None, error="the server's disk refuses")
            return
        if self._stopping.is_set() and ended.status == "failed":
            self._put_off(job)
            return
        if ended.status == "failed" and job.cancelled:
            ended.status, ended.error = "cancelled", None
        with self._ending:
            try:
                self._write(ended)
            except OSError as error:
                self._log.warning("job record not written", job=job.id, reason=str(error))
            shutil.rmtree(self._bases.place(job.kb).incoming / job.id, ignore_errors=True)
            if ended.makes_kb and ended.status != "done":
                self._bases.remove_empty(job.kb)
            self._jobs[job.id] = ended  # last, since a reader may look at the disk
        self._forget()
        self._metrics.job(ended.status)
        seconds = round(time.monotonic() - started, 3)
        self._log.info(
            "job ended", job=job.id, kb=job.kb, status=ended.status, seconds=seconds, reason=ended.error
        )

    def _put_off(self, job: Job) -> None:
        """Leave a job that the stop cut off to the next start, without counting this try."""
        job.status, job.stage = "waiting", None
        job.tries -= 1
        with contextlib.suppress(OSError):
            self._write(job)

    def _outcome(self, job: Job) -> Job:
        """Do a job, and return it as it is afterwards.

        Raises:
            OSError: the documents cannot be moved back.
        """
        place = self._bases.place(job.kb)
        report: dict[str, Any] | None = None
        error = None
        try:
            if job.cancelled and job.tries == 1:  # on a later try its documents may have been moved
                raise JobFailedError("it was cancelled")
            self._move(job, place)
            report = self._build(job, place)
        except JobFailedError as failure:
            error = str(failure)
        except Exception as failure:
            self._log.error("job failed unexpectedly", failure, job=job.id, kb=job.kb)
            error = "an unexpected error; the server's log has it"
        if not self._stopping.is_set():
            left_out = not_indexed(job, place, self._known(job.kb))
            take_back(job, place, left_out)
            if report is not None and len(left_out) == len(job.files):
                error = _none_taken(report, left_out)
        status: Literal["done", "failed"] = "done" if error is None else "failed"
        return replace(job, status=status, stage=None, report=report, error=error)

    def _known(self, kb: str) -> dict[str, str]:
        """SHA-256 of a knowledge base's documents, by path; empty if it is damaged."""
        try:
            return {file.path: file.sha256 for file in self._bases.files(kb)}
        except SpecragError:
            return {}

    def _forget(self) -> None:
        ended = [job.id for job in self._jobs.values() if job.status in ENDED]
        for identifier in ended[:-_KEPT]:
            del self._jobs[identifier]

    def _move(self, job: Job, place: Place) -> None:
        try:
            move(job, place)
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
        return self._run(job, [documents] if left else gone)

    def _empty(self, job: Job, removed: int) -> dict[str, Any]:
        """Empty a knowledge base whose last document is gone, if it was made through the API."""
        if not self._bases.place(job.kb).record.is_file():
            raise JobFailedError("it would leave the knowledge base without documents")
        folder = self._bases.folder(job.kb)
        (folder / MANIFEST).unlink()  # first, so that a kill cannot leave half of it
        shutil.rmtree(folder)
        return {"added": 0, "updated": 0, "removed": removed, "unchanged": 0, "skipped": [], "passages": 0}

    def _run(self, job: Job, paths: list[str]) -> dict[str, Any]:
        settings = self._bases.build_settings(job.kb)
        order = Order(
            str(self._bases.folder(job.kb)),
            tuple(paths),
            settings.encoder,
            settings.chunk_tokens,
            settings.chunk_overlap,
            self._settings.max_document_pages,
            self._settings.max_document_characters,
        )

        def progress(stage: str, done: int, total: int) -> None:
            job.stage, job.done, job.total = stage, done, total

        if job.tries > _TRIES:
            raise JobFailedError(f"it was begun {_TRIES} times, and the server was killed each time")
        for attempt in range(_ATTEMPTS):
            outcome = self._worker.run(order, progress, lambda: job.cancelled)
            # The other process may be that of a server which was killed a moment ago.
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


def _none_taken(report: Mapping[str, Any], names: frozenset[str]) -> str:
    """Why a successful build took none of a job's documents."""
    for skipped in report["skipped"]:
        if skipped["source"] in names:
            return f"none of the documents can be read, first {skipped['source']}: {skipped['reason']}"
    return "none of the documents was taken"
