"""Token speculation: draft trees, drafters, acceptance rules, schedules, and the decoding loop."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.speculation.acceptance import Matching, RowNeeds, Rule, View
    from specrag.speculation.augmented_target import (
        Augmented,
        AugmentedSettings,
        Guard,
        Residual,
        augmented_probs,
        guarded,
    )
    from specrag.speculation.decode import TARGET, DecodedToken, Settings, Speculation, Step, TextSink
    from specrag.speculation.relaxed import Relaxed
    from specrag.speculation.target import Alternative, Target, TargetView, alternatives
    from specrag.speculation.tree import EMPTY, ROOT, DraftTree, Round, Verdict, merge
    from specrag.speculation.vocabularies import VocabularyPair, check_alignment
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "EMPTY",
    "ROOT",
    "TARGET",
    "Alternative",
    "Augmented",
    "AugmentedSettings",
    "DecodedToken",
    "DraftTree",
    "Guard",
    "Matching",
    "Relaxed",
    "Residual",
    "Round",
    "RowNeeds",
    "Rule",
    "Settings",
    "Speculation",
    "Step",
    "Target",
    "TargetView",
    "TextSink",
    "Verdict",
    "View",
    "VocabularyPair",
    "alternatives",
    "augmented_probs",
    "check_alignment",
    "guarded",
    "merge",
]
