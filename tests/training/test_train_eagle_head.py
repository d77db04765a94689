"""What the head computes while it is trained is what drafting computes, step by step, for every draft at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from specrag.engine.outputs import Outputs
from specrag.engine.passes import Segment
from specrag.models.decoder import LeanDecoder
from specrag.models.eagle_files import HeadConfig, read_head
from specrag.models.eagle_head import EagleHead
from specrag.training.eagle.card import write_head
from specrag.training.eagle.features import Batch, Text, plan_epoch
from specrag.training.eagle.losses import TargetMatrices, count_hits, frequent_tokens, losses, unrolled
from specrag.training.eagle.module import TrainableHead, head_config
from specrag.training.eagle.objective import new_head
from tests.models.tiny_eagle import output_matrix, tiny_target

CPU = torch.device("cpu")
LENGTHS, ANSWERS = (9, 1, 14), (4, 1, 2)


@pytest.fixture(scope="module")
def target() -> LeanDecoder:
    return tiny_target("llama")


@pytest.fixture(scope="module")
def config(target: LeanDecoder) -> HeadConfig:
    return head_config(target.config)


@pytest.fixture(scope="module")
def matrices(target: LeanDecoder) -> TargetMatrices:
    tokens = torch.arange(0, target.vocab_size, 2)
    return TargetMatrices(target.embedding.float(), output_matrix(target)[tokens], tokens)


@pytest.fixture
def head(config: HeadConfig) -> TrainableHead:
    head = new_head(config, 3, CPU)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
    return head


def make_batch(config: HeadConfig, *, even: bool = False) -> Batch:
    """Random features; every text's answer begins at its own place."""
    draw = torch.Generator().manual_seed(5)
    rows = sum(LENGTHS)
    features = torch.randn(rows + len(LENGTHS), config.hidden_size, generator=draw)
    tokens = torch.randint(0, config.vocab_size, (rows + len(LENGTHS),), generator=draw)
    if even:
        tokens -= tokens % 2
    parts = list(
        zip(features.split([n + 1 for n in LENGTHS]), tokens.split([n + 1 for n in LENGTHS]), strict=True)
    )
    return Batch(
        LENGTHS,
        torch.cat([ids[1:] for _, ids in parts]),
        torch.cat([found[:-1] for found, _ in parts]),
        torch.cat([found[1:] for found, _ in parts]),
        torch.cat([F.pad(ids[2:], (0, 1), value=-1) for _, ids in parts]),
        torch.cat([torch.arange(n) + 1 - begin for n, begin in zip(LENGTHS, ANSWERS, strict=True)]),
    )


def drafting_head(head: TrainableHead, config: HeadConfig, target: LeanDecoder, folder: Path) -> EagleHead:
    """The same head as the drafter runs it, with the very weights in fp32."""
    write_head(folder, config, head.state_dict(), [])
    files = read_head(folder, target.embedding)
    assert files.config == config
    weights = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    assert all(torch.equal(weights[name].bfloat16(), tensor) for name, tensor in files.weights.items())
    files.weights.update(weights)
    return EagleHead(files, target)


def step(head: EagleHead, cache: object, tokens: list[int], features: list[torch.Tensor]) -> torch.Tensor:
    """Feed rows; the estimate of the last one."""
    outputs = [Outputs(hidden=("final",))] * len(tokens)
    rows = head.forward([Segment(cache, tokens, None, outputs, features)])[0]
    cache.accept(range(len(tokens)))  # type: ignore[attr-defined]
    found: torch.Tensor = rows[-1].hidden["final"]
    return found


def test_every_step_is_what_drafting_computes(
    head: TrainableHead, config: HeadConfig, target: LeanDecoder, matrices: TargetMatrices, tmp_path: Path
) -> None:
    """From each row: the target's features up to it, then the head's own estimates, fed one by one."""
    batch = make_batch(config)
    drafter = drafting_head(head, config, target, tmp_path)
    depth = 4
    with torch.no_grad():
        found = [estimate.features for estimate in unrolled(head, matrices, batch, batch.features, depth)]
    first = compared = 0
    for length in LENGTHS:
        tokens = batch.tokens[first : first + length].tolist()
        features = list(batch.features[first : first + length])
        for row in range(length):
            cache = drafter.new_cache()
            estimate = step(drafter, cache, tokens[: row + 1], features[: row + 1])
            for deep in range(depth):
                if row + deep == length:
                    break
                if deep:
                    estimate = step(drafter, cache, [tokens[row + deep]], [estimate])
                torch.testing.assert_close(found[deep][first + row + deep], estimate, atol=1e-4, rtol=1e-4)
                compared += 1
        first += length
    assert compared == sum(min(depth, length - row) for length in LENGTHS for row in range(length))


def test_texts_do_not_see_each_other(
    head: TrainableHead, config: HeadConfig, matrices: TargetMatrices
) -> None:
    batch = make_batch(config)
    with torch.no_grad():
        together = [each.features for each in unrolled(head, matrices, batch, batch.features, 3)]
        changed = batch.features.clone()
        changed[: LENGTHS[0]] += 1
        other = [each.features for each in unrolled(head, matrices, batch, changed, 3)]
    begin = sum(LENGTHS[:2])
    for depth, (before, after) in enumerate(zip(together, other, strict=True)):
        # The first rows of a text mean nothing behind its first step.
        torch.testing.assert_close(before[begin + depth :], after[begin + depth :])
        assert not torch.allclose(before[depth : LENGTHS[0]], after[depth : LENGTHS[0]])


def test_losses_are_their_formulas(head: TrainableHead, config: HeadConfig, matrices: TargetMatrices) -> None:
    batch = make_batch(config)
    noise = torch.randn(batch.features.shape, generator=torch.Generator().manual_seed(1)) / 10
    steps = 3
    with torch.no_grad():
        found = losses(head, matrices, batch, steps=steps, noise=noise)
        estimates = [each.features for each in unrolled(head, matrices, batch, batch.features + noise, steps)]
    regression, classification = [], []
    first = 0
    for length, answer in zip(LENGTHS, ANSWERS, strict=True):
        for depth in range(steps):
            for row in range(max(answer - 1, 0) + depth, length):
                guess, true = estimates[depth][first + row], batch.targets[first + row]
                difference = (guess - true).abs()
                small = difference < 1
                regression.append(torch.where(small, difference**2 / 2, difference - 0.5).mean())
                wanted = torch.softmax(matrices.output @ true, dim=0)
                classification.append(-(wanted * torch.log_softmax(matrices.output @ guess, dim=0)).sum())
        first += length
    assert found.rows == len(regression)
    torch.testing.assert_close(found.regression, torch.stack(regression).mean())
    torch.testing.assert_close(found.classification, torch.stack(classification).mean())
    torch.testing.assert_close(found.total(0.1), found.regression + 0.1 * found.classification)


def test_hits_are_those_of_drafts_made_one_by_one(
    head: TrainableHead, config: HeadConfig, target: LeanDecoder, matrices: TargetMatrices, tmp_path: Path
) -> None:
    batch = make_batch(config, even=True)
    drafter = drafting_head(head, config, target, tmp_path)
    depth = 2

    def chain(first: int, length: int, row: int) -> list[int]:
        """The head's own guesses, each read before the next."""
        cache, guesses = drafter.new_cache(), []
        tokens = batch.tokens[first : first + row + 1].tolist()
        estimate = step(drafter, cache, tokens, list(batch.features[first : first + row + 1]))
        for _ in range(depth):
            guesses.append(int(matrices.vocabulary[(matrices.output @ estimate).argmax()]))
            estimate = step(drafter, cache, [guesses[-1]], [estimate])
        return guesses

    # Texts in which guesses are often right: what the head itself would say.
    first = 0
    for length in LENGTHS:
        for row in range(length - depth):
            guesses = chain(first, length, row)
            right = {0: 2, 3: 1}.get(row % 6, 0)
            batch.tokens[first + row + 1 : first + row + 1 + right] = torch.tensor(guesses[:right])
            batch.following[first + row : first + row + right] = torch.tensor(guesses[:right])
        first += length
    drafts, reached = 0, [0] * depth
    first = 0
    for length, answer in zip(LENGTHS, ANSWERS, strict=True):
        for row in range(answer - 1, length - depth):
            drafts += 1
            for deep, guess in enumerate(chain(first, length, row)):
                if guess != batch.following[first + row + deep]:
                    break
                reached[deep] += 1
        first += length
    found = count_hits(head, matrices, batch, depth)
    assert (found.drafts, found.reached) == (drafts, reached)
    assert 0 < reached[1] < reached[0] < drafts
    assert found.mean_accepted_tokens == 1 + sum(reached) / drafts
    assert found.accuracy == [reached[0] / drafts, reached[1] / reached[0]]


def test_the_target_is_no_part_of_what_is_trained(head: TrainableHead, config: HeadConfig) -> None:
    assert {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()} == config.shapes()


def test_the_same_seed_gives_the_same_weights_and_leaves_others_randomness_alone(config: HeadConfig) -> None:
    state = torch.random.get_rng_state()
    first, second, third = (new_head(config, seed, CPU).state_dict() for seed in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["fc.weight"], third["fc.weight"])


# -- what is read together, and what may be proposed ----------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    most=st.integers(1, 60),
    seed=st.none() | st.integers(0, 5),
)
def test_an_epoch_reads_every_text_once(sizes: list[int], most: int, seed: int | None) -> None:
    batches = plan_epoch(sizes, most, seed)
    assert sorted(number for batch in batches for number in batch) == list(range(len(sizes)))
    assert all(len(batch) == 1 or sum(sizes[number] for number in batch) <= most for batch in batches)
    assert plan_epoch(sizes, most, seed) == batches
    if seed is None:
        assert [number for batch in batches for number in batch] == list(range(len(sizes)))


def test_the_vocabulary_is_what_answers_hold_most_often() -> None:
    texts = [Text("0", (7, 7, 7, 5, 3, 3, 4), 4, True), Text("1", (6, 6, 3, 4, 9), 2, True)]
    assert frequent_tokens(texts, 2, (), 12) == [3, 4]
    assert frequent_tokens(texts, 3, (), 12) == [3, 4, 9]
    assert frequent_tokens(texts, 4, (), 12) == [3, 4, 7, 9]  # then what prompts hold
    assert frequent_tokens(texts, 6, (), 12) == [3, 4, 5, 6, 7, 9]
    assert frequent_tokens(texts, 7, (), 12) == [0, 3, 4, 5, 6, 7, 9]
    assert frequent_tokens(texts, 2, (11,), 12) == [3, 11]
    assert frequent_tokens(texts, 0, (), 12) == frequent_tokens(texts, 12, (), 12) == []
