"""Curves and card of a tuned drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specrag.models import DRAFTER_RECORD
from specrag.training import card
from specrag.training.card import LOSS, draw, settings_table, write_history
from specrag.training.drafter.objective import Drafted, DrafterProgress, Measured
from specrag.training.files import replace_json, write_errors

_DRAFTS = "drafts.png"
_MOST_SOURCES = 20


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of rows."""

    name: str
    sha256: str
    rows: int


@dataclass(frozen=True, slots=True)
class RowCounts:
    """What became of the rows.

    Attributes:
        training, held_back: rows trained on and measured on.
        excluded: left out because they share a question or a passage with the evaluation data.
        unusable: left out because no passage fits, or their draft would end the turn early.
        shortened: rows trained on whose passages were cut.
        longest_draft: tokens of the longest draft trained on.
        sources: rows trained on, by what they were made from.
    """

    training: int
    held_back: int
    excluded: int
    unusable: int
    shortened: int
    longest_draft: int
    sources: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Provenance:
    """What the card says about the base model and the data.

    Attributes:
        model, origin, licence: the base model's name, where it comes from, and its licence.
        checksums: sha256 of its weight files.
        full: whether all weights were trained.
        parameters: how many were trained.
        device: that it was trained on.
        command: that repeats the run.
        settings: of the training.
    """

    model: str
    origin: str
    licence: str
    checksums: Mapping[str, str]
    full: bool
    parameters: int
    device: str
    command: str
    settings: Mapping[str, Any]
    data: Sequence[DataFile]
    rows: RowCounts


def write_curves(out: Path, history: Sequence[Measured]) -> None:
    """Write the measurements as JSON lines and draw them.

    Raises:
        SpecragError: the disk refuses.
    """
    write_history(out, history)
    x = "rows trained on"
    curves = {
        "held back": [(each.rows, each.held_back) for each in history],
        "training": [(each.rows, each.loss) for each in history if each.loss is not None],
    }
    draw(out / LOSS, curves, title="Loss", x=x, y="nats a token of a draft")
    drafted = [(each.rows, each.drafted) for each in history if each.drafted is not None]
    if drafted:
        shares = {
            "right": [(rows, found.right / found.count) for rows, found in drafted],
            "malformed": [(rows, found.malformed / found.count) for rows, found in drafted],
        }
        title = f"Drafts for {drafted[0][1].count} held-back rows"
        draw(out / _DRAFTS, shares, title=title, x=x, y="share")


def write_card(out: Path, provenance: Provenance, progress: DrafterProgress) -> None:
    """Write the card, for people and for programs.

    Args:
        progress: of a run with at least one measurement.

    Raises:
        SpecragError: the disk refuses.
    """
    untuned, kept = progress.history[0], progress.history[progress.best_at]
    record = {
        **asdict(provenance),
        "step": progress.step,
        "trained_rows": progress.rows,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds, 1),
        "ended": progress.ended,
        "untuned": asdict(untuned),
        "kept": asdict(kept),
        "versions": {name: version(name) for name in ("specrag", "torch", "transformers", "peft")},
    }
    curves = [f"![Loss against rows]({LOSS})"]
    if kept.drafted is not None:
        curves.append(f"![Drafts against rows]({_DRAFTS})")
    parts = [
        _title(provenance),
        _results(provenance, progress, untuned, kept),
        "\n\n".join(curves),
        _data(provenance),
        settings_table("Settings", provenance.settings),
    ]
    with write_errors(out, "card"):
        replace_json(out / DRAFTER_RECORD, record)
    card.write_card(out, parts, provenance.command)


def _title(provenance: Provenance) -> str:
    what = "All weights were trained" if provenance.full else "A LoRA adapter"
    files = ", ".join(f"`{name}` {digest}" for name, digest in provenance.checksums.items())
    form = provenance.settings["form"]
    writes = {"paper": "a rationale and an answer", "cited": "a cited sentence"}[form]
    load = (
        'drafter="THIS_FOLDER"' if provenance.full else f'drafter="{provenance.model}", adapter="THIS_FOLDER"'
    )
    return f"""# A RAG drafter from {provenance.model}

It writes {writes} from a few passages, for a larger model to verify (Wang et al. 2024, Speculative
RAG, section 3.2). {what}: {provenance.parameters / 1e6:.2f} million numbers, in bf16.

```python
llm = specrag.load("qwen2.5-coder-1.5b")
answer = llm.generate(question, kb="kb", method=specrag.SpeculativeRAG({load}, form="{form}"))
```

Base model: {provenance.model} from {provenance.origin} (sha256: {files}).

Licence: the base model's is {provenance.licence}, the rows' is named below with what they were made of."""


def _results(provenance: Provenance, progress: DrafterProgress, untuned: Measured, kept: Measured) -> str:
    ended = progress.ended or "training was stopped before its end"
    rows_an_hour = 3600 * progress.rows / progress.seconds if progress.seconds else 0.0
    lines = [
        "## Results",
        "",
        f"{progress.step:,} steps on {progress.rows:,} rows, {progress.tokens:,} tokens, in {progress.seconds:,.0f} "
        f"seconds with measuring on {provenance.device}, {rows_an_hour:,.0f} rows an hour ({ended}). Kept are the "
        f"weights of step {kept.step:,}, after {kept.rows:,} rows.",
        "",
        f"On {provenance.rows.held_back:,} held-back rows, of questions that were not trained on:",
        "",
        "| | untuned | kept |",
        "|---|---|---|",
        f"| loss, nats a token of a draft | {untuned.held_back:.4f} | {kept.held_back:.4f} |",
        f"| tokens that are the most probable ones | {untuned.tokens_right:.1%} | {kept.tokens_right:.1%} |",
    ]
    if untuned.drafted is not None and kept.drafted is not None:
        for name in ("right", "wrong", "malformed"):
            lines.append(
                f"| drafts {name} | {_share(untuned.drafted, name)} | {_share(kept.drafted, name)} |"
            )
        lines += [
            "",
            f"Drafts are written for {kept.drafted.count} of these rows, from all of a row's passages, greedily, "
            "without an example in the prompt and without being kept to the form.",
        ]
    if not provenance.settings["rationales"]:
        lines += ["", "It was trained without rationales: a dash stands where the rationale would."]
    return "\n".join(lines)


def _share(drafted: Drafted, name: str) -> str:
    count: int = getattr(drafted, name)
    return f"{count} ({count / drafted.count:.0%})"


def _data(provenance: Provenance) -> str:
    rows = provenance.rows
    files = "\n".join(f"| `{each.name}` | {each.rows:,} | `{each.sha256}` |" for each in provenance.data)
    sources = sorted(rows.sources.items(), key=lambda item: (-item[1], item[0]))
    made_of = [f"| {name or 'not said'} | {count:,} |" for name, count in sources[:_MOST_SOURCES]]
    if len(sources) > _MOST_SOURCES:
        others = sum(count for _, count in sources[_MOST_SOURCES:])
        made_of.append(f"| {len(sources) - _MOST_SOURCES} others | {others:,} |")
    return f"""## Data

{rows.training:,} rows to train on, {rows.held_back:,} held back. {rows.excluded:,} were left out because they share a
question, or an answer with its passage, with what the drafter is evaluated on, {rows.unusable:,} because they have no
room for a passage. The passages of {rows.shortened:,} were cut. The longest draft has {rows.longest_draft:,} tokens.

| file | rows | sha256 |
|---|---|---|
{files}

| rows made of | rows |
|---|---|
{chr(10).join(made_of)}"""
