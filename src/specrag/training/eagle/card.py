"""The files of a finished head: weights, configuration, curves and card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specrag.models import CONFIG, TOKENS, VOCABULARY, WEIGHTS, HeadConfig
from specrag.training import card
from specrag.training.card import LOSS, draw, settings_table, write_history
from specrag.training.eagle.measure import ChainResult
from specrag.training.eagle.objective import CHAIN, HeadProgress, Measured
from specrag.training.files import replace_json, replace_tensors, write_errors

_MAT = "mat.png"


@dataclass(frozen=True, slots=True)
class Provenance:
    """What the card says about the data and the target.

    Attributes:
        model, licence: the target's name and licence.
        command: that repeats the run.
        sources: sha256 of each data file, by name.
        excluded: passages left out because they share text with what the head is measured on.
        answers, answer_tokens, tokens: trained on; ``tokens`` includes prompts.
        held_back: answers measured on.
        covered: share of the held-back answers' tokens that the head may propose.
    """

    model: str
    licence: str
    command: str
    sources: Mapping[str, str]
    excluded: int
    answers: int
    answer_tokens: int
    tokens: int
    held_back: int
    covered: float


def write_head(
    out: Path, config: HeadConfig, weights: Mapping[str, torch.Tensor], vocabulary: Sequence[int]
) -> None:
    """Write what the drafter loads, in bf16.

    Args:
        vocabulary: tokens that the head may propose, ascending; empty for all.

    Raises:
        SpecragError: the disk refuses.
    """
    with write_errors(out, "head"):
        half = {name: value.to("cpu", torch.bfloat16).contiguous() for name, value in weights.items()}
        replace_tensors(out / WEIGHTS, half, {"format": "pt"})
        if vocabulary:
            replace_tensors(out / VOCABULARY, {TOKENS: torch.tensor(vocabulary, dtype=torch.int64)})
        else:
            (out / VOCABULARY).unlink(missing_ok=True)
        layer = {"num_hidden_layers": 1, "hidden_act": "silu", "dtype": "bfloat16", **asdict(config)}
        replace_json(out / CONFIG, {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **layer})


def write_curves(out: Path, history: Sequence[Measured], classification_weight: float) -> None:
    """Write the measurements as JSON lines and draw them.

    Raises:
        SpecragError: the disk refuses.
    """
    write_history(out, history)
    trained = [(m.tokens, m.regression + classification_weight * m.classification) for m in history]
    held_back = [
        (m.tokens, m.held_back_regression + classification_weight * m.held_back_classification)
        for m in history
    ]
    x = "tokens trained on"
    draw(out / LOSS, {"training, with noise": trained, "held back": held_back}, title="Loss", x=x, y="loss")
    draw(
        out / _MAT,
        {"held-back answers": [(m.tokens, m.mat) for m in history]},
        title=f"Accepted length of chains of {CHAIN} (modelled)",
        x=x,
        y="tokens a pass",
    )


@dataclass(frozen=True, slots=True)
class Training:
    """What the card says about the training.

    Attributes:
        settings: by group, such as ``data`` and ``training``.
        parameters: weights of the head.
        progress: of the training.
        kept: the measurement of the weights that were kept.
        measured: the measurement in the engine; ``None`` if there was none.
    """

    settings: Mapping[str, Mapping[str, Any]]
    parameters: int
    progress: HeadProgress
    kept: Measured
    measured: ChainResult | None


def write_card(out: Path, provenance: Provenance, training: Training) -> None:
    """Write the card.

    Raises:
        SpecragError: the disk refuses.
    """
    parts = [
        _title(provenance, training.parameters),
        _results(provenance, training),
        f"![Loss against tokens]({LOSS})\n\n![Accepted length against tokens]({_MAT})",
        _data(provenance),
        *(settings_table(f"Settings of the {name}", group) for name, group in training.settings.items()),
    ]
    card.write_card(out, parts, provenance.command)


def _title(provenance: Provenance, parameters: int) -> str:
    return f"""# An EAGLE head for {provenance.model}

It guesses the next tokens of {provenance.model} from the model's own hidden states (Li et al. 2024, EAGLE and
EAGLE-2): {parameters / 1e6:.1f} million weights in bf16, in the public checkpoint format. It changes no output, only
how fast it comes.

```sh
specrag generate "Why is the sky blue?" --model {provenance.model} -m eagle-2 -o drafter=eagle:THIS_FOLDER
```

It borrows the model's embedding and output matrix; the model's licence is {provenance.licence}."""


def _results(provenance: Provenance, training: Training) -> str:
    kept, progress = training.kept, training.progress
    ended = progress.ended or "training was stopped before its end"
    rows = [f"| {depth} | {accuracy:.1%} |" for depth, accuracy in enumerate(kept.accuracy, 1)]
    lines = [
        "## Results",
        "",
        f"{progress.step:,} steps on {progress.tokens:,} tokens ({ended}). Kept are the weights of step "
        f"{kept.step:,}, after {kept.tokens:,} tokens.",
        "",
        f"On {provenance.held_back:,} held-back greedy answers: Smooth-L1 loss of the features "
        f"{kept.held_back_regression:.4f}, cross-entropy {kept.held_back_classification:.4f}. How often a guess "
        "is right, where all guesses before it in its chain are:",
        "",
        "| depth | right |",
        "|---|---|",
        *rows,
        "",
        f"Chains of {CHAIN} accept {kept.mat:.2f} tokens a pass (MAT, bonus token included), modelled: counted "
        "from every token of the held-back answers, not only from those where a round would begin.",
    ]
    if training.measured is not None:
        found = training.measured
        lines += [
            "",
            f"Measured in the engine, greedy, on {found.prompts} held-back prompts: {found.tokens:,} tokens in "
            f"{found.passes:,} passes, {found.mean_accepted_tokens:.2f} tokens a pass.",
        ]
    return "\n".join(lines)


def _data(provenance: Provenance) -> str:
    files = "\n".join(f"| `{name}` | `{digest}` |" for name, digest in sorted(provenance.sources.items()))
    return f"""## Data

{provenance.answers:,} answers of {provenance.answer_tokens:,} tokens, made by {provenance.model} itself; with their
prompts {provenance.tokens:,} tokens. The prompts were made from the files below. {provenance.excluded:,} passages were
left out because they share thirteen words in a row with a text that the head is measured on. The head may propose
{provenance.covered:.1%} of the tokens of the held-back answers.

| file | sha256 |
|---|---|
{files}"""
