"""What RAPID would reach where keys and values outweigh the weights: measured passes of a model of random weights.

Grouped heads and 135M weights hide what the paper speeds up: at 120K tokens the keys and values of its models are as
large as their weights. A small model whose heads are not grouped reaches that point at a few thousand tokens. Its
passes are measured, its text means nothing: how many tokens a round has is replayed from the speed section.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from statistics import median
from typing import TYPE_CHECKING

from specrag.bench.interleave import Row, Trial
from specrag.bench.machine import half_precision
from specrag.bench.measurement import Measurement
from specrag.bench.records import Outcome, Record
from specrag.bench.suite import BenchContext
from specrag.engine.executor import Executor
from specrag.engine.outputs import ARGMAX
from specrag.engine.session import Session
from specrag.methods.rapid.decoder import GAMMA
from specrag.speculation.tree import EMPTY, DraftTree

if TYPE_CHECKING:
    from specrag.engine.passes import SessionModel

SIMULATED = "simulated, no grouped heads"
_HIDDEN, _LAYERS, _HEADS, _VOCABULARY = 512, 8, 8, 8192
#: As in the paper the drafter reads a 24th of the context; a part is never shorter than this.
_SHARE, _SHORTEST = 24, 128
_PASSES = 9
#: Rounds that a simulated run is made of, so that its tokens are a whole number.
_ROUNDS = 1000


def measure(
    context: BenchContext, lengths: Sequence[int], records: Sequence[Record], *, method: str, baseline: str
) -> Iterator[Measurement]:
    """Speed-ups by length, from measured passes and the tokens a round of earlier records.

    Args:
        lengths: tokens of context.
        records: of the speed section; without any of ``method`` nothing is simulated.
        method, baseline: labels.
    """
    recorded = [
        r.outcome for r in records if r.key.method == method and r.outcome is not None and r.outcome.passes
    ]
    if not recorded:
        return
    tokens = sum(outcome.tokens for outcome in recorded) / sum(outcome.passes or 1 for outcome in recorded)
    model = cache(lambda: random_model(context.device, max(lengths) + 64))
    rows = [
        Row(
            name=f"{length:,} tokens",
            task=f"{SIMULATED}/{length:,} tokens",
            methods=(baseline, method),
            prepare=lambda length=length: _trials(model(), length, tokens, (baseline, method)),  # type: ignore[misc]
        )
        for length in lengths
    ]
    made = context.measure(SIMULATED, rows, context.plan(1, warmups=0))
    yield from context.summarise(
        made,
        baselines=[baseline],
        dtype=half_precision(context.device),
        model="random weights",
        overall=False,
        simulated=True,
    )


def random_model(device: str, context_length: int) -> SessionModel:
    """A Llama of 30 million random weights, 60 MB, with 16 kB of keys and values a token."""
    import torch
    from transformers import LlamaConfig

    from specrag.models.decoder import LeanDecoder

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=_HIDDEN,
        intermediate_size=1408,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        max_position_embeddings=context_length,
        tie_word_embeddings=True,
    )
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5).to(torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": matrix(_VOCABULARY, _HIDDEN),
        "model.norm.weight": torch.ones(_HIDDEN),
    }
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}"
        for part in ("q", "k", "v", "o"):
            weights[f"{name}.self_attn.{part}_proj.weight"] = matrix(_HIDDEN, _HIDDEN)
        for part in ("gate", "up"):
            weights[f"{name}.mlp.{part}_proj.weight"] = matrix(1408, _HIDDEN)
        weights[f"{name}.mlp.down_proj.weight"] = matrix(_HIDDEN, 1408)
        for part in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{part}.weight"] = torch.ones(_HIDDEN)
    return LeanDecoder(
        config,
        weights,
        dtype=torch.bfloat16 if half_precision(device) == "bf16" else torch.float32,
        device=torch.device(device),
    )


def _trials(model: SessionModel, length: int, tokens: float, labels: tuple[str, str]) -> Mapping[str, Trial]:
    """One trial for plain decoding, one for rounds of a drafter behind its part and a verification behind all."""
    executor = Executor()
    target, drafter = Session(model), Session(model)
    for session, count in ((target, length), (drafter, max(length // _SHARE, _SHORTEST))):
        executor.run(executor.submit(session.extend([token % _VOCABULARY for token in range(count)])))
    guesses = DraftTree.chain(range(1, GAMMA + 1), "random")

    def seconds(session: Session, tree: DraftTree) -> float:
        return median(_passes(lambda: executor.run(executor.submit(session.score(tree, ARGMAX)))))

    def plain() -> Outcome:
        return Outcome(tokens=_ROUNDS, seconds=_ROUNDS * seconds(target, EMPTY), passes=_ROUNDS)

    def rounds() -> Outcome:
        draft, verify = seconds(drafter, EMPTY), seconds(target, guesses)
        # Every token needs the drafter's opinion, the one behind the last guess too.
        total = (GAMMA + 1) * draft + verify
        figures = {"draft_ms": 1e3 * (GAMMA + 1) * draft, "verify_ms": 1e3 * verify}
        return Outcome(
            tokens=round(_ROUNDS * tokens), seconds=_ROUNDS * total, passes=_ROUNDS, figures=figures
        )

    return dict(zip(labels, (plain, rounds), strict=True))


def _passes(run: Callable[[], object]) -> Iterator[float]:
    run()
    for _ in range(_PASSES):
        started = time.perf_counter()
        run()
        yield time.perf_counter() - started
