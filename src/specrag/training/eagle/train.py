"""``specrag train eagle``: from texts and a model to a head, in stages that can each be resumed.

The folder of a run::

    config.json model.safetensors draft_vocabulary.safetensors    the head, which the drafter loads
    README.md loss.png mat.png training.jsonl                     its card and its curves
    work/                                                         needed only to resume; may be deleted
        data.json answers.jsonl features/                         the settings, the target's answers and its features
        training/settings.json training/checkpoint.safetensors    the training
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from specrag.errors import InputError
from specrag.language_model import LanguageModel
from specrag.models import HeadConfig, LeanDecoder
from specrag.training.card import check_plotting
from specrag.training.eagle.answers import AnswerStore, make_answers
from specrag.training.eagle.card import Provenance, Training, write_card, write_curves, write_head
from specrag.training.eagle.features import FeatureCache, Text, texts_of
from specrag.training.eagle.losses import frequent_tokens, read_matrices
from specrag.training.eagle.measure import ChainResult, measure_chains
from specrag.training.eagle.module import head_config
from specrag.training.eagle.objective import (
    CHAIN,
    HeadObjective,
    HeadProgress,
    Material,
    Measured,
    head_loop,
    new_head,
)
from specrag.training.eagle.prompts import Sources, plan, read_sources
from specrag.training.eagle.run import DataSettings, EagleRun, Outcome
from specrag.training.files import locked, write_errors
from specrag.training.run import Status, check_same, silent


def train_eagle(
    llm: LanguageModel,
    run: EagleRun,
    report: Callable[[Status[Measured]], None] = silent,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Train a head, or resume its training.

    Args:
        llm: the target; its weights do not change.
        report: called with the run's status.
        clock: seconds.

    Raises:
        InputError: there is no text, the model gives no hidden states, or the run was begun with other settings.
        SpecragError: another process works there, the disk is full, or a file is damaged.
    """
    check_plotting()
    model = llm.model
    if not isinstance(model, LeanDecoder):
        remedy = "it gives no hidden states that a head can go on from; take a Llama, Qwen or Mistral model"
        raise InputError("--model", llm.loaded.name, remedy)
    config = head_config(model.config)
    proceed = run.watched(report, clock)
    sources = read_sources(run.data, run.prompts, llm.loaded.files.folder / "tokenizer.json", run.exclude)
    with locked(run.out):
        _check_data(llm, run, sources)
        store = _answers(llm, run, sources, proceed)
        if store is None:
            return Outcome(run.out, "answers")
        texts = texts_of(list(store.answers.values()), run.texts.length)
        cache = FeatureCache(run.out / "work" / "features", texts, config.hidden_size)
        cache.fill(model, lambda done: proceed(Status("features", done, len(texts))))
        if not cache.is_full:
            return Outcome(run.out, "features")
        return _train(llm, run, config, cache, sources, proceed, clock)


# -- data ---------------------------------------------------------------------------------------------------


def _check_data(llm: LanguageModel, run: EagleRun, sources: Sources) -> None:
    """Check the data settings: only the number of answers and of held-back ones may change later."""
    mine = {"model": llm.loaded.name, "dtype": llm.loaded.dtype, **asdict(run.texts)}
    del mine["tokens"], mine["held_back"]
    mine |= {f"sha256 of {name}": digest for name, digest in sources.checksums.items()}
    mine["excluded"] = sources.excluded
    check_same(run.out / "work" / "data.json", mine, "take another folder")


def _answers(
    llm: LanguageModel, run: EagleRun, sources: Sources, proceed: Callable[[Status[Measured]], bool]
) -> AnswerStore | None:
    """All answers; ``None`` if the time ran out before."""
    store = AnswerStore(run.out / "work" / "answers.jsonl")
    asked = plan(
        sources.passages,
        sources.prompts,
        chat=llm.tokenizer.has_chat_template,
        sampled=run.texts.temperature > 0,
        seed=run.texts.seed,
    )
    done = make_answers(
        llm, asked, store, run.texts, lambda tokens: proceed(Status("answers", tokens, run.texts.tokens))
    )
    return store if done else None


@dataclass(frozen=True, slots=True)
class _Split:
    training: list[int]
    held_back: list[int]


def _split(texts: Sequence[Text], settings: DataSettings) -> _Split:
    """Hold back whole conversations, since a second turn repeats much of the first.

    Raises:
        InputError: there are too few.
    """
    greedy = list(dict.fromkeys(text.conversation for text in texts if text.greedy))
    chosen = set(greedy[: min(settings.held_back, len(greedy) // 2)])
    if not chosen:
        remedy = "there are too few answers to train on and to hold back; give more data or a larger --tokens"
        raise InputError("--data", f"{len(texts)} answers", remedy)
    held_back = [number for number, text in enumerate(texts) if text.conversation in chosen]
    return _Split([number for number, text in enumerate(texts) if text.conversation not in chosen], held_back)


# -- training -----------------------------------------------------------------------------------------------


def _train(
    llm: LanguageModel,
    run: EagleRun,
    config: HeadConfig,
    cache: FeatureCache,
    sources: Sources,
    proceed: Callable[[Status[Measured]], bool],
    clock: Callable[[], float],
) -> Outcome:
    folder, settings = run.out / "work" / "training", run.training
    if run.fresh:
        with write_errors(folder, "training"):
            shutil.rmtree(folder, ignore_errors=True)
    split = _split(cache.texts, run.texts)
    mine = asdict(settings) | {"texts": len(split.training), "held_back": len(split.held_back)}
    check_same(folder / "settings.json", mine, "train anew with --fresh")
    known = [cache.texts[number] for number in split.training]
    vocabulary = frequent_tokens(
        known, settings.draft_vocabulary, llm.tokenizer.eos_tokens, config.vocab_size
    )
    device = torch.device(llm.loaded.device)
    precision = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    target = read_matrices(llm.loaded.files, vocabulary, dtype=precision, device=device)
    material = Material(cache, target, split.training, split.held_back)
    loop = head_loop(
        HeadObjective(new_head(config, settings.seed, device), material, settings),
        folder / "checkpoint.safetensors",
        clock=clock,
        checkpoint_seconds=60 * run.checkpoint_minutes,
    )
    total = settings.epochs * material.tokens

    def told(progress: HeadProgress) -> bool:
        newest = progress.history[-1] if progress.history else None
        return proceed(Status("training", progress.tokens, total, newest))

    loop.run(told)
    progress, kept = loop.progress, loop.progress.kept
    if kept is None:
        return Outcome(run.out, "training", progress=progress)
    write_head(run.out, config, loop.best, vocabulary)
    write_curves(run.out, progress.history, settings.classification_weight)
    measured = _measure(llm, run, [cache.texts[number] for number in split.held_back])
    training = Training(
        {"data": asdict(run.texts), "training": asdict(settings)},
        sum(tensor.numel() for tensor in loop.best.values()),
        progress,
        kept,
        measured,
    )
    write_card(run.out, _provenance(llm, run, material, sources), training)
    return Outcome(run.out, "training", progress.ended, progress, kept, measured)


def _measure(llm: LanguageModel, run: EagleRun, held_back: Sequence[Text]) -> ChainResult | None:
    if not run.measure:
        return None
    prompts = [text.tokens[: text.begin] for text in held_back[: run.measure]]
    return measure_chains(llm, run.out, prompts, length=CHAIN, max_tokens=run.texts.answer_tokens)


def _provenance(llm: LanguageModel, run: EagleRun, material: Material, sources: Sources) -> Provenance:
    texts = material.cache.texts
    known = [texts[number] for number in material.training]
    answers = [
        token for number in material.held_back for token in texts[number].tokens[texts[number].begin :]
    ]
    vocabulary = set(material.target.vocabulary.tolist())
    return Provenance(
        model=llm.loaded.name,
        licence=llm.loaded.files.licence,
        command=run.command,
        sources=sources.checksums,
        excluded=sources.excluded,
        answers=len(known),
        answer_tokens=sum(len(text.tokens) - text.begin for text in known),
        tokens=material.tokens,
        held_back=len(material.held_back),
        covered=sum(token in vocabulary for token in answers) / max(len(answers), 1),
    )
