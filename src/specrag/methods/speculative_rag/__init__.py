"""Speculative RAG: drafts from subsets of the passages, verified in one pass, the best chosen (Wang et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field

from specrag.errors import InputError
from specrag.methods.base import Method, MethodOptions, Needs, Plan
from specrag.methods.decoding import make_decoder
from specrag.methods.passages import DEFAULT_K, PASSAGE_TOKENS, refuse_form, retrieval

if TYPE_CHECKING:
    from specrag.engine import Coroutine, Executor, Session
    from specrag.methods.base import LocalModel
    from specrag.methods.resources import Resources
    from specrag.methods.speculative_rag.drafting import Drafting
    from specrag.methods.speculative_rag.scoring import Scoring
    from specrag.methods.speculative_rag.task import Task
    from specrag.models import TextGenerator
    from specrag.request import Options as GenerationOptions
    from specrag.request import Prompt, Request, Result

Factor = Literal["draft", "self-contain", "self-reflect"]
Form = Literal["paper", "cited"]
Strategy = Literal[
    "multi-perspective", "balanced", "random", "same-cluster", "anchored", "anchored-whole", "ranked"
]

#: Defaults that depend on the form of drafts: the paper's values, and those that measured better for cited sentences.
_USUAL: dict[Form, dict[str, Any]] = {
    "paper": {
        "strategy": "multi-perspective",
        "evidence": "rationale",
        "without": (),
        "length_normalized": False,
    },
    "cited": {
        "strategy": "ranked",
        "evidence": "best-passages",
        "without": ("draft", "self-reflect"),
        "length_normalized": True,
    },
}


class SpeculativeRAG(Method):
    """A drafter writes several answers, a verifier scores them all in one pass; the best is the answer.

    The model verifies. SmolLM2 drafts if the model is larger and no drafter is named; otherwise the model drafts.

    Args:
        options: :class:`SpeculativeRAG.Options`; ``form="paper"`` is the paper's configuration.
    """

    name = "speculative-rag"
    summary = "Speculative RAG: a small model drafts from subsets of the passages, the model chooses"
    needs = Needs.GENERATOR | Needs.SCORER | Needs.RETRIEVER
    reads_history = False

    class Options(MethodOptions):
        """Options of Speculative RAG."""

        drafter: Annotated[str, Field(max_length=4096)] | None = Field(
            None,
            description="Who drafts: a model's name, or http://HOST:PORT/v1#MODEL; none: the host's, smollm2-135m "
            "for a larger model, or the model.",
            json_schema_extra={"resource": "writers"},
        )
        adapter: Annotated[str, Field(max_length=4096)] | None = Field(
            None,
            description="The drafter's adapter, or plain for the drafter as it comes; none: for form=paper one that "
            "was tuned for it.",
            json_schema_extra={"resource": "writers"},
        )
        verifier: Annotated[str, Field(max_length=4096)] | None = Field(
            None,
            description="Who scores the drafts: a model's name, or http://HOST:PORT/v1#MODEL; none: the model.",
            json_schema_extra={"resource": "writers"},
        )
        form: Form | None = Field(
            None,
            description="What a draft is: a rationale and a few words as in the paper, with its way of dealing and of "
            "scoring, or a cited sentence; none: the paper's for a drafter that was trained on it, else cited.",
        )
        drafts: Annotated[int, Field(ge=1, le=16)] = Field(5, title="m", description="Drafts.")
        passages_per_draft: Annotated[int, Field(ge=1, le=8)] = Field(
            2, title="k", description="Passages that each is written from."
        )
        strategy: Strategy | None = Field(
            None,
            description="How passages are dealt out to drafts; none: ranked, multi-perspective for the paper's form.",
        )
        evidence: Literal["rationale", "passages", "both", "all-passages", "best-passages"] | None = Field(
            None,
            description="What the verifier reads beside a draft's answer; none: best-passages, rationale for the "
            "paper's form.",
        )
        without: Annotated[tuple[Factor, ...], Field(max_length=3)] | None = Field(
            None,
            description="Factors left out of the score: draft, self-contain, self-reflect; none: all but self-contain, "
            "nothing for the paper's form.",
        )
        length_normalized: bool | None = Field(
            None,
            description="Score by the mean log-probability of a token, not by the product of all; none: so, but for "
            "the paper's form.",
        )
        statement: Annotated[str, Field(min_length=1, max_length=1000)] | None = Field(
            None,
            description="What the verifier is asked to say Yes to: a name or a sentence; none: the paper's.",
        )
        chat: bool = Field(False, description="Score in the verifier's chat template, not as bare text.")
        judge: bool = Field(
            False,
            description="Ask the verifier whether the answer is right, and weigh its Yes against its No.",
        )
        calibrated: bool = Field(
            False,
            description="Of a verifier that judges: count by how much the evidence makes it surer.",
        )
        draft_tokens: Annotated[int, Field(ge=16, le=512)] = Field(
            128, description="Most tokens of a draft, its rationale included."
        )
        rationale_tokens: Annotated[int, Field(ge=1, le=511)] | None = Field(
            None, description="Most tokens of a rationale; none: five eighths of the draft's."
        )
        decoder: str = Field(
            "plain",
            max_length=64,
            description="How drafts are decoded: a method's name.",
            json_schema_extra={"resource": "decoders"},
        )
        claim: bool = Field(
            False,
            description="What is asked is a claim to be checked; by default the verifier weighs its labels, undrafted.",
        )
        choices: tuple[Annotated[str, Field(max_length=1000)], ...] = Field(
            (),
            max_length=26,
            description="Options of a multiple choice, such as A=Lyon,B=Oslo; weighed as a claim's labels are.",
        )

        def settled(self, form: Form | None = None) -> Self:
            """The options with a value for everything that depends on the form of drafts.

            Args:
                form: the drafter's form, used if the options name none.
            """
            form = self.form or form or "cited"
            usual: dict[str, Any] = {"form": form, **_USUAL[form]}
            if form == "cited" and (self.judge or self.statement is not None):
                usual["without"] = ("draft", "self-contain") if self.judge else ("draft",)
            given = {name: getattr(self, name) for name in usual if getattr(self, name) is not None}
            return self.model_copy(update={**usual, **given})

        def scoring(self) -> Scoring:
            """How drafts are scored."""
            from specrag.methods.speculative_rag.scoring import DEFAULT_STATEMENT, Scoring

            own = self.settled()
            without = own.without or ()
            return Scoring(
                draft="draft" not in without,
                self_contain="self-contain" not in without,
                self_reflect="self-reflect" not in without,
                evidence=own.evidence or "rationale",
                length_normalized=bool(own.length_normalized),
                statement=DEFAULT_STATEMENT if self.statement is None else self.statement,
                chat=self.chat,
                judge=self.judge,
                calibrated=self.calibrated,
            )

        def drafting(self) -> Drafting:
            """How drafts are written."""
            from specrag.methods.speculative_rag.drafting import Drafting

            most = self.draft_tokens
            rationale = self.rationale_tokens or max(most * 5 // 8, 1)
            return Drafting(most, rationale, form=self.settled().form or "cited")

        def task(self, text: str) -> Task:
            """What is asked.

            Raises:
                InputError: a choice is not ``LETTER=TEXT``, or there is a claim as well.
            """
            from specrag.methods.speculative_rag.task import Task

            if self.claim and self.choices:
                raise InputError("claim", True, "give a claim or choices, not both")
            if self.claim:
                return Task(text, "claim-checking")
            chosen: dict[str, str] = {}
            for choice in self.choices:
                letter, _, said = choice.partition("=")
                if not said.strip() or letter in chosen:
                    raise InputError("choices", choice, "give LETTER=TEXT such as A=Lyon, each letter once")
                chosen[letter] = said.strip()
            return Task(text, "multiple-choice", chosen) if chosen else Task(text)

    options: Options

    def plan(self, request: Request, given: Resources) -> Plan:
        """See :class:`~specrag.methods.base.Method`."""
        from specrag.methods.speculative_rag.pipeline import SpeculativeRAGPipeline

        refuse_form(request, "drafts have a form of their own")
        found = retrieval(request, given, self.name, 2 * DEFAULT_K)
        task = self.options.task(request.question)
        if self.options.drafter is not None and "://" in self.options.drafter:
            self._check_plain()
        writer: Any = None if self._weighs(task, given) else self._writer(given)
        options = self.options.settled(writer.loaded.drafter_form if hasattr(writer, "loaded") else None)
        pipeline = SpeculativeRAGPipeline(
            None if writer is None else self._generator(writer, request, given),
            given.scorer(options.verifier) if options.scoring().verifies else None,
            found,
            options,
            seed=request.options.get("seed", 0) % 2**32,
            executor=given.executor,
            clock=given.clock,
        )

        def begin() -> Coroutine[Result]:
            answer = yield from pipeline.answering(task)
            return answer.result()

        return Plan(begin, _tokens(options, request, given, writer, found.k))

    def _weighs(self, task: Task, given: Resources) -> bool:
        """Whether the verifier only weighs choices, so that no drafter has to be loaded."""
        own = self.options
        # A drafter that was tuned for a form brings its own way of scoring.
        tuned = given.has_model and given.llm.loaded.drafter_form
        chosen = own.drafter or own.adapter or own.decoder != "plain" or given.drafter or tuned
        return bool(task.choices) and not chosen and own.settled().scoring().weighs_choices

    def _writer(self, given: Resources) -> Any:
        """The model that drafts."""
        own = self.options
        return given.writer(own.drafter, own.adapter, own.form or "cited")

    def _check_plain(self) -> None:
        if self.options.decoder != "plain":
            remedy = "an endpoint decodes as it likes; leave it out"
            raise InputError("decoder", self.options.decoder, remedy)

    def _generator(self, writer: Any, request: Request, given: Resources) -> TextGenerator:
        from specrag.methods.generator import LocalGenerator

        if not hasattr(writer, "loaded"):
            self._check_plain()
            generator: TextGenerator = writer
            return generator
        # Decoders learn what a model's passes cost, so they must not be shared with another model.
        decoder = make_decoder(self.options.decoder, given.of(writer))
        return LocalGenerator(_Tenant(writer, request, given.executor), method=decoder)


def _tokens(
    options: SpeculativeRAG.Options, request: Request, given: Resources, writer: Any, passages: int
) -> int:
    """Tokens that sessions may hold, in the verifier's: per draft a session of the drafter and rows of its own pass."""
    if not given.has_model or (writer is not None and not hasattr(writer, "loaded")):
        return 0  # what an endpoint holds is its own concern
    from specrag.engine import keys_values_bytes

    verifier = given.llm.loaded.model
    said = [request.question, request.system or "", *(message["content"] for message in request.history)]
    length = min(sum(len(text.encode("utf-8", "replace")) for text in said), given.llm.context_length)
    prompt = (options.passages_per_draft + 1) * PASSAGE_TOKENS + length
    each = min(prompt, (writer or given.llm).context_length) + 2 * options.draft_tokens
    drafter = 0 if writer is None else keys_values_bytes(writer.loaded.model, each)
    share: float = drafter / keys_values_bytes(verifier, each)
    # What one more text reads: the draft of all passages, the verifier that has some of them in front.
    more = share if options.strategy == "anchored-whole" else 0.0
    more += options.evidence in ("all-passages", "best-passages")
    tokens: int = math.ceil((1 + share) * options.drafts * each + more * passages * PASSAGE_TOKENS)
    return tokens


class _Tenant:
    """The model that writes the drafts: the model itself, or another one whose passes run beside the model's.

    The model's prefix cache keeps what is read for one tenant separate from the others'; another drafter has no cache.
    """

    def __init__(self, llm: LocalModel, request: Request, executor: Executor) -> None:
        self._llm = llm
        self._tenant = request.tenant
        self.executor = executor
        self.loaded = llm.loaded

    def generating(
        self, prompt: Prompt, options: GenerationOptions, begun: Session | None = None
    ) -> Coroutine[Result]:
        """See the model's own ``generating``; adds the tenant."""
        own: Mapping[str, Any] = {**options, "tenant": self._tenant}
        return self._llm.generating(prompt, own, begun)  # type: ignore[arg-type]
