"""Draws the speed-ups that pages of ``docs/results`` show, from the records beside them.

``python -m benchmarks.pictures [NAME ...]`` writes ``docs/results/NAME.png``; without a name all of :data:`PICTURES`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.records import read_packed
from benchmarks.results import RECORDS
from specrag.bench.measurement import OVERALL, Measurement
from specrag.bench.plots import speedup_plot
from specrag.errors import InputError, SpecragError

_LARGE = "qwen2.5-coder-1.5b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What is shown of a record.

    Attributes:
        record: its name without ``.jsonl.gz``.
        title: of the picture.
        baseline: what the ratios are over.
        tasks, methods: what is shown, in this order, by its name in the record and in the picture.
        model: the only one that is shown; empty for all.
    """

    record: str
    title: str
    baseline: str
    tasks: Mapping[str, str]
    methods: Mapping[str, str]
    model: str = ""

    def shown(self) -> list[Measurement]:
        """The measurements, under their names in the picture.

        Raises:
            SpecragError: the record has none of them.
        """
        found = {
            (one.task, one.method): replace(one, task=self.tasks[one.task], method=self.methods[one.method])
            for one in read_packed(RECORDS / f"{self.record}.jsonl.gz")
            if one.baseline == self.baseline
            and one.task in self.tasks
            and one.method in self.methods
            and self.model in ("", one.model)
        }
        if not found:
            raise SpecragError(f"{self.record}: it has nothing of what the picture shows")
        wanted = [(task, method) for task in self.tasks for method in self.methods]
        return [found[key] for key in wanted if key in found]


_TOKENS = (
    "adaptive",
    "adaptive+eagle-2",
    "adaptive+draft-model",
    "prompt-lookup",
    "prompt-lookup+eagle-2",
    "sam-decoding",
    "sam-decoding+eagle-2",
    "token-recycling",
    "eagle-2",
    "eagle-2+cost-aware",
    "draft-model",
    "respec",
    "respec+recycling",
    "transformers",
    "transformers-lookup",
    "transformers-assisted",
)


def _tokens(record: str, model: str) -> Picture:
    return Picture(
        record=record,
        title=f"{model}, 8 bits: tokens a second over plain decoding",
        baseline="plain",
        tasks={OVERALL: "all"},
        methods={name: name for name in _TOKENS},
    )


PICTURES: Mapping[str, Picture] = {
    "tokens-smollm2": _tokens("tokens-smollm2", "SmolLM2"),
    "tokens-qwen": _tokens("tokens-qwen", "Qwen"),
    "rapid": Picture(
        record="longcontext-xeon",
        title="Qwen, long contexts: decoding",
        baseline="long-context",
        tasks={"speed/overall": "all"},
        methods={
            "rapid": "rapid+cost-aware",
            "rapid+smollm2-135m": "rapid+cost-aware+smollm2-135m",
            "respec": "adaptive",  # its name then
            "naive-sd": "rapid",
            "streaming-drafter": "streaming-drafter",
        },
        model=_LARGE,
    ),
    "ralmspec": Picture(
        record="passages-smollm2",
        title="SmolLM2: RaLMSpec over sequential retrieval",
        baseline="sequential-kv-reuse",
        tasks={
            f"{store}/overall": name
            for store, name in (
                ("BM25", "BM25"),
                ("HNSW", "HNSW"),
                ("exact dense", "exact"),
                ("pgvector exact", "PostgreSQL"),
                ("exact dense, 1,000,000 passages (synthetic distractors)", "a million"),
            )
        },
        methods={
            "ralmspec+P+cost-aware": "ralmspec+cost-aware",
            "ralmspec+PSA": "ralmspec",
            "ralmspec": "ralmspec+stride=3",
        },
    ),
}


def main() -> None:
    """Write those that are asked for."""
    for name in sys.argv[1:] or PICTURES:
        if name not in PICTURES:
            raise InputError("NAME", name, f"use one of {', '.join(PICTURES)}")
        drawn = speedup_plot(
            RECORDS.parent / f"{name}.png", PICTURES[name].shown(), title=PICTURES[name].title
        )
        sys.stdout.write(f"{drawn}\n")


if __name__ == "__main__":
    main()
