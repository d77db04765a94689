"""``specrag serve``: the OpenAI-compatible server and its page."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specrag.checks import nearest
from specrag.cli import common, completion, configuration
from specrag.errors import InputError
from specrag.extras import needed_by

if TYPE_CHECKING:
    from specrag.serving import Settings

_ACCESS = "Access"


def serve(
    context: typer.Context,
    kb: Annotated[
        list[str] | None,
        typer.Option(
            "--kb",
            "--kbs",
            metavar="[NAME=]DIR",
            help="A folder made by specrag index, by its own name or another; may be repeated.",
        ),
    ] = None,
    kb_root: Annotated[
        Path | None,
        typer.Option(
            "--kb-root", metavar="DIR", help="Where uploads and new knowledge bases go; by default none."
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-m",
            metavar="NAME",
            help="How to decode where a request does not say (default adaptive).",
            autocompletion=completion.methods,
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="A TOML file with settings.")] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Where to listen (default 127.0.0.1); another machine is served with a key only.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            parser=common.integer, metavar="N", help="Default 8000; 0: a free one.", rich_help_panel=_ACCESS
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            help="A file whose first line is the key that clients must send.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="A catalog name, a folder, a .gguf file or a hub id org/name; by default the best that this "
            "machine carries. SPECRAG_MODEL names another.",
            autocompletion=completion.models,
            rich_help_panel="Model",
        ),
    ] = None,
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            "--upstream",
            "--upstreams",
            metavar="NAME=URL[,URL...]",
            help="OpenAI-compatible servers that answer in place of a local model, up to /v1; may be repeated. local "
            "in place of a URL is that model, as one of them. Keys, weights and roles stand in the TOML file.",
            rich_help_panel="Model",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="fp32, bf16, fp16 or int8; by default int8 on the CPU, bf16 on a GPU.",
            rich_help_panel="Model",
        ),
    ] = None,
    device: common.Device = None,
    batch_invariant: common.BatchInvariant = None,
    kv_dtype: common.KvDtype = "auto",
    background: Annotated[
        bool,
        typer.Option(
            "--background",
            help="Start it, wait until it answers and leave it running, for specrag ask to use; it ends itself after "
            "30 minutes without a request.",
        ),
    ] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="End what --background has started, and exit.")
    ] = False,
    list_settings: Annotated[
        bool, typer.Option("--list-settings", help="Print every setting with its default, and exit.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the address, or the settings, as one JSON object.")
    ] = False,
) -> None:
    """Serve answers over HTTP to OpenAI's clients and to browsers.

    Every setting is also a flag, such as --max-queue 64, and a variable, such as SPECRAG_SERVE_MAX_QUEUE=64;
    --list-settings names them all.

    Example: specrag serve --model smollm2-135m --kb docs
    """
    flags: dict[str, Any] = {
        "kbs": tuple(kb) if kb else None,
        "kb_root": kb_root,
        "method": method,
        "host": host,
        "port": port,
        "api_key_file": api_key_file,
        "model": model,
        "upstreams": tuple(upstream) if upstream else None,
        "dtype": dtype,
        "device": device,
        "batch_invariant": batch_invariant,
        "kv_dtype": None if kv_dtype == "auto" else kv_dtype,
    }
    with needed_by("serve"):
        from specrag.serving import load_settings
    if list_settings:
        _print_settings(as_json)
        return
    if stop:
        _stop(as_json)
        return
    defaults = _defaults(context, flags)
    flags |= dict.fromkeys(defaults.keys() & flags.keys())
    given = {**flags, **_other_flags(context.args, flags)}
    try:
        settings = load_settings(config, given, defaults)
    except InputError as error:
        if given.get(error.field) is None and error.field in defaults:
            field = f"{configuration.file_of(context)}: {error.field}"
            raise InputError(field, error.value, error.remedy) from None
        raise _as_typed(error, given) from None
    check_settings(settings)
    if background:
        _start(settings, as_json)
        return
    from specrag.serving import serve as run

    url = f"http://{settings.host}:{settings.port}"
    if as_json:
        typer.echo(json.dumps({"url": url, "model": settings.name, "needs_key": settings.needs_key}))
    else:
        note = "" if settings.needs_key else "; without an API key, to this machine only"
        typer.echo(f"specrag serves {settings.name} at {url}{note}", err=True)
    run(settings)


def _start(settings: Settings, as_json: bool) -> None:
    """Start a server in the background."""
    from specrag.cli import background

    words = [word for word in sys.argv[2:] if word not in ("--background", "--json")]
    if "port" not in settings.model_fields_set:
        words += ["--port", "0"]
    server = background.start(words)
    if as_json:
        typer.echo(json.dumps({"url": server.url, "model": server.name, "pid": server.pid}))
        return
    typer.echo(
        f"specrag serves {server.name} at {server.url}; specrag ask uses it, and specrag serve --stop ends it"
    )


def _stop(as_json: bool) -> None:
    from specrag.cli import background

    stopped = background.stop()
    if as_json:
        typer.echo(json.dumps({"stopped": [server.url for server in stopped]}))
    else:
        told = ", ".join(server.url for server in stopped)
        typer.echo(f"ended {told}" if stopped else "no background server is running", err=not stopped)


def further_keys() -> Collection[str]:
    """Settings, which the file with defaults may hold although they are not options of the command."""
    with needed_by("serve"):
        from specrag.serving import Settings

        return Settings.model_fields.keys()


def _defaults(context: typer.Context, flags: dict[str, Any]) -> dict[str, Any]:
    """Settings from the file with defaults: environment and flags win over them."""
    written = configuration.written(context)
    found = {name: value for name, value in written.items() if name in further_keys() and name not in flags}
    names = {"kbs": "kb", "upstreams": "upstream"}  # settings whose option has another name
    return found | {
        name: flags[name]
        for name in flags
        if flags[name] is not None and configuration.is_from_file(context, names.get(name, name))
    }


def _other_flags(words: Sequence[str], named: dict[str, Any]) -> dict[str, str]:
    """Settings that have no option of their own: ``--max-queue 64`` or ``--max-queue=64``.

    Raises:
        InputError: there is no such setting, or it has no value.
    """
    from specrag.serving import Settings

    known = [name for name in Settings.model_fields if name not in named]
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in known:
            near = nearest(name, [*known, *named])
            hint = f"did you mean --{near.replace('_', '-')}? " if near else ""
            raise InputError("option", word, f"{hint}specrag serve --list-settings names all of them")
        if not equals:
            if not rest:
                raise InputError(flag, None, "give a value behind it")
            value = rest.pop(0)
        found[name] = value
    return found


def _as_typed(error: InputError, given: dict[str, Any]) -> InputError:
    """The same error, naming the option where the setting was given as one."""
    setting, *inside = error.field.split(".")
    if given.get(setting) is None:
        return error
    renamed = {"kbs": "--kb", "upstreams": "--upstream"}
    option = renamed.get(setting, f"--{setting.replace('_', '-')}")
    remedy = error.remedy.replace("NAME=FOLDER", f"{option} NAME=FOLDER")
    return InputError(".".join([option, *inside]), error.value, remedy)


def check_settings(settings: Settings) -> None:
    """Check what would otherwise fail only once the server runs.

    Raises:
        InputError: there is no such method, drafter or adapter, or a knowledge base or corpus is missing.
        KnowledgeBaseError: one is damaged.
        DatastoreError: a datastore is missing or damaged.
    """
    from specrag.methods import NamedDrafter, method_class
    from specrag.methods.knn_lm.store import DatastoreManifest
    from specrag.models import check_adapter, find_adapter
    from specrag.retrieval import Manifest
    from specrag.serving import refuse_sessions, split_drafter
    from specrag.speculation.suffix import SuffixCorpus

    method = method_class(settings.method, "--method")
    if settings.upstreams:
        refuse_sessions(method, "--method")
    for folder in settings.kbs.values():
        Manifest.read(folder.expanduser())
    for folder in settings.datastores.values():
        DatastoreManifest.read(folder)
    for folder in settings.corpora.values():
        SuffixCorpus.open(folder).close()
    for drafter in settings.drafters:
        NamedDrafter(drafter)
    if settings.rag_drafter is not None:
        name, adapter = split_drafter(settings.rag_drafter)
        if adapter is not None:
            check_adapter(find_adapter(adapter), name)


def _print_settings(as_json: bool) -> None:
    from specrag.serving import Settings

    rows = [
        (f"--{name.replace('_', '-')}", field.get_default(call_default_factory=True), field.description or "")
        for name, field in Settings.model_fields.items()
    ]
    if as_json:
        described = {flag: {"default": default, "meaning": meaning} for flag, default, meaning in rows}
        typer.echo(json.dumps(described, default=str))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("setting", "default", "meaning"):
        table.add_column(title)
    for flag, default, meaning in rows:
        table.add_row(flag, "" if default in (None, (), {}) else str(default), meaning)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


#: The parser hands words that it does not know on to the command.
context_settings = {"allow_extra_args": True, "ignore_unknown_options": True}
