"""The target's features of every text, cached on disk: one target pass costs more than several of the head.

A feature is the last hidden state after the final norm, in bf16: ``2 * hidden_size`` bytes per token, which is 1.2 GB
for a million tokens of SmolLM2. A shard is written completely or not at all, so that a stopped run can be resumed.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from specrag.engine import Outputs, Segment, SessionModel
from specrag.errors import SpecragError
from specrag.training.eagle.answers import Answer
from specrag.training.files import replace_tensors, write_errors

#: Texts in a shard.
SHARD = 256
_PASS_ROWS = 1024
_FEATURE = Outputs(hidden=("final",))
_SPARE_BYTES = 1 << 28
#: An answer needs a token to read, one to guess and one that shows whether the guess was right.
_FEWEST_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its answer.

    Attributes:
        conversation: id of the conversation that it is a turn of.
        tokens: of both.
        begin: where the answer begins.
        greedy: whether the answer is the target's likeliest.
    """

    conversation: str
    tokens: tuple[int, ...]
    begin: int
    greedy: bool


def texts_of(answers: Sequence[Answer], length: int) -> list[Text]:
    """Prompts with their answers, cut to ``length`` tokens; answers too short to learn from are left out."""
    texts = [
        Text(
            answer.id.partition("/")[0],
            (*answer.prompt, *answer.answer)[:length],
            len(answer.prompt),
            answer.greedy,
        )
        for answer in answers
    ]
    return [text for text in texts if len(text.tokens) - text.begin >= _FEWEST_TOKENS]


class FeatureCache:
    """The features of some texts in a folder.

    Args:
        folder: of the shards; created when the first one is written.
        texts: always the same for one folder, though more may be appended.
        size: of a feature.
    """

    def __init__(self, folder: Path, texts: Sequence[Text], size: int) -> None:
        self.folder = folder
        self.texts = texts
        self._size = size
        ends = list(accumulate(len(text.tokens) for text in texts))
        # Where a text begins in its shard.
        starts = [0, *ends][: len(texts)]
        self._starts = [start - starts[number - number % SHARD] for number, start in enumerate(starts)]

    def features(self, number: int) -> torch.Tensor:
        """The features of text ``number``: bf16 ``[tokens, size]``.

        Raises:
            SpecragError: the shard is damaged.
        """
        path = self._path(number // SHARD)
        start = self._starts[number]
        end = start + len(self.texts[number].tokens)
        with _readable(path), safe_open(path, framework="pt") as shard:
            found: torch.Tensor = shard.get_slice("features")[start:end]
        return found

    def fill(self, model: SessionModel, proceed: Callable[[int], bool]) -> None:
        """Compute the missing shards.

        Args:
            proceed: called with the number of texts done; returns whether to go on.

        Raises:
            SpecragError: the disk is or would be full.
        """
        missing = [shard for shard in self._shards() if not self._has(shard)]
        if not missing:
            return
        with write_errors(self.folder, "features"):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._require_space(missing)
        for shard in missing:
            if not proceed(shard * SHARD):
                return
            tensors = {"features": torch.cat(list(self._compute(model, shard)))}
            with write_errors(self.folder, "features"):
                replace_tensors(self._path(shard), tensors)

    @property
    def is_full(self) -> bool:
        """Whether every shard is there."""
        return all(map(self._has, self._shards()))

    def _shards(self) -> range:
        return range(-(-len(self.texts) // SHARD))

    def _path(self, shard: int) -> Path:
        return self.folder / f"{shard:05}.safetensors"

    def _has(self, shard: int) -> bool:
        """Whether a shard is there and complete; a last shard made from fewer texts is made again."""
        path = self._path(shard)
        if not path.is_file():
            return False
        rows = sum(len(text.tokens) for text in self._texts(shard))
        with _readable(path), safe_open(path, framework="pt") as opened:
            return list(opened.get_slice("features").get_shape()) == [rows, self._size]

    def _texts(self, shard: int) -> Sequence[Text]:
        return self.texts[shard * SHARD : (shard + 1) * SHARD]

    def _require_space(self, shards: Sequence[int]) -> None:
        tokens = sum(len(text.tokens) for shard in shards for text in self._texts(shard))
        needed = 2 * self._size * tokens + _SPARE_BYTES
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise SpecragError(
                f"features: {str(self.folder)!r} has {free / 1e9:.2f} GB free and {tokens:,} tokens need "
                f"{needed / 1e9:.2f} GB: free some space, or take another --out or fewer --tokens"
            )

    def _compute(self, model: SessionModel, shard: int) -> Iterator[torch.Tensor]:
        waiting: list[Segment] = []
        for text in self._texts(shard):
            rows = sum(len(segment.tokens) for segment in waiting)
            if waiting and rows + len(text.tokens) > _PASS_ROWS:
                yield _run(model, waiting)
                waiting = []
            outputs = [_FEATURE] * len(text.tokens)
            waiting.append(Segment(model.new_cache(), text.tokens, None, outputs))
        yield _run(model, waiting)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise SpecragError(
            f"features {str(path)!r} are damaged ({error}): delete the file and run again"
        ) from error


def _run(model: SessionModel, segments: Sequence[Segment]) -> torch.Tensor:
    answers = model.forward(segments)
    found = torch.stack([row.hidden["final"] for rows in answers for row in rows])
    return found.to(device="cpu", dtype=torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of some texts.

    Row ``t`` of a text has feature ``t`` and token ``t + 1`` and estimates feature ``t + 1``, which gives the target's
    distribution of token ``t + 2``; a text of ``n`` tokens has ``n - 1`` rows.

    Attributes:
        lengths: rows of each text.
        tokens: the token after each row's feature, int64 ``[T]``.
        features: bf16 ``[T, hidden_size]``.
        targets: the feature to estimate, bf16 ``[T, hidden_size]``.
        following: the token to guess, int64 ``[T]``; -1 if the text ends before it.
        behind: how many rows each row is behind the first row that drafting would read, int64 ``[T]``; that first row
            has the feature before the answer and the answer's first token. Negative inside the prompt.
    """

    lengths: tuple[int, ...]
    tokens: torch.Tensor
    features: torch.Tensor
    targets: torch.Tensor
    following: torch.Tensor
    behind: torch.Tensor


def make_batch(cache: FeatureCache, numbers: Sequence[int], device: torch.device) -> Batch:
    """The batch of the texts with these numbers."""
    lengths: list[int] = []
    tokens: list[int] = []
    following: list[int] = []
    behind: list[int] = []
    features, targets = [], []
    for number in numbers:
        text = cache.texts[number]
        found = cache.features(number)
        rows = len(text.tokens) - 1
        lengths.append(rows)
        tokens += text.tokens[1:]
        following += [*text.tokens[2:], -1]
        behind += range(1 - text.begin, 1 - text.begin + rows)
        features.append(found[:-1])
        targets.append(found[1:])
    return Batch(
        tuple(lengths),
        torch.tensor(tokens, device=device),
        torch.cat(features).to(device),
        torch.cat(targets).to(device),
        torch.tensor(following, device=device),
        torch.tensor(behind, device=device),
    )


def plan_epoch(sizes: Sequence[int], most: int, seed: int | None) -> list[list[int]]:
    """The texts of each batch; each text is in exactly one.

    Args:
        sizes: tokens of each text.
        most: tokens of a batch; a longer text is a batch of its own.
        seed: of the order; ``None`` keeps the given order.
    """
    order = list(range(len(sizes)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    batches: list[list[int]] = []
    room = 0
    for number in order:
        if not batches or sizes[number] > room:
            batches.append([])
            room = most
        batches[-1].append(number)
        room -= sizes[number]
    return batches
