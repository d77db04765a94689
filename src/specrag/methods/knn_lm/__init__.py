"""kNN-LM: each token is weighed against its nearest neighbours in a datastore (Khandelwal et al. 2020).

Its searches are speculated on as in RaLMSpec (Zhang et al. 2024), unless ``stride`` is ``sequential``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from specrag.errors import InputError
from specrag.methods.base import MethodOptions, Needs
from specrag.methods.decoding import DecodingMethod, make_decoder

if TYPE_CHECKING:
    from specrag.methods.base import Decoder, SpeculativeDecoder
    from specrag.methods.resources import Resources


class KnnLM(DecodingMethod):
    """Interpolates the model's distribution with that of its neighbours' next tokens.

    Args:
        options: :class:`KnnLM.Options`.
    """

    name = "knn-lm"
    summary = "kNN-LM: every token is weighed with its neighbours in a datastore"
    needs = Needs.SESSIONS | Needs.DATASTORE

    class Options(MethodOptions):
        """Options of kNN-LM, and of the speculation on its searches (RaLMSpec)."""

        datastore: Annotated[str, Field(max_length=4096)] | None = Field(
            None,
            description="Which one is searched; the only one where there is one.",
            json_schema_extra={"resource": "datastores"},
        )
        k: Annotated[int, Field(ge=1, le=1024)] | None = Field(
            None, title="k", description="Neighbours; 1,024, or all of a small datastore."
        )
        weight: Annotated[float, Field(ge=0, le=1)] = Field(
            0.25, title="lambda", description="Of the neighbours' next tokens; 0 is the model alone."
        )
        knn_temperature: Annotated[float, Field(gt=0, le=1e6)] = Field(
            1.0, description="Divides squared distances; specrag perplexity --sweep finds one."
        )
        knn_reach: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
            None,
            description="Squared distance at which neighbours count e times less; none: the same at any.",
        )
        index: Literal["flat", "hnsw", "pq"] = Field("flat", description="One that the datastore has.")
        stride: Annotated[int, Field(ge=1, le=64)] | Literal["cost-aware", "os3", "sequential"] = Field(
            "cost-aware",
            title="s",
            description="Tokens guessed before a search, os3 or cost-aware to choose a number, or sequential.",
        )
        decoder: str = Field(
            "adaptive",
            max_length=64,
            description="Whose guesses are read in one pass; plain: one token a pass. Not with sequential.",
            json_schema_extra={"resource": "decoders"},
        )
        prefetch: Annotated[int, Field(ge=1, le=1024)] | None = Field(
            None,
            title="P",
            description="Neighbours whose followers a search brings into the cache; none: k, at most 32.",
        )
        asynchronous: bool = Field(
            False, title="A", description="Decode on while guesses are verified. Not with sequential."
        )
        max_match: Annotated[float, Field(gt=0, le=1)] | None = Field(
            0.6,
            title="gamma_max",
            description="Cap of the match rate that os3 reckons with; none: a confidence bound.",
        )

    options: Options

    def decoder(self, given: Resources) -> Decoder:
        """See :class:`~specrag.methods.decoding.DecodingMethod`."""
        from specrag.methods.knn_lm.decoder import KnnDecoder, speculative

        options = self.options
        if options.stride == "sequential":
            for name in ("asynchronous", "decoder", "prefetch"):
                value = getattr(options, name)
                if name in options.model_fields_set and value:
                    raise InputError(
                        name, value, "nothing is guessed with a stride of sequential; leave it out"
                    )
        guesses: SpeculativeDecoder | None = None
        if options.stride != "sequential" and options.decoder != "plain":
            # One for all requests of a model: it learns what a pass costs.
            guesses = speculative(make_decoder(options.decoder, given))
        return given.shared.get(KnnDecoder, given.datastore(options.datastore), options, guesses)
