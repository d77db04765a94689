"""ReSpec and its rivals on the real small model: the same text as plain decoding, and what they tell of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from weakref import WeakValueDictionary

import pytest

import specrag
from specrag import Adaptive, InputError, LanguageModel, Needs, ReSpec
from specrag.methods import drafters
from specrag.methods import token_decoders as baselines
from specrag.methods.base import Decoder
from specrag.methods.decoding import DecodingMethod
from specrag.methods.registry import method_class, method_names
from specrag.methods.retrieval_decoder import RetrievalDecoder
from specrag.models import loading
from specrag.speculation.drafters.retrieval import RetrievalSettings
from tests.processor import PACKED_BF16

PASSAGE = (
    "The lighthouse on Gannet Rock was lit on the third of November 1887. Its lens floated in a bath of mercury "
    "and could be turned with one finger. A clockwork driven by a falling weight did the turning."
)
PROMPTS = (
    f"Repeat this text word for word:\n{PASSAGE}",
    f"{PASSAGE}\n\nWhen was the lighthouse lit?",
    "Write two sentences about snow.",
)
TOKENS = 28

#: Methods that decode tokens with nothing else than the model.
ALONE = [
    name
    for name in method_names()
    if method_class(name).needs == Needs.SESSIONS and name not in ("plain", "draft-model", "eagle-2")
]
EXACT: dict[str, Decoder | DecodingMethod | str] = {
    **{name: name for name in ALONE},
    "respec, recycling": ReSpec(drafter="recycling"),
    "respec, cost-aware": ReSpec(cost_aware=True),
    "respec, no trigger": ReSpec(trigger=False),
    "respec, no scores": ReSpec(feedback_rate=None),
    "adaptive, no trigger": RetrievalDecoder(retrieval=RetrievalSettings(trigger=None)),
    "adaptive, no scores": RetrievalDecoder(retrieval=RetrievalSettings(feedback_rate=None)),
    "adaptive, lookup": Adaptive(drafter="lookup"),
    "adaptive, nothing else": Adaptive(drafter="none"),
    "recycling, weighed": baselines.Drafted("token-recycling", "recycling", None),
}


@pytest.fixture(scope="module")
def invariant(smollm2: object) -> Iterator[LanguageModel]:
    """The small model with 8-bit weights, where a row's bits never depend on the pass."""
    llm = specrag.load("smollm2-135m", dtype="int8", device="cpu", batch_invariant=True)
    yield llm
    llm.close()


def ids(generation: specrag.Result) -> list[int]:
    return [token.token for token in generation.tokens]


@PACKED_BF16
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", EXACT)
def test_the_text_is_plain_decodings(invariant: LanguageModel, name: str, temperature: float) -> None:
    """Four requests at once, so that trees of several requests share passes too."""
    plain = invariant.batch(PROMPTS, max_tokens=TOKENS, temperature=temperature, seed=5, method="plain")
    made = invariant.batch(PROMPTS, max_tokens=TOKENS, temperature=temperature, seed=5, method=EXACT[name])
    for mine, theirs in zip(made, plain, strict=True):
        assert (ids(mine), mine.text, mine.finish_reason) == (ids(theirs), theirs.text, theirs.finish_reason)
        assert mine.usage.relaxed == 0
        assert mine.usage.completion_tokens == theirs.usage.completion_tokens
        assert mine.usage.accepted <= mine.usage.drafted
        assert sum(token.source != "target" for token in mine.tokens) == mine.usage.accepted


def test_copying_takes_few_passes(llm: LanguageModel) -> None:
    made = llm.generate(PROMPTS[0], max_tokens=TOKENS, method=RetrievalDecoder())
    assert made.usage.mean_accepted_tokens > 2
    assert made.usage.accepted_by["suffix"] > TOKENS / 3
    assert made.timing.verifying + made.timing.drafting < made.timing.decode


@PACKED_BF16
def test_references_that_the_prompt_does_not_hold_are_copied_from(invariant: LanguageModel) -> None:
    """The model's own words stand in a reference: nearly all of them can be copied from there."""
    question = "Write two sentences about snow."
    text = invariant.generate(question, max_tokens=TOKENS, method="plain").text
    alone = invariant.generate(question, max_tokens=TOKENS, method=RetrievalDecoder(drafter="none"))
    helped = invariant.generate(
        question,
        max_tokens=TOKENS,
        method=RetrievalDecoder(drafter="none"),
        references=["Something else.", text],
    )
    assert helped.usage.accepted_by.get("reference", 0) > 8
    assert helped.usage.passes < alone.usage.passes


def test_nothing_leaks_from_one_request_into_another(llm: LanguageModel) -> None:
    method = RetrievalDecoder(drafter="none")
    llm.generate(PROMPTS[0], max_tokens=TOKENS, method=method, references=[PASSAGE])
    after = llm.generate("Write two sentences about snow.", max_tokens=TOKENS, method=method)
    assert "reference" not in after.usage.drafted_by
    text = llm.tokenizer.decode(ids(after))
    assert "Gannet" not in text


@pytest.mark.parametrize("question", ["Name three uses of copper.", "Write two sentences about the sea."])
def test_relaxation_is_counted_marked_and_bounded(exact_llm: LanguageModel, question: str) -> None:
    """A reference that differs from the model's text in one token, its second choice there: it is copied."""
    plain = exact_llm.generate(question, max_tokens=TOKENS, log_probs=2, method="plain")
    method = RetrievalDecoder(
        drafter="none", relaxed=True, cost_aware=False, retrieval=RetrievalSettings(trigger=None)
    )
    for place in range(6, TOKENS - 6):
        best, second = plain.tokens[place].alternatives
        if best.log_prob - second.log_prob > 2:
            continue
        changed = ids(plain)
        changed[place] = second.token
        text = exact_llm.tokenizer.decode(changed)
        made = exact_llm.generate(question, max_tokens=TOKENS, method=method, references=[text], log_probs=5)
        relaxed = [token for token in made.tokens if token.relaxed]
        assert made.usage.relaxed == len(relaxed)
        for token in relaxed:
            assert token.source == "reference"
            assert token.log_prob is not None
            assert 0 < token.alternatives[0].log_prob - token.log_prob <= method.tolerance + 1e-5
            assert token.token in [other.token for other in token.alternatives[1:]]
        if relaxed:
            return
    pytest.fail("nothing was relaxed")


@PACKED_BF16
def test_a_sampled_text_is_never_relaxed(invariant: LanguageModel) -> None:
    method = RetrievalDecoder(relaxed=True, tolerance=50.0, relax_top_k=1000)
    made = invariant.generate(PROMPTS[0], max_tokens=TOKENS, temperature=0.8, seed=1, method=method)
    assert made.usage.relaxed == 0
    options = {"max_tokens": TOKENS, "temperature": 0.8, "seed": 1, "method": "plain"}
    assert ids(made) == ids(invariant.generate(PROMPTS[0], **options))  # type: ignore[arg-type]


@PACKED_BF16
def test_stop_strings_inside_an_accepted_run(invariant: LanguageModel) -> None:
    options = {"max_tokens": 60, "stop": "one finger"}
    plain = invariant.generate(PROMPTS[0], method="plain", **options)  # type: ignore[arg-type]
    made = invariant.generate(PROMPTS[0], method="sam-decoding", **options)  # type: ignore[arg-type]
    assert (made.text, ids(made), made.finish_reason) == (plain.text, ids(plain), plain.finish_reason)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("drafter", "recycle"),
        ("drafter", "model:"),
        ("tolerance", -1.0),
        ("relax_top_k", 0),
        ("relax_attempts", -1),
        ("relax_matches", 0),
    ],
)
def test_wrong_settings_are_refused_before_any_work(field: str, value: object) -> None:
    with pytest.raises(InputError, match=r"drafter|tau|top_k|attempts|matches"):
        replace(RetrievalDecoder(), **{field: value})  # type: ignore[arg-type]


@PACKED_BF16
def test_a_draft_model_drafts(invariant: LanguageModel) -> None:
    """The model drafts for itself: the text is plain decoding's."""
    method = baselines.draft_model("smollm2-135m")
    for prompt in PROMPTS:
        made = invariant.generate(prompt, max_tokens=48, method=method)
        assert ids(made) == ids(invariant.generate(prompt, max_tokens=48, method="plain"))
        assert made.usage.accepted_by["draft-model"] / made.usage.drafted > 0.5


def test_a_draft_model_that_is_the_target_is_always_right(
    smollm2: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its bits do not depend on the pass either: rounding by the pass moves 8-bit models past near ties."""
    monkeypatch.setattr(loading, "default_invariance", lambda *_: True)
    monkeypatch.setattr(drafters, "_models", WeakValueDictionary())
    method = baselines.draft_model("smollm2-135m")
    with closing(specrag.load("smollm2-135m", dtype="int8", device="cpu")) as llm:
        for prompt in PROMPTS:
            events = llm.stream(prompt, max_tokens=48, method=method)
            *before, _ = [event for event in events if isinstance(event, specrag.Step)]
            assert sum(step.drafted for step in before) > 10
            assert all(step.accepted == step.drafted for step in before)


def test_an_unknown_method_is_named_with_the_nearest(llm: LanguageModel) -> None:
    with pytest.raises(InputError, match="did you mean respec"):
        llm.generate("Hello", method="respeck")
