"""Draws the speed-ups that pages of ``docs/results`` show, from the records beside them.

``python -m benchmarks.pictures [NAME ...]`` writes ``docs/results/NAME.png``; without a name all of :data:`PICTURES`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
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
        title: of the picture; ``{n}`` stands for the record's number of prompts.
        baseline: what the ratios are over.
        tasks, methods: what is shown, in this order, by its name in the record and in the picture. With one task the
            fastest method comes first.
        muted: methods in grey.
        model: the only one that is shown; empty for all.
    """

    record: str
    title: str
    baseline: str
    tasks: Mapping[str, str]
    methods: Mapping[str, str]
    muted: Collection[str] = ()
    model: str = ""

    def shown(self) -> list[Measurement]:
        """The measurements, under their names in the picture.

        Raises:
            SpecragError: the record has none of them.
        """
        found = {
            (self.tasks[one.task], one.method): replace(one, task=self.tasks[one.task], dtype=None)
            for one in read_packed(RECORDS / f"{self.record}.jsonl.gz")
            if one.baseline == self.baseline
            and one.task in self.tasks
            and one.method in self.methods
            and self.model in ("", one.model)
        }
        if not found:
            raise SpecragError(f"{self.record}: it has nothing of what the picture shows")
        wanted = [(task, method) for task in self.tasks.values() for method in self.methods]
        known = [found[key] for key in wanted if key in found]
        return known if len(self.tasks) > 1 else sorted(known, key=lambda one: -(one.speedup or 0.0))


_TRANSFORMERS = {
    "transformers": "transformers, bf16",
    "transformers-lookup": "transformers' prompt lookup, bf16",
    "transformers-assisted": "transformers' assisted generation, bf16",
}


def _tokens(record: str, model: str) -> Picture:
    return Picture(
        record=record,
        title=f"{model}, 8 bits: tokens a second over plain decoding\ntwo Xeon cores with AMX, {{n}} prompts",
        baseline="plain",
        tasks={OVERALL: "all"},
        methods={
            "adaptive": "adaptive, the default",
            "adaptive+eagle-2": "adaptive with EAGLE-2's head",
            "adaptive+draft-model": "adaptive with SmolLM2",
            "prompt-lookup": "prompt lookup",
            "prompt-lookup+eagle-2": "prompt lookup, else the head",
            "sam-decoding": "SAM-Decoding",
            "sam-decoding+eagle-2": "SAM-Decoding, else the head",
            "token-recycling": "token recycling",
            "eagle-2": "EAGLE-2, 60 nodes",
            "eagle-2+cost-aware": "EAGLE-2, weighed",
            "draft-model": "draft model, weighed",
            "respec": "ReSpec, strict",
            "respec+recycling": "ReSpec, strict; recycled tokens",
            **_TRANSFORMERS,
        },
        muted=tuple(_TRANSFORMERS),
    )


PICTURES: Mapping[str, Picture] = {
    "tokens-smollm2": _tokens("tokens-smollm2-amx", "SmolLM2"),
    "tokens-qwen": _tokens("tokens-qwen-amx", "Qwen"),
    "rapid": Picture(
        record="longcontext-xeon",
        title="Qwen behind long contexts: decoding over plain decoding\ntwo Xeon cores, {n} prompts",
        baseline="long-context",
        tasks={"speed/overall": "all"},
        methods={
            "rapid": "RAPID, cost-aware",
            "rapid+smollm2-135m": "RAPID, cost-aware, SmolLM2 drafts",
            "respec": "adaptive",  # its name then
            "naive-sd": "RAPID's default, ten guesses",
            "streaming-drafter": "StreamingLLM drafts",
        },
        muted=("respec", "streaming-drafter"),
        model=_LARGE,
    ),
    "ralmspec": Picture(
        record="passages-smollm2",
        title="SmolLM2: RaLMSpec over sequential retrieval\ntwo Zen 4 cores, {n} questions",
        baseline="sequential-kv-reuse",
        tasks={
            f"{store}/overall": name
            for store, name in (
                ("exact dense", "exact dense, 71,234"),
                ("HNSW", "HNSW, 71,234"),
                ("BM25", "BM25, 71,234"),
                ("pgvector exact", "PostgreSQL, 71,234"),
                ("exact dense, 1,000,000 passages (synthetic distractors)", "exact dense, a million"),
            )
        },
        methods={
            "ralmspec+P+cost-aware": "stride=cost-aware",
            "ralmspec+PSA": "PSA, the paper's: the default",
            "ralmspec": "stride=3",
        },
    ),
}


def main() -> None:
    """Write those that are asked for."""
    for name in sys.argv[1:] or PICTURES:
        if name not in PICTURES:
            raise InputError("NAME", name, f"use one of {', '.join(PICTURES)}")
        picture = PICTURES[name]
        shown = picture.shown()
        drawn = speedup_plot(
            RECORDS.parent / f"{name}.png",
            shown,
            title=picture.title.format(n=shown[0].n),
            names=picture.methods,
            muted=picture.muted,
        )
        sys.stdout.write(f"{drawn}\n")


if __name__ == "__main__":
    main()
