"""What a head borrows from its target, frozen: the embedding, and the output matrix for the tokens it may propose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specrag.errors import InputError
from specrag.models.catalog import ModelFiles
from specrag.models.weights import read_weights
from specrag.training.eagle_features import Text

_EMBEDDING = "model.embed_tokens.weight"
_OUTPUT = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class TargetMatrices:
    """Parts of the target.

    Attributes:
        embedding: ``[vocab_size, hidden_size]``.
        output: rows of the output matrix, ``[len(vocabulary), hidden_size]``.
        vocabulary: the token of each of these rows, int64, ascending.
    """

    embedding: torch.Tensor
    output: torch.Tensor
    vocabulary: torch.Tensor

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The embeddings of tokens, ``[T, hidden_size]``."""
        return F.embedding(tokens, self.embedding)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Of the tokens in ``vocabulary``, fp32 ``[T, len(vocabulary)]``."""
        return F.linear(features.to(self.output.dtype), self.output).float()


def read_matrices(
    files: ModelFiles, vocabulary: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> TargetMatrices:
    """Read the matrices from the target's files.

    Args:
        vocabulary: the tokens that the head may propose, ascending; empty for all.
        dtype: of the matrices.

    Raises:
        InputError: the model has no such matrices.
        ModelFilesError: its files are damaged.
    """
    weights = read_weights(files)
    embedding = weights.get(_EMBEDDING)
    if embedding is None:
        raise InputError("model", files.name, f"it has no {_EMBEDDING}; take a model of the Llama family")
    output = weights.get(_OUTPUT, embedding)
    tokens = torch.tensor(vocabulary) if len(vocabulary) else torch.arange(len(output))
    return TargetMatrices(
        embedding.to(device=device, dtype=dtype, copy=True),
        output[tokens].to(device=device, dtype=dtype),
        tokens.to(device),
    )


def frequent_tokens(texts: Sequence[Text], count: int, always: Collection[int], vocab_size: int) -> list[int]:
    """The tokens that answers hold most often, ascending; among equals those that prompts hold more often, then
    smaller ids.

    Args:
        count: how many; all where it is 0 or no fewer than ``vocab_size``, returned as an empty list.
        always: tokens that are among them in any case, such as those that end an answer.
    """
    if not 0 < count < vocab_size:
        return []
    answers: Counter[int] = Counter()
    prompts: Counter[int] = Counter()
    for text in texts:
        answers.update(text.tokens[text.begin :])
        prompts.update(text.tokens[: text.begin])
    order = sorted(
        range(vocab_size), key=lambda token: (token not in always, -answers[token], -prompts[token], token)
    )
    return sorted(order[:count])
