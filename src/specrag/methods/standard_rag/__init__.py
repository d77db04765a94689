"""Standard RAG: find passages, put them into the prompt, answer from them with citations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from specrag.errors import InputError
from specrag.methods.base import GUESSES, Decoder, EncodesPrompts, Method, MethodOptions, Needs, Plan
from specrag.methods.decoding import make_decoder
from specrag.methods.passages import PASSAGE_TOKENS, retrieval, said_tokens
from specrag.methods.prompts import INSTRUCTION, build_prompt
from specrag.request import DEFAULT_MAX_TOKENS

if TYPE_CHECKING:
    from specrag.engine import Coroutine
    from specrag.methods.resources import Resources
    from specrag.request import Options, Request, Result


class StandardRAG(Method):
    """Answers from passages that are found once.

    Args:
        given, values: as for every method; the options are :class:`StandardRAG.Options`.
        decoding: a decoder that replaces the one named by the options.
    """

    name = "standard-rag"
    summary = "Passages in the prompt, an answer that cites them"
    needs = Needs.GENERATOR | Needs.RETRIEVER

    class Options(MethodOptions):
        """Options of standard RAG."""

        decoder: str = Field(
            "adaptive",
            max_length=64,
            description="How tokens are decoded: a method's name.",
            json_schema_extra={"resource": "decoders"},
        )
        lead: Annotated[str, Field(max_length=1000)] | None = Field(
            None,
            description="How the answer begins, in the prompt; none: According to passage [ for small models, empty "
            "for others. Citations are chosen by what passages hold, not by the model.",
        )
        instruction: Annotated[str, Field(max_length=4000)] | None = Field(
            None,
            description="What stands between passages and question; none: to answer in one short sentence.",
        )
        reuse: Literal["exact", "blocks"] = Field(
            "exact",
            description="What is not read anew: exact, beginnings of prompts as they were read; blocks, "
            "passages wherever they come, which is an approximation.",
        )
        prompt_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
            None, description="Most tokens of the prompt; none: what the passages take."
        )

    options: Options

    def __init__(self, *given: Any, decoding: Decoder | None = None, **values: Any) -> None:
        super().__init__(*given, **values)
        self._decoding = decoding

    def plan(self, request: Request, given: Resources) -> Plan:
        """See :class:`~specrag.methods.base.Method`."""
        from specrag.methods.standard_rag.pipeline import StandardPipeline

        found = retrieval(request, given, self.name)
        llm = given.generator
        options: Options = {"max_tokens": DEFAULT_MAX_TOKENS, **request.options}
        if isinstance(llm, EncodesPrompts):
            options["method"] = self._decoding or make_decoder(self.options.decoder, given)
        elif "decoder" in self.options.model_fields_set:
            raise InputError("decoder", self.options.decoder, "leave it out; an endpoint decodes as it likes")
        pipeline = StandardPipeline(
            llm,
            found,
            self.options,
            room=self._room(request, given, found.k),
            system=request.system,
            clock=given.clock,
        )
        pipeline.check(request.question, request.history, **options)

        def begin() -> Coroutine[Result]:
            answer = yield from pipeline.answering(request.question, request.history, **options)
            return answer.result()

        most = options["max_tokens"]
        return Plan(begin, pipeline.prompt_room(most) + most + GUESSES)

    def _room(self, request: Request, given: Resources, k: int) -> int:
        """The most tokens of a prompt: what given passages take, an estimate for those that will be found."""
        if request.passages is None:
            return (k + 1) * PASSAGE_TOKENS + said_tokens(request, given)
        whole = build_prompt(
            request.question,
            request.passages[:k],
            history=request.history,
            system=request.system,
            instruction=self.options.instruction or INSTRUCTION,
        )
        return given.generator.count(whole) + PASSAGE_TOKENS  # a lead, or words in another language
