"""RAPID on the real model: plain decoding's text at eta = 0, one text whatever the schedule above; its baselines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import specrag
from specrag import InputError, LanguageModel
from specrag.engine.processors import AllowedTokens
from specrag.errors import ContextLengthError
from specrag.methods.base import Decoder
from specrag.methods.rapid.baselines import StreamingDecoder, naive_sd
from specrag.methods.rapid.decoder import RapidDecoder, Reading
from specrag.models import catalog
from specrag.speculation.augmented_target import Residual
from specrag.speculation.drafters.draft_model import DRAFT_MODEL
from specrag.speculation.drafters.rag import RAG
from specrag.speculation.drafters.recycling import RECYCLING
from specrag.speculation.drafters.suffix import SUFFIX

COLOURS = ("green", "dark red", "pale blue", "yellow", "white", "orange", "violet")
ROOMS = [
    f"Room {number} of the old customs house is painted {COLOURS[number % 7]} and has {number % 4 + 1} windows."
    for number in range(10, 118)
]
QUESTION = "\n\nList rooms 63, 64 and 65 with their colours and windows, one sentence each."
NEW = 16


@pytest.fixture(scope="module")
def exact(smollm2: object) -> Iterator[LanguageModel]:
    """The small model in fp32; a prompt that was read once is not read again."""
    llm = specrag.load("smollm2-135m", dtype="fp32", device="cpu", prefix_cache_bytes=2**29)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def prompt(exact: LanguageModel) -> list[int]:
    """More than 2,000 tokens."""
    tokens = exact.encode("\n".join(ROOMS) + QUESTION)
    assert len(tokens) > 2000
    return tokens


@pytest.fixture(scope="module")
def part(exact: LanguageModel) -> list[int]:
    """What a retriever would find."""
    return exact.encode("\n".join(ROOMS[50:58]) + QUESTION)


def ids(llm: LanguageModel, prompt: Sequence[int], method: str | Decoder, **options: object) -> list[int]:
    made = llm.generate(prompt, method=method, **{"max_tokens": NEW, **options})  # type: ignore[arg-type]
    return [token.token for token in made.tokens]


@pytest.fixture(scope="module")
def plain(exact: LanguageModel, prompt: list[int]) -> list[int]:
    """Plain decoding's text, behind the keys and values that all others read too."""
    ids(exact, prompt, "plain", max_tokens=1)
    return ids(exact, prompt, "plain")


# --- eta = 0 -------------------------------------------------------------------------------------------------

LOSSLESS = {
    "cost-aware": RapidDecoder(),
    "guesses alone": RapidDecoder(suffix=False, cost_aware=False, gamma=6),
    "naive-sd": naive_sd(gamma=4),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_greedy_text_behind_2k_tokens_is_plain_decodings(
    exact: LanguageModel, prompt: list[int], part: list[int], plain: list[int], name: str
) -> None:
    method = LOSSLESS[name]
    made = exact.generate(prompt, method=method.reading(part), max_tokens=NEW)
    assert [token.token for token in made.tokens] == plain
    assert made.usage.accepted > 2
    assert set(made.usage.drafted_by) <= ({RAG, SUFFIX, RECYCLING} if method.copies else {RAG})
    assert made.usage.cached_tokens == len(prompt) - 1


def test_sampled_text_is_plain_decodings(exact: LanguageModel, prompt: list[int], part: list[int]) -> None:
    wanted = {"temperature": 0.8, "top_p": 0.95, "seed": 3}
    made = ids(exact, prompt, RapidDecoder(cost_aware=False, gamma=4).reading(part), **wanted)
    assert made == ids(exact, prompt, "plain", **wanted)


def test_a_drafter_with_a_window_changes_nothing(
    exact: LanguageModel, prompt: list[int], plain: list[int]
) -> None:
    made = exact.generate(prompt, method=StreamingDecoder(window=160, gamma=4), max_tokens=NEW)
    assert [token.token for token in made.tokens] == plain
    assert made.usage.drafted > 0


# --- eta > 0 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", ["exact", "paper"])
def test_one_seed_gives_one_text_whatever_the_number_of_guesses(
    exact: LanguageModel, prompt: list[int], part: list[int], residual: Residual
) -> None:
    """Also where the clock chooses it, as by default; all behind the same kept keys."""
    plain = ids(exact, part, "plain", max_tokens=1, temperature=1.0, seed=2)
    methods = [
        RapidDecoder(eta=10.0, residual=residual, gamma=gamma, cost_aware=False, suffix=gamma == 5)
        for gamma in (1, 2, 5, 10)
    ]
    texts = [
        ids(exact, part, method.reading(prompt[-60:]), temperature=1.0, seed=2)
        for method in (*methods, RapidDecoder(eta=10.0, residual=residual))
    ]
    assert texts == [texts[0]] * 5
    assert texts[0] != [*plain, *ids(exact, part, "plain", temperature=1.0, seed=2)[1:]]


def test_greedy_text_is_plain_decodings_whatever_eta_is(
    exact: LanguageModel, prompt: list[int], part: list[int]
) -> None:
    plain = ids(exact, part, "plain")
    for method in (RapidDecoder(eta=20.0), RapidDecoder(eta=20.0, cost_aware=False, gamma=4)):
        assert ids(exact, part, method.reading(prompt[-60:])) == plain


def test_a_grammar_binds_the_drafter_too(exact: LanguageModel, prompt: list[int], part: list[int]) -> None:
    """Of two tokens at every place, which nobody would guess here."""
    pairs = AllowedTokens(lambda output: {1000 + 7 * len(output), 3000 + 7 * len(output)})
    method = RapidDecoder(eta=5.0, cost_aware=False, gamma=3, suffix=False)
    made = exact.generate(
        part, method=method.reading(prompt[-60:]), max_tokens=8, temperature=1.0, processors=[pairs]
    )
    assert [token.token % 1000 for token in made.tokens] == list(range(0, 56, 7))
    assert made.usage.accepted > 0


def test_a_drafter_that_is_never_asked_reads_nothing(
    exact: LanguageModel, prompt: list[int], part: list[int]
) -> None:
    for method in (RapidDecoder(), RapidDecoder(cost_aware=False)):
        step: Any
        (step,) = exact.stream(prompt, method=method.reading(part), max_tokens=1)
        assert step.reading == 0
    steps: list[Any] = list(exact.stream(prompt, method=naive_sd().reading(part), max_tokens=3))
    assert steps[0].reading > steps[0].drafting > 0


def test_sampled_text_comes_again_with_its_seed(
    exact: LanguageModel, prompt: list[int], part: list[int]
) -> None:
    # Kept keys and freshly read ones differ by rounding, which may turn a tie: with seed 1 the noise of two tokens is
    # 7e-6 apart. All texts follow the same kept ones.
    ids(exact, part, "plain", max_tokens=1)
    for residual in ("exact", "paper"):
        method = RapidDecoder(eta=10.0, residual=residual, cost_aware=False, gamma=4)
        texts = [
            ids(exact, part, method.reading(prompt[-60:]), temperature=1.0, seed=seed, max_tokens=8)
            for seed in (1, 1, 2)
        ]
        assert texts[0] == texts[1] != texts[2]


def test_steps_tell_where_the_time_went(exact: LanguageModel, prompt: list[int], part: list[int]) -> None:
    method = RapidDecoder(eta=5.0, cost_aware=False, gamma=3, suffix=False)
    steps: list[Any] = list(exact.stream(prompt, method=method.reading(part), max_tokens=8))
    assert steps[0].reading > 0
    assert all(step.reading == 0 for step in steps[1:])
    assert all(step.drafting > 0 and step.verifying > 0 for step in steps)
    assert all(step.drafted <= 3 for step in steps)


# --- drafters ------------------------------------------------------------------------------------------------


def test_self_speculation_holds_the_weights_once(exact: LanguageModel) -> None:
    method = RapidDecoder()
    assert method.drafter_model(exact.loaded) is exact.loaded
    assert method._model.known_fit(exact.model).model is exact.model


def test_a_loaded_model_drafts(
    exact: LanguageModel, prompt: list[int], part: list[int], plain: list[int]
) -> None:
    """Upward speculation: another model of the same vocabulary; here a twin."""
    other = specrag.load("smollm2-135m", dtype="bf16", device="cpu")
    try:
        method = RapidDecoder(drafter=other, cost_aware=False, gamma=4)
        assert method.drafter_model(exact.loaded) is other.loaded
        assert ids(exact, prompt, method.reading(part)) == plain
        assert len(ids(exact, prompt, RapidDecoder(drafter=other, eta=5.0).reading(part))) == NEW
    finally:
        other.close()


@pytest.mark.slow
def test_a_drafter_of_another_vocabulary_reads_tokens_of_its_own(
    exact: LanguageModel, prompt: list[int], plain: list[int]
) -> None:
    name = "gemma-3-270m"
    if not any(status.name == name and status.pulled for status in catalog.list_models()):
        pytest.skip(f"{name} is not on this machine")
    method = RapidDecoder(drafter=name, cost_aware=False, gamma=4, suffix=False)
    theirs = method.drafter_model(exact.loaded)
    reading = theirs.tokenizer.encode("\n".join(ROOMS[53:56]) + "\n\nThe same once more:\n", special=True)
    made = exact.generate(prompt, method=method.reading(reading), max_tokens=8)
    assert [token.token for token in made.tokens] == plain[:8]
    assert made.usage.accepted_by.get(DRAFT_MODEL, 0) > 0
    lent = SimpleNamespace(loaded=theirs)
    with pytest.raises(InputError, match="no opinion of the target's tokens"):
        ids(exact, prompt, RapidDecoder(drafter=lent, eta=5.0).reading(reading))


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"eta": -1.0}, "eta"),
        ({"gamma": 0}, "gamma"),
        ({"gamma": True}, "gamma"),
        ({"residual": "none"}, "residual"),
        ({"guard": "raw"}, "guard"),
        ({"mask": -0.1}, "mask"),
        ({"drafter": ""}, "drafter"),
        ({"drafter": 3}, "drafter"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, object], match: str) -> None:
    with pytest.raises(InputError, match=match):
        RapidDecoder(**change)  # type: ignore[arg-type]


def test_it_needs_to_be_told_what_the_drafter_reads(llm: LanguageModel) -> None:
    with pytest.raises(InputError, match="--context"):
        llm.generate("Hello", method=RapidDecoder(), max_tokens=4)
    with pytest.raises(InputError, match="at least one token"):
        RapidDecoder().reading([])


def test_what_the_drafter_cannot_read_is_refused_before_any_work(llm: LanguageModel) -> None:
    length = llm.context_length
    with pytest.raises(ContextLengthError):
        llm.generate("Hello", method=RapidDecoder().reading([1] * (length + 1)), max_tokens=4)
    full = RapidDecoder(eta=5.0).reading([1] * (length - 10))
    with pytest.raises(ContextLengthError):
        llm.generate("Hello", method=full, max_tokens=20, temperature=1.0)


def test_the_window_holds_sinks_and_the_end() -> None:
    drafter = StreamingDecoder(window=20, sinks=4)
    assert drafter.kept(range(100), 6) == [0, 1, 2, 3, *range(90, 100)]
    assert drafter.kept(range(100), 500) == [0, 1, 2, 3, *range(94, 100)]
    assert drafter.kept(range(12), 6) == list(range(12))
    with pytest.raises(InputError, match="sinks"):
        StreamingDecoder(window=8, sinks=4)


def test_requests_share_what_a_configuration_has_learned() -> None:
    method = RapidDecoder(eta=5.0)
    first, second = method.reading([1]), method.reading([2])
    assert isinstance(first, Reading)
    assert first.method is second.method
    assert first.name == "rapid"
