"""Records and measurements: round trips, torn lines, versions, and files that cannot be used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrag.bench.measurement import Measurement, from_json_lines, to_json_lines
from specrag.bench.records import Outcome, Record, RecordKey, RecordStore
from specrag.errors import InputError, SpecragError

finite = st.floats(allow_nan=False, allow_infinity=False)
outcomes = st.builds(
    Outcome,
    tokens=st.integers(0, 10**6),
    seconds=st.floats(min_value=1e-9, max_value=1e9),
    output=st.none() | st.text(),
    passes=st.none() | st.integers(0, 1000),
    drafted=st.none() | st.integers(0, 1000),
    accepted=st.none() | st.integers(0, 1000),
    drafted_by=st.none() | st.dictionaries(st.text(), st.integers(0, 1000), max_size=3),
    accepted_by=st.none() | st.dictionaries(st.text(), st.integers(0, 1000), max_size=3),
    correct=st.none() | st.floats(0, 1),
    figures=st.dictionaries(st.text(), finite, max_size=3),
)
keys = st.builds(RecordKey, task=st.text(), row=st.text(), method=st.text(), repeat=st.integers(0, 9))
measurements = st.builds(
    Measurement,
    suite=st.text(min_size=1),
    task=st.text(min_size=1),
    method=st.sampled_from(["plain", "plain+int8", "ralmspec+PSA", "rapid+a+b"]),
    baseline=st.sampled_from([None, "transformers"]),
    model=st.none() | st.text(),
    dtype=st.sampled_from([None, "bf16", "fp32", "fp16"]),
    device=st.just("cpu"),
    n=st.integers(0, 99),
    speedup=st.none() | st.floats(0, 100),
    tokens_per_second=st.none() | st.floats(0, 1e6),
    acceptance_by_source=st.none() | st.dictionaries(st.text(), st.floats(0, 1), max_size=3),
    identical=st.none() | st.floats(0, 1),
    simulated=st.booleans(),
    command=st.text(min_size=1),
    version=st.just("0.1"),
    date=st.just("2026-01-01"),
    extra=st.dictionaries(
        st.text(), st.none() | st.booleans() | st.integers() | finite | st.text(), max_size=3
    ),
)

KEY = RecordKey(task="t", row="r", method="plain", repeat=0)


def open_store(
    path: Path, *, version: str = "1", fresh: bool = False, retry_failed: bool = False
) -> RecordStore:
    return RecordStore(
        path, suite="s", version=version, setting="here", fresh=fresh, retry_failed=retry_failed
    )


@given(keys, outcomes)
def test_a_record_survives_its_line(key: RecordKey, outcome: Outcome) -> None:
    record = Record(suite="s", version="1", setting="here", key=key, outcome=outcome, other_cpu=0.25)
    line = record.to_json()
    assert "\n" not in line
    assert Record.from_json(line) == record


@given(st.lists(measurements, max_size=4))
def test_measurements_survive_their_lines(entries: list[Measurement]) -> None:
    assert from_json_lines(to_json_lines(entries)) == entries


def test_the_published_fields_are_all_there_and_null_where_they_do_not_apply() -> None:
    entry = Measurement(
        suite="engine", task="t", method="plain", device="cpu", n=1, command="c", version="v", date="d"
    )
    values = json.loads(entry.to_json())
    published = (
        "suite task method baseline model dtype device n speedup speedup_low speedup_high tokens_per_second "
        "mat acceptance acceptance_by_source identical accuracy simulated command version date"
    )
    assert set(published.split()) | {"extra"} == set(values)
    assert values["baseline"] is None
    assert values["acceptance_by_source"] is None
    assert values["simulated"] is False


def test_lines_from_before_sources_were_told_are_still_read() -> None:
    record = Record(suite="s", version="1", setting="here", key=KEY, outcome=Outcome(seconds=1.0))
    line = json.loads(record.to_json())
    assert line["outcome"]["drafted_by"] is None
    del line["outcome"]["drafted_by"], line["outcome"]["accepted_by"]
    assert Record.from_json(json.dumps(line)) == record


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("method", {"method": "magic"}),
        ("method", {"method": "plain+"}),
        ("baseline", {"baseline": "none"}),
        ("dtype", {"dtype": "int4"}),
        ("identical", {"identical": 1.5}),
        ("acceptance_by_source.suffix", {"acceptance_by_source": {"suffix": 1.5}}),
        ("speedup", {"speedup": float("nan")}),
        ("speedup", {"speedup": 1.0, "speedup_low": 1.1, "speedup_high": 1.2}),
        ("speedup", {"speedup_low": 1.1}),
        ("n", {"n": -1}),
        ("suite", {"suite": ""}),
        ("extra.x", {"extra": {"x": float("inf")}}),
        ("extra.x", {"extra": {"x": [1]}}),
    ],
)
def test_a_measurement_that_cannot_be_is_refused(field: str, changes: dict[str, object]) -> None:
    entry = Measurement(
        suite="engine", task="t", method="plain", device="cpu", n=1, command="c", version="v", date="d"
    )
    values = json.loads(entry.to_json()) | changes
    with pytest.raises(InputError) as caught:
        Measurement(**values)
    assert caught.value.field == field


def test_records_are_found_again_and_the_newest_wins(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "s.jsonl"
    with open_store(path) as store:
        store.add(KEY, Outcome(seconds=1.0))
        store.add(KEY, Outcome(seconds=2.0), 0.3)
    with open_store(path) as store:
        found = store.find(KEY)
        assert found is not None
        assert found.outcome == Outcome(seconds=2.0)
        assert found.other_cpu == 0.3
        assert store.current() == [found]


def test_records_of_another_version_or_setting_are_kept_and_not_found(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with open_store(path) as store:
        store.add(KEY, Outcome(seconds=1.0))
    with open_store(path, version="2") as store:
        assert store.find(KEY) is None
    with RecordStore(path, suite="s", version="1", setting="elsewhere") as store:
        assert store.find(KEY) is None
    with open_store(path) as store:
        assert store.find(KEY) is not None


@given(cut=st.integers(1, 200))
def test_a_torn_last_line_is_dropped_and_the_rest_is_kept(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "s.jsonl"
    second = RecordKey(task="t", row="é", method="plain", repeat=1)
    with open_store(path) as store:
        store.add(KEY, Outcome(seconds=1.0))
        whole = path.stat().st_size
        store.add(second, Outcome(seconds=1.0, output="é" * 50))
    data = path.read_bytes()
    path.write_bytes(data[: max(len(data) - cut, whole + 1)])
    with open_store(path) as store:
        assert store.dropped_torn_line
        assert store.find(KEY) is not None
        assert store.find(second) is None
        store.add(second, Outcome(seconds=3.0))
    with open_store(path) as store:
        assert not store.dropped_torn_line
        assert len(store.current()) == 2


def test_a_damaged_line_before_the_last_is_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with open_store(path) as store:
        store.add(KEY, Outcome(seconds=1.0))
    damaged = b"{half\n" + path.read_bytes()
    path.write_bytes(damaged)
    with pytest.raises(SpecragError, match=r"line 1 of .* is damaged"), open_store(path):
        pass
    assert path.read_bytes() == damaged


def test_fresh_puts_the_old_records_aside(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with open_store(path) as store:
        store.add(KEY, Outcome(seconds=1.0))
    old = path.read_bytes()
    with open_store(path, fresh=True) as store:
        assert store.find(KEY) is None
    assert (tmp_path / "s.jsonl.old").read_bytes() == old


def test_failures_have_no_time_and_are_forgotten_on_wish(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with open_store(path) as store:
        record = store.add(KEY, "MemoryError: too much")
        assert record.outcome is None
    with open_store(path) as store:
        assert store.find(KEY) == record
    with open_store(path, retry_failed=True) as store:
        assert store.find(KEY) is None
        assert store.current() == []


def test_two_processes_cannot_write_the_same_records(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    program = (
        "import sys; from pathlib import Path; from specrag.bench.records import RecordStore\n"
        "with RecordStore(Path(sys.argv[1]), suite='s', version='1', setting='here'): pass"
    )
    with open_store(path):
        done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert done.returncode != 0
    assert "another bench writes there" in done.stderr


def test_a_full_disk_is_named_and_what_was_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from specrag.bench.records import Outcome, RecordKey, RecordStore\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "with RecordStore(Path(sys.argv[1]), suite='s', version='1', setting='here') as store:\n"
        "    for repeat in range(9):\n"
        "        key = RecordKey(task='t', row='r', method='plain', repeat=repeat)\n"
        "        store.add(key, Outcome(seconds=1.0))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert "cannot be written (File too large)" in done.stderr.splitlines()[-1]
    with open_store(path) as store:
        assert store.dropped_torn_line
        assert [record.key.repeat for record in store.current()] == list(range(len(store.current())))
        assert len(store.current()) >= 2


def test_a_row_cannot_be_claimed_twice(tmp_path: Path) -> None:
    with open_store(tmp_path / "s.jsonl") as store:
        store.claim("t", "r")
        store.claim("u", "r")
        with pytest.raises(InputError, match="its own name"):
            store.claim("t", "r")
