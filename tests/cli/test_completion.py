"""What the shell is offered, by typer's own protocol; a real bash completes a line by it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.shell import specrag


def offered(*words: str) -> list[str]:
    """What the shell may put in the place of the last word."""
    line, place = "\n".join(("specrag", *words)), str(len(words))
    result = specrag(COMP_WORDS=line, COMP_CWORD=place, _SPECRAG_COMPLETE="complete_bash")
    assert result.err == ""
    return result.out.split()


def test_commands_methods_and_models() -> None:
    assert offered("gen") == ["generate"]
    assert offered("generate", "-m", "r") == ["respec", "rapid", "ralmspec"]
    assert offered("methods", "know") == []
    assert offered("serve", "--model", "smol") == ["smollm2-135m"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("ask", "-m", "ralmspec", "-o", "st"), ["stop=", "stride="]),
        (("ask", "-m", "ralmspec", "-o", "stri"), ["stride=", "stride=os3", "stride=cost-aware"]),
        (("ask", "-o", "stri"), []),  # standard RAG has no stride
        (("ask", "-o", "abst"), ["abstain=", "abstain=true", "abstain=false"]),
        (("generate", "-o", "top_k"), ["top_k=", "top_k=0"]),
        (("generate", "-m", "nonsense", "-o", "st"), []),
    ],
)
def test_options_of_the_method_on_the_line(words: tuple[str, ...], expected: list[str]) -> None:
    assert offered(*words) == expected


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_loads_the_script_and_asks_by_it(tmp_path: Path) -> None:
    program = tmp_path / "specrag"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m specrag "$@"\n')
    program.chmod(0o755)
    script = (
        "source <(specrag --show-completion bash); complete -p specrag; "
        'COMP_WORDS=(specrag methods rap); COMP_CWORD=2; _specrag_completion specrag; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["complete -o default -F _specrag_completion specrag", "rapid"]
