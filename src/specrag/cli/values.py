"""``-o key=value``: options of a method, of the search, of the generation and of the model, in this order."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from specrag.checks import did_you_mean
from specrag.cli import completion, configuration
from specrag.errors import InputError
from specrag.methods import MethodOptions, check_values, method_class, method_names
from specrag.request import MAX_ALTERNATIVES, SearchOptions

if TYPE_CHECKING:
    from specrag.methods import Method
    from specrag.request import Options

PLACE = "-o"

KeyValues = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--option",
        metavar="KEY=VALUE",
        autocompletion=completion.option_keys,
        help="An option of the method, the search, the sampling or the model; may be repeated. "
        "`specrag methods NAME` lists them.",
    ),
]


class GenerationValues(MethodOptions):
    """How a text is generated."""

    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="At most this many tokens (256; 128 with a passage every few)."
    )
    # The bounds are those of SamplingParams, which checks them again.
    temperature: Annotated[float, Field(ge=0)] = Field(0.0, description="0 takes the likeliest token.")
    top_k: Annotated[int, Field(ge=0)] = Field(0, description="Draw among this many tokens; 0: all.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Draw among the likeliest tokens that hold this probability; 1: among all."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Leave out tokens less likely than this share of the likeliest."
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = Field(
        1.0, description="Above 1: tokens of prompt and text become less likely."
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = Field(
        0.0, description="Taken from the logits of tokens in the text."
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = Field(
        0.0, description="Taken once for each time a token is in the text."
    )
    logit_bias: tuple[str, ...] = Field(
        (), description="TOKEN=NUMBER added to a token's logit; -inf bans it."
    )
    seed: int = Field(0, description="The same seed gives the same text.")
    stop: tuple[str, ...] = Field((), description="End before this text.")
    log_probs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = Field(
        None, description="Show log-probabilities, with so many alternatives a token."
    )
    ignore_eos: bool = Field(False, description="Do not end at the model's end tokens (for measuring).")
    timeout: Annotated[float, Field(gt=0)] | None = Field(
        None, description="End with an error after so many seconds."
    )

    def options(self) -> Options:
        """The options in the form that calls take."""
        given: dict[str, Any] = self.model_dump(exclude_none=True)
        given["logit_bias"] = dict(_token_bias(text) for text in self.logit_bias)
        return given  # type: ignore[return-value]


class ModelValues(MethodOptions):
    """How the model is loaded."""

    dtype: str = Field("auto", description="fp32, bf16, fp16 or int8; auto: int8 on the CPU, bf16 on a GPU.")
    device: str | None = Field(None, description="cpu or cuda:0; none: the first GPU, else the CPU.")
    adapter: str | None = Field(
        None, description="A folder with a LoRA adapter, or the name of one that comes with specrag."
    )
    batch_invariant: bool | None = Field(
        None,
        description="Equal bits whatever else is in a pass (CPU, bf16 or int8), so that every lossless method "
        "writes the same text; by default with int8 where it costs little.",
    )
    kv_dtype: str = Field("auto", description="Keys and values: auto, or int8 for half the memory.")


#: The groups of options after a method's own, with their names.
GROUPS: tuple[tuple[str, type[Any]], ...] = (
    ("search", SearchOptions),
    ("generation", GenerationValues),
    ("model", ModelValues),
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a command line says of method, search, generation and model, checked.

    Attributes:
        method: with its options.
    """

    method: Method
    search: SearchOptions
    generation: GenerationValues
    model: ModelValues


def choose(
    line: typer.Context,
    method: str,
    pairs: Sequence[str] | None,
    flags: dict[str, dict[str, Any]] | None = None,
) -> Chosen:
    """Sort and check options. What is typed, by ``-o`` or a flag, wins over the file with defaults.

    Args:
        line: the command's context, which holds the file's values.
        method: a name.
        pairs: ``key=value`` as typed.
        flags: values of options that have flags of their own, by group; texts like the others, ``None`` if not given.

    Raises:
        InputError: there is no such method or option, an option is given twice, or a value cannot be used.
    """
    made = method_class(method, "--method")
    groups: dict[str, type[Any]] = {"method": made.Options, **dict(GROUPS)}
    texts: dict[str, dict[str, Any]] = {name: {} for name in groups}
    if not configuration.is_from_file(line, "option"):
        _sort(method, pairs or (), groups, texts)
    for group, values in (flags or {}).items():
        for key, value in values.items():
            if value is None:
                continue
            if key not in texts[group]:
                texts[group][key] = value
            elif not configuration.is_from_file(line, key):
                raise InputError(f"{PLACE} {key}", texts[group][key], "it has been given as a flag, too")
    given = {key for found in texts.values() for key in found}
    left = _left(configuration.written(line).get("option", ()), given, groups)
    try:
        _sort(method, left, groups, texts)
    except InputError as error:
        raise InputError(f"{configuration.file_of(line)}: {error.field}", error.value, error.remedy) from None
    # Values of the generation may come from flags: the frame names them as they can be typed.
    checked = {
        name: check_values(options, texts[name], method, "" if name == "generation" else PLACE, texts=True)
        for name, options in groups.items()
    }
    return Chosen(
        made(checked["method"]),
        checked["search"],  # type: ignore[arg-type]
        checked["generation"],  # type: ignore[arg-type]
        checked["model"],  # type: ignore[arg-type]
    )


def _sort(
    method: str, pairs: Iterable[str], groups: dict[str, type[Any]], texts: dict[str, dict[str, Any]]
) -> None:
    """Put options into their groups.

    Raises:
        InputError: there is no such option, or one is given twice.
    """
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = _key(pair)
        group = next((name for name, options in groups.items() if key in options.model_fields), None)
        if group is None or not equals:
            raise _unknown(method, key, value if equals else None, groups)
        field = groups[group].model_fields[key]
        texts[group][key] = _gather(field.annotation, texts[group].get(key), value, key)


def _left(written: Iterable[str], given: Collection[str], groups: dict[str, type[Any]]) -> list[str]:
    """The file's values of options that were not typed; options of other methods are skipped."""
    others = (
        {key for name in method_names() for key in method_class(name).Options.model_fields} if written else ()
    )
    foreign = set(others).difference(*(options.model_fields for options in groups.values()))
    return [pair for pair in written if _key(pair) not in given and _key(pair) not in foreign]


def _key(pair: str) -> str:
    return pair.partition("=")[0].strip().replace("-", "_")


def _gather(annotation: Any, known: Any, value: str, key: str) -> Any:
    """An option's text; for one that takes several, a list of them."""
    if "tuple[" not in str(annotation):
        if known is not None:
            raise InputError(f"{PLACE} {key}", value, "it is given twice")
        return value
    if value.startswith("["):
        try:
            parts = [str(part) for part in json.loads(value)]
        except ValueError:
            raise InputError(f"{PLACE} {key}", value, "give a JSON list, or texts one by one") from None
    else:
        parts = [value] if key in ("where", "stop") else value.split(",")
    return [*(known or ()), *parts]


def _unknown(method: str, key: str, value: str | None, groups: dict[str, type[Any]]) -> InputError:
    known = [name for options in groups.values() for name in options.model_fields]
    if key in known:
        return InputError(f"{PLACE} {key}", value, "give a value behind it, KEY=VALUE")
    own = ", ".join(groups["method"].model_fields) or "no options of its own"
    remedy = f"{did_you_mean(key, known)}{method} takes {own} (specrag methods {method} lists all)"
    return InputError(f"{PLACE} {key}", value, remedy)


def _token_bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        remedy = "give TOKEN=NUMBER such as 42=-5, or 42=-inf to ban it"
        raise InputError(f"{PLACE} logit_bias", text, remedy) from None
