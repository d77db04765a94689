"""Defaults of the command line from a TOML file: a table per command, ``[default]`` for all, keys like the flags.

The values become click's ``default_map``, so that everything typed wins over them.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from specrag.checks import nearest
from specrag.errors import InputError

FILE = "specrag.toml"
VARIABLE = "SPECRAG_CONFIG"
SHARED = "default"

_NEVER = frozenset({"help", "version", "debug", "install-completion", "show-completion"})


def find_file() -> Path | None:
    """Find ``specrag.toml`` in the working folder, else what ``$SPECRAG_CONFIG`` names, else the user's file, if any.

    Raises:
        InputError: the variable names a file that does not exist.
    """
    here = Path(FILE)
    if here.is_file():
        return here
    if named := os.environ.get(VARIABLE):
        path = Path(named).expanduser()
        if not path.is_file():
            raise InputError(VARIABLE, named, "there is no such file; name a TOML file, or leave it out")
        return path
    from platformdirs import user_config_path

    users = user_config_path("specrag", appauthor=False) / "config.toml"
    return users if users.is_file() else None


def read_file(file: Path) -> dict[str, dict[str, Any]]:
    """The tables of a file, as written.

    Raises:
        InputError: it cannot be read, is not TOML, or has a value outside a table.
    """
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(str(file), error.strerror, "make it readable, or remove it") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(str(file), str(error), "it is no TOML") from None
    for name, table in content.items():
        if not isinstance(table, dict):
            raise InputError(
                f"{file}: {name}", table, f"put it into a table, [{SHARED}] or that of a command"
            )
    return content


def default_map(file: Path, group: Any) -> dict[str, Any]:
    """The defaults of a group's commands, in the form that click takes.

    Args:
        file: holds the values.
        group: all commands.

    Raises:
        InputError: a table or key is unknown, or a value is of the wrong kind.
    """
    content = read_file(file)
    shared = content.pop(SHARED, {})
    leaves = list(_leaves(group))
    known = set().union(*(_options(command) for command in leaves))
    for key in shared:
        _check_key(file, SHARED, key, known)
    return _of_group(file, group, content, shared, ())


def is_from_file(line: typer.Context, name: str) -> bool:
    """Whether an option's value was not typed but comes from the file."""
    source = line.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT_MAP"


def file_of(line: typer.Context) -> Path | None:
    """The file that the defaults come from."""
    file: Path | None = line.find_root().obj
    return file


def written(line: typer.Context) -> Mapping[str, Any]:
    """What the file says for this command, by parameter."""
    return line.default_map or {}


def _of_group(
    file: Path, group: Any, content: Mapping[str, Any], shared: Mapping[str, Any], path: tuple[str, ...]
) -> dict[str, Any]:
    for name, table in content.items():
        place = ".".join((*path, name))
        if name not in group.commands:
            raise InputError(f"{file}: [{place}]", table, _remedy("table", name, (SHARED, *group.commands)))
        if not isinstance(table, dict):
            raise InputError(f"{file}: {place}", table, "give a table with options")
    made = {}
    for name, command in group.commands.items():
        table, inner = content.get(name, {}), (*path, name)
        if hasattr(command, "commands"):
            made[name] = _of_group(file, command, table, shared, inner)
        else:
            made[name] = _of_command(file, command, table, shared, ".".join(inner))
    return made


def _of_command(
    file: Path, command: Any, table: Mapping[str, Any], shared: Mapping[str, Any], place: str
) -> dict[str, Any]:
    options = _options(command)
    further = () if options.keys() >= set(map(_key, table)) else _further(place)
    for key in table:
        _check_key(file, place, key, {*options, *further})
    made = {}
    for name, given in ((SHARED, shared), (place, table)):
        for key, value in given.items():
            parameter = options.get(_key(key))
            if parameter is not None:
                made[parameter.name] = _as_typed(parameter, value, f"{file}: [{name}] {key}")
            elif name == place:
                made[_key(key).replace("-", "_")] = value
    return made


def _as_typed(parameter: Any, value: Any, field: str) -> Any:
    """A value in the form that click takes."""
    if parameter.is_flag or isinstance(value, bool):
        if parameter.is_flag and isinstance(value, bool):
            return value
        raise InputError(field, value, "give true or false" if parameter.is_flag else "give a text or number")
    if parameter.multiple:
        if isinstance(value, dict):
            return [f"{key}={_word(part)}" for key, part in value.items()]
        return [_word(part) for part in (value if isinstance(value, list) else [value])]
    if isinstance(value, dict | list):
        raise InputError(field, value, "give a single text or number")
    return _word(value)


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | list) else str(value)


def _check_key(file: Path, table: str, key: str, known: Collection[str]) -> None:
    if _key(key) not in known:
        raise InputError(f"{file}: [{table}]", key, _remedy("key", _key(key), sorted(known)))


def _remedy(what: str, name: str, known: Collection[str]) -> str:
    near = nearest(name, known)
    hint = f"; did you mean {near}?" if near else ""
    return f"there is no such {what}{hint} (specrag COMMAND --help lists the options)"


def _leaves(group: Any) -> Iterable[Any]:
    for command in group.commands.values():
        if hasattr(command, "commands"):
            yield from _leaves(command)
        else:
            yield command


def _options(command: Any) -> dict[str, Any]:
    """A command's options by their spellings, without the leading dashes."""
    named = ((spelled.lstrip("-"), each) for each in command.params for spelled in each.opts)
    return {name: each for name, each in named if each.param_type_name == "option" and name not in _NEVER}


def _further(command: str) -> Collection[str]:
    """Keys that a command takes beyond its options."""
    module = import_module(f"specrag.cli.{command.partition('.')[0]}")
    tell = getattr(module, "further_keys", tuple)
    return {_key(name) for name in tell()}


def _key(name: str) -> str:
    return name.replace("_", "-")
