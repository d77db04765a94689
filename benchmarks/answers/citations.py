"""Do the passages that are cited hold the answer? Counted on answers that were recorded, without a model.

`SPECRAG_DATA=DIR python -m benchmarks.answers.citations [RECORDS]` reads records of `specrag bench answers`. Counted
are right answers of which some passage in the prompt holds the gold answer; a citation is right where its passage is
marked as gold or, where there are no such marks, holds the gold answer.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrag.bench.metrics import contains_answer
from specrag.methods.citations import find_citations
from specrag.methods.citing import CitedText
from specrag.retrieval.passage import passage_text

RECORDS = Path("benchmarks/answers/answers-650-records.jsonl.gz")
FILES = {
    "hotpotqa": "hotpotqa_dev_100x10",
    "popqa": "popqa_dev_500x5",
    "musique": "musique_dev_100x20",
    "triviaqa": "retrievalqa_popqa_trivia_100x25",
}
LEAD = "According to passage "


@dataclass(frozen=True, slots=True)
class Answered:
    """A recorded answer: its task, model and method, what it was to say, what it read and what it said."""

    task: str
    model: str
    method: str
    question: str
    answers: list[str]
    passages: list[dict[str, Any]]
    text: str


def answered(records: Path, data: Path) -> Iterator[Answered]:
    """The recorded answers of standard RAG to questions in free form."""
    rows = {
        (task, str(row["id"])): row
        for task, name in FILES.items()
        for row in _lines(data / f"{name}.jsonl.gz")
    }
    for record in _lines(records):
        key, outcome = record["key"], record["outcome"]
        if not key["method"].startswith("standard-rag") or key["task"] not in FILES or not outcome:
            continue
        model, row = key["row"].split(" | ")
        asked = rows.get((key["task"], row))
        if asked is not None and outcome["output"]:
            passages = asked["passages"][: int(outcome["figures"]["passages_read"])]
            yield Answered(
                key["task"],
                model,
                key["method"],
                asked["question"],
                asked["answers"],
                passages,
                outcome["output"],
            )


def judge(one: Answered) -> dict[str, bool] | None:
    """Whether the model's citations and ours are right; ``None`` where it cannot be told."""
    sources = [passage_text(passage.get("title") or "", passage["text"]) for passage in one.passages]
    holds = [
        contains_answer(source, one.answers) and passage.get("gold", True)
        for source, passage in zip(sources, one.passages, strict=True)
    ]
    marked = any("gold" in passage for passage in one.passages)
    right = [passage["gold"] for passage in one.passages] if marked else holds
    cited = CitedText(one.question, sources, f"{LEAD}[" if one.text.startswith(LEAD) else "")
    cited.push(one.text.removeprefix(f"{LEAD}["))
    cited.end()
    ours = [
        citation.number
        for citation in find_citations(cited.text, sources).found
        if contains_answer(citation.sentence, one.answers)
    ]
    if not any(holds) or not ours:
        return None
    found = {
        "held": any(holds[number - 1] for number in ours),
        "all right": all(right[number - 1] for number in ours),
    }
    own = find_citations(one.text, sources).numbers
    return found | ({"model held": any(holds[number - 1] for number in own)} if own else {})


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def main() -> None:
    """Print a table, a row for each model and form of prompt."""
    records = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDS
    found: dict[tuple[str, str], dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for one in answered(records, Path(os.environ["SPECRAG_DATA"])):
        for name, right in (judge(one) or {}).items():
            found[one.model, one.method][name].append(right)
    for (model, method), rights in sorted(found.items()):
        told = (
            f"{name} {100 * sum(right) / len(right):.1f} % of {len(right)}" for name, right in rights.items()
        )
        sys.stdout.write(f"{model}, {method}: {', '.join(told)}\n")


if __name__ == "__main__":
    main()
