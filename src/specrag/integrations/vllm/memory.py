"""Earlier answers that requests of the same tenant may copy from, in memory and, if a folder is given, on disk."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from specrag.artifacts import LOCK, atomic_write, exclusive_lock
from specrag.integrations.vllm.copying import Found, Ints
from specrag.speculation.suffix import SuffixAutomaton

_log = logging.getLogger("vllm.specrag")

#: Most tokens of a row that are looked up.
_LONGEST = 32
#: The file in the folder, and the format of its content.
FILE = "answers.specrag"
FORMAT = "specrag answers 1"
#: Seconds until an answer that is not on disk yet is written: what a kill may lose.
DELAY = 5.0


class Part(NamedTuple):
    """Some answers of a tenant.

    Attributes:
        tenant: who owns them.
        tokens: int32 ``[tokens]``, with a negative number at the end of each answer.
    """

    tenant: str
    tokens: Ints


class AnswerMemory:
    """The answers of each tenant, indexed.

    A suffix automaton can forget only its newest tokens, so answers are kept in parts of half the total size, and the
    oldest part is dropped as a whole, whichever tenant owns it. One thread adds and finds; another may read the parts
    meanwhile.

    Args:
        tokens: most tokens to keep, for all tenants together; 0 for none.
    """

    def __init__(self, tokens: int) -> None:
        self._most = tokens
        self._parts: list[tuple[str, SuffixAutomaton]] = []  # the oldest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(len(part) for _, part in self._parts)

    def add(self, tenant: str, answer: Ints) -> bool:
        """Keep as much of an answer as fits; returns whether any was kept. Without a tenant, none is."""
        size = self._most // 2
        answer = answer[: size - 1]
        if not tenant or len(answer) < 2 or len(answer) >= size:
            return False
        with self._lock:
            part = next((part for owner, part in reversed(self._parts) if owner == tenant), None)
            if part is None or len(part) + len(answer) + 1 > size:
                part = SuffixAutomaton()
                self._parts.append((tenant, part))
            part.extend(answer)
            part.end_text()
            while len(self) > self._most:
                del self._parts[0]
        return True

    def find(self, tenant: str, tail: Ints) -> Found | None:
        """The longest suffix of ``tail`` in a tenant's answers; on a tie, the newest part wins."""
        best: Found | None = None
        for owner, part in reversed(self._parts):
            if tenant and owner == tenant:
                match = part.match(tail, _LONGEST)
                if match.length > (best.match.length if best else 0):
                    best = Found(part, part.tokens, match, "answers", tail)
        return best

    def parts(self) -> list[Part]:
        """A copy of everything, the oldest first."""
        with self._lock:
            return [Part(tenant, part.tokens.copy()) for tenant, part in self._parts]


class AnswerFile:
    """Keeps a memory's answers in a file across restarts; its own thread writes, so that no step waits.

    The file holds a checksum of all that follows, a line of JSON (format, model, and the parts' tenants and sizes), and
    the tokens as little-endian int32. It is replaced as a whole. A file that is damaged or of another model is not
    read, and a folder that another process holds is not written, each with a line in the log: answers are only a help.

    Args:
        folder: created if missing, for its owner only.
        model: what distinguishes the model and its tokenizer from others.
        vocabulary: number of tokens in the model's vocabulary.
    """

    def __init__(self, folder: Path, model: Mapping[str, str], vocabulary: int) -> None:
        self._folder = folder
        self._model = dict(model)
        self._vocabulary = vocabulary
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def read(self, memory: AnswerMemory) -> None:
        """Fill a memory from the file with as much as fits, the newest answers last."""
        path = self._folder / FILE
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            self._leave_out(error.strerror or str(error))
            return
        try:
            parts = self._parse(data)
        except (ValueError, KeyError, TypeError) as error:
            self._leave_out(f"{path.name} cannot be used: {error}")
            return
        for part in parts:
            for answer in np.split(part.tokens, np.flatnonzero(part.tokens < 0) + 1):
                memory.add(part.tenant, answer[:-1])
        _log.info("specrag: %d tokens of earlier answers from %s", len(memory), path)

    def keep(self, memory: AnswerMemory) -> None:
        """Arrange for a memory's answers to be written soon."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_on, args=(memory,), daemon=True)
            self._thread.start()
        self._changed.set()

    def _write_on(self, memory: AnswerMemory) -> None:
        pause = threading.Event()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with exclusive_lock(self._folder / LOCK, _busy):
                while self._changed.wait():
                    pause.wait(DELAY)  # more answers end meanwhile
                    self._changed.clear()
                    atomic_write(self._folder / FILE, self._content(memory.parts()))
        except OSError as error:
            self._leave_out(f"from now on answers are not written ({error.strerror or error})")

    def _content(self, parts: Sequence[Part]) -> bytes:
        header = {
            "format": FORMAT,
            "model": self._model,
            "parts": [[part.tenant, len(part.tokens)] for part in parts],
        }
        body = json.dumps(header).encode() + b"\n"
        body += b"".join(part.tokens.astype("<i4").tobytes() for part in parts)
        return _checksum(body) + b"\n" + body

    def _parse(self, data: bytes) -> list[Part]:
        checksum, _, body = data.partition(b"\n")
        if checksum != _checksum(body):
            raise ValueError("its checksum is another")
        line, _, tokens = body.partition(b"\n")
        header = json.loads(line)
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']!r}")
        if header["model"] != self._model:
            raise ValueError(f"it is of another model ({header['model']})")
        array = np.frombuffer(tokens, dtype="<i4").astype(np.int32)
        sizes = [size for _, size in header["parts"]]
        if sum(sizes) != len(array) or (len(array) and array.max() >= self._vocabulary):
            raise ValueError("its tokens are not the model's")
        places = np.cumsum([0, *sizes])
        return [
            Part(tenant, array[start : start + size])
            for (tenant, size), start in zip(header["parts"], places[:-1], strict=True)
        ]

    def _leave_out(self, why: str) -> None:
        _log.warning("specrag: answer memory in %s: %s", self._folder, why)


def _busy() -> None:
    raise BlockingIOError("another process writes there")


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(body).encode()
