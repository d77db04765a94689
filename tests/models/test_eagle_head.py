"""The EAGLE head: the public files, and the packed network against a slow plain one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from specrag.engine.executor import Executor
from specrag.engine.outputs import LOGITS, NOTHING, Outputs, Row
from specrag.engine.passes import Coroutine, Pass, Segment, gather
from specrag.errors import SpecragError
from specrag.models.eagle_files import HeadFiles, read_head
from specrag.models.eagle_head import EagleHead
from specrag.models.linear import PackedLinear
from tests.models.tiny_eagle import HIDDEN, VOCAB, HeadCase, SlowHead, make_case, output_matrix

TOLERANCE = 1e-4
ANSWER = Outputs(hidden=("final",), logits=True, top_k=5)
KINDS = ("llama", "vicuna", "qwen2")


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HeadCase:
    return make_case(request.param, tmp_path_factory.mktemp("head"))


def slow(case: HeadCase) -> SlowHead:
    return SlowHead(case.files, case.target.embedding, output_matrix(case.target))


@dataclass(frozen=True)
class Fed:
    """The rows of one sequence, as the slow head reads them."""

    tokens: list[int]
    features: list[torch.Tensor]

    def __len__(self) -> int:
        return len(self.tokens)

    def then(self, token: int, feature: torch.Tensor) -> Fed:
        return Fed([*self.tokens, token], [*self.features, feature])

    def first(self, count: int) -> Fed:
        return Fed(self.tokens[:count], self.features[:count])


def random_rows(seed: int, count: int) -> Fed:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (count,), generator=draw).tolist()
    return Fed(tokens, list(torch.randn(count, HIDDEN, generator=draw)))


def check(case: HeadCase, row: Row, path: Fed) -> None:
    """Features, logits and likeliest tokens of a row equal the slow head's."""
    reference = slow(case)
    feature = reference.feature(path.tokens, path.features)
    np.testing.assert_allclose(row.hidden["final"], feature, atol=TOLERANCE, rtol=TOLERANCE)
    expected = reference.log_probs(feature)
    assert row.logits is not None
    assert row.top_tokens is not None
    assert row.top_log_probs is not None
    found = torch.log_softmax(torch.from_numpy(row.logits), dim=-1)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    np.testing.assert_allclose(row.top_log_probs, expected[row.top_tokens], atol=TOLERANCE)
    np.testing.assert_allclose(row.top_log_probs, torch.topk(expected, 5).values, atol=TOLERANCE)


def run_pass(case: HeadCase, *segments: Segment) -> list[list[Row]]:
    return case.head.forward(segments)


def feed(case: HeadCase, cache: Any, path: Fed) -> list[Row]:
    """Commit the rows of a path that the cache does not hold yet."""
    tokens, features = path.tokens[cache.length :], path.features[cache.length :]
    rows = run_pass(case, Segment(cache, tokens, None, [ANSWER] * len(tokens), features))[0]
    cache.accept(range(len(tokens)))
    return rows


# -- against the slow head ------------------------------------------------------------------------------------


def test_every_row_of_a_chain_equals_the_slow_head(case: HeadCase) -> None:
    path = random_rows(0, 300)  # more than the fused attention takes
    cache = case.head.new_cache()
    rows = [row for end in (7, 290, 300) for row in feed(case, cache, path.first(end))]
    assert len(rows) == 300
    for index in (0, 1, 6, 7, 150, 289, 290, 299):
        check(case, rows[index], path.first(index + 1))


@pytest.mark.parametrize("context", [3, 260])
def test_a_tree_in_one_pass_and_level_by_level(case: HeadCase, context: int) -> None:
    stem = random_rows(1, context)
    parents = [-1, -1, 0, 0, 1, 2, 2, 4, 7]
    nodes = random_rows(2, len(parents))
    paths: list[Fed] = []
    for node, parent in enumerate(parents):
        before = stem if parent < 0 else paths[parent]
        paths.append(before.then(nodes.tokens[node], nodes.features[node]))
    cache = case.head.new_cache()
    feed(case, cache, stem)
    outputs = [ANSWER] * len(parents)
    rows = run_pass(case, Segment(cache, nodes.tokens, parents, outputs, nodes.features))[0]
    for row, path in zip(rows, paths, strict=True):
        check(case, row, path)
    # The rows written before stay where they are; nothing was accepted.
    for start, end in ((0, 2), (2, 5), (5, 6), (6, 9)):
        part = slice(start, end)
        segment = Segment(
            cache, nodes.tokens[part], parents[:end], outputs[part], nodes.features[part], written=start
        )
        for row, path in zip(run_pass(case, segment)[0], paths[part], strict=True):
            check(case, row, path)
    assert cache.length == context
    # What a tree left behind is not seen by what is committed afterwards.
    after = stem.then(5, nodes.features[0])
    check(case, feed(case, cache, after)[0], after)


def test_requests_share_passes(case: HeadCase, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [random_rows(seed, count) for seed, count in ((3, 4), (4, 30), (5, 270), (6, 30))]
    packed: list[int] = []
    forward = EagleHead.forward

    def noting(head: EagleHead, segments: Sequence[Segment]) -> list[list[Row]]:
        packed.append(len(segments))
        return forward(head, segments)

    monkeypatch.setattr(EagleHead, "forward", noting)

    def draft(path: Fed) -> Coroutine[None]:
        """A chain, then a tree of two levels in two passes, and a row of the next round."""
        cache = case.head.new_cache()
        yield Pass(case.head, Segment(cache, path.tokens, None, [NOTHING] * len(path.tokens), path.features))
        cache.accept(range(len(path.tokens)))
        more = random_rows(len(path.tokens), 3)
        first = [path.then(more.tokens[node], more.features[node]) for node in range(2)]
        second = first[1].then(more.tokens[2], more.features[2])
        rows = yield Pass(
            case.head, Segment(cache, more.tokens[:2], [-1, -1], [ANSWER] * 2, more.features[:2])
        )
        for row, expected in zip(rows, first, strict=True):
            check(case, row, expected)
        rows = yield Pass(
            case.head, Segment(cache, more.tokens[2:], [-1, -1, 1], [ANSWER], more.features[2:], written=2)
        )
        check(case, rows[0], second)
        rows = yield Pass(case.head, Segment(cache, [1], None, [ANSWER], more.features[:1]))
        check(case, rows[0], path.then(1, more.features[0]))

    executor = Executor()
    executor.run(executor.submit(gather([draft(path) for path in paths])))
    executor.close()
    assert packed == [4, 4, 4, 4]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["chain", "tree", "truncate", "fork"]), st.integers(1, 9), st.integers(0, 99)),
    min_size=1,
    max_size=7,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(OPERATIONS)
def test_after_any_history_it_answers_as_a_new_one(
    case: HeadCase, operations: list[tuple[str, int, int]]
) -> None:
    path = random_rows(7, 5)
    cache = case.head.new_cache()
    feed(case, cache, path)
    for name, number, seed in operations:
        if name == "truncate":
            length = seed % (len(path) + 1)
            cache.truncate(length)
            path = path.first(length)
        elif name == "fork":
            old, cache = cache, cache.fork(len(path))
            # What the parent writes from now on must not reach the child.
            stray = random_rows(seed, number)
            run_pass(case, Segment(old, stray.tokens, None, [NOTHING] * number, stray.features))
            old.accept(range(number))
        else:
            more = random_rows(seed, number)
            parents = None if name == "chain" else [node - 1 - seed % (node + 1) for node in range(number)]
            segment = Segment(cache, more.tokens, parents, [NOTHING] * number, more.features)
            run_pass(case, segment)
            if name == "chain":
                cache.accept(range(number))
                path = Fed(path.tokens + more.tokens, path.features + more.features)
    last = path.then(11, random_rows(8, 1).features[0])
    check(case, feed(case, cache, last)[0], last)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_near(kind: str, tmp_path: Path) -> None:
    if not PackedLinear.available():
        pytest.skip("this processor has no packed bf16 product")
    case = make_case(kind, tmp_path, dtype=torch.bfloat16)
    path = random_rows(9, 40)
    features = [feature.bfloat16() for feature in path.features]
    segment = Segment(case.head.new_cache(), path.tokens, None, [ANSWER] * 40, features)
    rows = run_pass(case, segment)[0]
    for index in (0, 20, 39):
        before = path.first(index + 1)
        expected = slow(case).feature(before.tokens, before.features)
        found = rows[index].hidden["final"]
        assert found.dtype == torch.bfloat16
        assert float((found.float() - expected).norm() / expected.norm()) < 0.03


# -- the reduced vocabulary -----------------------------------------------------------------------------------

TOKENS = torch.tensor([0, 3, 4, 17, 29, 30, 44, 60])


def reduced(case: HeadCase) -> EagleHead:
    files = HeadFiles(case.files.config, case.files.weights, TOKENS)
    return EagleHead(files, case.target, output_matrix(case.target)[TOKENS])


def test_only_the_tokens_of_a_reduced_vocabulary_are_proposed(case: HeadCase) -> None:
    head = reduced(case)
    path = random_rows(10, 12)
    feature = slow(case).feature(path.tokens, path.features)
    expected = slow(case).log_probs(feature, TOKENS)

    def ask(outputs: Outputs) -> Row:
        wanted = [NOTHING] * 11 + [outputs]
        return head.forward([Segment(head.new_cache(), path.tokens, None, wanted, path.features)])[0][-1]

    row = ask(Outputs(argmax=True, top_k=5, entropy=True, hidden=("final",)))
    order = torch.argsort(expected, descending=True)
    np.testing.assert_allclose(row.hidden["final"], feature, atol=TOLERANCE, rtol=TOLERANCE)
    assert row.top_tokens is not None
    assert row.top_log_probs is not None
    assert row.top_tokens.tolist() == TOKENS[order[:5]].tolist()
    np.testing.assert_allclose(row.top_log_probs, expected[order[:5]], atol=TOLERANCE)
    assert row.argmax == int(TOKENS[order[0]])
    assert row.entropy == pytest.approx(float(-(expected.exp() * expected).sum()), abs=TOLERANCE)
    every = ask(Outputs(top_k=20)).top_tokens  # more than there are
    assert every is not None
    assert sorted(every.tolist()) == TOKENS.tolist()
    # Whoever asks for all logits gets them at the tokens' own places.
    full = ask(Outputs(logits=True, top_k=5, argmax=True, log_probs_of=(17, 18)))
    assert full.logits is not None
    assert full.logits.shape == (VOCAB,)
    assert np.flatnonzero(np.isfinite(full.logits)).tolist() == TOKENS.tolist()
    assert full.argmax == row.argmax
    assert full.top_tokens is not None
    assert full.top_tokens.tolist() == row.top_tokens.tolist()
    assert full.log_probs is not None
    assert full.log_probs[0] == pytest.approx(float(expected[3]), abs=TOLERANCE)
    assert full.log_probs[1] == -np.inf


def test_it_is_read_from_a_file_beside_the_weights(case: HeadCase, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((case.folder / name).read_bytes())
    save_file({"tokens": TOKENS}, folder / "draft_vocabulary.safetensors")
    files = read_head(folder, case.target.embedding)
    assert files.vocabulary is not None
    assert files.vocabulary.tolist() == TOKENS.tolist()


# -- what a pass must bring -----------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [None, []])
def test_rows_without_features_are_refused(case: HeadCase, features: list[torch.Tensor] | None) -> None:
    with pytest.raises(SpecragError, match="for 1 rows of a head"):
        run_pass(case, Segment(case.head.new_cache(), [1], None, [LOGITS], features))


def test_it_has_no_other_hidden_states(case: HeadCase) -> None:
    segment = Segment(
        case.head.new_cache(), [1], None, [Outputs(hidden=("ffn_input",))], random_rows(0, 1).features
    )
    with pytest.raises(SpecragError, match="hidden"):
        run_pass(case, segment)
