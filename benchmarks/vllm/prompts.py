"""What is asked, by task, from the data folder; and the passages that a corpus is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specrag.bench.data import find_file, load_passages, load_spec_bench, read_json_lines

SPEC_BENCH = ("rag", "summarization", "multi-turn")
QUOTED, EDITED = "quoting", "editing"
TASKS = (*SPEC_BENCH, QUOTED, EDITED)
HOTPOTQA, HUMANEVAL = "hotpotqa_dev_100x10.jsonl", "humaneval_164.jsonl"
_PASSAGES = 6  # of a question
_MOST_CHARACTERS = 8000  # of a prompt
#: Changes that leave most of a function as it is.
_CHANGES = (
    "Add a log line at the beginning of the function",
    "Rename the function's first parameter to `data`",
    "Raise ValueError if the first argument is None",
)


def load_prompts(folder: Path, tasks: Iterable[str]) -> dict[str, list[str]]:
    """The prompts of each task.

    Args:
        folder: with Spec-Bench, HotpotQA and HumanEval, as far as the tasks need them.
        tasks: some of :data:`TASKS`.

    Raises:
        InputError: a file is missing or damaged.
    """
    found: dict[str, list[str]] = {task: [] for task in tasks}
    if found.keys() & set(SPEC_BENCH):
        for question in load_spec_bench(find_file(folder, "specbench_480.jsonl")):
            if question.task in found:
                found[question.task].append(question.turns[0])
    if QUOTED in found:
        found[QUOTED] = [_quoting(row) for row in read_json_lines(find_file(folder, HOTPOTQA))]
    if EDITED in found:
        rows = read_json_lines(find_file(folder, HUMANEVAL))
        found[EDITED] = [_editing(number, row) for number, row in enumerate(rows)]
    return {
        task: [prompt for prompt in mine if len(prompt) <= _MOST_CHARACTERS] for task, mine in found.items()
    }


def _quoting(row: Mapping[str, Any]) -> str:
    passages = "\n\n".join(
        f"[{number}] {passage['title']}\n{passage['text']}"
        for number, passage in enumerate(row["passages"][:_PASSAGES], start=1)
    )
    return (
        f"{passages}\n\nQuestion: {row['question']}\n\n"
        "Quote the passages that help to answer the question word by word, each with its number, then answer it."
    )


def _editing(number: int, row: Mapping[str, Any]) -> str:
    file = f"{row['prompt']}{row['canonical_solution']}"
    change = _CHANGES[number % len(_CHANGES)]
    return f"```python\n{file}```\n\n{change}. Write the whole file again, and change nothing else."


def load_sources(folder: Path, most: int) -> Iterator[str]:
    """The texts that the prompts' passages are from: HotpotQA's, and ``most`` of the Wikipedia passages.

    Raises:
        InputError: a file is missing or damaged.
    """
    for row in read_json_lines(find_file(folder, HOTPOTQA)):
        passages: Any = row["passages"]
        for passage in passages:
            yield f"{passage['title']}\n{passage['text']}"
    for number, passage in enumerate(load_passages(find_file(folder, "corpus_wiki_passages.jsonl"))):
        if number == most:
            return
        yield passage.text
