"""Keys and values of another text, turned to where they stand: what pasting keeps, and what it may not touch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from specrag.engine.executor import run
from specrag.engine.outputs import LOGITS
from specrag.engine.passes import Coroutine
from specrag.engine.prefix_cache import PrefixCache
from specrag.engine.session import Session
from specrag.errors import ContextLengthError, InputError
from specrag.models.decoder import LeanDecoder
from specrag.models.toy import ToyModel
from specrag.speculation.tree import DraftTree

VOCABULARY = 61


def model_of(layers: int, *, int8_kv: bool = False) -> LeanDecoder:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    module = AutoModelForCausalLM.from_config(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return LeanDecoder(
        config, module.state_dict(), dtype=torch.float32, device=torch.device("cpu"), int8_kv=int8_kv
    )


@pytest.fixture(scope="module")
def one_layer() -> LeanDecoder:
    """A key or a value of its only layer is its token's alone, so that pasting changes nothing."""
    return model_of(1)


def text(seed: int, length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()
    return tokens


def read(model: LeanDecoder, tokens: list[int]) -> Session:
    session = Session(model)
    run(session.extend(tokens))
    return session


def next_logits(session: Session) -> np.ndarray:
    (row, *_) = run(session.score(DraftTree(), LOGITS))
    assert row.logits is not None
    return row.logits


@settings(max_examples=40)
@given(
    front=st.integers(0, 40),
    before=st.integers(0, 80),
    length=st.integers(1, 90),
    behind=st.integers(1, 20),
    shared=st.booleans(),
)
def test_where_keys_are_their_tokens_alone_pasting_is_reading(
    one_layer: LeanDecoder, front: int, before: int, length: int, behind: int, shared: bool
) -> None:
    """Whatever stood in front of them, and whether either cache lies in several extents."""
    block = text(1, length)
    told = [*text(2, before), *block, 0]
    source, session = read(one_layer, told), read(one_layer, text(3, front + 1))
    if shared:  # the block itself lies in two extents
        source, session = source.fork(before + length // 2 + 1), session.fork()
        run(source.extend(told[len(source) :]))
    run(session.paste(source, before, before + length))
    run(session.extend(text(5, behind)))
    whole = [*text(3, front + 1), *block, *text(5, behind)]
    assert session.tokens == whole
    np.testing.assert_allclose(next_logits(session), next_logits(read(one_layer, whole)), atol=1e-4)


def test_behind_the_same_text_it_is_reading_and_behind_another_it_is_not() -> None:
    model = model_of(3)
    head, block, end = text(1, 20), text(2, 40), text(3, 5)
    source = read(model, [*head, *block, 0])
    same, other = read(model, head), read(model, text(9, 20))
    for session in (same, other):
        run(session.paste(source, len(head), len(head) + len(block)))
        run(session.extend(end))
    expected = next_logits(read(model, [*head, *block, *end]))
    np.testing.assert_allclose(next_logits(same), expected, atol=1e-5)
    elsewhere = next_logits(read(model, [*text(9, 20), *block, *end]))
    assert np.abs(next_logits(other) - elsewhere).max() > 1e-2


def counted(steps: Coroutine[None], passes: list[object]) -> Coroutine[None]:
    try:
        step = next(steps)
        while True:
            passes.append(step)
            step = steps.send((yield step))
    except StopIteration:
        return


def test_tokens_in_front_are_read_in_one_pass_with_what_is_pending() -> None:
    model = model_of(3)
    head, anew, block, end = text(1, 20), text(2, 9), text(3, 40), text(4, 5)
    source = read(model, [*head, *block, 0])
    apart, together = read(model, head), read(model, head)
    passes: list[object] = []
    for _ in range(2):  # behind a pasted block, too
        run(apart.extend(anew))
        run(apart.paste(source, len(head), len(head) + len(block)))
        run(counted(together.paste(source, len(head), len(head) + len(block), anew), passes))
    assert len(passes) == 2
    assert together.tokens == apart.tokens
    for session in (apart, together):
        run(session.extend(end))
    np.testing.assert_allclose(next_logits(together), next_logits(apart), atol=1e-5)


def test_numbers_in_8_bits_are_moved_too() -> None:
    model = model_of(1, int8_kv=True)
    block = text(2, 40)
    session = read(model, text(1, 30))
    run(session.paste(read(model, [*text(3, 10), *block, 0]), 10, 50))
    run(session.extend([7]))
    expected = next_logits(read(model, [*text(1, 30), *block, 7]))
    spread = float(expected.std())
    assert np.abs(next_logits(session) - expected).max() < 0.2 * spread


def test_what_was_pasted_is_kept_for_nobody(one_layer: LeanDecoder) -> None:
    session = read(one_layer, text(1, 30))
    prefixes = PrefixCache(2**30)
    run(session.paste(read(one_layer, text(2, 41)), 0, 40))
    run(session.extend(text(3, 4)))
    assert session.pasted == 40
    for kept in (session, session.fork(), session.fork(20)):
        prefixes.keep(kept)
    assert prefixes.known(one_layer, session.tokens) == 0


def test_what_does_not_fit_is_refused_before_any_work(one_layer: LeanDecoder) -> None:
    session, source = read(one_layer, text(1, 200)), read(one_layer, text(2, 101))
    with pytest.raises(ContextLengthError, match="300 tokens"):
        run(session.paste(source, 0, 100))
    with pytest.raises(ContextLengthError, match="257 tokens"):
        run(session.paste(source, 0, 40, text(3, 17)))
    assert (len(session), session.pasted) == (200, 0)


def test_a_model_whose_keys_cannot_be_moved_is_named() -> None:
    toy = ToyModel(VOCABULARY)
    session = Session(toy)
    run(session.extend([1, 2, 3]))
    with pytest.raises(InputError, match="reuse: 'blocks'"):
        run(session.paste(session.fork(), 0, 2))


def test_what_was_pasted_is_found_as_a_whole_by_those_who_ask(one_layer: LeanDecoder) -> None:
    cache, tokens = PrefixCache(10**9), list(text(1, 80))
    pasted = read(one_layer, tokens)
    pasted.pasted = 30
    cache.keep(pasted, "one", pasted=True)
    assert len(cache.start(one_layer, [*tokens, 1, 2], "one")) == 0
    assert cache.known(one_layer, [*tokens, 1, 2], "one") == 0
    assert len(cache.start(one_layer, [*tokens, 1, 2], "two", pasted=True)) == 0
    assert len(cache.start(one_layer, [*tokens[:60], 1, 2], "one", pasted=True)) == 0  # a part of it
    found = cache.start(one_layer, [*tokens, 1, 2], "one", pasted=True)
    assert (len(found), found.pasted) == (80, 30)


def test_what_was_pasted_neither_hides_nor_replaces_what_was_read(one_layer: LeanDecoder) -> None:
    cache, tokens = PrefixCache(10**9), list(text(1, 80))
    cache.keep(read(one_layer, tokens[:50]))
    pasted = read(one_layer, tokens)
    pasted.pasted = 30
    cache.keep(pasted, pasted=True)
    assert len(cache.start(one_layer, [*tokens, 1])) == 50
    shorter = read(one_layer, tokens[:60])
    shorter.pasted = 20
    cache.keep(shorter, pasted=True)
    assert (
        len(cache.start(one_layer, [*tokens[:60], 1], pasted=True)) == 60
    )  # a prefix of a pasted one is kept too
    cache.keep(read(one_layer, tokens))
    assert len(cache.start(one_layer, [*tokens, 1])) == 80
    assert cache.start(one_layer, [*tokens, 1], pasted=True).pasted == 0
