"""``specrag kb``: show what a knowledge base holds; add, update and remove documents; compact, export."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from specrag.cli.index import Bar, print_report
from specrag.cli.printable import printable

app = typer.Typer(help="Show, change, compact and export a knowledge base.", no_args_is_help=True)

_Kb = Annotated[Path, typer.Option("--kb", metavar="DIR", help="The knowledge base's folder.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@app.command(epilog="Example: specrag kb add report.pdf --kb kb/")
def add(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders.")],
    kb: _Kb,
    as_json: _Json = False,
) -> None:
    """Add documents to a knowledge base that is there, or bring them up to date."""
    _build(kb, paths, as_json)


@app.command(epilog="Example: specrag kb update --kb kb/")
def update(kb: _Kb, as_json: _Json = False) -> None:
    """Bring a knowledge base up to date with all paths that were ever indexed into it."""
    from specrag.retrieval import KnowledgeBase

    with KnowledgeBase.open(kb) as base:
        roots = [Path(path) for path in base.state.roots]
    _build(kb, roots, as_json)


def _build(kb: Path, paths: list[Path], as_json: bool) -> None:
    from specrag.retrieval import Manifest
    from specrag.retrieval.build import build

    Manifest.read(kb.expanduser())  # fails if there is none; another command makes one
    bar = Bar()
    try:
        report = build(paths, kb, progress=bar.show)
    finally:
        bar.close()
    if as_json:
        _print({"kb": str(kb), **asdict(report)})
    else:
        print_report(report)


@app.command(epilog="Example: specrag kb remove report.pdf --kb kb/")
def remove(
    names: Annotated[
        list[str],
        typer.Argument(metavar="DOCUMENT...", help="Names as `specrag kb list` shows them, or paths."),
    ],
    kb: _Kb,
    as_json: _Json = False,
) -> None:
    """Remove documents. Their files stay; indexing the path that they came from takes them in again."""
    from specrag.retrieval import remove as remove_documents

    passages = remove_documents(names, kb)
    if as_json:
        _print({"kb": str(kb), "removed": len(set(names)), "passages": passages})
    else:
        typer.echo(f"passages:  {passages:,}")


@app.command("list", epilog="Example: specrag kb list --kb kb/")
def list_(kb: _Kb, as_json: _Json = False) -> None:
    """Name the documents, with their passages and bytes."""
    from specrag.retrieval import KnowledgeBase

    with KnowledgeBase.open(kb) as base:
        passages = base.passages_by_document()
        files = base.documents()
    if as_json:
        held = [
            {
                "source": file.source,
                "path": file.path,
                "bytes": file.size,
                "passages": passages.get(file.document, 0),
                "sha256": file.sha256,
            }
            for file in files
        ]
        _print({"kb": str(kb), "documents": held})
        return
    for file in files:
        typer.echo(f"{passages.get(file.document, 0):>7,}  {file.size:>12,}  {printable(file.source)}")


@app.command(epilog="Example: specrag kb info --kb kb/")
def info(
    kb: _Kb,
    check: Annotated[
        bool, typer.Option("--check", help="Also read everything and compare it with its checksums.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Say what a knowledge base holds and how it was made."""
    from specrag.retrieval import KnowledgeBase
    from specrag.retrieval import check as check_everything

    if check:
        check_everything(kb)
    with KnowledgeBase.open(kb) as base:
        state, made = base.state, base.manifest
        fields = base.fields()
    size = sum(path.stat().st_size for path in kb.expanduser().rglob("*") if path.is_file())
    if as_json:
        _print(
            {
                "kb": str(kb),
                **asdict(state),
                "encoder": asdict(made.encoder),
                "chunking": asdict(made.chunking),
                "fields": fields,
                "bytes": size,
            }
        )
        return
    linked = 0 if state.graph is None else state.graph.rows
    lines = {
        "documents": f"{state.documents:,}",
        "passages": f"{state.passages:,}",
        "version": f"{state.version:,}",
        "languages": ", ".join(state.languages),
        "encoder": f"{made.encoder.name}, {made.encoder.dtype}, {made.encoder.dimension} dimensions",
        "chunking": f"{made.chunking.tokens} tokens, of which {made.chunking.overlap} overlap",
        "fields": ", ".join(fields),
        "hnsw": f"{linked:,} of {state.rows:,} rows" if linked else "none yet; hnsw searches exactly",
        "to compact": f"{state.rows - state.passages:,} of {state.rows:,} rows",
        "size": f"{size / 1e6:,.1f} MB",
        "paths": ", ".join(state.roots),
    }
    for name, value in lines.items():
        typer.echo(f"{f'{name}:':<12}{printable(value)}")


@app.command(epilog="Example: specrag kb compact --kb kb/")
def compact(kb: _Kb, as_json: _Json = False) -> None:
    """Rewrite a knowledge base without what was removed. Open readers are not disturbed."""
    from specrag.retrieval import compact as compact_folder

    bar = Bar()
    try:
        state = compact_folder(kb, bar.show)
    finally:
        bar.close()
    if as_json:
        _print({"kb": str(kb), "passages": state.passages, "rows": state.rows})
    else:
        typer.echo(f"passages:  {state.passages:,}")


@app.command(epilog="Example: specrag kb export passages.jsonl --kb kb/")
def export(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="A new file; JSON lines.")],
    kb: _Kb,
    as_json: _Json = False,
) -> None:
    """Write all passages with their metadata as JSON lines."""
    from specrag.retrieval import KnowledgeBase
    from specrag.retrieval import export as export_passages

    with KnowledgeBase.open(kb) as base:
        passages = export_passages(base, target)
    if as_json:
        _print({"kb": str(kb), "file": str(target), "passages": passages})
    else:
        typer.echo(f"passages:  {passages:,}")


def _print(described: dict[str, Any]) -> None:
    typer.echo(json.dumps(described, ensure_ascii=False))
