"""How much ``specrag bench knnlm`` measures."""

from __future__ import annotations

from dataclasses import dataclass

from specrag.bench.suites.knnlm_stores import PASSAGES, VALID, Store
from specrag.bench.suites.knnlm_subjects import ASYNCHRONOUS, FIXED, SEQUENTIAL, UNCAPPED, VARIANTS


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        helping: datastores of the perplexity section; tokens of the test text.
        exact: datastore of the exactness section, neighbours, prompts, tokens of a text, variants a prompt.
        fast: datastores of the speed section, the small ones first, neighbours, prompts, tokens, methods, repeats.
        slowed: R/G of an index slowed down, over the first of ``fast``.
        prompt: tokens of a prompt.
    """

    helping: tuple[Store, ...]
    helping_tokens: int
    exact: Store
    exact_k: tuple[int, ...]
    exact_prompts: int
    exact_new: int
    exact_variants: int
    fast: tuple[Store, ...]
    fast_k: tuple[int, ...]
    fast_prompts: int
    fast_new: int
    fast_methods: tuple[str, ...]
    repeats: int
    slowed: tuple[float, ...]
    prompt: int = 64


_VALID = Store("WikiText valid, 200,000 entries", VALID, 200_000, 200_000, hnsw=True)
_MILLION = Store("Wikipedia, 1,000,000 entries", PASSAGES, 1_000_000, 1_000_000, hnsw=True)
_FIVE = Store("Wikipedia and noisy copies, 5,000,000 entries", PASSAGES, 5_000_000, 1_000_000)
_SAMPLE = Store("sample", "", 2_000, 2_000, hnsw=True)
_ENLARGED = Store("sample and noisy copies, 8,000 entries", "", 8_000, 2_000)

FULL = Size(
    helping=(_VALID, _MILLION),
    helping_tokens=20_000,
    exact=_VALID,
    exact_k=(1, 8, 64, 256, 1024),
    exact_prompts=50,
    exact_new=24,
    exact_variants=1,
    fast=(_VALID, _MILLION, _FIVE),
    fast_k=(8, 1024, 1, 64, 256),
    fast_prompts=3,
    fast_new=48,
    fast_methods=tuple(name for name in VARIANTS if name not in ("knn-lm+A", "knn-lm+SA")),
    repeats=1,
    slowed=(1.0, 5.0, 20.0, 50.0),
)
QUICK = Size(
    helping=(_SAMPLE,),
    helping_tokens=200,
    exact=_SAMPLE,
    exact_k=(1, 64),
    exact_prompts=1,
    exact_new=8,
    exact_variants=2,
    fast=(_SAMPLE, _ENLARGED),
    fast_k=(64,),
    fast_prompts=1,
    fast_new=8,
    fast_methods=(SEQUENTIAL, FIXED, "knn-lm+stride=8", UNCAPPED, ASYNCHRONOUS),
    repeats=1,
    slowed=(5.0,),
    prompt=16,
)
