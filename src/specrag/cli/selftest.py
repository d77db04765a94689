"""The self-test of ``specrag doctor``: does this machine compute what the engine promises, and how fast?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specrag.engine import LOGITS, Coroutine, Session, SessionModel, gather, run
from specrag.errors import InputError, SpecragError
from specrag.language_model import load
from specrag.speculation import EMPTY, ROOT, DraftTree

State = Literal["passed", "failed", "skipped"]

_PROMPT = "The capital of France is Paris. The capital of Italy is"
_OTHER_PROMPT = "Copper conducts electricity and heat well, and so does"
_TOKENS = 12
_SPEED_TOKENS = 24


@dataclass(frozen=True)
class Check:
    """One line of the self-test.

    Attributes:
        detail: what was found, or what to do about it.
    """

    name: str
    state: State
    detail: str


@dataclass(frozen=True)
class Agreement:
    """Plain decoding against the same tokens scored as a tree, among wrong guesses and another session's rows.

    Attributes:
        tokens: whether the most probable token is the same after every prefix.
        bits: whether the whole logits are the same.
        compared: rows compared.
    """

    tokens: bool
    bits: bool
    compared: int


def run_checks(model: str, devices: Sequence[str]) -> Iterator[Check]:
    """Run the self-test, check by check.

    Args:
        model: a model of the lean decoder's family, which must be on this machine.
        devices: the torch devices to test.
    """
    for device in devices:
        # Only the CPU promises equal bits. In fp32 a near-tie that rounding could decide is next to impossible.
        for dtype in ("bf16", "int8") if device == "cpu" else ("fp32",):
            yield from _check_agreement(model, dtype, device)


def measure_speeds(model: str, devices: Sequence[str]) -> dict[str, float]:
    """Tokens per second of plain decoding, by ``"dtype, device"``; those that cannot run here are left out."""
    speeds = {}
    for device in devices:
        for dtype in ("bf16", "int8") if device == "cpu" else ("bf16",):
            with contextlib.suppress(SpecragError, RuntimeError):  # the checks have reported it
                llm = load(model, dtype=dtype, device=device)
                llm.generate(_PROMPT, method="plain", raw=True, max_tokens=4, ignore_eos=True)  # warm-up
                result = llm.generate(
                    _PROMPT, method="plain", raw=True, max_tokens=_SPEED_TOKENS, ignore_eos=True
                )
                speeds[f"{dtype}, {device}"] = result.tokens_per_second
    return speeds


def compare(model: SessionModel, prompt: Sequence[int], other: Sequence[int]) -> Agreement:
    """Decode greedily token by token, then score the same tokens in one pass and compare."""
    alone = run(_decode(model, prompt, _TOKENS))
    plain = [int(row.argmax()) for row in alone]
    packed = run(gather([_score_tree(model, prompt, plain[:-1]), _decode(model, other, 1)]))[0]
    return Agreement(
        tokens=[int(row.argmax()) for row in packed] == plain,
        bits=all(np.array_equal(one, two) for one, two in zip(alone, packed, strict=True)),
        compared=len(alone),
    )


def _decode(model: SessionModel, prompt: Sequence[int], count: int) -> Coroutine[list[np.ndarray]]:
    """Logits ``[vocab_size]`` of ``count`` greedy steps, one pass per step."""
    session = Session(model)
    try:
        yield from session.extend(prompt)
        found = []
        for _ in range(count):
            rows = yield from session.score(EMPTY, LOGITS)
            assert rows[0].logits is not None
            found.append(rows[0].logits)
            session.commit((), int(rows[0].logits.argmax()))
        return found
    finally:
        session.close()


def _score_tree(
    model: SessionModel, prompt: Sequence[int], tokens: Sequence[int]
) -> Coroutine[list[np.ndarray]]:
    """Logits after the prompt and after each token, from one pass in which each token has a wrong sibling."""
    nodes: list[int] = []
    parents: list[int] = []
    path: list[int] = []
    for token in tokens:
        parent = path[-1] if path else ROOT
        nodes += [(token + 1) % model.vocab_size, token]
        parents += [parent, parent]
        path.append(len(nodes) - 1)
    tree = DraftTree(tuple(nodes), tuple(parents), ("doctor",) * len(nodes))
    session = Session(model)
    try:
        yield from session.extend(prompt)
        rows = yield from session.score(tree, LOGITS)
        return [row.logits for row in (rows[0], *(rows[node + 1] for node in path)) if row.logits is not None]
    finally:
        session.close()


def _check_agreement(model: str, dtype: str, device: str) -> Iterator[Check]:
    on = f"{dtype}, {device}"
    name = f"tree pass equals plain decoding, {on}"
    invariant = device == "cpu"
    try:
        llm = load(model, dtype=dtype, device=device, batch_invariant=invariant)
        found = compare(llm.model, llm.encode(_PROMPT, raw=True), llm.encode(_OTHER_PROMPT, raw=True))
    except InputError as error:  # this machine or build cannot run it at all
        yield Check(name, "skipped", str(error))
        return
    except (SpecragError, RuntimeError) as error:
        yield Check(name, "failed", str(error))
        return
    where = f"{found.compared} positions compared"
    if found.tokens:
        yield Check(name, "passed", where)
    else:
        yield Check(name, "failed", f"{where}: the tokens differ, speculation would change outputs here")
    if invariant:
        name = f"equal bits in any pass, {on}"
        if found.bits:
            yield Check(name, "passed", where)
        else:
            yield Check(name, "failed", f"{where}: the bits differ, so batch_invariant does not hold here")
