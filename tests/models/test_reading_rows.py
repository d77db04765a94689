"""What rows answer from logits, against the plain definitions."""

from __future__ import annotations

import pytest
import torch

from specrag.engine.outputs import Outputs, Row
from specrag.models.logits import read_rows

INFINITY = float("inf")


def read(logits: torch.Tensor, *wanted: Outputs) -> list[Row]:
    """Rows whose hidden state is the logits themselves."""
    return read_rows(wanted, {"final": logits}, lambda final: final)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [640, 639])
def test_the_best_token_is_the_first_of_the_largest(dtype: torch.dtype, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    # Few different values, so that most rows have ties, within a block of entries and across blocks.
    logits = torch.randint(0, 5, (200, vocabulary), generator=generator).to(dtype)
    logits[0] = -INFINITY
    logits[1] = -INFINITY
    logits[1, [70, 600]] = 1.0
    expected = logits.float().argmax(dim=-1).tolist()
    assert expected[1] == 70
    assert [row.argmax for row in read(logits, *[Outputs(argmax=True)] * 200)] == expected
    mixed = [Outputs(argmax=True, top_k=3 if number % 2 else 0) for number in range(200)]
    assert [row.argmax for row in read(logits, *mixed)] == expected


def test_log_probabilities_do_not_depend_on_the_other_rows() -> None:
    logits = torch.randn(17, 4096, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    together = read(logits, *[Outputs(top_k=4)] * 17)
    expected = torch.log_softmax(logits.double(), dim=-1)
    for number, row in enumerate(together):
        (alone,) = read(logits[number : number + 1], Outputs(top_k=4))
        assert row.top_tokens is not None
        assert row.top_log_probs is not None
        assert alone.top_log_probs is not None
        assert row.top_log_probs.tolist() == alone.top_log_probs.tolist()
        assert row.top_log_probs == pytest.approx(expected[number, row.top_tokens.tolist()].numpy(), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("vocabulary", "count"), [(4096, 8), (4097, 20), (50, 50), (3, 8), (700, 1)])
def test_the_most_probable_tokens_are_those_of_a_stable_sort(
    dtype: torch.dtype, vocabulary: int, count: int
) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(40, vocabulary, generator=generator).mul(6).to(dtype)
    logits[::2] = logits[::2].round()  # ties, also across the border of what is asked for
    logits[5, : vocabulary // 2] = -INFINITY  # tokens that were removed
    logits[6] += 1000.0
    ordered = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    exact = torch.log_softmax(logits.double(), dim=-1)
    found = read(logits, *[Outputs(argmax=True, top_k=count)] * 40)
    for number, row in enumerate(found):
        assert row.top_tokens is not None
        assert row.top_log_probs is not None
        best = ordered.indices[number, :count].tolist()
        assert row.top_tokens.tolist() == best
        assert row.argmax == best[0]
        assert row.top_log_probs.tolist() == pytest.approx(exact[number, best].tolist(), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [3, 700, 4097])
def test_the_entropy_is_the_same_with_and_without_the_top_tokens(dtype: torch.dtype, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (
        torch.randn(20, vocabulary, generator=generator).mul(torch.logspace(-2, 2, 20)[:, None]).to(dtype)
    )
    logits[4, 1:] = -INFINITY
    expected = torch.distributions.Categorical(logits=logits.double()).entropy().tolist()
    expected[4] = 0.0  # torch takes 0 times infinity
    for outputs in (Outputs(entropy=True), Outputs(entropy=True, top_k=4)):
        assert [row.entropy for row in read(logits, *[outputs] * 20)] == pytest.approx(expected, abs=2e-5)
    assert all(row.entropy is None for row in read(logits, *[Outputs(top_k=4)] * 20))
