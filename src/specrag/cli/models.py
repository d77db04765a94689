"""``specrag models``: list, fetch and find models."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from specrag.cli import completion

app = typer.Typer(help="List, fetch and find models.", no_args_is_help=True)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
_Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A catalog name, a model folder, a .gguf file or a hub id org/name.",
        autocompletion=completion.models,
    ),
]


@app.command("list", epilog="Example: specrag models list")
def list_(as_json: _Json = False) -> None:
    """Show the models known by name, their size and licence, and which are on this machine."""
    from specrag.models import catalog

    models = catalog.list_models()
    if as_json:
        typer.echo(json.dumps([asdict(model) for model in models]))
        return
    for model in models:
        state = "pulled" if model.pulled else f"{model.download_bytes / 1e6:,.0f} MB to fetch"
        typer.echo(f"{model.name:<20} {state:<18} {model.bytes / 1e6:>6,.0f} MB on disk  {model.licence}")
        typer.echo(f"    {model.description}: {model.good_for}")
    typer.echo("\nFrom the Hugging Face hub, not tried here:")
    for hub in catalog.hub_models():
        typer.echo(f"{hub.name:<20} {hub.billions:>4} B  {hub.repository}  {hub.licence}")
        typer.echo(f"    {hub.good_for}")


@app.command(epilog="Example: specrag models pull smollm2-135m")
def pull(name: _Name, as_json: _Json = False) -> None:
    """Fetch a model and convert it; verify it if it is there, and repair it if it is damaged."""
    from specrag.models import catalog

    files = catalog.pull(name, progress=not as_json)
    if as_json:
        typer.echo(json.dumps(asdict(files) | {"folder": str(files.folder)}))
    else:
        typer.echo(f"{files.name} is ready in {files.folder}")


@app.command(epilog="Example: specrag models path smollm2-135m")
def path(name: _Name, as_json: _Json = False) -> None:
    """Print the folder of a model that has been pulled."""
    from specrag.models import catalog

    folder = catalog.path(name)
    typer.echo(json.dumps({"name": name, "path": str(folder)}) if as_json else str(folder))
