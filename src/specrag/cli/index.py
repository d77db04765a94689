"""``specrag index PATH... --kb DIR``: make a knowledge base of documents, and load it into a store if one is named."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specrag.checks import check_number
from specrag.cli import common, corpus_index, knn_index, store
from specrag.cli.printable import printable
from specrag.errors import InputError, SpecragError

if TYPE_CHECKING:
    from specrag.methods import ReadReport
    from specrag.retrieval import BuildReport, BuildSettings, Progress
    from specrag.retrieval.encoder import Encoder

_LOOK = 1.0  # seconds between two looks at the watched paths
_SHOWN = 20  # skipped documents that are listed
_UNITS = {
    "reading": "documents",
    "reading text": "tokens",
    "encoding": "passages",
    "indexing": "passages",
    "compacting": "rows",
    "loading": "passages",
    "reading passages": "passages",
}
_KNN, _READ = "kNN-LM, ReSpec", "Reading once"
_READ_GB = 4.0


def index(
    kb: Annotated[Path, typer.Option(metavar="DIR", help="The knowledge base's folder; made if need be.")],
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATH...", help="Files and folders with documents; with --store none loads what is there."
        ),
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(metavar="NAME", help="A sentence encoder; by default minilm-l6-v2.")
    ] = None,
    encoder_dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="fp32 or bf16; by default bf16, fp32 on processors without it."),
    ] = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(parser=common.integer, metavar="N", help="Most tokens of a passage; by default 200."),
    ] = None,
    chunk_overlap: Annotated[
        int | None,
        typer.Option(
            parser=common.integer, metavar="N", help="Tokens repeated in the next passage; by default 32."
        ),
    ] = None,
    pgvector: store.Url = None,
    table: store.Table = None,
    into: store.Address = None,
    hnsw: Annotated[
        bool,
        typer.Option(
            "--hnsw",
            help="Also build an approximate index in the store, or in a datastore.",
            rich_help_panel="Stores",
        ),
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Replace what is there.", rich_help_panel="Stores"),
    ] = False,
    knn_lm: Annotated[
        bool,
        typer.Option(
            "--knn-lm",
            help="Make a datastore for kNN-LM in place of a knowledge base.",
            rich_help_panel=_KNN,
        ),
    ] = False,
    corpus: Annotated[
        bool,
        typer.Option(
            "--corpus",
            help="Make a corpus that guesses are copied from in place of a knowledge base.",
            rich_help_panel=_KNN,
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Model that reads the text (default smollm2-135m; for --read the one that answers).",
            rich_help_panel=_KNN,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE", help="Its number type; by default int8, bf16 on a GPU.", rich_help_panel=_KNN
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="Its device, such as cpu.", rich_help_panel=_KNN),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            parser=common.integer, metavar="N", help="Tokens read in one go (512).", rich_help_panel=_KNN
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            parser=common.integer,
            metavar="N",
            help="Of them, tokens repeated from the window before (128).",
            rich_help_panel=_KNN,
        ),
    ] = None,
    pq: Annotated[
        bool,
        typer.Option(
            "--pq",
            help="Also build a product-quantised index, for a large datastore.",
            rich_help_panel=_KNN,
        ),
    ] = False,
    read: Annotated[
        bool,
        typer.Option(
            "--read",
            help="Also let the model read each passage and keep what it read, for -o reuse=blocks.",
            rich_help_panel=_READ,
        ),
    ] = False,
    read_gb: Annotated[
        float | None,
        typer.Option(
            parser=common.number,
            metavar="X",
            help="Most GB of it; passages for which there is no room are read when they are needed (4).",
            rich_help_panel=_READ,
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Encode on all nodes of a Ray cluster: HOST:PORT of its head, auto or local.",
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Go on, and follow the paths: what changes is indexed, until Ctrl-C."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
) -> None:
    """Make a knowledge base of documents, or bring it up to date.

    New documents are added, changed ones read again, and those gone from below the paths removed. Encoder and
    chunking are chosen once, when the knowledge base is made. With --store, or --table for PostgreSQL, it is then
    loaded into a store.

    With --read the model that will answer reads every passage now, and keeps what it has read on the disk. Answers with
    -o reuse=blocks begin sooner by it; they are an approximation.

    With --knn-lm it is a datastore for --method knn-lm: an entry for each token that the model reads. With --corpus
    it is a text that guesses may be copied from: generate and ask take it as -o corpus=DIR.

    Example: specrag index docs/ notes.txt --kb kb/
    """
    address = store.table_address(pgvector, table, into)
    of_model = {
        "--model": model,
        "--dtype": dtype,
        "--device": device,
        "--window": window,
        "--context": context,
    }
    of_passages = {
        "--encoder": encoder,
        "--encoder-dtype": encoder_dtype,
        "--chunk-tokens": chunk_tokens,
        "--chunk-overlap": chunk_overlap,
        "--pgvector": pgvector,
        "--table": table,
        "--store": into,
        "--replace": replace or None,
        "--ray": ray,
        "--watch": watch or None,
        "--read": read or None,
        "--read-gb": read_gb,
    }
    if knn_lm and corpus:
        raise InputError("--corpus", corpus, "leave it or --knn-lm out")
    of_datastores = {**of_model, "--pq": pq or None}
    if corpus:
        del of_datastores["--model"]
        _refuse({**of_passages, **of_datastores, "--hnsw": hnsw or None}, "leave it out with --corpus")
    elif knn_lm:
        _refuse(of_passages, "leave it out with --knn-lm")
    elif read:
        refused = {"--pq": pq or None, "--window": window, "--context": context, "--watch": watch or None}
        _refuse(refused, "leave it out with --read")
    else:
        _refuse({"--read-gb": read_gb}, "add --read")
        _refuse(of_datastores, "it is for datastores; add --knn-lm")
    if not paths and address is None:
        raise typer.BadParameter("name at least one PATH, or a --store to load the knowledge base into")
    bar = Bar()
    if corpus:
        corpus_index.index_corpus(
            paths or [], kb, model or "smollm2-135m", bar.show, bar.close, as_json=as_json
        )
    elif knn_lm:
        options = knn_index.DatastoreOptions(
            model or "smollm2-135m", dtype or "auto", device, window, context, hnsw, pq
        )
        knn_index.index_datastore(paths or [], kb, options, bar.show, bar.close, as_json=as_json)
    else:
        target = None if address is None else _Target(address, hnsw, replace)
        settings = (encoder, encoder_dtype, chunk_tokens, chunk_overlap)
        if watch and target is not None:
            raise InputError(
                "--watch", watch, "it follows paths into a folder; leave --store, --table and --pgvector out"
            )
        follow = _Follower(paths or [], kb) if watch else None
        reading = _Reading(model, dtype or "auto", device, read_gb) if read else None
        _index_documents(paths or [], kb, settings, target, ray, reading, as_json=as_json)
        if follow is not None:
            follow.run(as_json=as_json)


def _refuse(options: Mapping[str, object], remedy: str) -> None:
    """Refuse options that do not apply.

    Raises:
        InputError: one was given.
    """
    for option, value in options.items():
        if value is not None:
            raise InputError(option, value, remedy)


def _index_documents(
    paths: Sequence[Path],
    kb: Path,
    settings: tuple[str | None, str | None, int | None, int | None],
    target: _Target | None,
    cluster: str | None,
    reading: _Reading | None,
    *,
    as_json: bool,
) -> None:
    """Bring a knowledge base up to date, and load it into a store if one is named."""
    if target is not None:
        target.check()
    # Ray prints to standard output when a node dies, which would stand before the JSON.
    with redirect_stdout(sys.stderr), closing(Bar()) as bar:
        report = None
        if paths:
            from specrag.retrieval import BuildSettings
            from specrag.retrieval.build import build

            chosen = BuildSettings(*settings)
            encoder = None if cluster is None else _cluster_encoder(cluster, kb, chosen)
            report = build(paths, kb, chosen, bar.show, encoder=encoder)
        loaded = None if target is None else target.load(kb, bar.show)
        read = None if reading is None else reading.read(kb, bar.show)
    if as_json:
        described = {} if report is None else asdict(report)
        if target is not None and loaded is not None:
            described[target.kind] = asdict(loaded)
        if read is not None:
            described["read"] = asdict(read)
        typer.echo(json.dumps({"kb": str(kb), **described}, ensure_ascii=False))
        return
    if report is not None:
        print_report(report)
        _note_language(kb)
    if target is not None and loaded is not None:
        typer.echo(
            f"{target.kind}:     {printable(loaded.name)}, {loaded.passages:,} passages in {loaded.seconds:.1f} s"
        )
    if read is not None:
        typer.echo(
            f"read:      {read.passages:,} passages kept, {read.read:,} of them read now by {printable(read.model)} "
            f"({read.bytes / 1e6:,.0f} MB, {read.seconds:.1f} s)"
        )
        if read.left_out:
            typer.echo(f"note: no room for {read.left_out:,} passages; --read-gb gives more", err=True)


def _cluster_encoder(address: str, kb: Path, settings: BuildSettings) -> Encoder:
    """The encoder of these settings, running on all nodes of a cluster."""
    from specrag.integrations.ray import ClusterEncoder, connect
    from specrag.retrieval import Manifest, settle
    from specrag.retrieval.encoder import load_encoder

    folder = kb.expanduser()
    settled = settle(settings, folder, Manifest.read(folder) if Manifest.exists(folder) else None)
    here = load_encoder(settled.encoder, dtype=settled.encoder_dtype)
    connect(address)
    return ClusterEncoder(here)


class _Follower:
    """Indexes what changes below paths from now on.

    Args:
        paths: files and folders, which the caller indexes next.
        kb: folder of the knowledge base.
    """

    def __init__(self, paths: Sequence[Path], kb: Path) -> None:
        from specrag.retrieval import look

        self._paths = [path.expanduser() for path in paths]
        self._kb = kb.expanduser()
        self._indexed = look(self._paths, self._kb)

    def run(self, *, as_json: bool) -> None:
        """Follow changes until the process is ended."""
        from specrag.retrieval import Manifest, settled_changes
        from specrag.retrieval.build import build
        from specrag.retrieval.encoder import load_encoder

        made = Manifest.read(self._kb).encoder
        encoder = load_encoder(made.name, dtype=made.dtype)
        typer.echo("watching; Ctrl-C ends it", err=True)
        for _ in settled_changes(self._paths, self._kb, self._indexed, _LOOK):
            try:
                report = build(self._paths, self._kb, encoder=encoder)
            except SpecragError as error:  # the next change tries again
                typer.echo(f"error: {printable(str(error))}", err=True)
                continue
            if as_json:
                typer.echo(json.dumps({"kb": str(self._kb), **asdict(report)}, ensure_ascii=False))
            else:
                print_report(report)


@dataclass(frozen=True)
class _Loaded:
    """What a store holds now."""

    name: str
    passages: int
    seconds: float


class _Target:
    """A store that a knowledge base is loaded into.

    Args:
        address: the store's.
        hnsw: build an approximate index, too.
        replace: replace what is there.
    """

    def __init__(self, address: str, hnsw: bool, replace: bool) -> None:
        self.address = address
        self.hnsw = hnsw
        self.replace = replace
        self.kind = "table" if "#" in address and not address.startswith("shards:") else "store"

    def check(self) -> None:
        """Fail before the documents are read, not after."""
        from specrag.retrieval.stores import Loading, check_load

        check_load(self.address, Loading(self.hnsw, self.replace))

    def load(self, kb: Path, report: Callable[[Progress], None]) -> _Loaded:
        """Load the knowledge base into the store."""
        from specrag.retrieval import KnowledgeBase
        from specrag.retrieval.stores import Loading, load, shown

        started = time.perf_counter()
        with KnowledgeBase.open(kb) as base:
            passages = load(self.address, base, Loading(self.hnsw, self.replace, report))
        name = self.address.partition("#")[2] if self.kind == "table" else shown(self.address)
        return _Loaded(name, passages, time.perf_counter() - started)


class _Reading:
    """A model that reads passages once, when they are indexed.

    Args:
        model, dtype, device: as :func:`specrag.load` takes them; by default the model that answers by default.
        gigabytes: most that it keeps; ``None`` for the default.
    """

    def __init__(self, model: str | None, dtype: str, device: str | None, gigabytes: float | None) -> None:
        self._model, self._dtype, self._device = model, dtype, device
        gigabytes = _READ_GB if gigabytes is None else gigabytes
        self._bytes = int(check_number("--read-gb", gigabytes, least=1e-3) * 1e9)

    def read(self, kb: Path, report: Callable[[Progress], None]) -> ReadReport:
        """Read the passages that are not kept yet."""
        from specrag.language_model import load
        from specrag.methods import read_passages
        from specrag.retrieval import KnowledgeBase

        with (
            closing(load(common.model_name(self._model), dtype=self._dtype, device=self._device)) as llm,
            KnowledgeBase.open(kb.expanduser()) as base,
        ):
            return read_passages(llm, base, self._bytes, report)


class Bar:
    """A progress bar on standard error for each stage; nothing if that is not a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bars

        console = Console(stderr=True)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._stage = ""
        self._task = self._bars.add_task("", unit="", visible=False)

    def show(self, progress: Progress) -> None:
        """Move the stage's bar."""
        if progress.stage != self._stage:
            self._stage = progress.stage
            self._bars.start()
            self._task = self._bars.add_task(
                progress.stage, total=progress.total, unit=_UNITS[progress.stage]
            )
        self._bars.update(self._task, completed=progress.done)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._bars.stop()


def _note_language(kb: Path) -> None:
    """Print a note if the encoder, which knows only English, has read documents in another language."""
    from specrag.retrieval import DEFAULT_ENCODER, KnowledgeBase

    with KnowledgeBase.open(kb) as base:
        language, *_ = base.languages or ("english",)
        if language != "english" and base.manifest.encoder.name == DEFAULT_ENCODER:
            typer.echo(
                f"note: most documents are in {language.title()}, and {DEFAULT_ENCODER} knows English; "
                "--encoder multilingual-e5-small, from the hub, finds their meaning too",
                err=True,
            )


def print_report(report: BuildReport) -> None:
    """Print what a build has changed."""
    changes = (
        f"{report.added:,} added, {report.updated:,} updated, {report.removed:,} removed, "
        f"{report.unchanged:,} unchanged"
    )
    typer.echo(f"documents: {changes}")
    typer.echo(f"passages:  {report.passages:,}, of which {report.encoded:,} encoded")
    if report.skipped:
        typer.echo(f"skipped:   {len(report.skipped):,}")
        for item in report.skipped[:_SHOWN]:
            typer.echo(f"    {printable(item.source)}: {printable(item.reason)}")
        if len(report.skipped) > _SHOWN:
            typer.echo(f"    and {len(report.skipped) - _SHOWN:,} more; --json lists all")
    typer.echo(f"seconds:   {report.seconds:.1f}")
