"""``specrag generate PROMPT``: prints a text as it is written."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specrag.cli import common, values
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.request import Prompt


def generate(
    line: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; standard input if omitted.")
    ] = None,
    method: common.Method = None,
    option: values.KeyValues = None,
    max_tokens: common.MaxTokens = None,
    temperature: common.Temperature = None,
    system: common.System = None,
    file: common.File = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")
    ] = False,
    details: common.Details = False,
    as_json: common.Json = False,
    model: common.DefaultModel = None,
) -> None:
    """Generate a text and show it as it comes.

    Example: specrag generate "Name three uses of copper." --max-tokens 64
    """
    from specrag.cli import render
    from specrag.cli.resources import LocalResources
    from specrag.methods import Needs
    from specrag.request import Request, check_options

    flags: dict[str, dict[str, Any]] = {"generation": {"max_tokens": max_tokens, "temperature": temperature}}
    chosen = values.choose(line, method or "adaptive", option, flags)
    if chosen.method.needs & (Needs.RETRIEVER | Needs.CONTEXT):
        remedy = "it answers from passages or long texts; use specrag ask"
        raise InputError("--method", chosen.method.name, remedy)
    options = {**chosen.generation.options(), "raw": raw}
    # Everything that needs no model is checked before one is fetched and loaded.
    check_options(options)  # type: ignore[arg-type]
    words = common.read_prompt(prompt, file, raw=raw)
    asked = _with_system(words, system, raw)
    with ExitStack() as opened:
        given = LocalResources(common.model_name(model), chosen.model, opened)
        given.check(chosen.method)
        plan = chosen.method.plan(Request(asked, options), given)  # type: ignore[arg-type]
        task = given.submit(chosen.method.run(plan), chosen.generation.timeout)
        if as_json:
            described = render.describe(given.executor.run(task), chosen.method.name, given.tokenizer)
            typer.echo(json.dumps(described | given.describe(), ensure_ascii=False))
            return
        result = render.show(given.executor.stream(task), given.colours(details))
        if chosen.generation.log_probs is not None and given.tokenizer is not None:
            render.show_log_probs(given.tokenizer, result.tokens)
        render.show_result(result, details=details)


def _with_system(prompt: str, system: str | None, raw: bool) -> Prompt:
    if system is None:
        return prompt
    if raw:
        raise InputError("--system", system, "a raw prompt has no system message; leave out --raw")
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
