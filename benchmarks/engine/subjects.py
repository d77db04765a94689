"""The two engines that the suite measures, each doing the same things: ours and transformers' own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from specrag.bench.bounds import DecoderShape
from specrag.bench.interleave import Trial
from specrag.bench.memory import peak_memory
from specrag.bench.records import Outcome
from specrag.engine.executor import Executor
from specrag.engine.outputs import ARGMAX, Outputs
from specrag.engine.passes import gather
from specrag.engine.session import Session
from specrag.engine.stopping import StopConditions
from specrag.methods.token_decoders import PlainDecoder
from specrag.models.catalog import resolve
from specrag.models.loading import load_model
from specrag.models.tokenizer import TextStream
from specrag.speculation.decode import Settings
from specrag.speculation.tree import DraftTree

#: Passes of one timed run of a pass; their mean is recorded.
_PASSES = 3


class Engine(Protocol):
    """What both engines can be timed at. Preparation happens in the method, the trial is what is timed."""

    def decoding(self, prompt: list[int], new: int) -> Trial:
        """Greedy decoding of ``new`` tokens behind a prompt that has been read already."""

    def passing(self, prompt: list[int], rows: list[int]) -> Trial:
        """One pass of these rows as a chain behind a prompt that has been read already."""

    def prefilling(self, prompt: list[int]) -> Trial:
        """Reading a prompt, up to the first token."""


class Ours:
    """This engine.

    Args:
        name: of the model.
        kind: what else :func:`specrag.models.loading.load_model` takes.
    """

    def __init__(self, name: str, device: str, **kind: Any) -> None:
        self._loaded = load_model(name, device=device, **kind)
        self._model = self._loaded.model
        self._executor = Executor()
        self._synchronise = _synchroniser(device)
        self._last: Session | None = None

    @property
    def shape(self) -> DecoderShape:
        """The model's sizes."""
        return _shape(self._model.config)  # type: ignore[attr-defined]

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return self._loaded.tokenizer.encode(text, special=False)

    def decoding(self, prompt: list[int], new: int) -> Trial:
        session = self._read(prompt)

        def trial() -> Outcome:
            self._synchronise()
            started = time.perf_counter()
            self._decode(session, new)
            self._synchronise()
            seconds = time.perf_counter() - started
            output = session.tokens[len(prompt) :]
            session.truncate(len(prompt))
            return Outcome(tokens=len(output), seconds=seconds, output=str(output), passes=new)

        return trial

    def passing(self, prompt: list[int], rows: list[int]) -> Trial:
        session = self._read_once(prompt)
        self._run(session.extend(rows[:1]))
        tree = DraftTree.chain(rows[1:], "bench")

        def trial() -> Outcome:
            self._synchronise()
            started = time.perf_counter()
            for _ in range(_PASSES):
                self._run(session.score(tree, ARGMAX))
            self._synchronise()
            return Outcome(seconds=(time.perf_counter() - started) / _PASSES)

        return trial

    def prefilling(self, prompt: list[int]) -> Trial:
        def trial() -> Outcome:
            self._synchronise()
            started = time.perf_counter()
            session = self._read(prompt)
            row = self._run(session.score(DraftTree(), ARGMAX))[0]
            self._synchronise()
            seconds = time.perf_counter() - started
            return Outcome(tokens=len(prompt), seconds=seconds, output=str(row.argmax))

        return trial

    def requests(self, prompts: Sequence[list[int]], new: int, *, packed: bool) -> Trial:
        """Decoding behind several prompts that have been read, in the same passes or one after the other."""
        sessions = [self._read(prompt) for prompt in prompts]

        def trial() -> Outcome:
            self._synchronise()
            started = time.perf_counter()
            if packed:
                self._run(gather([self._plain(session, new) for session in sessions]))
            else:
                for session in sessions:
                    self._decode(session, new)
            self._synchronise()
            seconds = time.perf_counter() - started
            outputs = []
            for session, prompt in zip(sessions, prompts, strict=True):
                outputs.append(session.tokens[len(prompt) :])
                session.truncate(len(prompt))
            return Outcome(tokens=sum(map(len, outputs)), seconds=seconds, output=str(outputs))

        return trial

    def forking(self, prompt: list[int]) -> Trial:
        """Forking a session; with the bytes of its keys and values against their exact size."""
        session = self._read(prompt)
        self._decode(session, 8)

        def trial() -> Outcome:
            with peak_memory() as peak:
                started = time.perf_counter()
                forks = [session.fork() for _ in range(100)]
                seconds = (time.perf_counter() - started) / len(forks)
            cache: Any = session.cache
            exact = cache.length * cache.shape.bytes_per_token
            return Outcome(
                seconds=seconds,
                figures={
                    "microseconds": 1e6 * seconds,
                    "copied_mib": sum(fork.cache.nbytes for fork in forks) / 2**20,
                    "grown_mib": peak.grown_mib,
                    "held_mib": cache.nbytes / 2**20,
                    "held_over_exact": cache.nbytes / exact,
                },
            )

        return trial

    def perplexity(self, windows: Sequence[list[int]]) -> Trial:
        """Perplexity of the model on windows of text, each read from its start."""

        def trial() -> Outcome:
            total, count = 0.0, 0
            for window in windows:
                wanted = [Outputs(log_probs_of=(token,)) for token in window[1:]]
                rows = self._run(Session(self._model).extend(window, wanted, chunk=128))
                for row in rows:
                    assert row.log_probs is not None
                    total -= float(row.log_probs[0])
                count += len(rows)
            return Outcome(tokens=count, figures={"perplexity": math.exp(total / count)})

        return trial

    def _read(self, prompt: list[int]) -> Session:
        session = Session(self._model)
        self._run(session.extend(prompt))
        return session

    def _read_once(self, prompt: list[int]) -> Session:
        """:meth:`_read`, but what was read for the call before is used again if it is the same."""
        if self._last is None or self._last.tokens[: len(prompt)] != prompt:
            self._last = self._read(prompt)
        self._last.truncate(len(prompt))
        return self._last

    def _plain(self, session: Session, new: int) -> Any:
        return PlainDecoder().decode(
            session, Settings(StopConditions(new)), TextStream(self._loaded.tokenizer), time.perf_counter
        )

    def _decode(self, session: Session, new: int) -> None:
        self._run(self._plain(session, new))

    def _run(self, coroutine: Any) -> Any:
        return self._executor.run(self._executor.submit(coroutine))


class Transformers:
    """transformers' own ``generate`` and ``forward``, in bf16, with its dynamic cache."""

    def __init__(self, name: str, device: str) -> None:
        from transformers import AutoModelForCausalLM

        files = resolve(name)
        self._module: Any = AutoModelForCausalLM.from_pretrained(files.folder, dtype=torch.bfloat16).to(
            device
        )
        self._device = device
        self._synchronise = _synchroniser(device)
        self._last: list[int] | None = None
        self._last_cache: Any = None

    def decoding(self, prompt: list[int], new: int) -> Trial:
        ids = self._ids(prompt)
        cache = self._read(ids[:, :-1])

        def trial() -> Outcome:
            self._synchronise()
            started = time.perf_counter()
            output = self._generate(ids, cache, new)[0, len(prompt) :].tolist()
            self._synchronise()
            seconds = time.perf_counter() - started
            _crop(cache, len(prompt) - 1)
            return Outcome(tokens=len(output), seconds=seconds, output=str(output), passes=new)

        return trial

    def passing(self, prompt: list[int], rows: list[int]) -> Trial:
        if self._last != prompt:
            self._last_cache = self._read(self._ids(prompt))
            self._last = prompt
        cache = self._last_cache
        new = self._ids(rows)

        def trial() -> Outcome:
            seconds = 0.0
            for _ in range(_PASSES):
                self._synchronise()
                started = time.perf_counter()
                with torch.inference_mode():
                    self._module(new, past_key_values=cache, use_cache=True).logits.argmax(-1)
                self._synchronise()
                seconds += time.perf_counter() - started
                _crop(cache, len(prompt))
            return Outcome(seconds=seconds / _PASSES)

        return trial

    def prefilling(self, prompt: list[int]) -> Trial:
        ids = self._ids(prompt)

        def trial() -> Outcome:
            self._synchronise()
            started = time.perf_counter()
            output = self._generate(ids, None, 1)[0, -1]
            self._synchronise()
            seconds = time.perf_counter() - started
            return Outcome(tokens=len(prompt), seconds=seconds, output=str(int(output)))

        return trial

    @torch.inference_mode()
    def _read(self, ids: torch.Tensor) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache(config=self._module.config)
        self._module(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    @torch.inference_mode()
    def _generate(self, ids: torch.Tensor, cache: Any, new: int) -> torch.Tensor:
        output: torch.Tensor = self._module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
        )
        return output

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(tokens)], device=self._device)


def _crop(cache: Any, length: int) -> None:
    surplus = cache.get_seq_length() - length
    if surplus > 0:
        cache.crop(-surplus)


def _shape(config: Any) -> DecoderShape:
    heads = config.num_attention_heads
    return DecoderShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=config.vocab_size,
    )


def _synchroniser(device: str) -> Callable[[], None]:
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None
