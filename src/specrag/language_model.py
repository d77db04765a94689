"""The Python interface: load a model, generate text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from specrag.engine import (
    MAX_ROWS,
    PREFILL_ROWS,
    Coroutine,
    Executor,
    FinishReason,
    PrefixCache,
    Session,
    check_room,
)
from specrag.errors import InputError
from specrag.methods import (
    NO_ADAPTER,
    Decoder,
    Facade,
    Resources,
    SharedMethods,
    make_decoder,
    read_prompt,
    tap_steps,
)
from specrag.models import LoadedModel, TextStream, load_model
from specrag.request import Options, Prompt, Result, Timing, Usage, check_options
from specrag.speculation import TARGET, Settings, Step

if TYPE_CHECKING:
    from specrag.methods import LocalModel
    from specrag.methods.knn_lm.store import Datastore
    from specrag.models import TextGenerator, TextScorer
    from specrag.speculation.suffix import SuffixCorpus

_PROMPT_KINDS = "give a text, a list of messages, or a list of token ids"


@dataclass(frozen=True, slots=True)
class _Request:
    """A checked call of :meth:`LanguageModel.generating`."""

    prompt: list[int]
    settings: Settings
    method: Decoder
    tenant: str


class LanguageModel(Facade):
    """A model that generates text. Made by :func:`load`.

    Calls from several threads, and asynchronous calls, share passes.

    Args:
        loaded: the model.
        prefix_cache_bytes: memory for keys and values of earlier texts; 0 for none.
        max_rows: the most rows of a pass that several requests share.
        prefill_rows: the most rows of one prompt in a pass; with fewer, other requests wait less.
        clock: returns seconds, for deadlines and timings.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        prefix_cache_bytes: int = 0,
        max_rows: int = MAX_ROWS,
        prefill_rows: int = PREFILL_ROWS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.loaded = loaded
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.executor = Executor(clock=clock, max_rows=max_rows)
        self._prefixes = PrefixCache(prefix_cache_bytes)
        self.clock = clock
        self._prefill_rows = prefill_rows
        self.shared = SharedMethods()
        self.resources = OpenResources(self)

    def __repr__(self) -> str:
        loaded = self.loaded
        return f"LanguageModel({loaded.name!r}, dtype={loaded.dtype!r}, device={str(loaded.device)!r})"

    @property
    def context_length(self) -> int:
        """The most tokens of prompt and output together."""
        return self.model.context_length

    @property
    def prefixes(self) -> PrefixCache:
        """Keys and values of earlier texts, for coroutines of :attr:`executor`."""
        return self._prefixes

    def generating(self, prompt: Prompt, options: Options, begun: Session | None = None) -> Coroutine[Result]:
        """A coroutine for `executor` that decodes a text and emits its steps; methods are built on it.

        The prompt and the options are checked at the call; enforcing a timeout is up to the caller that submits it.

        Args:
            begun: a session that holds the first tokens of the prompt, at most all but one; closed at the end. By
                default the prefix cache is searched for them.
        """
        return self._decode(self._request(prompt, options), begun)

    def close(self) -> None:
        """Stop what is running; release the prefix cache and everything that options have opened."""
        self.executor.close()
        self._prefixes.clear()
        self.shared.clear()
        self.resources.close()

    # -- requests -------------------------------------------------------------------------------------------

    def count(self, prompt: Prompt, *, raw: bool = False) -> int:
        """Number of tokens of a prompt.

        Raises:
            InputError: the prompt is empty or of a wrong kind.
        """
        return len(self.encode(prompt, raw=raw))

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The tokens that the model reads for a prompt.

        Raises:
            InputError: the prompt is empty or of a wrong kind.
        """
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise InputError("prompt", prompt, _PROMPT_KINDS)
        if not prompt:
            raise InputError("prompt", prompt, "give at least one character")
        if isinstance(prompt, str):
            if not raw and self.tokenizer.has_chat_template:
                return self.tokenizer.chat([{"role": "user", "content": prompt}])
            return self.tokenizer.encode(prompt, special=True)
        if all(isinstance(part, int) for part in prompt):
            return list(cast("Sequence[int]", prompt))
        if all(isinstance(part, Mapping) for part in prompt):
            return self.tokenizer.chat(cast("Sequence[Mapping[str, str]]", prompt))
        raise InputError("prompt", prompt, _PROMPT_KINDS)

    def _request(self, prompt: Prompt, options: Options) -> _Request:
        checked = check_options(options)
        tokens = self.encode(prompt, raw=checked.raw)
        check_room(self.model, len(tokens))
        ends = frozenset() if checked.ignore_eos else self.tokenizer.eos_tokens
        conditions = replace(checked.stop, stop_tokens=ends)
        references = tuple(tuple(self.tokenizer.encode(text, special=False)) for text in checked.references)
        settings = Settings(conditions, checked.sampling, checked.log_probs, checked.processors, references)
        return _Request(tokens, settings, self._method(checked.method), checked.tenant)

    def _method(self, method: str | Decoder) -> Decoder:
        """Decoders requested by name are shared, since they learn what a pass costs on this machine."""
        made = make_decoder(method, self.resources, "method") if isinstance(method, str) else method
        made.check(self.loaded)
        return made

    def _decode(self, request: _Request, begun: Session | None = None) -> Coroutine[Result]:
        """Prefill, decode, and sum up. Time spent compiling loops at a first run is not counted."""
        from specrag.engine import without_compiling  # imports the compiler

        with without_compiling(self.clock) as clock:
            started = clock()
            session = (
                self._prefixes.start(self.model, request.prompt, request.tenant) if begun is None else begun
            )
            with closing(session):
                cached = len(session)
                prompt_rows = yield from read_prompt(
                    session, request.prompt[cached:], request.method.prompt_needs, self._prefill_rows
                )
                joined = len(session.pending) > 1
                prefilled = clock()
                steps: list[Step] = []
                text = TextStream(self.tokenizer)
                # The decoding loop's steps pass through here on their way to the caller, so they can be summed up.
                reason = yield from tap_steps(
                    request.method.decode(session, request.settings, text, clock, prompt_rows),
                    steps,
                    # The prompt has been read: keep it for other requests that begin with it.
                    lambda: self._prefixes.keep(session, request.tenant),
                )
                decoded = clock()
                # The next turn of the conversation will begin with this answer as well.
                self._prefixes.keep(session, request.tenant)
                if joined and steps:
                    prefilled += steps[0].verifying
                timing = Timing(
                    prefilled - started,
                    decoded - prefilled,
                    sum(step.drafting for step in steps),
                    sum(step.verifying for step in steps[joined:]),
                )
                return _sum_up(request, cached, steps, reason, timing, self.loaded.batch_invariant)


class OpenResources(Resources):
    """Opens what a method's options name, each once: datastores, corpora, folders, models, endpoints.

    For callers that may read every file of this machine; a server only uses what its owner has opened.

    Args:
        llm: the local model, if there is one.
        given: arguments of :class:`~specrag.methods.resources.Resources`.
    """

    opens_by_name = True

    def __init__(self, llm: LanguageModel | None = None, **given: Any) -> None:
        super().__init__(llm, **given)
        self._opened: dict[tuple[str, str | None], Any] = {}

    def datastore(self, name: str | None, field: str = "datastore") -> Datastore:
        """The datastore in a folder."""
        from specrag.methods.knn_lm.store import Datastore

        if name is not None and name not in self.datastores:
            self.datastores[name] = self._open((name, field), lambda: Datastore.open(Path(name).expanduser()))
        return super().datastore(name, field)

    def corpus(self, name: str | None, field: str = "corpus") -> SuffixCorpus | None:
        """The corpus in a folder."""
        from specrag.speculation.suffix import SuffixCorpus

        if name is not None and name not in self.corpora:
            self.corpora[name] = self._open((name, field), lambda: SuffixCorpus.open(Path(name).expanduser()))
        return super().corpus(name, field)

    def folder(self, path: str | None, field: str) -> Path | None:  # noqa: ARG002 - any will do
        """A folder of this machine."""
        return None if path is None else Path(path).expanduser()

    def writer(
        self, name: str | None = None, adapter: str | None = None, form: str = "paper"
    ) -> TextGenerator | LocalModel:
        """The model or endpoint of a name, by default the given drafter or SmolLM2; with the adapter tuned for it."""
        from specrag.models import drafter_form, shipped_adapters
        from specrag.models.catalog import SMALL

        if name is None and adapter is None and self._drafter is not None:
            return self._drafter
        if name is not None and is_endpoint(name):
            writer: TextGenerator = self._endpoint(name)
            return writer
        wanted = name or SMALL
        shipped = (str(folder) for folder in shipped_adapters(wanted) if drafter_form(folder) == form)
        tuned = adapter or next(shipped, None)
        return self._named(wanted, None if tuned == NO_ADAPTER else tuned)

    def scorer(self, name: str | None = None) -> TextScorer | LocalModel:
        """The model or endpoint of a name; by default the given verifier, or the model."""
        if name is None:
            return super().scorer()
        found: TextScorer | LocalModel = (
            self._endpoint(name) if is_endpoint(name) else self._named(name, None)
        )
        return found

    def load(self, name: str, adapter: str | None) -> LanguageModel:
        """Load a model by name, with the dtype and device of the local one if there is one."""
        if not self.has_model:
            return load(name, adapter=adapter)
        loaded = self.llm.loaded
        return load(name, dtype=loaded.dtype, device=str(loaded.device), adapter=adapter)

    def close(self) -> None:
        """Close everything that was opened."""
        self.datastores.clear()
        self.corpora.clear()
        while self._opened:
            self._opened.popitem()[1].close()
        super().close()

    def _named(self, name: str, adapter: str | None) -> LocalModel:
        if adapter is None and self._is_own(name):
            return self.llm
        found: LocalModel = self._open((name, adapter), lambda: self.load(name, adapter))
        return found

    def _is_own(self, name: str) -> bool:
        return self.has_model and name == self.llm.loaded.name

    def _endpoint(self, address: str) -> Any:
        from specrag.models.endpoint import open_endpoint

        return self._open((address, None), lambda: open_endpoint(address))

    def _open(self, key: tuple[str, str | None], make: Callable[[], Any]) -> Any:
        if key not in self._opened:
            self._opened[key] = make()
        return self._opened[key]


def is_endpoint(name: str) -> bool:
    """Whether a model is behind an address."""
    return name.startswith(("http://", "https://"))


def load(
    name: str | Path,
    *,
    dtype: str = "auto",
    device: str | None = None,
    adapter: str | Path | None = None,
    batch_invariant: bool | None = None,
    kv_dtype: str = "auto",
    prefix_cache_bytes: int = 0,
    progress: bool = False,
) -> LanguageModel:
    """Load a model by name; fetch it first if it is in the catalog and not here yet.

    Args:
        name: a catalog name (``specrag models list``), a folder, a GGUF file, or a hub id.
        dtype: ``fp32``, ``bf16``, ``fp16``, or ``int8`` for 8-bit linear layers; ``auto`` is ``bf16`` on a GPU and
            ``int8`` on a CPU that has the kernels for it, if the engine's own decoder runs the model.
        device: a torch device; by default the first GPU if there is one, else the CPU.
        adapter: a folder with a LoRA adapter, or the name of one that comes with specrag; merged into the weights.
        batch_invariant: a token's distribution has the same bits whatever else is in its pass, so every lossless
            method writes the same text; the default with ``int8`` on the CPU, except with Intel AMX, where it would
            slow down the prefill.
        kv_dtype: ``auto``, or ``int8`` for an 8-bit KV cache, which takes about half the memory; the text may differ a
            little.
        prefix_cache_bytes: memory for keys and values of earlier texts; 0 for none. Without ``batch_invariant``, a
            prompt found there may round differently from one that is read again.
        progress: show what is fetched and converted, on standard error.
    """
    loaded = load_model(
        name,
        dtype=dtype,
        device=device,
        adapter=adapter,
        batch_invariant=batch_invariant,
        kv_dtype=kv_dtype,
        progress=progress,
    )
    return LanguageModel(loaded, prefix_cache_bytes=prefix_cache_bytes)


def _sum_up(
    request: _Request, cached: int, steps: Sequence[Step], reason: FinishReason, timing: Timing, exact: bool
) -> Result:
    tokens = tuple(token for step in steps for token in step.tokens)
    drafted_by: Counter[str] = Counter()
    for step in steps:
        drafted_by.update(step.drafted_by)
    usage = Usage(
        prompt_tokens=len(request.prompt),
        cached_tokens=cached,
        completion_tokens=len(tokens),
        passes=len(steps),
        drafted_by=dict(drafted_by),
        accepted_by=dict(Counter(token.source for token in tokens if token.source != TARGET)),
        relaxed=sum(token.relaxed for token in tokens),
        exact=exact,
    )
    return Result("".join(step.text for step in steps), tokens, reason, usage, timing)
