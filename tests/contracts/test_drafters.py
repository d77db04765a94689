"""What every drafter promises, checked on each of them with the toy model: add a new one to ``DRAFTERS``."""

from __future__ import annotations

import gc
import random
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.engine.executor import run
from specrag.engine.passes import SessionModel, gather
from specrag.engine.sampling_params import SamplingParams
from specrag.engine.session import Session
from specrag.engine.stopping import StopConditions
from specrag.models.linear import PackedLinear
from specrag.models.loading import LoadedModel, load_model
from specrag.models.tokenizer import TextStream
from specrag.models.toy import ToyModel
from specrag.speculation.decode import Settings
from specrag.speculation.drafters.base import Drafter, NoDrafter
from specrag.speculation.drafters.cross_vocabulary import CrossVocabulary
from specrag.speculation.drafters.draft_model import DraftModel
from specrag.speculation.drafters.eagle import Eagle
from specrag.speculation.drafters.pair import FirstNonEmpty, Weighed
from specrag.speculation.drafters.prompt_lookup import PromptLookup
from specrag.speculation.drafters.rag import RAG, Guessing, RagDrafter, TranslatedRagDrafter
from specrag.speculation.drafters.recycling import Recycling
from specrag.speculation.drafters.retrieval import RetrievalDrafter, RetrievalSettings
from specrag.speculation.drafters.suffix import SuffixDrafter
from specrag.speculation.schedule.tokens import CostAware, SharedCosts
from specrag.speculation.tree import ROOT, DraftTree, Round, Verdict
from specrag.speculation.vocabularies import VocabularyPair
from tests.speculation.guessing import Budgets, Decoded, PruningBudgets, decoding, plain_decoding
from tests.speculation.spelling import Spelling
from tests.speculation.toy_head import ToyHead

VOCABULARY = 6
TARGET = ToyModel(vocab_size=VOCABULARY, order=2, scale=2.0, seed=3, context_length=400)
#: Nearly the target; its padded column must never be proposed, its context ends first.
DRAFT = ToyModel(vocab_size=VOCABULARY + 1, order=2, scale=2.0, seed=4, context_length=120)
DRAFT.table[:VOCABULARY, :VOCABULARY, :VOCABULARY] = TARGET.table[:VOCABULARY, :VOCABULARY] * 0.9
DRAFT.table[..., VOCABULARY] = 0.5
#: The models' tokens as words, halves of a character among them; the last of each is special or none.
WORDS = VocabularyPair(
    Spelling([b"a", b"b", b"ab", b"\xc3", b"\xa9", b""], {"<end>": 5}, ends=[5]),
    Spelling([b"a", b"b", b"\xc3\xa9", b"ba", b"aab", b"b\xc3", b""], {"<end>": 6}, ends=[6]),
)


#: What a RAG drafter reads in place of the prompt: where the output begins decides what it proposes.
READING = [3, 1, 4, 1, 5]
DRAWN = SamplingParams(1.0, top_k=4, seed=7)


def rag(sampling: SamplingParams, opinions: bool = True, copy_from: int = 0) -> RagDrafter:
    return RagDrafter(DRAFT, READING, Guessing(sampling, opinions, copy_from=copy_from))


def weighed(priced: Drafter) -> Weighed:
    """Free guesses never promise enough, so that both guess."""

    class Dissatisfied(CostAware):
        def prefers(self, tree: DraftTree) -> bool:
            return False

        def note_drafted(self, guessed: DraftTree) -> None:
            """Kept until a round ends, which those driven by hand never tell."""

        def rate(self, source: str, grade: int) -> float:
            """Not remembered until the round ends, either: that is the schedule's memory."""
            return self._acceptance.rate(source, grade)

    return Weighed(Recycling(), priced, Dissatisfied(SharedCosts()), lambda: 4)


@dataclass(frozen=True)
class Subject:
    """A drafter under test: how to make one; whether it proposes after a truncation what a new one would."""

    make: Callable[[], Drafter]
    forgets: bool = True


DRAFTERS = {
    "none": Subject(NoDrafter),
    "lookup": Subject(PromptLookup),
    "lookup-1": Subject(lambda: PromptLookup(1, 3)),
    "recycling": Subject(Recycling, forgets=False),
    "recycling-paper": Subject(lambda: Recycling(read_prompt=False), forgets=False),
    "draft-model": Subject(lambda: DraftModel(DRAFT)),
    "draft-model-short": Subject(lambda: DraftModel(DRAFT, 5)),
    "eagle": Subject(lambda: Eagle(ToyHead(TARGET))),
    "cross-vocabulary": Subject(lambda: CrossVocabulary(DRAFT, WORDS)),
    "rag": Subject(lambda: rag(SamplingParams(), opinions=False), forgets=False),
    "rag-coupled": Subject(lambda: rag(DRAWN, opinions=False), forgets=False),
    "rag-drawn": Subject(lambda: rag(DRAWN), forgets=False),
    "rag-copying": Subject(lambda: rag(DRAWN, copy_from=2), forgets=False),
    "rag-translated": Subject(lambda: TranslatedRagDrafter(DRAFT, WORDS, READING), forgets=False),
    "suffix": Subject(lambda: SuffixDrafter(1)),
    "switching": Subject(lambda: FirstNonEmpty(SuffixDrafter(3), DraftModel(DRAFT), lambda: 4)),
    "retrieval": Subject(
        lambda: RetrievalDrafter(RetrievalSettings(), Recycling(), lambda: 0), forgets=False
    ),
    "retrieval-model": Subject(
        lambda: RetrievalDrafter(RetrievalSettings(trigger=None), DraftModel(DRAFT), lambda: 4),
        forgets=False,
    ),
    "weighed": Subject(lambda: weighed(DraftModel(DRAFT)), forgets=False),
    "weighed-rag": Subject(lambda: weighed(rag(DRAWN, opinions=False)), forgets=False),
}


@pytest.fixture(params=DRAFTERS, scope="module")
def subject(request: pytest.FixtureRequest) -> Subject:
    return DRAFTERS[str(request.param)]


# -- one request, driven by hand --------------------------------------------------------------------------------


class Request:
    """A session and its drafter, as the loop and whoever takes tokens back treat them."""

    def __init__(self, drafter: Drafter, prompt: Sequence[int] = ()) -> None:
        self.drafter = drafter
        self.session = Session(TARGET)
        if prompt:
            rows = run(self.session.extend(prompt, drafter.outputs))
            run(drafter.start(self.session, rows))

    def propose(self, budget: int) -> DraftTree:
        before = list(self.session.tokens)
        tree: DraftTree = run(self.drafter.propose(self.session, budget))
        assert self.session.tokens == before
        assert len(tree) <= budget
        assert all(0 <= token < VOCABULARY for token in tree.tokens)
        assert all(tree.sources)
        assert len(tree.opinions) in (0, 1 + len(tree))
        for opinion in tree.opinions:
            assert opinion.shape == (VOCABULARY,)
            assert opinion.sum() == pytest.approx(1.0)
        for opinion, source, token in zip(tree.opinions, tree.sources, tree.tokens, strict=False):
            assert opinion[token] > 0 or source != RAG  # a copy may be one that the drafter would not draw
        return tree

    def round(self, budget: int, seed: int) -> None:
        """Accept any path, so that drafters are told much that the toy would never say."""
        rng = random.Random(seed)
        proposed = self.propose(budget) if budget else DraftTree()
        tree = proposed.kept(range(rng.randint(0, len(proposed))))  # as a schedule may
        rows = run(self.session.score(tree, self.drafter.outputs))
        path: list[int] = []
        while rng.random() < 0.8:
            last = path[-1] if path else ROOT
            children = [node for node, parent in enumerate(tree.parents) if parent == last]
            if not children:
                break
            path.append(rng.choice(children))
        bonus = rng.randrange(VOCABULARY)
        cut = bool(path) and rng.random() < 0.2  # the text ends inside the path
        verdict = Verdict(tuple(path), None if cut else bonus)
        tokens = [tree.tokens[node] for node in path] + ([] if cut else [bonus])
        self.session.commit(verdict.path, verdict.bonus)
        self.drafter.observe(Round(tree, rows, verdict, tuple(tokens), proposed))

    def truncate(self, length: int) -> None:
        self.session.truncate(length)
        self.drafter.truncate(length)

    def grow(self, tokens: Sequence[int]) -> None:
        """New tokens from outside, such as another passage, and the loop once more."""
        rows = run(self.session.extend(tokens, self.drafter.outputs))
        run(self.drafter.start(self.session, rows[len(rows) - len(tokens) :]))

    def fork(self) -> Request:
        other = Request(self.drafter.fork())
        other.session = self.session.fork()
        return other


Operation = tuple[str, int, int]
PROMPTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20)
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["round", "round", "truncate", "grow"]), st.integers(0, 12), st.integers(0, 99)
    ),
    max_size=8,
)


def apply(request: Request, operations: Sequence[Operation]) -> None:
    for name, number, seed in operations:
        if name == "round":
            request.round(number, seed)
        elif name == "truncate":
            request.truncate(1 + seed % len(request.session))
        else:
            request.grow([random.Random(seed + i).randrange(VOCABULARY) for i in range(1 + number % 4)])


@settings(max_examples=30, deadline=None)
@given(PROMPTS, OPERATIONS, st.integers(1, 80))
def test_proposals_are_always_valid(
    subject: Subject, prompt: list[int], operations: list[Operation], budget: int
) -> None:
    request = Request(subject.make(), prompt)
    apply(request, operations)
    request.propose(budget)


@settings(max_examples=30, deadline=None)
@given(PROMPTS, OPERATIONS, st.integers(1, 5))
def test_no_path_is_longer_than_asked_for(
    subject: Subject, prompt: list[int], operations: list[Operation], depth: int
) -> None:
    request = Request(subject.make(), prompt)
    apply(request, operations)
    tree: DraftTree = run(request.drafter.propose(request.session, 60, depth))
    depths: list[int] = []
    for parent in tree.parents:
        depths.append(1 if parent == ROOT else 1 + depths[parent])
    assert max(depths, default=0) <= depth


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(PROMPTS, OPERATIONS, OPERATIONS, OPERATIONS, st.booleans())
def test_forks_are_independent(
    subject: Subject,
    prompt: list[int],
    before: list[Operation],
    mine: list[Operation],
    theirs: list[Operation],
    close: bool,
) -> None:
    request = Request(subject.make(), prompt)
    apply(request, before)
    twins = [Request(subject.make(), prompt) for _ in range(2)]
    for twin in twins:
        apply(twin, before)
    fork = request.fork()
    # What either does must be what a drafter does that was never forked, whatever the other one does.
    apply(fork, theirs)
    apply(twins[0], theirs)
    apply(request, mine)
    apply(twins[1], mine)
    assert request.propose(20) == twins[1].propose(20)
    if close:
        request.drafter.close()
        request.session.close()
    assert fork.propose(20) == twins[0].propose(20)


@pytest.mark.parametrize("name", [name for name, subject in DRAFTERS.items() if subject.forgets])
@settings(max_examples=30, deadline=None)
@given(PROMPTS, OPERATIONS, st.integers(0, 99), OPERATIONS)
def test_what_is_taken_back_is_forgotten(
    name: str, prompt: list[int], before: list[Operation], cut: int, after: list[Operation]
) -> None:
    subject = DRAFTERS[name]
    request = Request(subject.make(), prompt)
    apply(request, before)
    request.truncate(1 + cut % len(request.session))
    fresh = Request(subject.make(), request.session.tokens)
    assert request.propose(20) == fresh.propose(20)
    apply(request, after)
    apply(fresh, after)
    assert request.session.tokens == fresh.session.tokens
    assert request.propose(20) == fresh.propose(20)


def test_behind_a_context_that_only_the_target_has(subject: Subject) -> None:
    request = Request(subject.make(), [1, 2, 3] * 39)
    for seed in range(12):
        request.round(6, seed)
    assert len(request.session) > DRAFT.context_length
    request.truncate(60)
    request.round(6, 0)


def reachable_bytes(drafter: Drafter) -> int:
    """Memory of all that a drafter refers to, but for code and models."""
    seen: dict[int, object] = {}
    left: list[object] = [drafter]
    while left:
        found = left.pop()
        skipped = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, ToyModel)
        if id(found) in seen or isinstance(found, skipped):
            continue
        seen[id(found)] = found
        left += gc.get_referents(found)
    return sum(found.__sizeof__() for found in seen.values())


def test_closing_releases_memory(subject: Subject) -> None:
    rng = random.Random(0)
    request = Request(subject.make(), [rng.randrange(VOCABULARY) for _ in range(100)])
    for seed in range(20):
        request.round(6, seed)
    request.drafter.close()
    assert reachable_bytes(request.drafter) <= reachable_bytes(subject.make()) + 500


# -- the loop -------------------------------------------------------------------------------------------------

SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=5),
    "penalised": SamplingParams(
        temperature=1.0, top_k=5, repetition_penalty=1.2, frequency_penalty=0.2, seed=6
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_output_is_plain_decodings(subject: Subject, sampling: SamplingParams) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))] for _ in range(6)]
    plain = [plain_decoding(TARGET, prompt, max_tokens=60, sampling=sampling) for prompt in prompts]
    wanted = Settings(StopConditions(60), sampling)
    for number in range(3):
        drafters = [subject.make() for _ in prompts]
        schedules = [
            PruningBudgets([9, 3, 80], number) if number == 2 else Budgets([[4], [60, 0, 7]][number])
            for _ in prompts
        ]
        texts = run(
            gather(
                [
                    decoding(TARGET, prompt, wanted, drafter, schedule)
                    for prompt, drafter, schedule in zip(prompts, drafters, schedules, strict=True)
                ]
            )
        )
        assert [text.tokens for text in texts] == [text.tokens for text in plain]
        accepted = sum(step.accepted for text in texts for step in text.steps)
        assert accepted > 0 or isinstance(drafters[0], NoDrafter)


def test_it_works_up_to_the_end_of_the_context(subject: Subject) -> None:
    short = ToyModel(vocab_size=VOCABULARY, order=2, scale=2.0, seed=3, context_length=40)
    prompt = [0, 1, 2, 3, 4, 5] * 3
    plain = plain_decoding(short, prompt, max_tokens=100, sampling=SamplingParams())
    wanted = Settings(StopConditions(100), SamplingParams())
    text = run(decoding(short, prompt, wanted, subject.make(), Budgets([30])))
    assert text.tokens == plain.tokens
    assert text.reason == "length"


# -- the loop on a real model ---------------------------------------------------------------------------------

REAL_DRAFTERS: dict[str, Callable[[SessionModel], Drafter]] = {
    "lookup": lambda _: PromptLookup(),
    "recycling": lambda _: Recycling(),
    "draft-model": lambda model: DraftModel(model, 6),
    "suffix": lambda _: SuffixDrafter(2),
    "retrieval": lambda _: RetrievalDrafter(RetrievalSettings(), Recycling(), lambda: 0),
}
QUESTIONS = (
    "Count from one to twelve in words.",
    "Repeat after me, twice: one potato, two potato, three potato, four.",
)
REAL_SAMPLINGS = {name: SAMPLINGS[name] for name in ("greedy", "sampled")}


@pytest.fixture(scope="module")
def real(smollm2: Path) -> LoadedModel:
    if not PackedLinear.available():
        pytest.skip("this processor has no packed bf16 product, on which batch_invariant rests")
    return load_model("smollm2-135m", dtype="bf16", device="cpu", batch_invariant=True)


@pytest.fixture(scope="module")
def plain_texts(real: LoadedModel) -> dict[str, list[Decoded]]:
    """Plain decoding's, greedy and sampled."""
    return {name: decode_all(real, sampling, NoDrafter) for name, sampling in REAL_SAMPLINGS.items()}


def decode_all(real: LoadedModel, sampling: SamplingParams, make: Callable[[], Drafter]) -> list[Decoded]:
    found = []
    for question in QUESTIONS:
        prompt = real.tokenizer.chat([{"role": "user", "content": question}])
        wanted = Settings(StopConditions(32, real.tokenizer.eos_tokens), sampling)
        drafter = make()
        text = TextStream(real.tokenizer)
        found.append(run(decoding(real.model, prompt, wanted, drafter, Budgets([24, 5]), text)))
        drafter.close()
    return found


@pytest.mark.parametrize("name", REAL_DRAFTERS)
@pytest.mark.parametrize("sampling", REAL_SAMPLINGS)
def test_the_output_of_a_real_model_is_plain_decodings(
    real: LoadedModel, plain_texts: dict[str, list[Decoded]], name: str, sampling: str
) -> None:
    found = decode_all(real, REAL_SAMPLINGS[sampling], lambda: REAL_DRAFTERS[name](real.model))
    assert [text.tokens for text in found] == [text.tokens for text in plain_texts[sampling]]
    steps = [step for text in found for step in text.steps]
    assert sum(step.accepted for step in steps) > 0
    if name == "draft-model" and sampling == "greedy":
        # A model that drafts for itself is always right; only where the text ends are guesses lost.
        assert sum(step.accepted < step.drafted for step in steps if not step.finish_reason) == 0
