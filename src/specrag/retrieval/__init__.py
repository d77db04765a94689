"""Retrieval: from documents to passages, from passages to indexes, from questions to hits."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.retrieval.build import DEFAULT_ENCODER, BuildSettings, compact, remove, settle
    from specrag.retrieval.knowledge_base import KnowledgeBase, SingleIndex, check_index, check_queries
    from specrag.retrieval.language import COMMON_WORDS, language_of
    from specrag.retrieval.maintenance import check, export
    from specrag.retrieval.manifest import Manifest, write_errors, writer_lock
    from specrag.retrieval.passage import Hit, Passage, passage_text
    from specrag.retrieval.passage_store import StoredFile
    from specrag.retrieval.progress import BuildReport, Progress, Reporter
    from specrag.retrieval.read_passages import READ
    from specrag.retrieval.watching import look, settled_changes
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "COMMON_WORDS",
    "DEFAULT_ENCODER",
    "READ",
    "BuildReport",
    "BuildSettings",
    "Hit",
    "KnowledgeBase",
    "Manifest",
    "Passage",
    "Progress",
    "Reporter",
    "SingleIndex",
    "StoredFile",
    "check",
    "check_index",
    "check_queries",
    "compact",
    "export",
    "language_of",
    "look",
    "passage_text",
    "remove",
    "settle",
    "settled_changes",
    "write_errors",
    "writer_lock",
]
