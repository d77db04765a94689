"""The drafters that a method can be given by name."""

from __future__ import annotations

import difflib
import threading
from typing import TYPE_CHECKING

from specrag.engine.outputs import NOTHING, Outputs
from specrag.errors import InputError
from specrag.speculation.drafters.base import Drafter, NoDrafter
from specrag.speculation.drafters.draft_model import DraftModel, check_same_vocabulary
from specrag.speculation.drafters.prompt_lookup import PromptLookup
from specrag.speculation.drafters.recycling import Recycling

if TYPE_CHECKING:
    from specrag.models.loading import LoadedModel
    from specrag.models.tokenizer import Tokenizer

DRAFTERS = ("recycling", "lookup", "none")
MODEL_PREFIX = "model:"


class NamedDrafter:
    """Makes a drafter for each request from a name.

    Args:
        name: one of :data:`DRAFTERS`, or ``model:NAME`` for a draft model of the same vocabulary.

    Raises:
        InputError: there is no such drafter.
    """

    def __init__(self, name: str) -> None:
        if name not in DRAFTERS and not (name.startswith(MODEL_PREFIX) and len(name) > len(MODEL_PREFIX)):
            near = difflib.get_close_matches(name, DRAFTERS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError("drafter", name, f"take one of {', '.join(DRAFTERS)} or model:NAME{hint}")
        self.name = name
        self._tokenizer: Tokenizer | None = None
        self._fits: Tokenizer | None = None  # whose vocabulary was found to be the same
        self._model: LoadedModel | None = None
        self._lock = threading.Lock()

    def check(self, target: LoadedModel) -> None:
        """Load the draft model if there is one, and compare the vocabularies.

        Raises:
            InputError: they differ.
        """
        if not self.name.startswith(MODEL_PREFIX):
            return
        from specrag.models.catalog import resolve
        from specrag.models.loading import load_model  # torch, which other drafters do without
        from specrag.models.tokenizer import Tokenizer

        name = self.name.removeprefix(MODEL_PREFIX)
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = Tokenizer(resolve(name))
            if self._fits is not target.tokenizer:  # comparing takes up to a second
                check_same_vocabulary(target.tokenizer, self._tokenizer)
                self._fits = target.tokenizer
            if self._model is None:
                self._model = load_model(name, dtype=target.dtype, device=target.device)

    @property
    def outputs(self) -> Outputs:
        """What its drafters read of the target's rows."""
        return Recycling.outputs if self.name == "recycling" else NOTHING

    def make(self) -> Drafter:
        """A drafter for one request; whoever asks closes it."""
        if self._model is not None:
            return DraftModel(self._model.model)
        if self.name == "recycling":
            return Recycling()
        if self.name == "lookup":
            return PromptLookup()
        return NoDrafter()
