"""Ask a model the 60 questions, and count what is right.

``python -m benchmarks.documents OUT [--model NAME] [--method NAME] [-o KEY=VALUE]``

Every question is answered, whether its passages are about it or not; which ones the default refuses is told beside it.
Each answer is recorded in ``OUT/answers.jsonl`` as it comes, so that a run that was stopped goes on. With ``--most 0``
the records are only counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import specrag
from benchmarks.documents.questions import FILES, KINDS, Question, load_questions
from benchmarks.records import read_records
from specrag.methods.evidence import is_about_nothing
from specrag.methods.registry import make_method
from specrag.methods.retriever import similarities
from specrag.models.catalog import default_model
from specrag.retrieval.build import build

#: Tokens of an answer.
MAX_TOKENS = 64

_METHOD = "standard-rag"


def main() -> None:
    """Ask what has no record yet, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--method", default=_METHOD)
    parser.add_argument("--most", type=int, default=None, help="questions to ask; 0 counts the records")
    parser.add_argument(
        "-o", "--option", action="append", default=[], metavar="KEY=VALUE", help="of the search"
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    records = given.out / "answers.jsonl"
    own = [] if given.method == _METHOD else [given.method]
    configuration = " ".join([given.model, *own, *given.option])
    known = {(record["configuration"], record["id"]) for record in read_records(records)}
    questions = load_questions()
    left = [one for one in questions if (configuration, one.identifier) not in known][: given.most]
    build([FILES], given.out / "kb")
    if left:
        options = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in given.option)}
        with specrag.KnowledgeBase.open(given.out / "kb") as kb, records.open("a", encoding="utf-8") as file:
            llm = specrag.load(given.model)
            for question in left:
                record = {"configuration": configuration, **ask(llm, kb, question, given.method, options)}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
    with specrag.KnowledgeBase.open(given.out / "kb") as kb:
        asked = {one.identifier: one for one in questions}
        sys.stdout.write(table([judge(kb, asked[record["id"]], record) for record in read_records(records)]))


def ask(
    llm: specrag.LanguageModel,
    kb: specrag.KnowledgeBase,
    question: Question,
    name: str,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Ask one question; what came of it."""
    began = time.perf_counter()
    messages = [*question.history, {"role": "user", "content": question.question}]
    method = make_method(name)
    result = llm.generate(messages, method=method, kb=kb, max_tokens=MAX_TOKENS, abstain=False, **options)
    details = {} if result.details is None else result.details.summary()
    return {
        "id": question.identifier,
        "text": result.text,
        "searched": details.get("question", question.question),
        "found": [Path(source.passage.source).name for source in result.sources],
        "cited": [Path(source.passage.source).name for source in result.sources if source.cited],
        "unheld": details.get("unheld", []),
        "seconds": round(time.perf_counter() - began, 2),
    }


def judge(kb: specrag.KnowledgeBase, question: Question, record: Mapping[str, Any]) -> dict[str, Any]:
    """What is right of a recorded answer, and whether the default would have refused it."""
    hits = kb.search([record["searched"]], 5)[0]
    similar = similarities(kb, record["searched"], hits)
    return {
        "configuration": record["configuration"],
        "kind": question.kind,
        "right": question.is_right(record["text"]),
        "cites": bool(set(record["cited"]) & set(question.sources)),
        "refused": is_about_nothing(kb, record["searched"], hits, similar, None),
        "seconds": record["seconds"],
    }


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """A line for each configuration: right answers by kind, right citations, refusals."""
    by: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        by[record["configuration"]].append(record)
    kinds = [kind for kind in KINDS if kind != "unanswerable"]
    heads = ["configuration", *kinds, "all", "of them cited right", "refused by default: right ones"]
    heads += ["other answerable ones", "unanswerable ones", "mean s"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name, found in by.items():
        answerable = [entry for entry in found if entry["kind"] != "unanswerable"]
        right = [entry for entry in answerable if entry["right"]]
        wrong = [entry for entry in answerable if not entry["right"]]
        others = [entry for entry in found if entry["kind"] == "unanswerable"]
        cells = [name]
        cells += [_share([entry for entry in answerable if entry["kind"] == kind], "right") for kind in kinds]
        cells += [_share(answerable, "right"), _share(right, "cites")]
        cells += [_share(entries, "refused") for entries in (right, wrong, others)]
        cells.append(f"{sum(entry['seconds'] for entry in found) / len(found):.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _share(entries: Sequence[Mapping[str, Any]], name: str) -> str:
    return f"{sum(entry[name] for entry in entries)} of {len(entries)}"


if __name__ == "__main__":
    main()
