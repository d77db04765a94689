"""The drafters that a method can be given by name."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary

from specrag.checks import did_you_mean
from specrag.engine import NOTHING, Outputs
from specrag.errors import InputError
from specrag.speculation import VocabularyPair, check_alignment
from specrag.speculation.drafters import (
    PROMPT_ROWS,
    CrossVocabulary,
    Drafter,
    DraftModel,
    Eagle,
    NoDrafter,
    PromptLookup,
    Recycling,
    check_same_vocabulary,
)
from specrag.speculation.schedule import Estimates

if TYPE_CHECKING:
    from specrag.engine import SessionModel
    from specrag.models import EagleHead, LoadedModel, Tokenizer
    from specrag.models.catalog import ModelFiles

DRAFTERS = ("recycling", "lookup", "none")
MODEL_PREFIX = "model:"
EAGLE_PREFIX = "eagle:"


class NamedDrafter:
    """Makes a drafter for each request from a name.

    Args:
        name: one of :data:`DRAFTERS`, ``model:NAME`` for a draft model, which reads the target's text in its own tokens
            if its vocabulary differs, or ``eagle:NAME`` for an EAGLE-2 head of the target
            (:func:`~specrag.models.eagle_files.head_folder`).

    Raises:
        InputError: there is no such drafter.
    """

    def __init__(self, name: str) -> None:
        named = any(name.startswith(prefix) and name != prefix for prefix in (MODEL_PREFIX, EAGLE_PREFIX))
        if name not in DRAFTERS and not named:
            known = f"{', '.join(DRAFTERS)}, model:NAME or eagle:NAME"
            raise InputError("drafter", name, f"{did_you_mean(name, DRAFTERS)}take one of {known}")
        self.name = name
        self._tokenizer: Tokenizer | None = None
        self._model: LoadedModel | None = None
        # One method may serve several targets at once. A borrowed target may arrive without having been checked: it is
        # assumed to be the one checked last.
        self._fits: WeakKeyDictionary[SessionModel, _Fit] = WeakKeyDictionary()
        self._newest = _Fit()
        self._lock = threading.Lock()

    def check(self, target: LoadedModel) -> None:
        """Load the draft model or the head, if there is one, and make sure that it fits.

        Raises:
            InputError: it does not fit.
            ModelFilesError: its files are missing or damaged.
        """
        with self._lock:
            fit = self._fits.get(target.model)
            if fit is None:
                fit = self._fit(target)
                self._fits[target.model] = fit
            self._newest = fit

    @property
    def outputs(self) -> Outputs:
        """What its drafters read from the target's rows."""
        if self.name.startswith(EAGLE_PREFIX):
            return Eagle.outputs
        return Recycling.outputs if self.name == "recycling" else NOTHING

    @property
    def prompt_features(self) -> int:
        """The number of prompt rows whose hidden states its drafters read."""
        return PROMPT_ROWS if self.name.startswith(EAGLE_PREFIX) else 0

    def make(self, target: SessionModel, estimates: Estimates | None = None) -> Drafter:
        """A drafter for one request; whatever decodes with it closes it.

        Args:
            target: the model that it drafts for.
            estimates: of a schedule that weighs guesses: the drafter then guesses less where more cannot pay.
        """
        fit = self._fits.get(target, self._newest)
        if fit.head is not None:
            return Eagle(fit.head) if estimates is not None else Eagle(fit.head, min_gain=0)
        if self._model is not None and fit.pair is not None:
            return CrossVocabulary(self._model.model, fit.pair)
        if self._model is not None:
            return DraftModel(self._model.model)
        if self.name == "recycling":
            return Recycling(estimates=estimates)
        if self.name == "lookup":
            return PromptLookup()
        return NoDrafter()

    def _fit(self, target: LoadedModel) -> _Fit:
        if self.name.startswith(EAGLE_PREFIX):
            return _Fit(head=shared_head(self.name.removeprefix(EAGLE_PREFIX), target))
        if not self.name.startswith(MODEL_PREFIX):
            return _Fit()
        from specrag.models import Tokenizer
        from specrag.models.catalog import resolve

        files = resolve(self.name.removeprefix(MODEL_PREFIX))
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(files)
        pair = pair_of(target.tokenizer, self._tokenizer)
        if self._model is None:
            self._model = shared_model(self.name.removeprefix(MODEL_PREFIX), files, target)
        return _Fit(pair=pair)


@dataclass(frozen=True, slots=True)
class _Fit:
    """What is needed to draft for a target.

    Attributes:
        pair: aligns the vocabularies of the target and the draft model, if they differ.
        head: of the target.
    """

    pair: VocabularyPair | None = None
    head: EagleHead | None = None


# One for all methods that name it, whatever their settings, as long as any of them exists: a server's client may vary
# settings at will.
_models: WeakValueDictionary[tuple[str, str, str], LoadedModel] = WeakValueDictionary()
_heads: WeakKeyDictionary[SessionModel, WeakValueDictionary[str, EagleHead]] = WeakKeyDictionary()
_loading = threading.Lock()


def shared_model(name: str, files: ModelFiles, target: LoadedModel) -> LoadedModel:
    """A model that drafts for a target.

    Args:
        files: where it is stored.

    Raises:
        ModelFilesError: its files are missing or damaged.
    """
    from specrag.models import load_model

    dtype = draft_dtype(files, target.dtype)
    key = (name, dtype, target.device)
    with _loading:
        found = _models.get(key)
        if found is None:
            found = _models[key] = load_model(name, dtype=dtype, device=target.device)
        return found


def shared_head(name: str, target: LoadedModel) -> EagleHead:
    """A head of a target.

    Raises:
        InputError: there is none of this name, or it is for another model.
        ModelFilesError: its files are missing or damaged.
    """
    from specrag.models import load_head  # imports torch, which other drafters do not need

    with _loading:
        known = _heads.setdefault(target.model, WeakValueDictionary())
        found = known.get(name)
        if found is None:
            found = known[name] = load_head(name, target)
        return found


def pair_of(target: Tokenizer, draft: Tokenizer) -> VocabularyPair | None:
    """The object that aligns two vocabularies, or ``None`` if they are the same.

    Raises:
        InputError: they cannot be aligned.
    """
    try:
        check_same_vocabulary(target, draft)
    except InputError:
        check_alignment(target, draft)
        return VocabularyPair(target, draft)
    return None


def draft_dtype(files: ModelFiles, wanted: str) -> str:
    """The target's dtype, or bf16 instead of int8 if the draft model does not use the lean decoder.

    Only the lean decoder computes int8; a guess may be rounded differently.
    """
    from specrag.models import is_lean

    return "bf16" if wanted == "int8" and not is_lean(files) else wanted
