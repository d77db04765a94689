"""transformers' logits processors, stopping criteria and streamers for rows that each decode at their own pace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specrag.engine import OutputPath

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

#: None of these depends on which row it is, and many sort the vocabulary.
_WARPERS = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


class RowProcessors:
    """transformers' processors as one of ours (:class:`specrag.engine.processors.LogitsProcessor`).

    They see a batch of the usual shape with the row in question in every place, so that what they keep for each row of
    the batch, such as the length of its padding, still matches.

    Args:
        processors: each a function of the tokens and the scores.
        prompt: ``[length]``, padding included.
        row: the row in question.
        rows: number of rows of the batch.
    """

    def __init__(self, processors: LogitsProcessorList, prompt: torch.Tensor, row: int, rows: int) -> None:
        self._steps = [(LogitsProcessorList([step]), type(step) in _WARPERS) for step in processors]
        self._prompt = prompt
        self._row = row
        self._rows = rows

    def start(self, prompt: Sequence[int]) -> OutputPath:
        """See the protocol."""
        del prompt
        return OutputPath()

    def advance(self, state: OutputPath, token: int) -> OutputPath:
        """See the protocol."""
        return OutputPath(state, token)

    def apply(self, logits: NDArray[np.float32], state: OutputPath) -> NDArray[np.float32]:
        """See the protocol."""
        output = torch.tensor(state.tokens(), dtype=self._prompt.dtype, device=self._prompt.device)
        tokens = torch.cat([self._prompt, output])[None]
        # A copy: processors may write to their argument.
        scores = torch.tensor(logits, device=self._prompt.device)[None]
        for step, any_row in self._steps:
            if any_row or self._rows == 1:
                scores = step(tokens, scores)
            else:
                scores = step(tokens.repeat(self._rows, 1), scores.repeat(self._rows, 1))
                scores = scores[self._row : self._row + 1]
        processed: NDArray[np.float32] = scores[0].float().cpu().numpy()
        return processed


class RowCriteria:
    """transformers' stopping criteria for one row; they too see a batch of the usual shape.

    Args:
        criteria: called after every token, without scores.
        prompt: ``[length]``, padding included.
        padding: number of padding tokens.
        row: the row in question.
        rows: number of rows of the batch.
    """

    def __init__(
        self, criteria: StoppingCriteriaList, prompt: torch.Tensor, padding: int, row: int, rows: int
    ) -> None:
        self._criteria = criteria
        self._ids = prompt[None]
        self._padding = padding
        self._row = row
        self._rows = rows

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Whether the text ends after these tokens, which begin with the prompt's."""
        new = tokens[self._ids.shape[1] - self._padding :]
        self._ids = torch.cat([self._ids, self._ids.new_tensor(new)[None]], dim=1)
        ended = self._criteria(self._ids.repeat(self._rows, 1), None)
        return bool(ended.expand(self._rows)[self._row])


class Rows:
    """The outputs of a batch.

    Args:
        count: number of rows.
        pad: token that fills up rows that have ended.
        streamer: gets the next token of all rows together, as soon as every row has it or has ended.
    """

    def __init__(self, count: int, pad: int, streamer: BaseStreamer | None) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self._running = [True] * count
        self._pad = pad
        self._streamer = streamer
        self._streamed = 0

    def outputs(self) -> list[RowOutput]:
        """The outputs that the rows write to."""
        return [RowOutput(self, row) for row in range(len(self._tokens))]

    def push(self, row: int, token: int) -> None:
        """Add a token to a row."""
        self._tokens[row].append(token)
        self._stream()

    def end(self, row: int) -> None:
        """Mark a row as ended."""
        self._running[row] = False
        self._stream()

    def padded(self) -> torch.Tensor:
        """``[rows, length of the longest]``, padded on the right."""
        longest = max(map(len, self._tokens))
        return torch.tensor([row + [self._pad] * (longest - len(row)) for row in self._tokens])

    def _stream(self) -> None:
        if self._streamer is None:
            return
        ready = [len(row) for row, running in zip(self._tokens, self._running, strict=True) if running]
        until = min(ready, default=max(map(len, self._tokens)))
        for place in range(self._streamed, until):
            tokens = [row[place] if place < len(row) else self._pad for row in self._tokens]
            self._streamer.put(torch.tensor(tokens))
        self._streamed = max(self._streamed, until)


class RowOutput:
    """Where the token loop writes one row's tokens (:class:`specrag.speculation.decode.TextSink`)."""

    def __init__(self, rows: Rows, row: int) -> None:
        self._rows = rows
        self._row = row

    def push(self, token: int) -> str:
        """Keep the token; there is no text."""
        self._rows.push(self._row, token)
        return ""

    def finish(self) -> str:
        """Mark the row as ended."""
        self._rows.end(self._row)
        return ""
