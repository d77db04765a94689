"""The order in which a job is written down and shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from specrag import artifacts
from specrag.serving.knowledge import jobs as jobs_module
from specrag.serving.knowledge.bases import KnowledgeBases
from specrag.serving.knowledge.jobs import Jobs
from specrag.serving.knowledge.staging import Job, read_job
from specrag.serving.operation.logs import Log
from specrag.serving.operation.metrics import Metrics
from specrag.serving.settings import load_settings


def test_a_job_is_shown_as_running_only_once_its_try_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server that is killed when it says so may begin the job once more than the bound."""
    settings = load_settings(None, {"kb_root": str(tmp_path)})
    bases = KnowledgeBases(settings)
    place = bases.place("metals")
    place.documents.mkdir(parents=True)
    (place.documents / "tin.md").write_text("Tin melts at 232 degrees.\n", encoding="utf-8")
    bases.create("metals")
    jobs = Jobs(bases, Metrics(), Log(settings), settings)
    seen: list[tuple[str, int]] = []  # what is shown while a record is written, and the tries on the disk

    def looking(path: Path, value: Any) -> None:
        found, record = jobs.find("0" * 32), read_job(path)
        if found is not None and record is not None:
            seen.append((found.status, record.tries))
        artifacts.atomic_write_json(path, value)

    monkeypatch.setattr(jobs_module, "atomic_write_json", looking)
    jobs.add(Job("0" * 32, "metals", "key", "remove", ("tin.md",), created=0.0))
    jobs._do(jobs._jobs["0" * 32])
    found = jobs.find("0" * 32)
    assert found is not None
    assert (found.status, found.tries) == ("done", 1)
    assert seen == [("waiting", 0), ("running", 1)]
