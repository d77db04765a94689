"""The prefix cache: the same logits with less work, nothing seen of other tenants, memory bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.engine.executor import run
from specrag.engine.outputs import LOGITS
from specrag.engine.prefix_cache import MIN_SHARED_TOKENS, PrefixCache
from specrag.engine.session import Session
from specrag.errors import InputError
from specrag.models.decoder import LeanDecoder
from specrag.models.toy import ToyModel
from tests.engine.test_kv import Tree, close, fresh, next_logits, text, tiny_model

PLENTY = 1 << 30


@pytest.fixture(scope="module")
def model() -> LeanDecoder:
    return tiny_model()


def request(
    cache: PrefixCache, model: LeanDecoder | ToyModel, tokens: list[int], tenant: str = ""
) -> Session:
    """What a generating call does before it decodes."""
    session = cache.start(model, tokens, tenant)
    run(session.extend(tokens[len(session) :]))
    cache.keep(session, tenant)
    return session


@pytest.mark.parametrize("shared", [16, 40, 63, 64, 65, 100])
def test_a_hit_gives_the_logits_of_a_fresh_prefill(model: LeanDecoder, shared: int) -> None:
    cache = PrefixCache(PLENTY)
    first, second = text(1, 100), [*text(1, 100)[:shared], *text(2, 30)]
    request(cache, model, first).close()
    session = cache.start(model, second)
    assert len(session) >= shared
    assert session.cache.nbytes == 0
    assert session.tokens == second[: len(session)]
    run(session.extend(second[len(session) :]))
    np.testing.assert_allclose(next_logits(session), fresh(model, second), atol=1e-4)


def test_the_same_prompt_again_feeds_almost_nothing() -> None:
    model = ToyModel()
    cache = PrefixCache(PLENTY)
    tokens = [1, 2, 3, 4] * 20
    request(cache, model, tokens)
    rows = model.rows
    session = request(cache, model, tokens)
    assert model.rows - rows <= 2
    assert session.tokens == tokens
    assert len(cache._entries) == 1


def test_a_short_common_beginning_is_not_used(model: LeanDecoder) -> None:
    cache = PrefixCache(PLENTY)
    request(cache, model, text(1, 50))
    assert len(cache.start(model, [*text(1, 50)[: MIN_SHARED_TOKENS - 1], 60, 60, 60])) == 0


def test_the_longest_common_beginning_is_taken(model: LeanDecoder) -> None:
    cache = PrefixCache(PLENTY)
    base = text(1, 90)
    request(cache, model, [*base[:40], *text(2, 40)])
    request(cache, model, [*base[:70], *text(3, 40)])
    request(cache, model, [*base[:20], *text(4, 40)])
    assert 70 <= len(cache.start(model, base)) <= 72


def test_tenants_and_models_never_share(model: LeanDecoder) -> None:
    cache = PrefixCache(PLENTY)
    tokens = text(1, 80)
    request(cache, model, tokens, tenant="a")
    assert len(cache.start(model, tokens, tenant="b")) == 0
    assert len(cache.start(model, tokens, tenant="")) == 0
    assert len(cache.start(tiny_model(1), tokens, tenant="a")) == 0
    assert len(cache.start(model, tokens, tenant="a")) == 79
    # Another tenant's equal prompt neither replaces nor touches the first one's.
    request(cache, model, tokens, tenant="b")
    assert {owner for owner, _ in cache._entries.values()} == {"a", "b"}


def test_a_request_that_goes_on_or_is_closed_does_not_change_what_was_kept(model: LeanDecoder) -> None:
    cache = PrefixCache(PLENTY)
    tokens = text(1, 60)
    session = request(cache, model, tokens)
    session.truncate(20)
    run(session.extend(text(5, 70)))
    session.close()
    again = request(cache, model, [*tokens, 9])
    np.testing.assert_allclose(next_logits(again), fresh(model, [*tokens, 9]), atol=1e-4)


def test_the_longest_unused_goes_first(model: LeanDecoder) -> None:
    prompts = [text(seed, 60) for seed in range(4)]
    one = model.new_cache()
    one.prepare(60)
    cache = PrefixCache(3 * one.nbytes)
    for prompt in prompts[:3]:
        request(cache, model, prompt).close()
    assert cache.nbytes == 3 * one.nbytes
    cache.start(model, prompts[0])  # used: now the second is the longest unused
    request(cache, model, prompts[3]).close()
    found = [len(cache.start(model, prompt)) > 0 for prompt in prompts]
    assert found == [True, False, True, True]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(1, 120),
            st.integers(0, 40),
            st.sampled_from(["a", "b"]),
            st.booleans(),
        ),
        max_size=12,
    ),
    st.integers(0, 12),
)
def test_memory_is_limited_whatever_comes(
    requests: list[tuple[int, int, int, str, bool]], extents: int
) -> None:
    """Conversations that grow, branch and generate: what is really held, shared extents once, stays below."""
    model = _MODEL
    limit = extents * 64 * model.new_cache().shape.bytes_per_token
    cache = PrefixCache(limit)
    for seed, length, more, tenant, decodes in requests:
        tokens = [*text(seed, length), *text(50 + more, more)]
        session = request(cache, model, tokens, tenant)
        if decodes:
            run(session.extend(text(99, 80)))  # grows the buffer that the cache has kept
        session.close()
        cache.start(model, [1])  # any later request
        held = {id(e): e for _, kept in cache._entries.values() for e in kept.cache.extents()}
        assert cache.nbytes == sum(extent.nbytes for extent in held.values()) <= limit


_MODEL = tiny_model()


def test_no_memory_keeps_nothing_and_less_is_refused(model: LeanDecoder) -> None:
    cache = PrefixCache(0)
    request(cache, model, text(1, 60))
    assert cache.nbytes == 0
    assert len(cache.start(model, text(1, 60))) == 0
    with pytest.raises(InputError, match="limit_bytes"):
        PrefixCache(-1)


def test_clear_forgets_everything(model: LeanDecoder) -> None:
    cache = PrefixCache(PLENTY)
    request(cache, model, text(1, 60))
    assert cache.nbytes > 0
    cache.clear()
    assert cache.nbytes == 0
    assert len(cache.start(model, text(1, 60))) == 0


def test_scoring_a_tree_behind_a_hit(model: LeanDecoder) -> None:
    cache = PrefixCache(PLENTY)
    request(cache, model, text(1, 60))
    tokens = [*text(1, 60), 5, 6]
    session = request(cache, model, tokens)
    rows = run(session.score(Tree([7, 8, 9], [-1, 0, -1]), LOGITS))
    close(rows[2], fresh(model, [*tokens, 7, 8]))
    close(rows[3], fresh(model, [*tokens, 9]))


def test_what_is_held_stays_whatever_the_limit(model: LeanDecoder) -> None:
    cache = PrefixCache(0)
    session = Session(model)
    run(session.extend(text(1, 60)))
    cache.hold(session, "alice")
    assert cache.nbytes == 0  # not of the cache's own
    assert len(cache.start(model, text(1, 60), "bob")) == 0
    hit = cache.start(model, [*text(1, 60), 5], "alice")
    assert hit.tokens == text(1, 60)
    run(hit.extend([5, *text(2, 10)]))
    np.testing.assert_allclose(next_logits(hit), fresh(model, [*text(1, 60), 5, *text(2, 10)]), atol=1e-4)
    cache.release(session)
    assert len(cache.start(model, text(1, 60), "alice")) == 0
