"""The methods of ``specrag bench longcontext`` by their labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from specrag.methods.plain import Plain
from specrag.methods.rapid import RAPID
from specrag.methods.rapid_baselines import StreamingDrafter, naive_sd
from specrag.methods.respec import ReSpec

if TYPE_CHECKING:
    from specrag.methods.base import DecodingMethod

LC, RAG, NAIVE, STREAMING, RESPEC = "long-context", "rag", "naive-sd", "streaming-drafter", "respec"
LOSSLESS = "rapid"
#: A smaller model, which drafts for any other across vocabularies.
SMALL = "smollm2-135m"
ETAS = (5, 10, 20, 30, 40, 50)


def with_eta(eta: float, drafter: str = "") -> str:
    """The label of RAPID at a strength of transfer, with a drafter that is not the target itself."""
    return "+".join(part for part in (LOSSLESS, drafter, f"eta={eta:g}" if eta else "") if part)


#: By their label; what depends on the row is added by :class:`Subjects`.
METHODS: Mapping[str, Callable[[], DecodingMethod | RAPID]] = {
    LC: Plain,
    RAG: Plain,
    NAIVE: naive_sd,
    STREAMING: StreamingDrafter,
    RESPEC: ReSpec,
    LOSSLESS: RAPID,
    **{with_eta(eta): lambda eta=eta: RAPID(eta=float(eta)) for eta in ETAS},  # type: ignore[misc]
    **{with_eta(eta, SMALL): lambda eta=eta: RAPID(drafter=SMALL, eta=float(eta)) for eta in ETAS},  # type: ignore[misc]
    "rapid+eta=10+published": lambda: RAPID(eta=10.0, cost_aware=False, suffix=False),
    f"naive-sd+{SMALL}": lambda: naive_sd(SMALL),
    f"rapid+{SMALL}": lambda: RAPID(drafter=SMALL),
    "rapid+eta=20+exact": lambda: RAPID(eta=20.0, cost_aware=False, suffix=False),
    "rapid+eta=20+exact+off": lambda: RAPID(eta=20.0, guard="off", cost_aware=False, suffix=False),
    "rapid+eta=20+paper": lambda: RAPID(eta=20.0, residual="paper", cost_aware=False),
    "rapid+eta=20+paper+off": lambda: RAPID(eta=20.0, residual="paper", guard="off", cost_aware=False),
    "rapid+eta=20+mask": lambda: RAPID(eta=20.0, mask=0.1, cost_aware=False, suffix=False),
}

#: Guards and residuals, compared by sampling.
GUARD_METHODS = (
    LC, "rapid+eta=20+exact", "rapid+eta=20+exact+off", "rapid+eta=20+paper", "rapid+eta=20+paper+off",
    "rapid+eta=20+mask",
)  # fmt: skip
