"""How much to guess: schedules for tokens, chains, strides and guesses of passages, over one cost model."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.speculation.schedule.base import Estimates, FixedBudget, Timed, TokenSchedule
    from specrag.speculation.schedule.chains import ChainCosts, ChainLength
    from specrag.speculation.schedule.cost_model import (
        ByModel,
        CostModel,
        Line,
        StrideCosts,
        passages_per_second,
    )
    from specrag.speculation.schedule.guesses import (
        MAX_FRESH,
        CostAwareGuesses,
        CountedGuesses,
        GuessSchedule,
        SharedGuesses,
    )
    from specrag.speculation.schedule.strides import (
        MAX_STRIDE,
        OS3,
        ChunkTime,
        CostAwareStride,
        FixedStride,
        SharedStrides,
        SharedStrideStats,
        StrideRound,
        StrideSchedule,
    )
    from specrag.speculation.schedule.tokens import CostAware, SharedCosts
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "MAX_FRESH",
    "MAX_STRIDE",
    "OS3",
    "ByModel",
    "ChainCosts",
    "ChainLength",
    "ChunkTime",
    "CostAware",
    "CostAwareGuesses",
    "CostAwareStride",
    "CostModel",
    "CountedGuesses",
    "Estimates",
    "FixedBudget",
    "FixedStride",
    "GuessSchedule",
    "Line",
    "SharedCosts",
    "SharedGuesses",
    "SharedStrideStats",
    "SharedStrides",
    "StrideCosts",
    "StrideRound",
    "StrideSchedule",
    "Timed",
    "TokenSchedule",
    "passages_per_second",
]
