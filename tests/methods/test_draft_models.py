"""``model:NAME`` with a draft model of another vocabulary: the same text as plain decoding, with guesses kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import specrag
from specrag import InputError, LanguageModel
from specrag.methods import token_decoders as baselines
from specrag.methods.base import Decoder
from specrag.methods.retrieval_decoder import RetrievalDecoder
from specrag.models import catalog
from specrag.speculation.drafters.draft_model import DRAFT_MODEL
from tests.processor import PACKED_BF16
from tests.speculation.spelling import real_tokenizer

PROMPTS = (
    "Count from one to twelve in words.",
    "Translate to German: the lighthouse on Gannet Rock, 1887 \u2013 \u201ca caf\u00e9\u201d.",
)
TOKENS = 12


def need(name: str) -> None:
    if not any(status.name == name and status.pulled for status in catalog.list_models()):
        pytest.skip(f"{name} is not on this machine")


@pytest.fixture(scope="module")
def invariant(smollm2: object) -> Iterator[LanguageModel]:
    """The small model with 8-bit weights, where a row's bits never depend on the pass."""
    llm = specrag.load("smollm2-135m", dtype="int8", device="cpu", batch_invariant=True)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def methods(model_home: object) -> dict[str, Decoder]:
    """Gemma drafts alone and in ReSpec; made once, since each loads it."""
    need("gemma-3-270m")
    return {
        "alone": baselines.draft_model("gemma-3-270m"),
        "respec": RetrievalDecoder(drafter="model:gemma-3-270m"),
    }


def ids(generation: specrag.Result) -> list[int]:
    return [token.token for token in generation.tokens]


@PACKED_BF16
@pytest.mark.parametrize(("name", "temperature"), [("alone", 0.0), ("alone", 0.8), ("respec", 0.0)])
def test_the_text_is_plain_decodings(
    invariant: LanguageModel, methods: dict[str, Decoder], name: str, temperature: float
) -> None:
    """Two requests at once, which share the draft model."""
    plain = invariant.batch(PROMPTS, max_tokens=TOKENS, temperature=temperature, seed=5, method="plain")
    made = invariant.batch(PROMPTS, max_tokens=TOKENS, temperature=temperature, seed=5, method=methods[name])
    for mine, theirs in zip(made, plain, strict=True):
        assert (ids(mine), mine.text, mine.finish_reason) == (ids(theirs), theirs.text, theirs.finish_reason)
    if name == "alone":
        assert sum(generation.usage.accepted_by.get(DRAFT_MODEL, 0) for generation in made) > 4


@PACKED_BF16
def test_the_small_model_drafts_for_a_large_one_of_another_family(smollm2: object) -> None:
    need("qwen2.5-coder-1.5b")
    llm = specrag.load("qwen2.5-coder-1.5b", dtype="bf16", device="cpu", batch_invariant=True)
    plain = llm.generate(PROMPTS[0], max_tokens=8, method="plain")
    made = llm.generate(PROMPTS[0], max_tokens=8, method=baselines.draft_model("smollm2-135m"))
    llm.close()
    assert ids(made) == ids(plain)
    assert made.usage.accepted_by[DRAFT_MODEL] > 2


def test_a_module_of_transformers_may_be_the_target(smollm2: Path, methods: dict[str, Decoder]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from specrag.integrations.transformers import speculate

    module = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    row = real_tokenizer("smollm2-135m").chat([{"role": "user", "content": PROMPTS[0]}])
    prompt = {"inputs": torch.tensor([row]), "attention_mask": torch.ones(1, len(row), dtype=torch.long)}
    plain = module.generate(**prompt, max_new_tokens=8, do_sample=False)
    made = module.generate(
        **prompt, max_new_tokens=8, do_sample=False, custom_generate=speculate(methods["alone"])
    )
    assert made.tolist() == plain.tolist()


def test_a_model_whose_texts_cannot_be_aligned_is_refused(llm: LanguageModel) -> None:
    with pytest.raises(InputError, match="the draft model's tokenizer loses words"):
        llm.generate("Hello", max_tokens=4, method=RetrievalDecoder(drafter="model:minilm-l6-v2"))
