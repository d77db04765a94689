"""How kNN-LM is chosen on the command line: its datastore, its mixture, and how it speculates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specrag.cli import common
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.methods.generation import Generation
    from specrag.methods.knn_lm import KnnLM
    from specrag.methods.knn_lm import Stride as StrideChoice
    from specrag.methods.knn_mixture import Mixture
    from specrag.retrieval.knn_datastore import Datastore

METHOD = "knn-lm"

#: A stride of 1 without guesses.
SEQUENTIAL = "sequential"

_PANEL = "kNN-LM"

DatastoreFolder = Annotated[
    Path | None,
    typer.Option(
        "--datastore",
        metavar="DIR",
        help="The datastore of --method knn-lm, made by index --knn-lm.",
        rich_help_panel=_PANEL,
    ),
]
Index = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="flat (default), or hnsw or pq if it was built.", rich_help_panel=_PANEL
    ),
]
Neighbours = Annotated[
    int | None,
    typer.Option(
        "--k",
        parser=common.integer,
        metavar="N",
        help="Neighbours, up to 1,024 (default: 1,024 or all).",
        rich_help_panel=_PANEL,
    ),
]
Weight = Annotated[
    float | None,
    typer.Option(
        "--lambda",
        parser=common.number,
        metavar="X",
        help="Weight of the neighbours, 0 to 1 (default 0.25).",
        rich_help_panel=_PANEL,
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--knn-temperature",
        parser=common.number,
        metavar="X",
        help="Divides squared distances (default 1); perplexity --sweep finds one.",
        rich_help_panel=_PANEL,
    ),
]
Reach = Annotated[
    float | None,
    typer.Option(
        "--knn-reach",
        parser=common.number,
        metavar="X",
        help="Squared distance at which neighbours count e times less (default: they count the same at any).",
        rich_help_panel=_PANEL,
    ),
]
Stride = Annotated[
    str | None,
    typer.Option(
        metavar="N|os3|cost-aware|sequential",
        help="Tokens guessed before one search verifies them; os3 and cost-aware (default) choose a number; "
        "sequential guesses none.",
        rich_help_panel=_PANEL,
    ),
]
Decoder = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Method whose guesses are read in one pass (default respec); plain reads one token a pass.",
        rich_help_panel=_PANEL,
    ),
]
Prefetch = Annotated[
    int | None,
    typer.Option(
        parser=common.integer,
        metavar="N",
        help="Neighbours whose followers are cached (default k, at most 32).",
        rich_help_panel=_PANEL,
    ),
]
Asynchronous = Annotated[
    bool, typer.Option("--asynchronous", help="Decode on while guesses are verified.", rich_help_panel=_PANEL)
]
Uncapped = Annotated[
    bool,
    typer.Option(
        "--uncapped", help="Let os3 believe match rates above the paper's 0.6.", rich_help_panel=_PANEL
    ),
]


def method_of(
    method: str,
    folder: Path | None,
    *,
    index: str | None,
    k: int | None,
    weight: float | None,
    temperature: float | None,
    reach: float | None,
    stride: str | None,
    decoder: str | None,
    prefetch: int | None,
    asynchronous: bool,
    uncapped: bool,
) -> KnnLM | None:
    """What the options describe; ``None`` for another method.

    Raises:
        InputError: they do not fit together, or a value cannot be used.
        DatastoreError: the datastore cannot be opened.
    """
    if method != METHOD:
        others: Mapping[str, Any] = {
            "--datastore": folder,
            "--index": index,
            "--k": k,
            "--lambda": weight,
            "--knn-temperature": temperature,
            "--knn-reach": reach,
            "--stride": stride,
            "--decoder": decoder,
            "--prefetch": prefetch,
            "--asynchronous": asynchronous or None,
            "--uncapped": uncapped or None,
        }
        for option, value in others.items():
            if value is not None:
                raise InputError(option, str(value), f"only --method {METHOD} searches a datastore; add it")
        return None
    from specrag.methods.registry import check_method

    if folder is None:
        remedy = "make one with `specrag index PATH --knn-lm --kb DIR` and name it"
        raise InputError("--datastore", None, remedy)
    if uncapped and stride != "os3":
        raise InputError("--uncapped", uncapped, "only --stride os3 estimates a match rate; add it")
    chosen = _stride(stride)
    if chosen is None:
        guessing = {"--asynchronous": asynchronous or None, "--prefetch": prefetch, "--decoder": decoder}
        for option, value in guessing.items():
            if value is not None:
                raise InputError(option, value, "nothing is guessed with --stride sequential; leave it out")
    if decoder is not None:
        check_method(decoder, "--decoder")
    check_mixture(k, weight, temperature, reach)
    from specrag.methods.knn_lm import KnnLM
    from specrag.methods.speculative_search import MAX_MATCH
    from specrag.retrieval.knn_datastore import Datastore

    datastore = Datastore.open(folder)
    return KnnLM(
        datastore,
        mixture_of(k, weight, temperature, reach, datastore),
        index=index or "flat",
        stride=chosen,
        decoder=decoder or "respec",
        prefetch=prefetch,
        asynchronous=asynchronous,
        max_match=None if uncapped else MAX_MATCH,
    )


def check_mixture(
    k: int | None, weight: float | None, temperature: float | None, reach: float | None
) -> None:
    """Check what needs no datastore.

    Raises:
        InputError: a value is out of its range.
    """
    from specrag.methods.knn_mixture import Mixture

    given = {"k": k, "weight": weight, "temperature": temperature, "reach": reach}
    Mixture(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def mixture_of(
    k: int | None,
    weight: float | None,
    temperature: float | None,
    reach: float | None,
    datastore: Datastore,
) -> Mixture:
    """The mixture that the options describe; by default with all entries of a small datastore.

    Raises:
        InputError: a value is out of its range, or the datastore has fewer than k entries.
    """
    from specrag.methods.knn_mixture import Mixture
    from specrag.retrieval.knn_index import check_k

    default = Mixture()
    return Mixture(
        check_k(min(default.k, len(datastore)) if k is None else k, len(datastore)),
        default.weight if weight is None else weight,
        default.temperature if temperature is None else temperature,
        reach,
    )


def status(result: Generation) -> str:
    """How the guessing went, for the line behind a text."""
    usage = result.usage
    return (
        f"{usage.mean_accepted_tokens:.2f} tokens a round, {usage.accepted} of {usage.drafted} guesses right"
    )


def _stride(text: str | None) -> StrideChoice | None:
    if text is None or text == "cost-aware":
        return "cost-aware"
    if text == "os3":
        return "os3"
    if text == SEQUENTIAL:
        return None
    try:
        stride = int(text)
    except ValueError:
        stride = 0
    if stride < 1:
        raise InputError("--stride", text, "give a whole number of at least 1, os3, cost-aware or sequential")
    return stride
