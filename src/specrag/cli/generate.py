"""``specrag generate PROMPT``: text to the terminal as it is made."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specrag.cli import common, knn, sampling, speculation
from specrag.cli.streaming import show
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel
    from specrag.methods.generation import Generation, Prompt
    from specrag.methods.options import Options
    from specrag.speculation.decode import DecodedToken


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to ask; by default standard input.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(parser=common.integer, metavar="N", help="At most this many tokens.")
    ] = 256,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system message in front of the prompt.")
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", metavar="PATH", help="A file with the prompt; - is stdin.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")
    ] = False,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be repeated.")
    ] = None,
    log_probs: Annotated[
        int | None,
        typer.Option(
            parser=common.integer, metavar="N", help="Show log-probabilities, with N alternatives a token."
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(parser=common.number, metavar="SECONDS", help="End with an error after this time."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end in place of the text.")
    ] = False,
    temperature: sampling.Temperature = 0.0,
    top_k: sampling.TopK = 0,
    top_p: sampling.TopP = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            parser=common.number,
            metavar="X",
            help="Leave out tokens less likely than this share of the likeliest.",
            rich_help_panel=sampling.PANEL,
        ),
    ] = 0.0,
    repetition_penalty: Annotated[
        float,
        typer.Option(
            parser=common.number,
            metavar="X",
            help="Above 1: tokens of prompt and text become less likely.",
            rich_help_panel=sampling.PANEL,
        ),
    ] = 1.0,
    presence_penalty: Annotated[
        float,
        typer.Option(
            parser=common.number,
            metavar="X",
            help="Taken from the logits of tokens in the text.",
            rich_help_panel=sampling.PANEL,
        ),
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        typer.Option(
            parser=common.number,
            metavar="X",
            help="Taken once for each time a token is in the text.",
            rich_help_panel=sampling.PANEL,
        ),
    ] = 0.0,
    logit_bias: Annotated[
        list[Any] | None,
        typer.Option(
            parser=common.token_bias,
            metavar="TOKEN=VALUE",
            help="Add to a token's logit, -inf bans it; may be repeated.",
            rich_help_panel=sampling.PANEL,
        ),
    ] = None,
    seed: sampling.Seed = 0,
    method: speculation.Method = "plain",
    drafter: speculation.Drafter = None,
    corpus: speculation.Corpus = None,
    relaxed: speculation.Relaxed = False,
    tolerance: speculation.Tolerance = 3.0,
    show_sources: speculation.ShowSources = False,
    datastore: knn.DatastoreFolder = None,
    index: knn.Index = None,
    k: knn.Neighbours = None,
    weight: knn.Weight = None,
    knn_temperature: knn.Temperature = None,
    knn_reach: knn.Reach = None,
    stride: knn.Stride = None,
    decoder: knn.Decoder = None,
    prefetch: knn.Prefetch = None,
    asynchronous: knn.Asynchronous = False,
    uncapped: knn.Uncapped = False,
    model: common.Model = "smollm2-135m",
    dtype: common.Dtype = "bf16",
    device: common.Device = None,
    adapter: common.Adapter = None,
    batch_invariant: common.BatchInvariant = False,
    kv_dtype: common.KvDtype = "auto",
) -> None:
    """Generate a text and show it as it comes.

    Example: specrag generate "Name three uses of copper." --max-tokens 64
    """
    from rich.console import Console

    from specrag.language_model import load
    from specrag.methods.options import check_options
    from specrag.models.tokenizer import TextStream

    speculation.check_method(method, knn.METHOD)
    neighbours = knn.method_of(
        method,
        datastore,
        index=index,
        k=k,
        weight=weight,
        temperature=knn_temperature,
        reach=knn_reach,
        stride=stride,
        decoder=decoder,
        prefetch=prefetch,
        asynchronous=asynchronous,
        uncapped=uncapped,
    )
    if neighbours is not None:
        given = {"--drafter": drafter, "--relaxed": relaxed or None, "--corpus": corpus}
        for option, value in given.items():
            if value is not None:
                remedy = f"--method {knn.METHOD} guesses from its datastore; leave it out"
                raise InputError(option, str(value), remedy)
    options: Options = {
        "method": neighbours or speculation.method_of(method, drafter, relaxed, tolerance, corpus),
        "max_tokens": max_tokens,
        "stop": stop or (),
        "raw": raw,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": dict(logit_bias or ()),
        "seed": seed,
    }
    if log_probs is not None:
        options["log_probs"] = log_probs
    if timeout is not None:
        options["timeout"] = timeout
    # All that can be wrong without the model is said before it is fetched and loaded.
    check_options(options)
    words = common.read_prompt(prompt, file, raw=raw)
    question = _with_system(words, system, raw)
    llm = load(
        model,
        dtype=dtype,
        device=device,
        adapter=adapter,
        batch_invariant=batch_invariant,
        kv_dtype=kv_dtype,
        progress=sys.stderr.isatty(),
    )
    if as_json:
        result = llm.generate(question, **options)
        typer.echo(json.dumps(_describe(llm, result, method), ensure_ascii=False))
        return
    colours = speculation.SourceColours(TextStream(llm.tokenizer)) if show_sources else None
    result = show(llm.stream(question, **options), colours)
    if log_probs is not None:
        _show_log_probs(llm, result)
    if show_sources:
        Console(stderr=True).print(speculation.legend(result.usage), soft_wrap=True)
    _show_status(result, None if neighbours is None else knn.status(result))


def _with_system(prompt: str, system: str | None, raw: bool) -> Prompt:
    if system is None:
        return prompt
    if raw:
        raise InputError("--system", system, "a raw prompt has no system message; leave out --raw")
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]


def _show_status(result: Generation, guessing: str | None = None) -> None:
    """One line for people, on standard error.

    Args:
        guessing: how that went, where guesses are not checked by passes.
    """
    from rich.console import Console
    from rich.text import Text

    usage, timing = result.usage, result.timing
    tokens = f"{usage.completion_tokens} token{'s' if usage.completion_tokens != 1 else ''}"
    parts = [
        f"{tokens}, {result.tokens_per_second:.1f} tokens/s",
        f"prefill {timing.prefill:.2f} s, decoding {timing.decode:.2f} s",
    ]
    if usage.drafted:
        checked = (
            f"{usage.mean_accepted_tokens:.2f} tokens a pass, "
            f"{usage.accepted} of {usage.drafted} guesses accepted"
        )
        parts.append(guessing or checked)
    if result.finish_reason == "length":
        parts.append("cut at the limit")
    Console(stderr=True).print(Text("; ".join(parts), style="dim"), soft_wrap=True)


def _show_log_probs(llm: LanguageModel, result: Generation) -> None:
    """A table on standard error: each token, its probability, and what could have come in its place."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("token")
    table.add_column("log-probability", justify="right")
    table.add_column("alternatives", style="dim")
    for token in result.tokens:
        others = "  ".join(
            f"{_shown(llm, other.token)} {math.exp(other.log_prob):.1%}" for other in token.alternatives
        )
        assert token.log_prob is not None
        table.add_row(
            Text(_shown(llm, token.token)),
            f"{token.log_prob:.3f} ({math.exp(token.log_prob):.1%})",
            Text(others),
        )
    Console(stderr=True).print(table)


def _shown(llm: LanguageModel, token: int) -> str:
    """A token as a reader sees it: quoted, so that spaces count; special ones by number."""
    text = llm.tokenizer.decode([token])
    return repr(text) if text else f"<{token}>"


def _describe(llm: LanguageModel, result: Generation, method: str) -> dict[str, object]:
    usage, timing = result.usage, result.timing
    return {
        "text": result.text,
        "tokens": [_describe_token(llm, token) for token in result.tokens],
        "finish_reason": result.finish_reason,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "passes": usage.passes,
            "drafted": usage.drafted,
            "accepted": usage.accepted,
            "relaxed": usage.relaxed,
            "drafted_by": dict(usage.drafted_by),
            "accepted_by": dict(usage.accepted_by),
            "mean_accepted_tokens": usage.mean_accepted_tokens,
        },
        "timing": {
            "prefill_seconds": timing.prefill,
            "decode_seconds": timing.decode,
            "tokens_per_second": result.tokens_per_second,
        },
        "model": llm.loaded.name,
        "dtype": llm.loaded.dtype,
        "device": llm.loaded.device,
        "method": method,
    }


def _describe_token(llm: LanguageModel, token: DecodedToken) -> dict[str, object]:
    described: dict[str, object] = {
        "id": token.token,
        "text": llm.tokenizer.decode([token.token]),
        "source": token.source,
        "relaxed": token.relaxed,
    }
    if token.log_prob is not None:
        described["log_prob"] = token.log_prob
        described["alternatives"] = [
            {"id": other.token, "text": llm.tokenizer.decode([other.token]), "log_prob": other.log_prob}
            for other in token.alternatives
        ]
    return described
