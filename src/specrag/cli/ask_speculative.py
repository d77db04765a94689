"""How Speculative RAG is chosen for ``specrag ask``: a drafter, a verifier, and how they work together."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specrag.cli.speculative_answers import describe_speculative, show_speculative
from specrag.cli.speculative_options import (
    DEFAULT_DRAFTS,
    DEFAULT_K,
    DEFAULT_MODEL,
    DEFAULT_PASSAGES,
    DEFAULT_TOKENS,
    FACTORS,
    SPECULATIVE_RAG,
)
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.cli.ask_standard import StandardChoice
    from specrag.language_model import LanguageModel
    from specrag.methods.draft_scores import Scoring
    from specrag.methods.draft_task import Task
    from specrag.models.endpoint import Endpoint
    from specrag.models.roles import TextGenerator, TextScorer

#: Given as ``--adapter``: a drafter as its model comes.
NO_ADAPTER = "none"
#: Tokens of a rationale, of a draft's; the rest is the answer's.
_RATIONALE_SHARE = 5 / 8


@dataclass(frozen=True, slots=True)
class Own:
    """The options that Speculative RAG alone takes, as they were given."""

    verifier: str | None
    drafts: int | None
    passages: int | None
    strategy: str | None
    evidence: str | None
    without: list[str] | None
    length_normalized: bool
    option: list[str] | None
    claim: bool
    show_drafts: bool

    def given(self) -> dict[str, object]:
        """By the names that they have on the command line."""
        return {f"--{field.name.replace('_', '-')}": getattr(self, field.name) for field in fields(self)}

    def scoring(self) -> Scoring:
        """How drafts are scored.

        Raises:
            InputError: a value cannot be used.
        """
        from specrag.methods.draft_scores import Scoring

        left_out = set(self.without or ())
        for factor in left_out:
            if factor not in FACTORS:
                raise InputError("--without", factor, f"take one of {', '.join(FACTORS)}")
        evidence: Any = self.evidence or "rationale"
        return Scoring(
            draft="draft" not in left_out,
            self_contain="self-contain" not in left_out,
            self_reflect="self-reflect" not in left_out,
            evidence=evidence,
            length_normalized=self.length_normalized,
        )

    def task(self, text: str) -> Task:
        """What is asked.

        Raises:
            InputError: the options are no ``LETTER=TEXT``, or there is a claim as well.
        """
        from specrag.methods.draft_task import Task

        if self.claim and self.option:
            raise InputError("--claim", self.claim, "give a claim or options, not both")
        if self.claim:
            return Task(text, "claim-checking")
        chosen: dict[str, str] = {}
        for option in self.option or ():
            letter, _, said = option.partition("=")
            if not said.strip() or letter in chosen:
                raise InputError("--option", option, "give LETTER=TEXT such as A=Lyon, each letter once")
            chosen[letter] = said.strip()
        return Task(text, "multiple-choice", chosen) if chosen else Task(text)


@dataclass(frozen=True, slots=True)
class Models:
    """The models as they were named, and how those that run here are loaded.

    Attributes:
        model: of ``-m``: here the number of drafts, as the paper's m, or the model of a role that has none.
        drafter: writes drafts.
        decoder: how it decodes.
        adapter: the drafter's; by default one that comes with specrag for this model, and none if it is "none".
    """

    model: str
    drafter: str | None
    decoder: str | None
    dtype: str
    device: str | None
    adapter: Path | None
    batch_invariant: bool
    kv_dtype: str

    def drafts(self, given: int | None) -> int:
        """How many drafts.

        Raises:
            InputError: they were given twice.
        """
        if not self.model.isdigit():
            return DEFAULT_DRAFTS if given is None else given
        if given is not None:
            raise InputError("-m", self.model, f"give --drafts {given} or -m {self.model}, not both")
        return int(self.model)

    @property
    def writer(self) -> str:
        """Who writes drafts."""
        return self.drafter or (DEFAULT_MODEL if self.model.isdigit() else self.model)

    @property
    def tuned(self) -> Path | None:
        """The adapter that the drafter gets."""
        from specrag.models.adapters import shipped_adapters

        if self.adapter is not None:
            return None if str(self.adapter) == NO_ADAPTER else self.adapter
        return next(iter(shipped_adapters(self.writer)), None)

    def check(self) -> None:
        """Check all that needs no model.

        Raises:
            InputError: a value cannot be used.
        """
        from specrag.methods.options import check_options

        if is_endpoint(self.writer) and self.decoder not in (None, "plain"):
            raise InputError("--decoder", self.decoder, "an endpoint decodes as it likes; leave it out")
        check_options({"method": self.decoder or "plain"})

    def open(self, verifier: str | None, opened: ExitStack) -> Pair:
        """Load or connect both; a model that is both is loaded once, unless an adapter makes the drafter another.

        Args:
            verifier: by default the drafter's model.
            opened: closes what has been opened.
        """
        from specrag.methods.local_generator import LocalGenerator
        from specrag.models.scoring import LocalScorer

        judge = verifier or self.writer
        drafter: TextGenerator
        if is_endpoint(self.writer):
            endpoint = _open(self.writer, opened)
            if judge == self.writer:
                return Pair(endpoint, endpoint)
            drafter = endpoint
        else:
            llm = self._load(self.writer, self.tuned, opened)
            drafter = LocalGenerator(llm, method=self.decoder or "plain")
            if judge == self.writer and self.tuned is None:
                return Pair(drafter, LocalScorer(llm.loaded))
        if is_endpoint(judge):
            return Pair(drafter, _open(judge, opened))
        return Pair(drafter, LocalScorer(self._load(judge, None, opened).loaded))

    def _load(self, name: str, adapter: Path | None, opened: ExitStack) -> LanguageModel:
        from specrag.language_model import load

        llm = load(
            name,
            dtype=self.dtype,
            device=self.device,
            adapter=adapter,
            batch_invariant=self.batch_invariant,
            kv_dtype=self.kv_dtype,
            progress=sys.stderr.isatty(),
        )
        opened.callback(llm.close)
        return llm


@dataclass(frozen=True, slots=True)
class Pair:
    """A drafter and a verifier, ready."""

    drafter: TextGenerator
    verifier: TextScorer


def answer(
    own: Own,
    standard: StandardChoice,
    models: Models,
    question: str,
    kb: Path | None,
    where: Mapping[str, Any],
    *,
    max_tokens: int | None,
    timeout: float | None,
    seed: int,
    as_json: bool,
) -> None:
    """Answer and show it. All that can be wrong without a model is said before one is loaded.

    Args:
        standard: how passages are found.
    """
    from specrag.methods.drafting import Drafting
    from specrag.methods.perspectives import check_count, check_sampling
    from specrag.methods.speculative_rag import SpeculativeRAG
    from specrag.retrieval.knowledge_base import KnowledgeBase
    from specrag.retrieval.reranker import load_reranker

    task = own.task(question)
    scoring = own.scoring()
    m, k = models.drafts(own.drafts), DEFAULT_K if standard.k is None else standard.k
    strategy: Any = own.strategy or "multi-perspective"
    check_sampling(m, k, strategy)
    passages = DEFAULT_PASSAGES if own.passages is None else own.passages
    check_count("passages", passages)
    standard.check()
    models.check()
    tokens = DEFAULT_TOKENS if max_tokens is None else max_tokens
    drafting = Drafting(max_tokens=tokens, rationale_tokens=max(int(tokens * _RATIONALE_SHARE), 1))
    assert kb is not None
    with ExitStack() as opened:
        base = opened.enter_context(KnowledgeBase.open(kb))
        base.allowed(where)
        pair = models.open(own.verifier, opened)
        rag = SpeculativeRAG(
            pair.drafter,
            pair.verifier,
            base,
            m=m,
            k=k,
            passages=passages,
            strategy=strategy,
            scoring=scoring,
            drafting=drafting,
            seed=seed,
            index=standard.index,
            where=where,
            reranker=None if standard.rerank is None else load_reranker(standard.rerank),
            min_score=standard.threshold,
        )
        # What a server pays once is no part of an answer's time.
        rag.prepare()
        base.search(["warm-up"], 1, index=standard.index, reranker=rag.reranker)
        if as_json:
            described = describe_speculative(rag.answer(task, timeout=timeout))
            typer.echo(json.dumps(described | {"method": SPECULATIVE_RAG}, ensure_ascii=False))
        else:
            show_speculative(rag.stream(task, timeout=timeout), m, table=own.show_drafts)


def refuse(options: Mapping[str, object], method: str) -> None:
    """Refuse options of Speculative RAG with another method, or those of others with Speculative RAG.

    Args:
        options: by name, with what was given; ``None``, ``False`` and no values are nothing.

    Raises:
        InputError: one was given.
    """
    for option, value in options.items():
        if value is not None and value is not False and value != []:
            remedy = (
                f"leave it out; --method {SPECULATIVE_RAG} has no use for it"
                if method == SPECULATIVE_RAG
                else f"only --method {SPECULATIVE_RAG} takes it; add it"
            )
            raise InputError(option, value, remedy)


def is_endpoint(name: str) -> bool:
    """Whether a model is behind an address."""
    return name.startswith(("http://", "https://"))


def _open(address: str, opened: ExitStack) -> Endpoint:
    from specrag.models.endpoint import open_endpoint

    return opened.enter_context(open_endpoint(address))
