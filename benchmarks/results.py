"""Measure anew what ``docs/results`` says: the pages' commands, one after the other, on one quiet machine.

``python -m benchmarks.results OUT --data FOLDER [--quick] [--only STEP ...]``, or ``make results`` and ``make
results-quick``. A step that is done is not run again, one that was stopped goes on, and ``OUT/STEP.log`` holds what it
said. All steps are of one version of the code: the folder remembers it, and refuses another. What was measured lies in
``OUT/STEP``; people write the pages from it, since they have to choose what to show.

RAPID, RaLMSpec, kNN-LM, the gateway and a million passages are measured by the commands that their pages name; of the
first three the exactness is a step here.

``--quick`` takes minutes: it runs the short form of the step that has one and compares its ratios with its record.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.records import read_packed
from specrag.bench.measurement import Measurement, from_json_lines
from specrag.bench.runner import code_version
from specrag.errors import InputError, SpecragError

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs" / "results" / "records"
_SMALL, _LARGE = "smollm2-135m", "qwen2.5-coder-1.5b"
#: A quick ratio holds if it is within this factor of the page's: it rests on a handful of prompts.
_HOLDS = 1.3
_ENVIRONMENT = "SPECRAG_VLLM_PYTHON"
_LONG_PROMPTS = "--longest 6000 --most 60 --new 64"


@dataclass(frozen=True, slots=True)
class Step:
    """A measurement.

    Attributes:
        page: of ``docs/results`` that it is for; ``answering`` is the guide.
        words: of the command behind ``python -m``; ``OUT`` and ``DATA`` stand for folders.
        quick: of its short form; empty if it has none.
        record: of the page, for the comparison with a short run.
        needs: a variable of the environment, without which it is left out.
    """

    page: str
    words: str
    quick: str = ""
    record: str = ""
    needs: str = ""


def _bench(suite: str, model: str, more: str = "") -> str:
    return f"specrag bench {suite} --model {model} --data DATA --out OUT {more}".strip()


def _engines(model: str, rounds: int) -> str:
    words = f"benchmarks.rag OUT --data DATA --alone --model {model} --clients 1 --draws uniform --rounds {rounds}"
    return f"{words} --each 5 --methods plain plain+bf16 vllm --beside plain"


STEPS: Mapping[str, Step] = {
    "engine-smollm2": Step(
        "engine", _bench("engine", _SMALL), _bench("engine", _SMALL, "--quick"), "engine-smollm2"
    ),
    "engine-qwen": Step("engine", _bench("engine", _LARGE, "--quick")),
    "engines-smollm2": Step("engine", _engines(_SMALL, 10), needs=_ENVIRONMENT),
    "engines-qwen": Step("engine", _engines(_LARGE, 6), needs=_ENVIRONMENT),
    "tokens-smollm2": Step(
        "tokens",
        _bench("tokens", _SMALL, "--dtype int8 --rows 17 --repeats 1"),
    ),
    "tokens-qwen": Step("tokens", _bench("tokens", _LARGE, "--dtype int8 --rows 5 --repeats 1")),
    "exactness-smollm2": Step("exactness", f"benchmarks.exactness.defaults OUT --data DATA --model {_SMALL}"),
    "exactness-qwen": Step("exactness", f"benchmarks.exactness.defaults OUT --data DATA --model {_LARGE}"),
    "exactness-long": Step(
        "exactness", f"benchmarks.exactness.defaults OUT --data DATA --model {_SMALL} {_LONG_PROMPTS}"
    ),
    "exactness-contexts": Step(
        "exactness", f"benchmarks.exactness.contexts OUT --data DATA --model {_SMALL}"
    ),
    "exactness-ralmspec": Step("exactness", _bench("passages", _SMALL, "--task exactness* --no-plots")),
    "exactness-knnlm": Step("exactness", _bench("knnlm", _SMALL, "--task exactness* --no-plots")),
    "exactness-rapid": Step("exactness", _bench("longcontext", _SMALL, "--task exactness* --no-plots")),
    "server": Step("server", _bench("server", _SMALL, "--dtype int8"), needs=_ENVIRONMENT),
    "retrieval": Step("retrieval", _bench("retrieval", _SMALL)),
    "documents": Step("answering", f"benchmarks.documents OUT --model {_LARGE}"),
    "blocks-smollm2": Step("reading", f"benchmarks.rag.blocks OUT --data DATA --model {_SMALL}"),
    "blocks-qwen": Step("reading", f"benchmarks.rag.blocks OUT --data DATA --model {_LARGE}"),
    "frontier": Step("speculative-rag", "benchmarks.answers.frontier OUT --data DATA --rows 24"),
    "rag": Step(
        "reading",
        f"benchmarks.rag OUT --data DATA --model {_LARGE} --clients 1 4 8 16 --rounds 1 "
        "--methods adaptive vllm vllm+suffix",
        needs=_ENVIRONMENT,
    ),
    "vllm": Step(
        "vllm",
        f"benchmarks.vllm OUT --data DATA --model {_SMALL} --dtype float32 --each 4",
        needs=_ENVIRONMENT,
    ),
}


def main() -> None:
    """Run what is not done yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=STEPS, metavar="STEP", default=list(STEPS))
    given = parser.parse_args()
    # Ended, it ends its step too: one that went on would slow whatever is measured next.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = {name: STEPS[name] for name in given.only if not given.quick or STEPS[name].quick}
    try:
        check_version(given.out)
        failed = [name for name, step in chosen.items() if not run(name, step, given)]
    except SpecragError as error:
        sys.exit(str(error))
    if given.quick:
        for name in chosen:
            sys.stdout.writelines(compare(name, given.out / name))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; the same command goes on")


def check_version(out: Path) -> None:
    """Make the folder, and mark it with the version of the code.

    Raises:
        InputError: it holds what another version has measured.
    """
    out.mkdir(parents=True, exist_ok=True)
    version = out / "version"
    if version.is_file() and (before := version.read_text(encoding="utf-8")) != code_version():
        raise InputError("OUT", str(out), f"it is of {before}; remove it, or go on there")
    version.write_text(code_version(), encoding="utf-8")


def run(name: str, step: Step, given: argparse.Namespace) -> bool:
    """Run a step in a process of its own, if it is not done; whether it is done now, or cannot be run here."""
    out: Path = given.out / name
    out.mkdir(parents=True, exist_ok=True)
    done = out / "done"
    if done.is_file():
        return True
    if step.needs and not os.environ.get(step.needs):
        sys.stdout.write(f"{name}: left out, {step.needs} is not set\n")
        return True
    places = {"OUT": str(out.resolve()), "DATA": str(given.data.resolve())}
    words = [places.get(word, word) for word in (step.quick if given.quick else step.words).split()]
    started = time.monotonic()
    with (given.out / f"{name}.log").open("a", encoding="utf-8") as log:
        code = subprocess.run(
            [sys.executable, "-m", *words], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False
        ).returncode
    sys.stdout.write(f"{name}: {'done' if not code else 'failed'} in {time.monotonic() - started:.0f} s\n")
    if not code:
        done.touch()
    return not code


def compare(name: str, out: Path) -> Iterator[str]:
    """Whether the page's ratios hold, one line for each that both have.

    Raises:
        SpecragError: the step has written nothing.
    """
    written = list(out.glob("*.jsonl"))
    if not written:
        raise SpecragError(f"{name}: there is no record in {out}: see {out}.log")
    now = ratios(from_json_lines(written[0].read_text(encoding="utf-8")))
    kept = read_packed(RECORDS / f"{STEPS[name].record}.jsonl.gz")
    for key, before in ratios(kept).items():
        if key in now:
            holds = 1 / _HOLDS <= now[key] / before <= _HOLDS
            task, method, baseline = key
            shown = f"{task}: {method} over {baseline}: {before:.2f} on the page, {now[key]:.2f} now"
            yield f"{'holds' if holds else 'MOVED'}  {name}: {shown}\n"


def ratios(measurements: Sequence[Measurement]) -> dict[tuple[str, str, str], float]:
    """Speed-ups by task, method and baseline."""
    return {
        (one.task, one.method, one.baseline): one.speedup
        for one in measurements
        if one.baseline is not None and one.speedup is not None
    }


if __name__ == "__main__":
    main()
