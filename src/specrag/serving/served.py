"""What writes the texts of requests, a model on this machine or a pool of endpoints, as the routes need it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from specrag.engine import Executor
    from specrag.language_model import LanguageModel
    from specrag.methods import Generator, RemoteModel
    from specrag.models import Tokenizer


class Served(Protocol):
    """A model under the name that requests use."""

    @property
    def name(self) -> str:
        """The name that requests use."""

    @property
    def generator(self) -> Generator:
        """Writes the texts."""

    @property
    def executor(self) -> Executor:
        """Runs the coroutines of requests."""

    @property
    def remote(self) -> RemoteModel | None:
        """The generator if it is behind endpoints, else ``None``."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; ``None`` if only texts are known, not tokens."""

    @property
    def keeps_prompts(self) -> bool:
        """Whether prompts are kept, so that an equal prompt is read faster."""

    @property
    def fingerprint(self) -> str:
        """Identifies what computes: equal fingerprints give equal texts for equal seeds, as far as rounding allows."""

    def bytes_for(self, tokens: int) -> int:
        """Bytes that the keys and values of ``tokens`` tokens take on this machine."""


@dataclass(frozen=True, slots=True)
class LocalServed:
    """A model on this machine."""

    name: str
    generator: LanguageModel
    remote: None = None

    @property
    def executor(self) -> Executor:
        return self.generator.executor

    @property
    def tokenizer(self) -> Tokenizer:
        return self.generator.tokenizer

    @property
    def keeps_prompts(self) -> bool:
        return bool(self.generator.prefixes.limit_bytes)

    @property
    def fingerprint(self) -> str:
        loaded = self.generator.loaded
        return f"specrag-{_version()}-{loaded.dtype}-{loaded.device}"

    def bytes_for(self, tokens: int) -> int:
        from specrag.engine import keys_values_bytes

        return keys_values_bytes(self.generator.model, tokens)


@dataclass(frozen=True, slots=True)
class RemoteServed:
    """A pool of endpoints, which return texts and no tokens."""

    name: str
    remote: RemoteModel
    tokenizer: None = None
    keeps_prompts: bool = False

    @property
    def generator(self) -> RemoteModel:
        return self.remote

    @property
    def executor(self) -> Executor:
        return self.remote.executor

    @property
    def fingerprint(self) -> str:
        return f"specrag-{_version()}-upstream"

    def bytes_for(self, tokens: int) -> int:  # noqa: ARG002 - what an endpoint holds is its own business
        return 0


@cache  # every answer has it, and reading it from the installed package takes two milliseconds
def _version() -> str:
    return version("specrag")
