"""Ask a model the 60 questions, and count what is right.

``python -m benchmarks.documents OUT [--model NAME] [-o KEY=VALUE]``

Each answer is recorded in ``OUT/answers.jsonl`` as it comes, so that a run that was stopped goes on. With
``--most 0`` the records are only counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import specrag
from benchmarks.documents.questions import FILES, KINDS, Question, load_questions
from specrag.methods.registry import method_class
from specrag.models.catalog import default_model
from specrag.retrieval.build import build

#: Tokens of an answer.
MAX_TOKENS = 64


def main() -> None:
    """Ask what has no record yet, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--most", type=int, default=None, help="questions to ask; 0 counts the records")
    parser.add_argument(
        "-o", "--option", action="append", default=[], metavar="KEY=VALUE", help="of the search"
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    records = given.out / "answers.jsonl"
    configuration = " ".join([given.model, *given.option])
    known = {(record["configuration"], record["id"]) for record in _read(records)}
    left = [one for one in load_questions() if (configuration, one.identifier) not in known][: given.most]
    if left:
        build([FILES], given.out / "kb")
        options = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in given.option)}
        with specrag.KnowledgeBase.open(given.out / "kb") as kb, records.open("a", encoding="utf-8") as file:
            llm = specrag.load(given.model)
            for question in left:
                record = {"configuration": configuration, **ask(llm, kb, question, options)}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
    sys.stdout.write(table(_read(records)))


def ask(
    llm: specrag.LanguageModel, kb: specrag.KnowledgeBase, question: Question, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Ask one question; what came of it."""
    began = time.perf_counter()
    messages = [*question.history, {"role": "user", "content": question.question}]
    result = llm.generate(
        messages, method=method_class("standard-rag")(), kb=kb, max_tokens=MAX_TOKENS, **options
    )
    cited = {Path(source.passage.source).name for source in result.sources if source.cited}
    found = {Path(source.passage.source).name for source in result.sources}
    details = result.details.summary() if result.details is not None else {}
    return {
        "id": question.identifier,
        "kind": question.kind,
        "text": result.text,
        "abstained": bool(details.get("abstained")),
        "similarity": max((source.similarity or 0.0 for source in result.sources), default=None),
        "found": bool(found & set(question.sources)),
        "right": question.is_right(result.text),
        "cites": bool(cited & set(question.sources)),
        "unheld": details.get("unheld", []),
        "seconds": round(time.perf_counter() - began, 2),
    }


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """A line for each configuration: right answers by kind, refusals, right citations."""
    by: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        by[record["configuration"]].append(record)
    heads = ["configuration", *KINDS, "answerable", "of them refused", "right ones that cite right", "mean s"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name, found in by.items():
        answerable = [record for record in found if record["kind"] != "unanswerable"]
        right = [record for record in answerable if record["right"]]
        cells = [name]
        for kind in KINDS:
            those = [record for record in found if record["kind"] == kind]
            good = "abstained" if kind == "unanswerable" else "right"
            cells.append(f"{sum(record[good] for record in those)} of {len(those)}")
        cells += [
            f"{len(right)} of {len(answerable)}",
            str(sum(record["abstained"] for record in answerable)),
            f"{sum(record['cites'] for record in right)} of {len(right)}",
            f"{sum(record['seconds'] for record in found) / len(found):.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main()
