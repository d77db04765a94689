"""What a request may tell the methods: ``specrag.options``, with their defaults, their limits and a word for people."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from specrag.methods.draft_scores import Evidence
from specrag.methods.perspectives import Strategy
from specrag.serving.schemas import Body

#: Methods that decode tokens, for those that leave it to another.
Decoder: TypeAlias = Literal["plain", "respec", "prompt-lookup", "token-recycling", "sam-decoding"]


class NoOptions(Body):
    """None."""


class ReSpecOptions(Body):
    """Of ReSpec; see :class:`specrag.methods.respec.ReSpec`."""

    drafter: Annotated[str, Field(max_length=128)] = Field(
        "recycling", description="Who guesses besides what can be copied."
    )
    corpus: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="Texts that guesses may be copied from, too."
    )
    relaxed: bool = Field(
        False, description="Accept copied tokens near the model's choice: faster, another text."
    )
    tolerance: Annotated[float, Field(ge=0, le=20)] = Field(
        3.0, description="Nats that a relaxed token may lie below the best."
    )
    cost_aware: bool = Field(True, description="Weigh every guess by its measured cost.")


class KnnOptions(Body):
    """Of kNN-LM; see :class:`specrag.methods.knn_lm.KnnLM`."""

    datastore: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="Which one is searched; the only one where there is one."
    )
    k: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="Neighbours; 1,024, or all of a small datastore."
    )
    weight: Annotated[float, Field(ge=0, le=1)] = Field(
        0.25, description="Of the neighbours' next tokens; 0 is the model alone."
    )
    knn_temperature: Annotated[float, Field(gt=0, le=1e6)] = Field(
        1.0, description="Divides squared distances; specrag perplexity --sweep finds one."
    )
    knn_reach: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        None, description="Squared distance at which neighbours count e times less; null: the same at any."
    )
    index: Literal["flat", "hnsw", "pq"] = Field("flat", description="One that the datastore has.")
    stride: Annotated[int, Field(ge=1, le=16)] | Literal["cost-aware", "os3", "sequential"] = Field(
        "cost-aware",
        description="Tokens guessed before a search, os3 or cost-aware to choose a number, or sequential.",
    )
    decoder: Decoder = Field(
        "respec",
        description="Whose guesses are read in one pass; plain: one token a pass. Not with sequential.",
    )
    asynchronous: bool = Field(
        False, description="Decode on while guesses are verified. Not with sequential."
    )


class StandardRAGOptions(Body):
    """Of standard RAG."""

    decoder: Decoder = Field("plain", description="How tokens are decoded.")


class RaLMOptions(Body):
    """Of iterative retrieval; see :class:`specrag.methods.iterative_ralm.IterativeRaLM`."""

    interval: Annotated[int, Field(ge=1, le=128)] = Field(4, description="New tokens between two retrievals.")
    query_tokens: Annotated[int, Field(ge=1, le=512)] = Field(32, description="Most tokens of a query.")
    passage_tokens: Annotated[int, Field(ge=16, le=2048)] = Field(
        256, description="Most tokens of a passage; the rest is cut."
    )
    prompt_tokens: Annotated[int, Field(ge=32, le=8192)] = Field(
        512, description="Most tokens of passage and question together."
    )
    decoder: Decoder = Field("plain", description="How the tokens between two retrievals are decoded.")


class RaLMSpecOptions(RaLMOptions):
    """Of RaLMSpec; see :class:`specrag.methods.ralmspec.RaLMSpec`."""

    stride: Annotated[int, Field(ge=1, le=16)] | Literal["cost-aware", "os3"] = Field(
        "cost-aware",
        description="Retrievals guessed before a search verifies them, os3, or cost-aware: guess by guess.",
    )
    prefetch: Annotated[int, Field(ge=1, le=256)] = Field(
        20, description="Passages that a search brings into the cache."
    )
    asynchronous: bool = Field(
        False, description="Decode on while guesses are verified; cost-aware decides that by itself."
    )


class SpeculativeRAGOptions(Body):
    """Of Speculative RAG; see :class:`specrag.methods.speculative_rag.SpeculativeRAG`."""

    drafts: Annotated[int, Field(ge=1, le=16)] = Field(5, description="Drafts (the paper's m).")
    passages_per_draft: Annotated[int, Field(ge=1, le=8)] = Field(
        2, description="Passages that each is written from (the paper's k)."
    )
    strategy: Strategy = Field("multi-perspective", description="How passages are dealt out to drafts.")
    evidence: Evidence = Field("rationale", description="What the verifier reads beside a draft's answer.")
    draft_tokens: Annotated[int, Field(ge=16, le=512)] = Field(
        128, description="Most tokens of a draft, its rationale included."
    )
    decoder: Decoder = Field("plain", description="How drafts are decoded.")


class RapidOptions(Body):
    """Of RAPID; see :class:`specrag.methods.rapid.RAPID`. The model drafts for itself."""

    eta: Annotated[float, Field(ge=0, le=100)] = Field(
        0.0,
        description="How much of the drafter's opinion the answer takes over; 0 gives the model's own text.",
    )
    gamma: Annotated[int, Field(ge=1, le=32)] = Field(10, description="Most guesses in a round.")
