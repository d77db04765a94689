"""The drafter inside a real vLLM server: the same answers, whatever happens to the rows."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from specrag.integrations.vllm.memory import DELAY, FILE
from tests.integrations.vllm.conftest import NEW, PROMPTS, Prompts, Served, story


def test_answers_of_sixteen_clients_are_those_without_a_proposer(served: Served) -> None:
    assert len(served.answers) == PROMPTS
    both = zip(served.answers, served.plain, strict=True)
    assert [place for place, (ours, plain) in enumerate(both) if ours != plain] == []
    assert served.counts.accepted > PROMPTS / 2
    assert served.counts.accepted > 0.3 * served.counts.drafted


def test_requests_that_are_cancelled(served: Served, prompts: Prompts) -> None:
    """Their rows go in the middle of an answer, and others take their places."""
    with ThreadPoolExecutor(8) as pool:
        left = [pool.submit(served.client.leave_early, prompt, 300) for prompt, _ in prompts[-4:]]
        assert served.client.ask_all(prompts[:6], 4) == served.plain[:6]
        for future in left:
            future.result()
    assert served.client.ask_all(prompts[6:10], 4) == served.plain[6:10]


def test_passages_of_a_request_are_copied_from(served: Served) -> None:
    prompt, client = story(4), served.client
    answer = client.ask(prompt, NEW)
    without = client.accepted(prompt, NEW)
    given = client.accepted(prompt, NEW, {"specrag_passages": [f"Something else. {answer}"]})
    assert given > without + 10
    assert client.ask(prompt, NEW, {"specrag_passages": [answer]}) == answer


def test_earlier_answers_are_copied_by_the_same_tenant_only(served: Served) -> None:
    prompt, client = story(2), served.client
    acme, other = {"specrag_tenant": "acme"}, {"specrag_tenant": "other"}
    first = client.accepted(prompt, NEW, acme)
    client.ask(story(8), 4)  # the row has to leave
    foreign = client.accepted(prompt, NEW, other)
    nobody = client.accepted(prompt, NEW)
    own = client.accepted(prompt, NEW, acme)
    # What all of them copy from their own text depends on how well that has paid lately, so that it differs a little.
    assert own > max(first, foreign, nobody) + 10


def test_a_restart_keeps_each_tenants_answers(served: Served, prompts: Prompts) -> None:
    """Killed, not asked to end."""
    if served.has_restarted:
        pytest.skip("another test has restarted it: run this file in its order")
    prompt, kept, other = story(6), {"specrag_tenant": "kept"}, {"specrag_tenant": "other"}
    first = served.client.accepted(prompt, NEW, kept)
    answer = served.client.ask(prompt, NEW)
    before = time.time()
    while not (served.memory / FILE).is_file() or (served.memory / FILE).stat().st_mtime < before:
        assert time.time() < before + 10 * DELAY
        served.client.ask(story(8), 2, kept)  # the last row leaves when another comes
        time.sleep(0.5)
    served.restart()
    foreign = served.client.accepted(prompt, NEW, other)
    assert served.client.accepted(prompt, NEW, kept) > max(first, foreign) + 10
    assert served.client.ask(prompt, NEW, kept) == answer
    assert served.client.ask_all(prompts[:6], 3) == served.plain[:6]


def test_a_corpus_is_copied_from(served: Served) -> None:
    served.restart()
    told, guessed = served.told, served.guessed
    served.tell()
    assert served.told == told
    assert served.guessed > guessed + 10 * len(told)
