"""Keys and values, in memory and on disk, that spare a second question about a document from reading it again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specrag.engine import MIN_SHARED_TOKENS, Coroutine, PrefixCache, Search, Session

if TYPE_CHECKING:
    from specrag.models import LoadedModel

#: Another document's session is continued if it holds this share of the prompt. For less, such as the system message,
#: all of that document's keys and values would stay in memory.
_WORTH_SHARING = 0.5


@dataclass(frozen=True, slots=True)
class PrefixRead:
    """How the beginning of a prompt came into memory.

    Attributes:
        known: tokens that did not have to be read.
        prefill_seconds: of reading the others.
        disk_seconds: of reading or writing the file.
        note: what was wrong with the file; empty if nothing.
    """

    known: int
    prefill_seconds: float
    disk_seconds: float
    note: str


class KeptPrefixes:
    """Holds the keys and values of the newest document that was asked about.

    Used from coroutines of the model's executor.

    Args:
        loaded: the model.
        prefixes: its cache, which serves what is held here to every request.
        folder: also stores them on disk here; ``None`` keeps them in memory only. The files hold the documents' content
            in another form and are readable only by their owner.
        clock: seconds.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prefixes: PrefixCache,
        *,
        folder: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.folder = folder
        self._loaded = loaded
        self._prefixes = prefixes
        self._clock = clock
        self._held: list[Session] = []
        self._named: dict[str, str] | None = None

    def read(self, tokens: Sequence[int], tenant: str = "") -> Coroutine[PrefixRead]:
        """Bring the keys and values of these tokens into memory, unless they are there: from disk, or by reading.

        Args:
            tokens: the beginning of a prompt that another prompt may share.
            tenant: their owner.
        """
        model = self._loaded.model
        # One extra token, since the returned session lacks the last one.
        session = self._prefixes.start(model, [*tokens, -1], tenant)
        known = len(session)
        disk_seconds, note = 0.0, ""
        if known >= len(tokens) or len(tokens) < MIN_SHARED_TOKENS:
            return PrefixRead(known, 0.0, 0.0, "")
        if known < len(tokens) * _WORTH_SHARING:
            session, known = Session(model), 0
        self.release()
        if self.folder is not None:
            started = self._clock()
            loaded, note = yield Search(lambda: self._from_disk(tokens))
            disk_seconds = self._clock() - started
            if loaded is not None:
                self._hold(loaded, tenant)
                return PrefixRead(len(tokens), 0.0, disk_seconds, note)
        from specrag.engine import without_compiling

        with without_compiling(self._clock) as clock:
            started = clock()
            yield from session.extend(tokens[known:])
            prefill_seconds = clock() - started
        self._hold(session, tenant)
        if self.folder is not None:
            started = self._clock()
            failure = yield Search(lambda: self._to_disk(session, len(tokens)))
            disk_seconds += self._clock() - started
            note = note or failure
        return PrefixRead(known, prefill_seconds, disk_seconds, note)

    @property
    def nbytes(self) -> int:
        """Bytes of what is held in memory."""
        return sum(extent.nbytes for session in self._held for extent in session.cache.extents())

    def release(self) -> None:
        """Forget what is held in memory."""
        for session in self._held:
            self._prefixes.release(session)
        self._held.clear()

    def _hold(self, session: Session, tenant: str) -> None:
        self._prefixes.hold(session, tenant)
        self._held.append(session)

    # -- on disk; in a thread -------------------------------------------------------------------------------

    def _from_disk(self, tokens: Sequence[int]) -> tuple[Session | None, str]:
        """The session, if there is a usable file; otherwise what is wrong with the file."""
        from specrag.engine import PrefixFileError, load_prefix, remove_unfinished

        assert self.folder is not None
        remove_unfinished(self.folder)
        try:
            session = load_prefix(self._path(tokens), self._loaded.model, self._identity)
        except FileNotFoundError:
            return None, ""
        except PrefixFileError as error:
            return None, str(error)
        return (session, "") if session.tokens == list(tokens) else (None, "")

    def _to_disk(self, session: Session, length: int) -> str:
        from specrag.engine import PrefixFileError, save_prefix

        try:
            save_prefix(self._path(session.tokens[:length]), session, length, self._identity)
        except PrefixFileError as error:  # the answer does not depend on it
            return str(error)
        return ""

    def _path(self, tokens: Sequence[int]) -> Path:
        assert self.folder is not None
        digest = hashlib.sha256(json.dumps([self._identity, list(tokens)]).encode())
        return self.folder / f"{digest.hexdigest()[:32]}.safetensors"

    @property
    def _identity(self) -> dict[str, str]:
        if self._named is None:
            self._named = identity_of(self._loaded)
        return self._named


def identity_of(loaded: LoadedModel) -> dict[str, str]:
    """Everything that affects a model's keys and values: weights, adapter, configuration, types, attention method."""
    from specrag.models.catalog import sha256_of
    from specrag.retrieval.encoder import checksums

    sums = checksums(loaded.files)
    adapter = loaded.adapter
    merged = sorted(path for path in adapter.iterdir() if path.is_file()) if adapter else []
    config = sums.pop("config.json", "")  # layers, heads, rotary embeddings, windows
    return {
        "model": loaded.files.name,
        "weights": hashlib.sha256(json.dumps(sorted(sums.items())).encode()).hexdigest(),
        "adapter": hashlib.sha256("".join(map(sha256_of, merged)).encode()).hexdigest() if merged else "",
        "configuration": config,
        "dtype": loaded.dtype,
        "device": loaded.device.split(":")[0],
        "decoder": type(loaded.model).__name__,
        "batch_invariant": str(getattr(loaded.model, "batch_invariant", False)),
        "attention": getattr(loaded.model, "attention", ""),
        "kv_dtype": loaded.kv_dtype,
    }
