"""Pools of endpoints: who is asked, what is tried elsewhere, who is left out; over real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from specrag.errors import UpstreamError
from specrag.models.endpoint import Address, Pool, PoolSettings, ReplicaSettings
from specrag.models.endpoint.breaker import LONGEST_REST, Breaker
from specrag.models.endpoint.connection import Call, Refused
from specrag.models.endpoint.pool import ChunkStream, Load, Replica
from specrag.models.endpoint.prefixes import BLOCK_BYTES, REMEMBERED, ReadPrefixes, blocks_of
from tests.models.upstream_server import MODEL, SAID, UpstreamServer, upstream_server

KEY = "sk-very-secret-1234"
QUICK = PoolSettings(failures=5, rest_seconds=0.3, check_seconds=60.0)


def chat(text: str = "What is copper?", **more: Any) -> Call:
    return Call("/chat/completions", {"messages": [{"role": "user", "content": text}], **more})


def text_of(stream: ChunkStream, told: list[str]) -> str:
    """Everything that a stream says; ``told`` holds what came before a failure."""
    while chunks := stream.next():
        told += [piece.text for chunk in chunks for piece in chunk.pieces]
    return "".join(told)


def streamed(pool: Pool, call: Call) -> str:
    return text_of(pool.stream(Call(call.path, {**(call.body or {}), "stream": True})), [])


def content(answer: Any) -> str:
    said: str = answer["choices"][0]["message"]["content"]
    return said


@contextmanager
def pool_of(*servers: UpstreamServer, **settings: Any) -> Iterator[Pool]:
    replicas = [
        ReplicaSettings(Address(server.url, KEY, silence_seconds=0.5, answer_seconds=0.5), **settings)
        for server in servers
    ]
    pool = Pool("quartz", replicas, QUICK)
    pool.connect()
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture
def first() -> Iterator[UpstreamServer]:
    with upstream_server() as server:
        yield server


@pytest.fixture
def second() -> Iterator[UpstreamServer]:
    with upstream_server() as server:
        yield server


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# -- the circuit breaker ----------------------------------------------------------------------------------------


def test_failures_in_a_row_open_the_circuit_and_only_a_probe_closes_it() -> None:
    clock = Clock()
    breaker = Breaker(clock, failures=3, rest=2.0)
    breaker.fail("a")
    breaker.fail("b")
    breaker.succeed()  # the row begins anew
    breaker.fail("c")
    breaker.fail("d")
    assert breaker.is_ready
    breaker.fail("e")
    assert breaker.reason == "e"
    assert not breaker.is_ready
    breaker.succeed()  # of a call that began before
    assert breaker.is_open
    clock.now += 1.9
    assert not breaker.probe_due
    clock.now += 0.2
    assert breaker.probe_due
    assert not breaker.is_ready  # nobody's request is the probe
    breaker.probe_succeeded()
    assert breaker.is_ready


def test_a_replica_that_stays_sick_is_probed_less_and_less_often() -> None:
    clock = Clock()
    breaker = Breaker(clock, failures=1, rest=1.0)
    breaker.fail("gone")
    rests = []
    for _ in range(7):
        rests.append(breaker.rest_seconds)
        clock.now += breaker.rest_seconds
        breaker.probe_failed("still gone")
    assert rests == [1, 2, 4, 8, 16, LONGEST_REST, LONGEST_REST]
    breaker.probe_succeeded()
    breaker.fail("gone")
    assert breaker.rest_seconds == 1


def test_a_busy_replica_is_spared_and_is_not_sick() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.spare(5.0)
    breaker.spare(2.0)  # a shorter pause ends no longer one
    assert (breaker.is_ready, breaker.is_open) == (False, False)
    clock.now += 4.9
    assert not breaker.is_ready
    clock.now += 0.2
    assert breaker.is_ready


# -- who is asked -----------------------------------------------------------------------------------------------


def test_blocks_are_those_of_the_common_beginning() -> None:
    one, other = b"a" * 3 * BLOCK_BYTES, b"a" * 2 * BLOCK_BYTES + b"b" * BLOCK_BYTES
    assert len(blocks_of(one)) == 3
    assert blocks_of(one)[:2] == blocks_of(other)[:2]
    assert blocks_of(one)[2] != blocks_of(other)[2]
    assert len(set(blocks_of(one))) == 3  # a block is told with all in front of it
    assert not blocks_of(b"short")


def test_what_is_remembered_is_bounded_and_the_beginning_stays_longest() -> None:
    read = ReadPrefixes()
    for number in range(REMEMBERED):
        read.add(blocks_of(b"x" * BLOCK_BYTES + str(number).zfill(BLOCK_BYTES).encode()))
    assert len(read) == REMEMBERED
    assert read.known(blocks_of(b"x" * BLOCK_BYTES)) == 1


def test_of_a_prompt_its_end_is_forgotten_first() -> None:
    read = ReadPrefixes()
    prompt = blocks_of(b"p" * 4 * BLOCK_BYTES)
    read.add(prompt)
    for number in range(REMEMBERED - 3):
        read.add(blocks_of(str(number).zfill(BLOCK_BYTES).encode()))
    assert read.known(prompt) == 3


def make_replica(weight: float = 1.0) -> Replica:
    return Replica(1, ReplicaSettings(Address("http://nowhere/v1"), weight), QUICK, Clock())


def test_work_is_what_is_outstanding_and_not_read_yet_by_weight() -> None:
    replica = make_replica(weight=2.0)
    load = Load(1000, blocks_of(b"p" * 4 * BLOCK_BYTES))
    assert replica.work(load) == 500
    replica.outstanding = 300
    assert replica.work(load) == 650
    replica.read.add(load.blocks[:2])
    assert replica.work(load) == (300 + 1000 - 2 * 128) / 2


def test_calls_are_spread_by_outstanding_tokens(first: UpstreamServer, second: UpstreamServer) -> None:
    first.pause = second.pause = 0.1
    with pool_of(first, second) as pool:
        calls = pool.begin([chat(f"Question {number}") for number in range(6)])
        answers = [calls.next().answer() for _ in range(6)]
    assert all(content(answer) == SAID for answer in answers)
    assert (len(first.calls), len(second.calls)) == (3, 3)


def test_weights_share_the_work_out(first: UpstreamServer, second: UpstreamServer) -> None:
    first.pause = second.pause = 0.1
    heavy = ReplicaSettings(Address(first.url), weight=3.0)
    pool = Pool("quartz", [heavy, ReplicaSettings(Address(second.url))], QUICK)
    pool.connect()
    calls = pool.begin([chat(f"Question {number}") for number in range(8)])
    for _ in range(8):
        calls.next().answer()
    pool.close()
    assert (len(first.calls), len(second.calls)) == (6, 2)


def test_the_same_passages_go_to_the_replica_that_has_read_them(
    first: UpstreamServer, second: UpstreamServer
) -> None:
    texts = {name: f"[1] {name} " * 200 for name in ("copper", "tin", "zinc")}
    with pool_of(first, second) as pool:
        for _ in range(3):
            for name in ("copper", "tin", "zinc"):
                pool.ask(chat(f"{texts[name]} What is it? {time.monotonic()}"))
    readers = {
        name: {
            server.port
            for server in (first, second)
            for call in server.calls
            if call["messages"][0]["content"].startswith(texts[name])
        }
        for name in texts
    }
    assert all(len(ports) == 1 for ports in readers.values())
    assert len(set.union(*readers.values())) == 2


def test_affinity_gives_way_to_load(first: UpstreamServer, second: UpstreamServer) -> None:
    first.pause = second.pause = 0.1
    passages = "[1] copper " * 60
    with pool_of(first, second) as pool:
        pool.ask(chat(passages))
        calls = pool.begin([chat(passages, max_tokens=500) for _ in range(6)])
        for _ in range(6):
            calls.next().answer()
    assert min(len(first.calls), len(second.calls)) >= 2


# -- what is tried elsewhere ------------------------------------------------------------------------------------

BEFORE = ["drop", "silent", "html", "500", "503", "403", "404 model_not_found"]


@pytest.mark.parametrize("fault", [*BEFORE, "nonsense", "other-json"])
def test_a_failed_answer_is_asked_for_elsewhere(
    fault: str, first: UpstreamServer, second: UpstreamServer
) -> None:
    with pool_of(first, second) as pool:
        first.faults.extend([fault] * 2)  # a dropped connection is tried once more on the same replica
        assert content(pool.ask(chat())) == SAID
        assert pool.retries >= 1
    assert len(second.calls) == 1


@pytest.mark.parametrize("fault", [*BEFORE, "drop 0", "end 0", "done 0", "silent 0", "garbage 0", "error 0"])
def test_a_stream_that_fails_before_its_first_token_begins_elsewhere(
    fault: str, first: UpstreamServer, second: UpstreamServer
) -> None:
    with pool_of(first, second) as pool:
        first.faults.extend([fault] * 2)
        assert streamed(pool, chat()) == SAID
    assert len(second.calls) == 1


@pytest.mark.parametrize("fault", ["drop 2", "end 2", "done 2", "silent 2", "garbage 2", "error 2"])
def test_a_stream_that_fails_later_ends_with_an_error_that_names_the_upstream(
    fault: str, first: UpstreamServer, second: UpstreamServer
) -> None:
    with pool_of(first, second) as pool:
        first.faults.append(fault)
        told: list[str] = []
        with pytest.raises(UpstreamError, match=r"upstream quartz: .* after the first token"):
            text_of(pool.stream(chat(stream=True)), told)
    assert "".join(told) == "Copper conducts "  # nothing of what came is lost
    assert not second.calls


@pytest.mark.parametrize("status", ["400", "404", "422"])
def test_a_refused_request_is_refused_at_once(
    status: str, first: UpstreamServer, second: UpstreamServer
) -> None:
    with pool_of(first, second) as pool:
        first.faults.append(status)
        with pytest.raises(Refused, match="upstream quartz: it refuses the request: said Bearer") as told:
            pool.ask(chat())
        assert pool.healthy == 2
    assert not second.calls
    assert KEY not in str(told.value)
    assert "127.0.0.1" not in str(told.value)


def test_where_nobody_is_left_the_last_reason_is_told(first: UpstreamServer, second: UpstreamServer) -> None:
    with pool_of(first, second) as pool:
        first.faults.append("500")
        second.faults.append("500")
        with pytest.raises(UpstreamError, match="upstream quartz: it answers 500") as told:
            pool.ask(chat())
    assert told.value.status == 502


def test_an_idle_connection_that_was_closed_is_no_failure(first: UpstreamServer) -> None:
    with pool_of(first) as pool:
        first.faults.append("drop")
        assert content(pool.ask(chat())) == SAID
        assert pool.healthy == 1


# -- who is left out --------------------------------------------------------------------------------------------


def test_a_killed_replica_is_left_out_and_comes_back(first: UpstreamServer, second: UpstreamServer) -> None:
    with pool_of(first, second) as pool:
        first.kill()
        assert content(pool.ask(chat())) == SAID
        assert pool.healthy == 1  # at once: it cannot be reached
        assert pool.reasons == ["1: it cannot be reached"]
        with upstream_server(first.port) as again:
            wait_for(lambda: pool.healthy == 2)
            for _ in range(4):
                pool.ask(chat(f"Question {time.monotonic()}"))
            assert again.calls


def test_a_replica_killed_in_mid_answer_costs_no_answer(
    first: UpstreamServer, second: UpstreamServer
) -> None:
    first.pause = 0.2
    with pool_of(first, second) as pool:
        calls = pool.begin([chat()])
        wait_for(lambda: first.calls)
        first.kill()
        assert content(calls.next().answer()) == SAID


def test_a_pool_without_replicas_says_why_at_once(first: UpstreamServer) -> None:
    first.kill()
    with pool_of(first) as pool:
        began = time.monotonic()
        with pytest.raises(
            UpstreamError, match=r"upstream quartz: no replica can answer \(1: it cannot be reached\)"
        ) as told:
            pool.ask(chat())
        assert time.monotonic() - began < 0.5
    assert told.value.status == 503
    assert told.value.retry_after


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("html", "no JSON"), ("object", "it is no OpenAI server"), ("other", "it serves verses and not words")],
)
def test_what_does_not_serve_the_model_is_left_out(
    fault: str, reason: str, first: UpstreamServer, second: UpstreamServer
) -> None:
    second.models_fault = fault
    with pool_of(first, second) as pool:
        assert pool.healthy == 1
        assert reason in pool.reasons[0]
        assert content(pool.ask(chat())) == SAID
        assert pool.model == MODEL
        assert pool.context_length == 4096
        second.models_fault = ""
        wait_for(lambda: pool.healthy == 2)
    assert not second.calls


# -- pauses that are asked for ----------------------------------------------------------------------------------


def test_retry_after_is_honoured(first: UpstreamServer, second: UpstreamServer) -> None:
    with pool_of(first, second) as pool:
        first.faults.append("429 2")
        began = time.monotonic()
        while time.monotonic() - began < 1.0:
            assert content(pool.ask(chat(f"Question {time.monotonic()}"))) == SAID
        assert len(first.calls) == 1  # the one that was told to wait
        assert pool.healthy == 2
        wait_for(lambda: pool.ask(chat(f"Question {time.monotonic()}")) and len(first.calls) > 1)


@pytest.mark.parametrize("fault", ["429 7", "503 7"])
def test_where_all_are_busy_the_pause_is_told(
    fault: str, first: UpstreamServer, second: UpstreamServer
) -> None:
    with pool_of(first, second) as pool:
        first.faults.append(fault)
        second.faults.append("429 30")
        for _ in range(2):
            with pytest.raises(UpstreamError, match="upstream quartz: it is too busy") as told:
                pool.ask(chat())
            assert told.value.status == 429
            assert told.value.retry_after == 7
    assert len(first.calls) + len(second.calls) == 2


# -- the rest ---------------------------------------------------------------------------------------------------


def test_cancelling_a_stream_reaches_the_replica(first: UpstreamServer) -> None:
    first.pause = 0.3
    with pool_of(first) as pool:
        stream = pool.stream(chat(stream=True))
        assert stream.next()
        stream.cancel()
        wait_for(lambda: first.gone == 1)
        assert pool.replicas[0].outstanding == 0
        assert pool.healthy == 1


def test_each_replica_gets_its_own_key_alone(first: UpstreamServer, second: UpstreamServer) -> None:
    replicas = [
        ReplicaSettings(Address(first.url, "one-key")),
        ReplicaSettings(Address(second.url, "other-key")),
    ]
    assert "one-key" not in repr(replicas)
    pool = Pool("quartz", replicas, QUICK)
    pool.connect()
    for number in range(4):
        pool.ask(chat(f"Question {number}"))
    pool.close()
    assert {seen["authorization"] for seen in first.seen} == {"Bearer one-key"}
    assert {seen["authorization"] for seen in second.seen} == {"Bearer other-key"}
