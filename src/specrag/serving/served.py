"""Who writes the texts of requests: a model on this machine, or a pool of endpoints; what routes need of either."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from specrag.engine.executor import Executor
    from specrag.language_model import LanguageModel
    from specrag.methods.base import Generator
    from specrag.methods.remote import RemoteModel
    from specrag.models.tokenizer import Tokenizer


class Served(Protocol):
    """A model by the name that requests give."""

    @property
    def name(self) -> str:
        """As requests name it."""

    @property
    def generator(self) -> Generator:
        """Writes its texts."""

    @property
    def executor(self) -> Executor:
        """Runs the coroutines of requests."""

    @property
    def remote(self) -> RemoteModel | None:
        """The generator where it is behind endpoints."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Of its tokens; ``None`` where only texts are known."""

    @property
    def keeps_prompts(self) -> bool:
        """Whether a text is read faster behind an equal one."""

    @property
    def fingerprint(self) -> str:
        """Of what computes: equal ones give equal texts for equal seeds, as far as rounding allows."""

    def bytes_for(self, tokens: int) -> int:
        """Memory of keys and values of so many tokens, on this machine."""


@dataclass(frozen=True, slots=True)
class LocalServed:
    """A model on this machine."""

    name: str
    generator: LanguageModel
    remote: None = None

    @property
    def executor(self) -> Executor:
        """See :class:`Served`."""
        return self.generator.executor

    @property
    def tokenizer(self) -> Tokenizer:
        """See :class:`Served`."""
        return self.generator.tokenizer

    @property
    def keeps_prompts(self) -> bool:
        """See :class:`Served`."""
        return bool(self.generator.prefixes.limit_bytes)

    @property
    def fingerprint(self) -> str:
        """See :class:`Served`."""
        loaded = self.generator.loaded
        return f"specrag-{_version()}-{loaded.dtype}-{loaded.device}"

    def bytes_for(self, tokens: int) -> int:
        """See :class:`Served`."""
        from specrag.engine.memory import keys_values_bytes

        return keys_values_bytes(self.generator.model, tokens)


@dataclass(frozen=True, slots=True)
class RemoteServed:
    """A pool of endpoints, which tell texts and no tokens."""

    name: str
    remote: RemoteModel
    tokenizer: None = None
    keeps_prompts: bool = False

    @property
    def generator(self) -> RemoteModel:
        """See :class:`Served`."""
        return self.remote

    @property
    def executor(self) -> Executor:
        """See :class:`Served`."""
        return self.remote.executor

    @property
    def fingerprint(self) -> str:
        """See :class:`Served`."""
        return f"specrag-{_version()}-upstream"

    def bytes_for(self, tokens: int) -> int:  # noqa: ARG002 - what an endpoint holds is its own business
        """See :class:`Served`."""
        return 0


@cache  # every answer bears it, and reading it from the installed package takes two milliseconds
def _version() -> str:
    return version("specrag")
