"""Which request each row belongs to, and what a request says in ``vllm_xargs``.

vLLM gives a proposer only the tokens. Its runner knows the requests and calls the proposer from
``GPUModelRunner.propose_draft_token_ids``: that method is wrapped, once per process, so that the runner first shows the
requests to the drafter. If a version of vLLM has no such method, or keeps its requests elsewhere, rows stay unnamed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specrag.models import Tokenizer

_log = logging.getLogger("vllm.specrag")

#: Fields of a request's ``vllm_xargs``.
PASSAGES, TENANT = "specrag_passages", "specrag_tenant"
#: Most tokens taken from a request's passages.
MOST_PASSAGE_TOKENS = 1 << 13


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What is known about a request besides its tokens.

    Attributes:
        name: vLLM's id of it; empty if that cannot be seen.
        extra: its ``vllm_xargs``.
        encode: text to tokens; without it there are no passages.
    """

    name: str = ""
    extra: Mapping[str, Any] | None = None
    encode: Callable[[str], Sequence[int]] | None = None

    @property
    def tenant(self) -> str:
        """The tenant that it names; empty for none."""
        named = (self.extra or {}).get(TENANT)
        return named if isinstance(named, str) else ""

    def passages(self) -> list[list[int]]:
        """The tokens of its passages; values that are not text and tokens beyond the limit are left out."""
        given = (self.extra or {}).get(PASSAGES)
        if self.encode is None or not isinstance(given, str | list):
            return []
        found: list[list[int]] = []
        room = MOST_PASSAGE_TOKENS
        for text in [given] if isinstance(given, str) else [text for text in given if isinstance(text, str)]:
            tokens = list(self.encode(text))[:room]
            room -= len(tokens)
            if tokens:
                found.append(tokens)
        return found


UNNAMED = Request()


def watch_requests() -> str:
    """Have vLLM's runner show its requests to its drafter before each proposal.

    Returns:
        Why this is not possible; empty if it is.
    """
    try:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # type: ignore[import-not-found]
    except ImportError as error:
        return f"vLLM's model runner is not where it was in 0.32 ({error})"
    propose = getattr(GPUModelRunner, "propose_draft_token_ids", None)
    if propose is None:
        return "GPUModelRunner has no propose_draft_token_ids"
    if not hasattr(propose, "__specrag__"):
        GPUModelRunner.propose_draft_token_ids = _showing(propose)
    return ""


def _showing(propose: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(propose)
    def propose_draft_token_ids(runner: Any, *args: Any, **kwargs: Any) -> Any:
        see = getattr(runner.drafter, "see_requests", None)
        if see is not None:
            names, known = getattr(runner.input_batch, "req_ids", None), getattr(runner, "requests", None)
            if names is not None and known is not None:
                see(names, known)
        return propose(runner, *args, **kwargs)

    propose_draft_token_ids.__specrag__ = True  # type: ignore[attr-defined]
    return propose_draft_token_ids


def extra_of(state: Any) -> Mapping[str, Any] | None:
    """A request's ``vllm_xargs``, from vLLM's state of it."""
    extra = getattr(getattr(state, "sampling_params", None), "extra_args", None)
    return extra if isinstance(extra, Mapping) else None


def asked(extra: Mapping[str, Any] | None) -> Collection[str]:
    """Which of our fields a request gives."""
    return {PASSAGES, TENANT} & (extra or {}).keys()


def open_tokenizer(config: Any) -> Tokenizer | None:
    """The served model's tokenizer, from its files on this machine; ``None`` if there is no ``tokenizer.json``.

    Args:
        config: vLLM's ``VllmConfig``.
    """
    from specrag.models import Tokenizer
    from specrag.models.catalog import ModelFiles

    model = config.model_config
    folder = _folder(str(model.tokenizer or model.model), getattr(model, "tokenizer_revision", None))
    if folder is None:
        return None
    return Tokenizer(ModelFiles(folder.name, folder, "unknown", "vLLM"))


def _folder(name: str, revision: str | None) -> Path | None:
    """The folder of a model's ``tokenizer.json``: the model's own, or one in the hub's cache."""
    if (Path(name) / "tokenizer.json").is_file():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "tokenizer.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
