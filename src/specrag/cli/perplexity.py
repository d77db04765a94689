"""``specrag perplexity PATH...``: how well a model predicts a text, with and without the neighbours of a datastore."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specrag.cli import common, knn
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.methods.knn_mixture import Mixture
    from specrag.methods.knn_perplexity import Measured
    from specrag.retrieval.knn_datastore import Datastore

#: What ``--sweep`` tries.
SWEPT_K = (1, 8, 64, 256, 1024)
SWEPT_WEIGHTS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5)
SWEPT_TEMPERATURES = (1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)
SWEPT_REACHES = (None, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


def perplexity(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders with text.")],
    datastore: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A kNN-LM datastore; without it the model alone is measured."),
    ] = None,
    index: knn.Index = None,
    k: knn.Neighbours = None,
    weight: knn.Weight = None,
    knn_temperature: knn.Temperature = None,
    knn_reach: knn.Reach = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Try many k, weights and temperatures, and name the best.")
    ] = False,
    tokens: Annotated[
        int | None,
        typer.Option(
            parser=common.integer, metavar="N", help="Read the first N tokens only; by default all."
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            parser=common.integer, metavar="N", help="Tokens read in one go; by default as the datastore's."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
    model: common.Model = "smollm2-135m",
    dtype: common.Dtype = "bf16",
    device: common.Device = None,
) -> None:
    """Measure a model's perplexity on a text, with and without the neighbours of a datastore.

    The last tokens of a window are the first ones of the next, so that every token but the first has context.

    Example: specrag perplexity test.txt --datastore store/ --sweep
    """
    if tokens is not None and tokens < 2:
        raise InputError("--tokens", tokens, "give a whole number of at least 2")
    if datastore is None:
        given = {
            "--index": index,
            "--k": k,
            "--lambda": weight,
            "--knn-temperature": knn_temperature,
            "--knn-reach": knn_reach,
            "--sweep": sweep or None,
        }
        for option, value in given.items():
            if value is not None:
                raise InputError(option, value, "it says something about neighbours; add --datastore")
    knn.check_mixture(k, weight, knn_temperature, knn_reach)
    from specrag.retrieval.files import find_files

    find_files([path.expanduser() for path in paths])
    store, mixture = None, None
    if datastore is not None:
        from specrag.retrieval.knn_datastore import Datastore

        store = Datastore.open(datastore)
        mixture = knn.mixture_of(k, weight, knn_temperature, knn_reach, store)
        store.index(index or "flat")
    measured = _measure(paths, store, index, mixture, tokens, window, model, dtype, device, k, sweep)
    found: dict[str, object] = {"tokens": len(measured.log_probs), "perplexity": measured.perplexity()}
    if mixture is not None:
        found |= {"mixture": asdict(mixture), "mixture_perplexity": measured.perplexity(mixture)}
    if sweep:
        tried = _sweep(measured)
        best = min(tried, key=lambda entry: entry[1])
        found |= {
            "best": {**asdict(best[0]), "perplexity": best[1]},
            "sweep": [{**asdict(mixture), "perplexity": value} for mixture, value in tried],
        }
    if as_json:
        typer.echo(json.dumps(found))
        return
    _print(measured, mixture, _sweep(measured) if sweep else [])


def _measure(
    paths: list[Path],
    store: Datastore | None,
    index: str | None,
    mixture: Mixture | None,
    tokens: int | None,
    window: int | None,
    model: str,
    dtype: str,
    device: str | None,
    k: int | None,
    sweep: bool,
) -> Measured:
    from specrag.language_model import load
    from specrag.methods.knn_perplexity import measuring
    from specrag.retrieval.knn_datastore import model_record
    from specrag.retrieval.knn_manifest import WindowSettings
    from specrag.retrieval.knn_texts import read_texts

    made = WindowSettings() if store is None else store.manifest.windows
    settings = made if window is None else WindowSettings(window, min(made.context, window // 4))
    llm = load(model, dtype=dtype, device=device, progress=sys.stderr.isatty())
    try:
        if settings.tokens >= llm.context_length:
            remedy = f"the model's context holds {llm.context_length:,} tokens; give fewer"
            raise InputError("--window", settings.tokens, remedy)
        if store is not None:
            store.check_model(model_record(llm.loaded))
        documents, left = [], tokens
        for text in read_texts(paths, llm.tokenizer).documents:
            documents.append(text[:left])
            left = None if left is None else left - len(documents[-1])
            if left == 0:
                break
        most = 1 if mixture is None else mixture.k
        if sweep and store is not None and k is None:
            most = min(SWEPT_K[-1], len(store))
        work = measuring(llm.model, documents, settings, store, index or "flat", most)
        return llm.executor.run(llm.executor.submit(work))
    finally:
        llm.close()


def _sweep(measured: Measured) -> list[tuple[Mixture, float]]:
    from specrag.methods.knn_mixture import Mixture

    most = measured.distances.shape[1]
    mixtures = [
        Mixture(k, weight, temperature, reach)
        for k in sorted({*(k for k in SWEPT_K if k <= most), most})
        for weight in SWEPT_WEIGHTS
        for temperature in SWEPT_TEMPERATURES
        for reach in SWEPT_REACHES
    ]
    return list(zip(mixtures, measured.sweep(mixtures), strict=True))


def _print(measured: Measured, mixture: Mixture | None, tried: list[tuple[Mixture, float]]) -> None:
    typer.echo(f"tokens:          {len(measured.log_probs):,}")
    typer.echo(f"perplexity:      {measured.perplexity():.3f}")
    if mixture is not None:
        settings = f"k {mixture.k}, lambda {mixture.weight:g}, temperature {mixture.temperature:g}"
        if mixture.reach is not None:
            settings += f", reach {mixture.reach:g}"
        typer.echo(f"with neighbours: {measured.perplexity(mixture):.3f} ({settings})")
    if tried:
        typer.echo("best of the sweep, for each k:")
        for k in dict.fromkeys(entry.k for entry, _ in tried):
            best, value = min((entry for entry in tried if entry[0].k == k), key=lambda entry: entry[1])
            settings = f"--k {k} --lambda {best.weight:g} --knn-temperature {best.temperature:g}"
            if best.reach is not None:
                settings += f" --knn-reach {best.reach:g}"
            typer.echo(f"    {value:.3f}  {settings}")
