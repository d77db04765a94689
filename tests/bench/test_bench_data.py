"""The readers of data sets, on files written here and on the real ones where they are."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrag.bench.data import (
    DATA_VARIABLE,
    WIKITEXT_TEST,
    WIKITEXT_VALID,
    Text,
    data_folder,
    detokenize,
    find_file,
    load_long_bench,
    load_passages,
    load_spec_bench,
    load_text,
    read_json_lines,
    read_text,
    read_wikitext,
    token_prompts,
)
from specrag.errors import InputError


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_json_lines_plain_and_gzipped(tmp_path: Path) -> None:
    line = json.dumps({"id": 1, "title": "T", "text": "two\u2028lines"}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_text(f"{line}\n\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(f"{line}\n".encode()))
    plain = list(load_passages(find_file(tmp_path, "a.jsonl")))
    assert plain == list(load_passages(find_file(tmp_path, "b.jsonl")))
    assert plain[0].text == "two\u2028lines"


def test_bad_files_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1}\n[1]\n')
    with pytest.raises(InputError, match=r"a\.jsonl:2"):
        list(read_json_lines(path))
    path.write_text('{"question_id": 1, "category": "qa", "turns": "one"}\n')
    with pytest.raises(InputError, match="a list of texts"):
        load_spec_bench(path)
    path.write_text('{"id": 1}\n')
    with pytest.raises(InputError, match="'task'"):
        load_long_bench(path)
    broken = tmp_path / "a.txt.gz"
    broken.write_bytes(gzip.compress(b"text" * 100)[:-9])
    with pytest.raises(InputError, match="readable"):
        read_text(find_file(tmp_path, "a.txt"))
    with pytest.raises(InputError, match=r"holds b\.txt"):
        find_file(tmp_path, "b.txt")


def test_the_folder_is_given_or_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    assert data_folder(None) is None
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert data_folder(None) == tmp_path
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(InputError, match=DATA_VARIABLE):
        data_folder(None)
    with pytest.raises(InputError, match="--data"):
        data_folder(tmp_path / "none")


@given(length=st.integers(1, 9000), count=st.integers(1, 4))
def test_prompts_have_the_wished_length(length: int, count: int) -> None:
    text = load_text(None)
    prompts = token_prompts(text, encode, length=length, count=count)
    assert [len(prompt) for prompt in prompts] == [length] * count
    if length < len(text.content) // 8:
        assert len({tuple(prompt) for prompt in prompts}) == count or length < 20
        assert all(bytes(prompt).decode() in text.content for prompt in prompts)


def test_prompts_of_no_text_or_no_length_are_refused() -> None:
    with pytest.raises(InputError, match="text"):
        token_prompts(Text(source="none", content=""), encode, length=1, count=1)
    with pytest.raises(InputError, match="length"):
        token_prompts(load_text(None), encode, length=0, count=1)


def test_text_prefers_wikitext_and_falls_back_on_passages(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="corpus_wiki_passages"):
        load_text(tmp_path)
    (tmp_path / "corpus_wiki_passages.jsonl").write_text('{"id": 1, "text": "A passage."}\n')
    assert load_text(tmp_path).content == "A passage."
    (tmp_path / "wikitext_valid.txt").write_text("Wiki.")
    assert load_text(tmp_path) == Text(source="wikitext_valid.txt", content="Wiki.")


@pytest.mark.parametrize(
    ("tokenised", "plain"),
    [
        (" = = Career = = ", "== Career =="),
        (" = = = 2000 \u2013 2005 = = = ", "=== 2000\u20132005 ==="),
        (" = Robert <unk> = ", "= Robert ="),
        (" a guest @-@ starring role in 1 @,@ 000 films .", "a guest-starring role in 1,000 films."),
        (" it 's Teddy 's story ; they didn 't", "it's Teddy's story; they didn't"),
        (
            ' " Craig " in ( the ) episode " Teddy \'s Story " , 3 @.@ 5 % of it',
            '"Craig" in (the) episode "Teddy\'s Story", 3.5% of it',
        ),
        (" the teams ' pay : $ 5 , why ? because !", "the teams' pay: $5, why? because!"),
        (" as <unk> , the <unk> <unk> Factory .", "as, the Factory."),
        (' A review of <unk> \'s part ( <unk> ) in " <unk> " .', "A review of part in."),
        (
            " a Neo @-@ <unk> church , a <unk> @-@ class ship of 18 @,@ <unk> tons",
            "a Neo church, a class ship of tons",
        ),
        (
            'Ordinary (plain) text, "quoted": it\'s 5% = five.',
            'Ordinary (plain) text, "quoted": it\'s 5% = five.',
        ),
        ("One.\n\n Two .\n", "One.\n\nTwo.\n"),
    ],
)
def test_wikitext_is_read_as_ordinary_text(tokenised: str, plain: str, tmp_path: Path) -> None:
    (tmp_path / "wikitext_test.txt.gz").write_bytes(gzip.compress(tokenised.encode()))
    assert load_text(tmp_path).content == plain
    assert detokenize(plain) == plain


def test_nothing_of_the_tokenised_form_is_left(measuring_data: Path) -> None:
    for name in (WIKITEXT_TEST, WIKITEXT_VALID):
        before, text = read_text(find_file(measuring_data, name)), read_wikitext(measuring_data, name)
        left = re.findall(r"<unk>| @.@ | 's\b|\w [,;](?= )|\w \. |^= = ", text, re.MULTILINE)
        assert not left
        assert text.count("\n") == before.count("\n")
        # Only unknown words go.
        words, known = (re.sub(r"[^a-z]+", "", each.lower()) for each in (text, before.replace("<unk>", "")))
        assert 0.99 * len(known) < len(words) <= len(known)


def test_the_real_files_can_be_read(measuring_data: Path) -> None:
    questions = load_spec_bench(find_file(measuring_data, "specbench_480.jsonl"))
    tasks = [question.task for question in questions]
    assert {task: tasks.count(task) for task in tasks} == dict.fromkeys(
        ["multi-turn", "translation", "summarization", "qa", "math_reasoning", "rag"], 80
    )
    long = load_long_bench(find_file(measuring_data, "longbench_v1_mini.jsonl"))
    assert len(long) == 185
    classified = [prompt for prompt in long if prompt.task == "trec"]
    assert all(prompt.answers[0] in prompt.classes for prompt in classified)
    assert next(load_passages(find_file(measuring_data, "corpus_wiki_passages.jsonl"))).title == "Teutberga"
    assert load_text(measuring_data).source == "wikitext_test.txt"
