"""Which model drafts in RAPID: the target itself, a model by name, or one that is already loaded."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from specrag.engine import SessionModel
from specrag.errors import InputError
from specrag.methods.drafters import pair_of, shared_model
from specrag.speculation import VocabularyPair

if TYPE_CHECKING:
    from specrag.models import LoadedModel

#: The target's own weights draft, in a separate session.
SELF = "self"


@runtime_checkable
class HasLoadedModel(Protocol):
    """Holds a loaded model, as a :class:`~specrag.language_model.LanguageModel` does."""

    @property
    def loaded(self) -> LoadedModel:
        """The model."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A drafter for one target.

    Attributes:
        model: computes the drafter's passes.
        pair: aligns the vocabularies, if they differ.
    """

    model: SessionModel
    pair: VocabularyPair | None


class DrafterModel:
    """Finds the drafter's model for a target, loads it once, and compares the vocabularies once.

    Args:
        drafter: :data:`SELF`, a model's name, or an object that holds a loaded model.

    Raises:
        InputError: it is none of these.
    """

    def __init__(self, drafter: str | HasLoadedModel) -> None:
        if not isinstance(drafter, str) and not isinstance(drafter, HasLoadedModel):
            raise InputError("drafter", drafter, f"give '{SELF}', a model's name or a loaded LanguageModel")
        if drafter == "":
            raise InputError("drafter", drafter, f"give '{SELF}' or a model's name")
        self._drafter = drafter
        self._named: LoadedModel | None = None
        self._fits: WeakKeyDictionary[SessionModel, Fit] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def loaded_for(self, target: LoadedModel) -> LoadedModel:
        """The drafter's model, loaded on first use; its tokenizer encodes what the drafter reads.

        Raises:
            ModelFilesError: its files are missing or damaged.
        """
        if not isinstance(self._drafter, str):
            return self._drafter.loaded
        if self._drafter == SELF:
            return target
        with self._lock:
            if self._named is None:
                from specrag.models.catalog import resolve

                self._named = shared_model(self._drafter, resolve(self._drafter), target)
        return self._named

    def fit(self, target: LoadedModel) -> Fit:
        """The drafter for a target.

        Raises:
            InputError: texts cannot be aligned between the two.
        """
        found = self._fits.get(target.model)
        if found is None:
            loaded = self.loaded_for(target)
            pair = None if loaded is target else pair_of(target.tokenizer, loaded.tokenizer)
            found = Fit(loaded.model, pair)
            self._fits[target.model] = found
        return found

    def known_fit(self, target: SessionModel) -> Fit:
        """The drafter for a target that was checked before; any model drafts for itself.

        Raises:
            InputError: the target was not checked.
        """
        if self._drafter == SELF:
            return Fit(target, None)
        found = self._fits.get(target)
        if found is None:
            raise InputError("drafter", self._drafter, "call check with the target before decoding")
        return found
