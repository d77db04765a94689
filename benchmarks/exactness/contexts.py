"""One text behind long contexts, at the defaults: RAPID, its rivals and adaptive against plain decoding.

``python -m benchmarks.exactness.contexts OUT --data FOLDER [--model NAME] [--most N]``

The contexts are texts of LongBench, cut to ``--longest`` characters, with their questions; each is answered greedily
and at temperature 0.8. Texts are recorded in ``OUT/texts.jsonl`` as they come, so that a run that was stopped goes on.
``--most 0`` only counts.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import specrag
from benchmarks.rag.longbench import load_rows, split
from benchmarks.records import append_records, read_records
from specrag.methods.registry import make_method
from specrag.models.catalog import default_model

PLAIN = "plain"
#: What a drafter reads of a context of some four thousand tokens.
_PART = {"retrieval_tokens": 1_024, "chunk_tokens": 256}
#: By name in the records: the method with its options.
METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    PLAIN: (PLAIN, {}),
    "adaptive": ("long-context", {"decoder": "adaptive"}),
    "rapid": ("rapid", _PART),
    "rapid, cost-aware": ("rapid", {**_PART, "schedule": "cost-aware"}),
    "naive-sd": ("naive-sd", _PART),
    "streaming-drafter": ("streaming-drafter", {"window": 1_024}),
}
TEMPERATURES = (0.0, 0.8)


def main() -> None:
    """Write what has no record yet, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder with LongBench")
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--most", type=int, default=50, help="questions")
    parser.add_argument("--longest", type=int, default=16_000, help="characters of a context")
    parser.add_argument("--new", type=int, default=48, help="most tokens of a text")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    records = given.out / "texts.jsonl"
    append_records(records, _write(given, read_records(records)))
    sys.stdout.write(table([one for one in read_records(records) if one["model"] == given.model]))


def _write(given: argparse.Namespace, known: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    done = {(one["model"], one["id"], one["temperature"], one["method"]) for one in known}
    rows = load_rows(given.data)[: given.most]
    with closing(specrag.load(given.model)) as llm:
        for row, temperature, name in itertools.product(rows, TEMPERATURES, METHODS):
            told = {"model": given.model, "id": row.identifier, "temperature": temperature, "method": name}
            if tuple(told.values()) in done:
                continue
            text, question = split(row.prompt)
            result = llm.generate(
                question,
                documents=[text[: given.longest]],
                method=make_method(*METHODS[name]),
                max_tokens=given.new,
                temperature=temperature,
                seed=7,
            )
            yield {
                **told,
                "tokens": [token.token for token in result.tokens],
                "prompt_tokens": result.usage.prompt_tokens,
                "accepted": sum(result.usage.accepted_by.values()),
                "exact": result.usage.exact,
            }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Equal texts of each method and temperature, and how many tokens its passes took over from guesses."""
    plain = {(one["id"], one["temperature"]): one["tokens"] for one in records if one["method"] == PLAIN}
    lines = ["| method | temperature | texts | equal | guesses kept |", "|---|---:|---:|---:|---:|"]
    for name in METHODS:
        for temperature in TEMPERATURES:
            group = [one for one in records if (one["method"], one["temperature"]) == (name, temperature)]
            equal = sum(one["tokens"] == plain[one["id"], temperature] for one in group)
            kept = sum(one["accepted"] for one in group)
            lines.append(f"| {name} | {temperature} | {len(group)} | {equal} | {kept:,} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
