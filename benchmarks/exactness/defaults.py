"""One text at the defaults: every lossless method, twice, against plain decoding of one prompt at a time.

``python -m benchmarks.exactness.defaults OUT --data FOLDER [--model NAME] [--methods M ...] [--batch-invariant]``

With ``--batch-invariant`` equal bits are asked for, which processors with matrix tiles do not have by default. The
prompts are first turns of Spec-Bench, evenly spread over its tasks. The first run has sixteen at once; the second
has eight at once in the opposite order, and keeps what it has read. Texts are recorded in ``OUT/texts.jsonl`` as they
come, so that a run that was stopped goes on. ``--methods`` with nothing behind it only counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import specrag
from benchmarks.records import append_records, read_records
from specrag.bench.data import find_file, load_spec_bench
from specrag.methods.registry import make_method
from specrag.models.catalog import default_model
from specrag.models.eagle_files import shipped_heads

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel
    from specrag.request import Result

PLAIN = "plain"
_DATA = "specbench_480.jsonl"
_LOSSLESS = ("adaptive", "respec", "prompt-lookup", "token-recycling", "sam-decoding")
_DRAFTER = "smollm2-135m"
#: By run how many prompts share passes; the first one is the reference's.
RUNS = {"alone": 1, "16": 16, "8, kept": 8}
_KEPT = 2 << 30


def main() -> None:
    """Write what has no record yet, then print the table."""
    given = _arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    records = given.out / "texts.jsonl"
    methods = lossless(given.model) if given.methods is None else given.methods
    if methods:
        prompts = _prompts(given.data, given.most, given.longest)
        append_records(records, _write(given, methods, prompts, read_records(records)))
    sys.stdout.write(table([one for one in read_records(records) if one["model"] == given.model]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder with Spec-Bench")
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--methods", nargs="*", help="all that are lossless")
    parser.add_argument("--batch-invariant", action="store_true", default=None, help="ask for equal bits")
    parser.add_argument("--most", type=int, default=200, help="prompts")
    parser.add_argument("--longest", type=int, default=1_500, help="characters of a prompt")
    parser.add_argument("--new", type=int, default=24, help="most tokens of a text")
    return parser.parse_args()


def lossless(model: str) -> list[str]:
    """Methods that decode tokens and keep the model's own text, of those that this model has."""
    own = ["eagle-2"] if model in shipped_heads() else []
    return [*_LOSSLESS, *own, *([] if model == _DRAFTER else ["draft-model"])]


def _prompts(data: Path, most: int, longest: int) -> list[str]:
    """First turns of at most so many characters, evenly spread."""
    turns = [row.turns[0] for row in load_spec_bench(find_file(data, _DATA))]
    short = [turn for turn in turns if len(turn) <= longest]
    return [short[place * len(short) // most] for place in range(min(most, len(short)))]


def _write(
    given: argparse.Namespace,
    methods: Sequence[str],
    prompts: Sequence[str],
    known: Sequence[Mapping[str, Any]],
) -> Iterator[dict[str, Any]]:
    """The tokens of each prompt by method and run, of those that have no record."""
    done = {(one["model"], one["new"], one["method"], one["run"], one["prompt"]) for one in known}
    for run in RUNS:
        kept = _KEPT if "kept" in run else 0
        llm = specrag.load(given.model, batch_invariant=given.batch_invariant, prefix_cache_bytes=kept)
        with closing(llm):
            for method in [PLAIN] if run == "alone" else methods:
                told = {"model": given.model, "new": given.new, "method": method, "run": run}
                numbers = [place for place in range(len(prompts)) if (*told.values(), place) not in done]
                yield from _texts(llm, told, prompts, numbers[::-1] if "kept" in run else numbers)


def _texts(
    llm: LanguageModel, told: Mapping[str, Any], prompts: Sequence[str], numbers: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Records of these prompts, as many at once as the run has."""
    count = RUNS[told["run"]]
    for start in range(0, len(numbers), count):
        together = numbers[start : start + count]
        results = _answers(llm, told["method"], [prompts[number] for number in together], told["new"])
        for number, result in zip(together, results, strict=True):
            tokens = [token.token for token in result.tokens]
            yield {**told, "prompt": number, "tokens": tokens, "cached": result.usage.cached_tokens}


def _answers(llm: LanguageModel, method: str, prompts: Sequence[str], new: int) -> list[Result]:
    drafters = {"draft-model": _DRAFTER, "eagle-2": llm.loaded.name}
    made = make_method(method, {"drafter": drafters[method]} if method in drafters else {})
    return llm.batch([[{"role": "user", "content": text}] for text in prompts], method=made, max_tokens=new)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Equal texts of each method and run."""
    plain = {(one["new"], one["prompt"]): one["tokens"] for one in records if one["method"] == PLAIN}
    lines = ["| method | run | texts | equal | tokens kept from before |", "|---|---|---:|---:|---:|"]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in records:
        groups.setdefault((one["method"], one["run"]), []).append(one)
    for (method, run), group in groups.items():
        equal = sum(one["tokens"] == plain[one["new"], one["prompt"]] for one in group)
        kept = sum(one["cached"] for one in group)
        lines.append(f"| {method} | {run} | {len(group)} | {equal} | {kept:,} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
