"""A decoding method for specrag: copies what followed the newest token where it first stood."""

from pydantic import Field

from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.methods.base import Decoder, DraftingDecoder, MethodOptions
from specrag.methods.decoding import DecodingMethod
from specrag.methods.resources import Resources
from specrag.speculation.acceptance import Matching
from specrag.speculation.decode import Settings, Speculation
from specrag.speculation.drafters.base import ANY_DEPTH, NoDrafter
from specrag.speculation.schedule.base import FixedBudget
from specrag.speculation.tree import EMPTY, DraftTree


class FirstWordDrafter(NoDrafter):
    """Guesses that the text goes on as behind the first occurrence of its newest token."""

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        yield from ()  # a drafter with a model of its own asks for passes here
        *earlier, newest = session.tokens
        if newest not in earlier:
            return EMPTY
        place = earlier.index(newest) + 1
        return DraftTree.chain(earlier[place : place + min(budget, depth)], "first-word")


class FirstWordDecoder(DraftingDecoder):
    """That drafter, strict verification, always as many guesses."""

    name = "first-word-lookup"

    def __init__(self, most: int) -> None:
        self.most = most

    def speculation(self, session: Session, settings: Settings) -> Speculation:
        return Speculation(FirstWordDrafter(), Matching(), FixedBudget(self.most))


class FirstWordLookup(DecodingMethod):
    """Copies behind the first occurrence of the newest token."""

    name = "first-word-lookup"
    summary = "Copies what followed the newest token where it first stood"

    class Options(MethodOptions):
        """How much is copied."""

        most: int = Field(4, ge=1, le=32, description="Tokens copied at most.")

    options: Options

    def decoder(self, given: Resources) -> Decoder:
        return given.shared.get(FirstWordDecoder, self.options.most)
