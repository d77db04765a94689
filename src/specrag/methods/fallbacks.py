"""The drafters that a method can be given by name."""

from __future__ import annotations

import difflib
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

from specrag.engine.outputs import NOTHING, Outputs
from specrag.errors import InputError
from specrag.models.family import supports
from specrag.speculation.drafters.base import Drafter, NoDrafter
from specrag.speculation.drafters.cross_vocabulary import CrossVocabulary
from specrag.speculation.drafters.draft_model import DraftModel, check_same_vocabulary
from specrag.speculation.drafters.eagle import PROMPT_ROWS, Eagle
from specrag.speculation.drafters.prompt_lookup import PromptLookup
from specrag.speculation.drafters.recycling import Recycling
from specrag.speculation.vocabularies import VocabularyPair, check_alignment

if TYPE_CHECKING:
    from specrag.engine.passes import SessionModel
    from specrag.models.catalog import ModelFiles
    from specrag.models.eagle_head import EagleHead
    from specrag.models.loading import LoadedModel
    from specrag.models.tokenizer import Tokenizer

DRAFTERS = ("recycling", "lookup", "none")
MODEL_PREFIX = "model:"
EAGLE_PREFIX = "eagle:"


class NamedDrafter:
    """Makes a drafter for each request from a name.

    Args:
        name: one of :data:`DRAFTERS`, ``model:NAME`` for a draft model, which reads the target's
            text in tokens of its own if its vocabulary is another, or ``eagle:NAME``
            for an EAGLE-2 head of the target (:func:`~specrag.models.eagle_reading.head_folder`).

    Raises:
        InputError: there is no such drafter.
    """

    def __init__(self, name: str) -> None:
        named = any(name.startswith(prefix) and name != prefix for prefix in (MODEL_PREFIX, EAGLE_PREFIX))
        if name not in DRAFTERS and not named:
            near = difflib.get_close_matches(name, DRAFTERS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            known = f"{', '.join(DRAFTERS)}, model:NAME or eagle:NAME"
            raise InputError("drafter", name, f"take one of {known}{hint}")
        self.name = name
        self._tokenizer: Tokenizer | None = None
        self._compared: Tokenizer | None = None  # the target's
        self._pair: VocabularyPair | None = None  # where the two vocabularies differ
        self._model: LoadedModel | None = None
        self._head: EagleHead | None = None
        self._head_of: SessionModel | None = None  # the target that it reads
        self._lock = threading.Lock()

    def check(self, target: LoadedModel) -> None:
        """Load the draft model or the head if there is one, and make sure that it fits.

        Raises:
            InputError: it does not.
            ModelFilesError: its files are missing or damaged.
        """
        if self.name.startswith(EAGLE_PREFIX):
            self._check_head(target)
        if not self.name.startswith(MODEL_PREFIX):
            return
        from specrag.models.catalog import resolve
        from specrag.models.loading import load_model  # torch, which other drafters do without
        from specrag.models.tokenizer import Tokenizer

        name = self.name.removeprefix(MODEL_PREFIX)
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = Tokenizer(resolve(name))
            if self._compared is not target.tokenizer:  # comparing takes up to a second
                self._pair = _pair_of(target.tokenizer, self._tokenizer)
                self._compared = target.tokenizer
            if self._model is None:
                dtype = _draft_dtype(resolve(name), target.dtype)
                self._model = load_model(name, dtype=dtype, device=target.device)

    @property
    def outputs(self) -> Outputs:
        """What its drafters read of the target's rows."""
        if self.name.startswith(EAGLE_PREFIX):
            return Eagle.outputs
        return Recycling.outputs if self.name == "recycling" else NOTHING

    @property
    def prompt_features(self) -> int:
        """How many of the prompt's rows its drafters read the hidden state of."""
        return PROMPT_ROWS if self.name.startswith(EAGLE_PREFIX) else 0

    def make(self, *, weighed: bool = True) -> Drafter:
        """A drafter for one request; whoever asks closes it.

        Args:
            weighed: it may guess less than it is asked for where more is not worth its passes.
        """
        if self._head is not None:
            return Eagle(self._head) if weighed else Eagle(self._head, min_gain=0)
        if self._model is not None and self._pair is not None:
            return CrossVocabulary(self._model.model, self._pair)
        if self._model is not None:
            return DraftModel(self._model.model)
        if self.name == "recycling":
            return Recycling()
        if self.name == "lookup":
            return PromptLookup()
        return NoDrafter()

    def _check_head(self, target: LoadedModel) -> None:
        from specrag.models.eagle_head import load_head  # torch, as above

        with self._lock:
            if self._head_of is not target.model:
                self._head = load_head(self.name.removeprefix(EAGLE_PREFIX), target)
                self._head_of = target.model


def _pair_of(target: Tokenizer, draft: Tokenizer) -> VocabularyPair | None:
    """What aligns two vocabularies, or nothing if they are the same.

    Raises:
        InputError: they cannot be aligned.
    """
    try:
        check_same_vocabulary(target, draft)
    except InputError:
        check_alignment(target, draft)
        return VocabularyPair(target, draft)
    return None


def _draft_dtype(files: ModelFiles, wanted: str) -> str:
    """The target's, or bf16 where only the lean decoder computes that: a guess may be rounded otherwise."""
    from specrag.models.weights import read_config_json

    config = SimpleNamespace(**{"model_type": "", **read_config_json(files)})
    return "bf16" if wanted == "int8" and not supports(config) else wanted
