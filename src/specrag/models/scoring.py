"""Log-probabilities of given texts from a local model: all texts in one pass, common prefixes read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specrag.engine import NOTHING, PREFILL_ROWS, Coroutine, Outputs, Pass, Row, Segment, Session
from specrag.errors import ContextLengthError
from specrag.models.loading import LoadedModel
from specrag.models.roles import PartScore, ScoredText, ScoringRequest, TextPrompt, assign
from specrag.models.tokenizer import encode_text, place_text

#: The most rows of one pass. Each scored row briefly holds a whole vector of logits.
ROWS = 512


class LocalScorer:
    """A local model as a :class:`~specrag.models.roles.TextScorer`.

    The texts of one call are laid out as a token tree in which common prefixes share a path: the question before all
    drafts is read once, and so is an answer that several drafts share.

    Args:
        loaded: the model with its tokenizer.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    @property
    def name(self) -> str:
        return self.loaded.name

    @property
    def context_length(self) -> int:
        return self.loaded.model.context_length

    def count(self, prompt: TextPrompt, lead: str = "") -> int:
        return len(encode_text(self.loaded.tokenizer, prompt, lead))

    def check_scoring(self) -> None:
        """A local model can always score."""

    def scoring(self, requests: Sequence[ScoringRequest]) -> Coroutine[list[ScoredText]]:
        texts = [self._placed(request) for request in requests]
        limit = self.context_length
        for text in texts:
            if len(text.tokens) > limit:
                remedy = f"the model's context holds {limit:,}; shorten the passages or take another model"
                raise ContextLengthError("text to score", f"{len(text.tokens):,} tokens", remedy)
        return self._scoring(requests, texts)

    def _placed(self, request: ScoringRequest) -> _Text:
        placed = place_text(self.loaded.tokenizer, request.prompt, [part.text for part in request.parts])
        parts = assign(placed.starts, placed.borders)
        # The first token follows nothing, so it has no log-probability.
        wanted = [
            number > 0 and part >= 0 and request.parts[part].scored for number, part in enumerate(parts)
        ]
        return _Text(placed.tokens, parts, wanted)

    def _scoring(
        self, requests: Sequence[ScoringRequest], texts: Sequence[_Text]
    ) -> Coroutine[list[ScoredText]]:
        tree = _TextTree()
        paths = [tree.add(text.tokens, text.wanted) for text in texts]
        rows = yield from self._pass(tree)
        scored = []
        for request, text, path in zip(requests, texts, paths, strict=True):
            log_probs: dict[str, list[float]] = {part.name: [] for part in request.parts if part.scored}
            for number, wanted in enumerate(text.wanted):
                if wanted:
                    found = tree.log_prob(rows, path.nodes[number - 1], text.tokens[number])
                    log_probs[request.parts[text.parts[number]].name].append(found)
            parts = {name: PartScore(tuple(values)) for name, values in log_probs.items()}
            scored.append(ScoredText(parts, len(text.tokens), path.fresh))
        return scored

    def _pass(self, tree: _TextTree) -> Coroutine[list[Row]]:
        """Read the tree: a long trunk as a prompt, what follows in one pass, or in a few if it is large."""
        model = self.loaded.model
        session, outputs, trunk = Session(model), tree.outputs(), tree.trunk()
        if trunk < PREFILL_ROWS:  # a pass of its own would cost more than its rows gain
            trunk = 0
        parents = [parent - trunk if parent >= trunk else -1 for parent in tree.parents[trunk:]]
        try:
            rows = yield from session.extend(tree.tokens[: trunk + 1])
            for start in range(trunk, len(outputs), ROWS):
                end = min(start + ROWS, len(outputs))
                segment = Segment(
                    session.cache, tree.tokens[start:end], parents[: end - trunk], outputs[start:end],
                    written=start - trunk,
                )  # fmt: skip
                rows += yield Pass(model, segment)
        finally:
            session.close()
        return rows


@dataclass(frozen=True, slots=True)
class _Text:
    """A request's tokens, the part of each, and whether its log-probability is wanted."""

    tokens: Sequence[int]
    parts: Sequence[int]
    wanted: Sequence[bool]


@dataclass(frozen=True, slots=True)
class _Path:
    """A sequence's nodes, and how many of them were new to the tree."""

    nodes: Sequence[int]
    fresh: int


@dataclass(slots=True)
class _TextTree:
    """Token sequences that share their common prefixes. Nodes are numbered in the order in which they were added."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)
    _wanted: dict[int, dict[int, int]] = field(default_factory=dict)

    def add(self, tokens: Sequence[int], wanted: Sequence[bool]) -> _Path:
        """Add a sequence; its last token gets no node, since nothing after it is scored."""
        before = len(self.tokens)
        path: list[int] = []
        node = -1
        for number, token in enumerate(tokens):
            if wanted[number]:
                places = self._wanted.setdefault(node, {})
                places.setdefault(token, len(places))
            if number == len(tokens) - 1:
                break
            child = self._children.get((node, token))
            if child is None:
                child = self._children[node, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
            node = child
            path.append(node)
        return _Path(path, len(self.tokens) - before)

    def trunk(self) -> int:
        """How many first nodes lie one behind the other, before texts part and before a log-probability is wanted."""
        forks = [parent + 1 for node, parent in enumerate(self.parents) if parent != node - 1]
        return min([max(len(self.tokens) - 1, 0), *forks, *self._wanted])

    def outputs(self) -> list[Outputs]:
        """What each node's row returns: the log-probabilities of the tokens that follow it in some sequence."""
        return [
            Outputs(log_probs_of=tuple(self._wanted[node])) if node in self._wanted else NOTHING
            for node in range(len(self.tokens))
        ]

    def log_prob(self, rows: Sequence[Row], node: int, token: int) -> float:
        """The log-probability of a token that follows a node."""
        found = rows[node].log_probs
        assert found is not None
        return float(found[self._wanted[node][token]])
