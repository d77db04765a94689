"""The methods of ``specrag bench longcontext`` by their labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from specrag.methods.rapid.baselines import StreamingDecoder, naive_sd
from specrag.methods.rapid.decoder import RapidDecoder
from specrag.methods.retrieval_decoder import RetrievalDecoder
from specrag.methods.token_decoders import PlainDecoder

if TYPE_CHECKING:
    from specrag.methods.base import Decoder

LC, RAG, NAIVE, STREAMING, ADAPTIVE = "long-context", "rag", "naive-sd", "streaming-drafter", "adaptive"
LOSSLESS = "rapid"
#: A smaller model, which drafts for any other across vocabularies.
SMALL = "smollm2-135m"
ETAS = (5, 10, 20, 30, 40, 50)


def with_eta(eta: float, drafter: str = "") -> str:
    """The label of RAPID at a strength of transfer, with a drafter that is not the target itself."""
    return "+".join(part for part in (LOSSLESS, drafter, f"eta={eta:g}" if eta else "") if part)


#: By their label; what depends on the row is added by :class:`Subjects`.
METHODS: Mapping[str, Callable[[], Decoder | RapidDecoder]] = {
    LC: PlainDecoder,
    RAG: PlainDecoder,
    NAIVE: naive_sd,
    STREAMING: StreamingDecoder,
    ADAPTIVE: RetrievalDecoder,
    LOSSLESS: RapidDecoder,
    **{with_eta(eta): lambda eta=eta: RapidDecoder(eta=float(eta)) for eta in ETAS},  # type: ignore[misc]
    **{with_eta(eta, SMALL): lambda eta=eta: RapidDecoder(drafter=SMALL, eta=float(eta)) for eta in ETAS},  # type: ignore[misc]
    "rapid+eta=10+published": lambda: RapidDecoder(eta=10.0, cost_aware=False, suffix=False),
    f"naive-sd+{SMALL}": lambda: naive_sd(SMALL),
    f"rapid+{SMALL}": lambda: RapidDecoder(drafter=SMALL),
    "rapid+eta=20+exact": lambda: RapidDecoder(eta=20.0, cost_aware=False, suffix=False),
    "rapid+eta=20+exact+off": lambda: RapidDecoder(eta=20.0, guard="off", cost_aware=False, suffix=False),
    "rapid+eta=20+paper": lambda: RapidDecoder(eta=20.0, residual="paper", cost_aware=False),
    "rapid+eta=20+paper+off": lambda: RapidDecoder(eta=20.0, residual="paper", guard="off", cost_aware=False),
    "rapid+eta=20+mask": lambda: RapidDecoder(eta=20.0, mask=0.1, cost_aware=False, suffix=False),
}

#: Guards and residuals, compared by sampling.
GUARD_METHODS = (
    LC, "rapid+eta=20+exact", "rapid+eta=20+exact+off", "rapid+eta=20+paper", "rapid+eta=20+paper+off",
    "rapid+eta=20+mask",
)  # fmt: skip
