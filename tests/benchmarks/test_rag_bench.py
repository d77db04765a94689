"""``python -m benchmarks.rag``: what is asked, in which order, and the table."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.rag.__main__ import Cell, main, rounds, table
from benchmarks.rag.questions import SETS, RagQuestion, drawn, load, load_alone
from benchmarks.rag.subjects import BLOCKS, OPENVINO, PLAIN_BF16, Subjects
from benchmarks.server.clients import answers_at
from benchmarks.server.subjects import PLAIN, VLLM
from specrag.errors import InputError
from specrag.models.catalog import resolve
from specrag.models.tokenizer import Tokenizer


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two questions of each set over seven passages."""
    passages = [{"id": number, "title": f"T{number}", "text": f"Text {number}."} for number in range(7)]
    files = {"corpus_wiki_passages": passages}
    for name in SETS:
        files[f"corpus_questions_{name}_dev"] = [
            {
                "id": f"{name}-{place}",
                "question": f"What is text {place}?",
                "answers": ["one", "1"],
                "bm25_top20": [6, 5, 4, 3, 1 + place, 0],
            }
            for place in range(2)
        ]
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def questions(count: int) -> list[RagQuestion]:
    return [RagQuestion(str(number), "", ("x",), (), ()) for number in range(count)]


def test_a_prompt_holds_the_five_best_passages_in_their_order(data: Path) -> None:
    found = load(data)
    assert len(found) == 2 * len(SETS)
    said = found[0].messages[-1]["content"]
    places = [said.index(f"[{number}] T{passage}") for number, passage in enumerate((6, 5, 4, 3, 1), 1)]
    assert places == sorted(places)
    assert "T0" not in said
    assert said.endswith("Question: What is text 0?")
    (data / "corpus_questions_nq_dev.jsonl").unlink()
    with pytest.raises(InputError, match="corpus_questions_nq_dev"):
        load(data)


def test_prompts_without_passages_are_spec_bench_s_even_ones(tmp_path: Path) -> None:
    rows = [
        {"question_id": number, "category": "rag", "turns": [f"Q{number}", "more"]} for number in (81, 82, 84)
    ]
    (tmp_path / "specbench_480.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_alone(tmp_path)
    assert [one.identifier for one in found] == ["82", "84"]
    assert found[0].messages == ({"role": "user", "content": "Q82"},)


def test_uniform_questions_come_once_each_before_any_comes_again() -> None:
    asked = [one.identifier for one in islice(drawn(questions(30), "uniform"), 60)]
    assert set(asked[:30]) == set(asked[30:]) == {str(number) for number in range(30)}


def test_zipf_s_law() -> None:
    """The most asked of 500 comes in one of 6.8 draws, twice as often as the second, four times as the fourth."""
    counts = Counter(one.identifier for one in islice(drawn(questions(2000), "zipf"), 20_000))
    assert len(counts) <= 500
    often = [count for _, count in counts.most_common(4)]
    assert often[0] / 20_000 == pytest.approx(1 / 6.79, rel=0.1)
    assert often[0] / often[1] == pytest.approx(2, rel=0.15)
    assert often[0] / often[3] == pytest.approx(4, rel=0.25)


def test_a_draw_goes_on_over_rounds() -> None:
    given = argparse.Namespace(rounds=2, draws=["uniform"], clients=[1, 2], rate=0.0, each=3)
    asked = [one.identifier for _, _, part in rounds(given, questions(18)) for one in part]
    assert len(asked) == len(set(asked)) == 18


def test_the_table_compares_answers_to_the_same_questions() -> None:
    def answer(method: str, place: int, total: float, *, right: bool) -> dict[str, object]:
        told = {"draw": "zipf", "clients": 4, "round": 0, "method": method, "tokens_per_second": 20.0}
        read = {"prompt_tokens": 100, "cached_tokens": 25 if method == PLAIN else 0}
        return {**told, **read, "place": place, "first": total / 2, "total": total, "right": right}

    records = [answer(VLLM, place, 2.0 + place, right=True) for place in range(4)]
    records += [answer(PLAIN, place, 1.0 + place / 2, right=place < 3) for place in range(5)]
    lines = table(records).splitlines()
    assert lines[2] == "| zipf | 4 | vllm | 4 | 1.75 / 2.42 | 3.50 / 4.85 |  | 20.0 | 0% | 100% |"
    assert lines[3].startswith("| zipf | 4 | plain | 5 | 1.00 / 1.45 | 2.00 / 2.90 | 0.50 (0.50 to 0.50) |")
    assert lines[3].endswith("| 20.0 | 25% | 60% |")
    assert "| 2.00 (2.00 to 2.00) |" in table(records, beside=PLAIN).splitlines()[2]


def test_it_asks_a_server_and_goes_on_where_it_was_stopped(
    smollm2: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (
        f"bench {tmp_path / 'out'} --data {data} --draws zipf --clients 2 --methods plain --each 1 --new 4"
    )
    records = tmp_path / "out" / "answers.jsonl"
    monkeypatch.setattr("sys.argv", [*words.split(), "--rounds", "1"])
    main()
    first = records.read_text()
    assert [json.loads(line)["place"] for line in first.splitlines()] == [0, 1]
    monkeypatch.setattr("sys.argv", [*words.split(), "--rounds", "2"])
    main()
    both = records.read_text()
    assert both.startswith(first)
    assert [json.loads(line)["round"] for line in both.splitlines()] == [0, 0, 1, 1]
    assert "| zipf | 2 | plain | 4 |" in capsys.readouterr().out


def test_no_server_is_asked_where_the_others_left_no_memory(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asleep(AbstractContextManager["Asleep"]):
        def __exit__(self, *_: object) -> None:
            pass

        @contextmanager
        def awake(self, _: object) -> Iterator[int]:
            with slow_server(0.0) as port:
                yield port

    monkeypatch.setattr(Subjects, "server", lambda *_: Asleep())
    monkeypatch.setattr("specrag.engine.memory.free_bytes", lambda: 10**9)
    words = f"bench {tmp_path / 'out'} --data {data} --draws zipf --clients 1 --each 1 --rounds 1 --methods"
    monkeypatch.setattr("sys.argv", [*words.split(), "plain", "adaptive"])
    with pytest.raises(SystemExit, match=r"2 servers stand ready and leave 1\.0 GB .* --methods,"):
        main()
    (first,) = map(json.loads, (tmp_path / "out" / "answers.jsonl").read_text().splitlines())
    assert first["method"] == PLAIN  # alone it was asked


def test_our_knowledge_base_has_read_its_passages_when_it_was_indexed(
    smollm2: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"bench {tmp_path / 'out'} --data {data} --draws zipf --clients 1 --each 1 --new 4 --rounds 1"
    monkeypatch.setattr("sys.argv", [*words.split(), "--methods", BLOCKS])
    main()
    (told,) = map(json.loads, (tmp_path / "out" / "answers.jsonl").read_text().splitlines())
    assert told["method"] == BLOCKS
    assert told["prompt_tokens"] > 40  # with passages
    assert list((tmp_path / "out" / "passages").rglob("*.safetensors"))


def test_questions_at_a_rate_do_not_wait_for_answers() -> None:
    """Three requests of which each takes 0.5 s come 0.1 s apart: all are there before the first is answered."""
    with slow_server(0.5) as port:
        run = answers_at(port, [0.0, 0.1, 0.2], [{}, {}, {}])
    assert run.ended - run.started < 1.2
    assert [answer.sent - run.started for answer in run.answers] == pytest.approx([0, 0.1, 0.2], abs=0.08)
    assert all(answer.total >= 0.5 for answer in run.answers)


def test_the_rate_of_a_cell() -> None:
    cell = Cell("uniform", 0, 50.0)
    assert cell.questions(40) == 40
    with slow_server(0.0) as port:
        run = cell.run(port, 0, [{}] * 40)
    assert 0.4 < run.answers[-1].sent - run.started < 1.4  # 40 gaps of 0.02 s on average


def test_our_engine_in_bf16_is_asked_for_plain_decoding(tmp_path: Path) -> None:
    asked = RagQuestion("1", "Who?", ("x",), (), ({"role": "user", "content": "Who?"},))
    body = Subjects("smollm2-135m", tmp_path).body(PLAIN_BF16, asked, 8)
    assert body["specrag"] == {"method": "plain"}


def test_engines_that_read_tokens_get_those_of_the_template(smollm2: Path, tmp_path: Path) -> None:
    asked = RagQuestion("1", "Who?", ("x",), (), ({"role": "user", "content": "Who?"},))
    body = Subjects("smollm2-135m", tmp_path).body(OPENVINO, asked, 8)
    tokenizer = Tokenizer(resolve("smollm2-135m"))
    text = tokenizer.chat_text(asked.messages)
    assert body["prompt"] == tokenizer.encode(text, special=False)
    assert text.endswith("Who?<|im_end|>\n<|im_start|>assistant\n")
    assert body["stop_token_ids"]


@contextmanager
def slow_server(seconds: float) -> Iterator[int]:
    """Streams one word behind a while; many requests at once."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            time.sleep(seconds)
            self.send_response(200)
            self.end_headers()
            usage = {"prompt_tokens": 1, "completion_tokens": 1}
            for chunk in ({"choices": [{"delta": {"content": "word"}}]}, {"choices": [], "usage": usage}):
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
