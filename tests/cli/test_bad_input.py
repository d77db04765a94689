"""Values that cannot be used: one line with field, value and remedy, on the command line and in Python."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

import specrag as package
from specrag.errors import ContextLengthError, InputError
from tests.cli.shell import Result, specrag
from tests.models.tiny import write_gguf

REFUSED_BEFORE_LOADING = [
    # words, exit code, what the line must name: field, value, remedy
    (
        ("--model", "smollm2-135n"),
        1,
        ("model", "smollm2-135n", "did you mean 'smollm2-135m'", "gemma-3-270m"),
    ),
    (("--model", "./nothing-here"), 1, ("model", "./nothing-here", "no such folder")),
    (("--model", "nothing-here.gguf"), 1, ("nothing-here.gguf", "does not exist", "check the path")),
    (("--temperature", "-1"), 1, ("--temperature", "'-1'", "a number from 0")),
    (("--temperature", "nan"), 1, ("--temperature", "'nan'", "a number from 0")),
    (("--temperature", "inf"), 1, ("--temperature", "inf", "from 0 (greedy) upwards")),
    (("--temperature", "hot"), 1, ("--temperature", "'hot'", "give a number")),
    (("-o", "top_p=0"), 1, ("-o top_p", "'0'", "above 0 up to 1")),
    (("-o", "top_p=nan"), 1, ("-o top_p", "'nan'", "above 0 up to 1")),
    (("-o", "top_k=-1"), 1, ("-o top_k", "'-1'", "a whole number from 0")),
    (("-o", "min_p=2"), 1, ("-o min_p", "'2'", "from 0 to 1")),
    (("-o", "repetition_penalty=0"), 1, ("-o repetition_penalty", "'0'", "from 0.01 to 100")),
    (("-o", "presence_penalty=3"), 1, ("-o presence_penalty", "'3'", "from -2 to 2")),
    (("-o", "frequency_penalty=inf"), 1, ("-o frequency_penalty", "'inf'", "from -2 to 2")),
    (("-o", "seed=1.5"), 1, ("-o seed", "'1.5'", "a whole number")),
    (("-o", "seed=abc"), 1, ("-o seed", "'abc'", "a whole number")),
    (("-o", "seed="), 1, ("-o seed", "''", "a whole number")),
    (("--max-tokens", "0"), 1, ("--max-tokens", "'0'", "a whole number from 1")),
    (("--max-tokens", "many"), 1, ("--max-tokens", "'many'", "a whole number")),
    (("-o", "stop="), 1, ("-o stop", "''", "at least one character")),
    (("-o", "logit_bias=copper"), 1, ("-o logit_bias", "'copper'", "TOKEN=NUMBER")),
    (("-o", "logit_bias=3=high"), 1, ("-o logit_bias", "'3=high'", "TOKEN=NUMBER")),
    (("-o", "logit_bias=3=nan"), 1, ("-o logit_bias", "3", "nan")),
    (("-o", "logit_bias=-3=1"), 1, ("-o logit_bias", "-3", "from 0 upwards")),
    (("-o", "logit_bias=3=1000"), 1, ("-o logit_bias", "1000", "from -100 to 100")),
    (("-o", "log_probs=21"), 1, ("-o log_probs", "21", "from 0 to 20")),
    (("-o", "timeout=0"), 1, ("-o timeout", "'0'", "above 0")),
    (("-o", "dtype=int4"), 1, ("-o dtype", "'int4'", "fp32, bf16, fp16, int8")),
    (("-o", "device=abacus"), 1, ("-o device", "'abacus'", "cpu or cuda:0")),
    (("--method", "plane"), 1, ("method", "'plane'", "did you mean plain?")),
    (
        ("--method", "knnlm"),
        1,
        ("--method", "'knnlm'", "draft-model, eagle-2, knn-lm", "did you mean knn-lm?"),
    ),
    (("--method", "standard-rag"), 1, ("--method", "'standard-rag'", "use specrag ask")),
    (("-o", "tempreature=1"), 1, ("-o tempreature", "did you mean temperature?")),
    (("--tempreature", "1"), 2, ("--tempreature", "--temperature")),
    (("--system", "Be brief.", "--raw"), 1, ("--system", "Be brief.", "leave out --raw")),
]


def _assert_one_line(result: Result, code: int, named: tuple[str, ...]) -> None:
    assert result.code == code, result.err
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert result.err.endswith("\n")
    assert "Traceback" not in result.err
    assert [part for part in named if part not in result.err] == [], result.err


@pytest.mark.parametrize(
    ("words", "code", "named"), REFUSED_BEFORE_LOADING, ids=lambda value: str(value)[:40]
)
def test_refused_on_the_command_line(words: tuple[str, ...], code: int, named: tuple[str, ...]) -> None:
    _assert_one_line(specrag("generate", "Hello", *words), code, named)


@pytest.mark.parametrize("words", [("--temperature", "-1"), ("-o", "seed=1.5"), ("--method", "plane")])
def test_debug_shows_the_traceback(words: tuple[str, ...]) -> None:
    result = specrag("--debug", "generate", "Hello", *words)
    assert result.code != 0
    assert "Traceback" in result.err
    assert result.err.splitlines()[-1].startswith("error: ")


def test_values_are_refused_before_the_model_is_touched(tmp_path: Path) -> None:
    home = tmp_path / "home"
    result = specrag("generate", "Hello", "-o", "top_p=0", SPECRAG_HOME=str(home))
    _assert_one_line(result, 1, ("-o top_p",))
    assert not home.exists()


def test_empty_prompt() -> None:
    named = ("prompt", "''", "at least one character")
    _assert_one_line(specrag("generate", ""), 1, named)
    _assert_one_line(specrag("generate"), 1, named)  # read from standard input
    _assert_one_line(specrag("generate", stdin=b" \n"), 1, ("prompt", "' '", "at least one character"))


def test_prompt_that_is_no_text(tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    photo.write_bytes(b"\x89PNG\r\n\xff\xfe")
    named = ("--file", "photo.png", "UTF-8")
    _assert_one_line(specrag("generate", "--file", str(photo)), 1, named)
    _assert_one_line(specrag("generate", stdin=b"\xff\xfe"), 1, ("prompt", "UTF-8"))


def test_prompt_file_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "question.txt"
    named = ("--file", "question.txt", "no such file", "give a text file")
    _assert_one_line(specrag("generate", "--file", str(missing)), 1, named)
    _assert_one_line(specrag("generate", "-f", str(tmp_path)), 1, ("--file", "directory", "give a text file"))


def test_prompt_and_file(tmp_path: Path) -> None:
    result = specrag("generate", "Hello", "--file", str(tmp_path / "question.txt"))
    _assert_one_line(result, 1, ("--file", "question.txt", "not both"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of a Llama with 256 tokens of context."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("home"))


def test_prompt_longer_than_the_context(tiny: Path, home: str) -> None:
    result = specrag("generate", "a" * 300, "--model", str(tiny), SPECRAG_HOME=home)
    _assert_one_line(result, 1, ("prompt", "tokens", "holds 256", "shorten it"))


@pytest.mark.parametrize("words", [("-o", "logit_bias=999999=1"), ("-o", "logit_bias=999999=1", "--json")])
def test_bias_of_an_unknown_token(words: tuple[str, ...], tiny: Path, home: str) -> None:
    result = specrag("generate", "Hello", "--model", str(tiny), *words, SPECRAG_HOME=home)
    _assert_one_line(result, 1, ("-o logit_bias", "999999", "token ids below"))


def test_adapter_that_is_missing(tiny: Path, home: str, tmp_path: Path) -> None:
    words = ("--model", str(tiny), "-o", f"adapter={tmp_path / 'adapter'}")
    _assert_one_line(
        specrag("generate", "Hello", *words, SPECRAG_HOME=home), 1, ("adapter", "adapter_config")
    )


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.99])
def test_truncated_gguf(share: float, tiny: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    data = tiny.read_bytes()
    cut.write_bytes(data[: int(len(data) * share)])
    home = tmp_path / "home"
    result = specrag("generate", "Hello", "--model", str(cut), SPECRAG_HOME=str(home))
    _assert_one_line(result, 1, ("cut.gguf",))
    assert "fetch it again" in result.err or "give a GGUF file" in result.err
    assert not [path for path in home.rglob("*") if path.name.endswith(".safetensors")]


def test_file_that_is_no_gguf(tmp_path: Path) -> None:
    fake = tmp_path / "fake.gguf"
    fake.write_text("not a model\n" * 100, encoding="utf-8")
    _assert_one_line(specrag("generate", "Hello", "--model", str(fake)), 1, ("fake.gguf",))


def test_folder_without_a_model(tmp_path: Path) -> None:
    _assert_one_line(
        specrag("generate", "Hello", "--model", str(tmp_path)),
        1,
        (tmp_path.name, "no safetensors", "give a folder"),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such arguments themselves")
def test_prompt_of_broken_bytes() -> None:
    result = specrag("generate", "caf\udce9")
    _assert_one_line(result, 1, ("prompt", "UTF-8"))


# -- the same from Python -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tiny: Path) -> package.LanguageModel:
    return package.load(tiny)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("seed", 1.5),
        ("seed", "abc"),
        ("seed", None),
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("stop", ""),
        ("stop", ["\n", ""]),
        ("stop", 5),
        ("log_probs", -1),
        ("log_probs", True),
        ("timeout", 0),
        ("timeout", math.nan),
        ("timeout", "soon"),
        ("method", "plane"),
        ("logit_bias", {"copper": 1}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", [3]),
    ],
)
def test_refused_from_python(field: str, value: Any, llm: package.LanguageModel) -> None:
    options: Any = {field: value}
    for call in (llm.generate, llm.stream):
        with pytest.raises(InputError) as caught:
            call("Hello", **options)
        assert caught.value.field == field
        assert "\n" not in str(caught.value)


def test_unknown_option_from_python(llm: package.LanguageModel) -> None:
    with pytest.raises(InputError, match="did you mean temperature"):
        llm.generate("Hello", temprature=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("prompt", ["", [], 5.5, [1.5], [{"role": "user"}]])
def test_unusable_prompt_from_python(prompt: Any, llm: package.LanguageModel) -> None:
    with pytest.raises(InputError):
        llm.generate(prompt)


def test_token_ids_outside_of_the_vocabulary(llm: package.LanguageModel) -> None:
    for token in (-1, llm.model.vocab_size):
        with pytest.raises(InputError, match="vocabulary"):
            llm.generate([1, token])


def test_long_prompt_costs_no_work(llm: package.LanguageModel) -> None:
    with pytest.raises(ContextLengthError, match="holds 256"):
        llm.generate("a" * 300)
    assert llm.generate("a", max_tokens=2).usage.completion_tokens == 2


def test_one_bad_prompt_of_a_batch_is_found_before_any_work(llm: package.LanguageModel) -> None:
    with pytest.raises(InputError, match="prompt"):
        llm.batch(["Hello", ""])


def test_unusable_model_from_python(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="dtype"):
        package.load(tiny, dtype="int4")
    with pytest.raises(InputError, match="device"):
        package.load(tiny, device="abacus")
    with pytest.raises(InputError, match="adapter"):
        package.load(tiny, adapter=tmp_path / "adapter")
    with pytest.raises(InputError, match="did you mean"):
        package.load("smolm2-135m")
