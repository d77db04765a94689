"""A loaded language model in the roles that methods above the token level have: writing texts, scoring texts."""

from __future__ import annotations

from specrag.methods.local_generator import LocalGenerator, SharingModel
from specrag.models.roles import TextGenerator, TextScorer
from specrag.models.scoring import LocalScorer


def as_generator(model: TextGenerator | SharingModel) -> TextGenerator:
    """What writes texts: the model itself, or a loaded language model that decodes plainly."""
    return model if isinstance(model, TextGenerator) else LocalGenerator(model)


def as_scorer(model: TextScorer | SharingModel) -> TextScorer:
    """What scores texts: the model itself, or a loaded language model."""
    return model if isinstance(model, TextScorer) else LocalScorer(model.loaded)
