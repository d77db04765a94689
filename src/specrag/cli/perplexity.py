"""``specrag perplexity PATH...``: how well a model predicts a text, with and without the neighbours of a datastore."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specrag.cli import common, values
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.methods.knn_lm.mixture import Mixture
    from specrag.methods.knn_lm.perplexity import Measured
    from specrag.methods.knn_lm.store import Datastore

#: What ``--sweep`` tries.
SWEPT_K = (1, 8, 64, 256, 1024)
SWEPT_WEIGHTS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5)
SWEPT_TEMPERATURES = (1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)
SWEPT_REACHES = (None, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


def perplexity(
    line: typer.Context,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders with text.")],
    datastore: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A kNN-LM datastore; without it the model alone is measured."),
    ] = None,
    option: values.KeyValues = None,
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
    as_json: common.Json = False,
    model: common.Model = "smollm2-135m",
) -> None:
    """Measure a model's perplexity on a text, with and without the neighbours of a datastore.

    The last tokens of a window are the first ones of the next, so that every token but the first has context.

    Example: specrag perplexity test.txt --datastore store/ --sweep
    """
    if tokens is not None and tokens < 2:
        raise InputError("--tokens", tokens, "give a whole number of at least 2")
    chosen = values.choose(line, "knn-lm", option)
    own: Any = chosen.method.options
    if datastore is None:
        named = [*own.model_fields_set, *(["sweep"] if sweep else [])]
        if named:
            raise InputError(named[0], True, "it says something about neighbours; add --datastore")
    from specrag.retrieval.documents import find_files

    find_files([path.expanduser() for path in paths])
    store, mixture = None, None
    if datastore is not None:
        from specrag.methods.knn_lm.store import Datastore

        store = Datastore.open(datastore)
        mixture = _mixture(own, store)
        store.index(own.index)
    most = 1 if mixture is None else mixture.k
    if sweep and store is not None and own.k is None:
        most = min(SWEPT_K[-1], len(store))
    measured = _measure(_Texts(paths, tokens, window), store, own.index, most, model, chosen.model)
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


@dataclass(frozen=True, slots=True)
class _Texts:
    """What is read: files, most tokens in all, and tokens in one go."""

    paths: list[Path]
    tokens: int | None
    window: int | None


def _mixture(own: Any, store: Datastore) -> Mixture:
    from specrag.methods.knn_lm.mixture import Mixture

    k = min(Mixture().k, len(store)) if own.k is None else own.k
    if k > len(store):
        raise InputError(f"{values.PLACE} k", k, f"the datastore holds {len(store):,} entries; give fewer")
    return Mixture(k, own.weight, own.knn_temperature, own.knn_reach)


def _measure(
    texts: _Texts, store: Datastore | None, index: str, most: int, model: str, loading: values.ModelValues
) -> Measured:
    """Read the texts, with ``most`` neighbours for every token."""
    from specrag.cli.resources import LocalResources
    from specrag.methods.knn_lm.perplexity import measuring
    from specrag.methods.knn_lm.store import WindowSettings, model_record, read_texts

    made = WindowSettings() if store is None else store.manifest.windows
    window = texts.window
    settings = made if window is None else WindowSettings(window, min(made.context, window // 4))
    with ExitStack() as opened:
        llm = LocalResources(model, loading, opened).llm
        if settings.tokens >= llm.context_length:
            remedy = f"the model's context holds {llm.context_length:,} tokens; give fewer"
            raise InputError("--window", settings.tokens, remedy)
        if store is not None:
            store.check_model(model_record(llm.loaded))
        documents, left = [], texts.tokens
        for text in read_texts(texts.paths, llm.tokenizer).documents:
            documents.append(text[:left])
            left = None if left is None else left - len(documents[-1])
            if left == 0:
                break
        work = measuring(llm.model, documents, settings, store, index, most)
        return llm.executor.run(llm.executor.submit(work))


def _sweep(measured: Measured) -> list[tuple[Mixture, float]]:
    from specrag.methods.knn_lm.mixture import Mixture

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
            settings = f"-o k={k} -o weight={best.weight:g} -o knn-temperature={best.temperature:g}"
            if best.reach is not None:
                settings += f" -o knn-reach={best.reach:g}"
            typer.echo(f"    {value:.3f}  {settings}")
