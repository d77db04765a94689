"""What adaptive speculation and ReSpec are measured against, as in the respective papers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import Field

from specrag.errors import InputError
from specrag.methods.base import MethodOptions, Needs
from specrag.methods.decoding import DecodingMethod

if TYPE_CHECKING:
    from specrag.methods.base import Decoder
    from specrag.methods.resources import Resources


class PromptLookup(DecodingMethod):
    """Copies after the newest n-gram (Saxena 2023)."""

    name = "prompt-lookup"
    summary = "Copies behind the newest n-gram of the text"

    def decoder(self, given: Resources) -> Decoder:
        from specrag.methods.token_decoders import prompt_lookup

        return given.shared.get(prompt_lookup)


class TokenRecycling(DecodingMethod):
    """Guesses the tokens that were likely after the same ones before (Luo et al. 2024)."""

    name = "token-recycling"
    summary = "Guesses tokens that were likely after the same ones before"

    def decoder(self, given: Resources) -> Decoder:
        from specrag.methods.token_decoders import token_recycling

        return given.shared.get(token_recycling)


class SamDecoding(DecodingMethod):
    """Copies after the longest match, otherwise recycles tokens (Hu et al. 2024)."""

    name = "sam-decoding"
    summary = "Copies behind the longest match, else recycles tokens"

    def decoder(self, given: Resources) -> Decoder:
        from specrag.methods.token_decoders import sam_decoding

        return given.shared.get(sam_decoding)


def _drafter(prefix: str) -> Any:
    return Field(
        None,
        max_length=4096,
        description="Name or folder of the drafter.",
        json_schema_extra={"resource": "drafters", "prefix": prefix},
    )


class _Named(DecodingMethod):
    """A method whose drafter has to be named."""

    needs = Needs.SESSIONS | Needs.DRAFTER
    options: Any

    def _drafter(self, given: Resources, prefix: str, make: Callable[[str], Decoder]) -> Decoder:
        drafter = self.options.drafter
        if not drafter:
            raise InputError("drafter", drafter, f"{self.name} needs one; name it (-o drafter=NAME)")
        name = drafter.removeprefix(prefix)
        given.check_drafter(prefix + name, ())
        return given.shared.get(make, name)


class DraftModel(_Named):
    """A smaller model guesses (Leviathan et al. 2023), even one with another vocabulary (Timor et al. 2025)."""

    name = "draft-model"
    summary = "A smaller model guesses"

    class Options(MethodOptions):
        """Which model."""

        drafter: str | None = _drafter("model:")

    def decoder(self, given: Resources) -> Decoder:
        from specrag.methods.drafters import MODEL_PREFIX
        from specrag.methods.token_decoders import draft_model

        return self._drafter(given, MODEL_PREFIX, draft_model)


class Eagle2(_Named):
    """A head on the target's features guesses (Li et al. 2024, EAGLE-2)."""

    name = "eagle-2"
    summary = "A head on the model's features guesses"

    class Options(MethodOptions):
        """Which head."""

        drafter: str | None = _drafter("eagle:")

    def decoder(self, given: Resources) -> Decoder:
        from specrag.methods.drafters import EAGLE_PREFIX
        from specrag.methods.token_decoders import eagle

        return self._drafter(given, EAGLE_PREFIX, eagle)
