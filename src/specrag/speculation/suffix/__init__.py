"""Suffix indexes: an automaton over a growing sequence of tokens, and a suffix array over a static corpus."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.speculation.suffix.automaton import SuffixAutomaton
    from specrag.speculation.suffix.corpus import SuffixCorpus, build_corpus
    from specrag.speculation.suffix.corpus_files import require_target
    from specrag.speculation.suffix.index import Match, SuffixIndex
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "Match",
    "SuffixAutomaton",
    "SuffixCorpus",
    "SuffixIndex",
    "build_corpus",
    "require_target",
]
