"""The drafter inside a real vLLM server: the same answers, whatever happens to the rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.server.subjects import VLLM_SPECRAG
from tests.integrations.vllm.conftest import ARTICLES, PROMPTS, Client, serving

Prompts = list[tuple[str, int]]


def _own(number: int) -> str:
    """A prompt that stands in no corpus, for an answer that hardly repeats it."""
    return f"{ARTICLES[number]['title']} and {ARTICLES[number + 1]['title']}: a short story.\n\n"


def test_answers_of_sixteen_clients_are_those_without_a_proposer(
    client: Client, prompts: Prompts, plain_answers: list[str]
) -> None:
    """They ask for 12 to 40 tokens, so that rows end, move and are replaced all the time."""
    answers = client.ask_all(prompts)
    assert len(answers) == PROMPTS
    assert [
        place for place, (ours, plain) in enumerate(zip(answers, plain_answers, strict=True)) if ours != plain
    ] == []
    counts = client.counts()
    assert counts.accepted > 2 * PROMPTS
    assert counts.accepted > 0.3 * counts.drafted


def test_requests_that_are_cancelled(client: Client, prompts: Prompts, plain_answers: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        left = [pool.submit(client.leave_early, prompt, 300) for prompt, _ in prompts[-4:]]
        assert client.ask_all(prompts[:6], 4) == plain_answers[:6]
        for future in left:
            future.result()
    assert client.ask_all(prompts[6:10], 4) == plain_answers[6:10]


def test_a_corpus_is_copied_from(
    client: Client, smollm2: Path, prompts: Prompts, plain_answers: list[str]
) -> None:
    """The answers to the first sixth of the prompts stand in it; those to others do not."""
    inside, outside = (
        sum(client.accepted(prompt, new) / new for prompt, new in some) / len(some)
        for some in (prompts[: PROMPTS // 6][:5], prompts[-(PROMPTS // 6) :][:5])
    )
    assert inside > outside + 0.15  # of the tokens written, those that were guessed


def test_passages_of_a_request_are_copied_from(client: Client) -> None:
    prompt = _own(4)
    answer = client.ask(prompt, 60)
    without = client.accepted(prompt, 60)
    given = client.accepted(prompt, 60, {"specrag_passages": [f"Something else. {answer}"]})
    assert given > without + 15
    assert client.ask(prompt, 60, {"specrag_passages": [answer]}) == answer


def test_earlier_answers_are_copied_by_the_same_tenant_only(client: Client) -> None:
    prompt = _own(4)
    acme, other = {"specrag_tenant": "acme"}, {"specrag_tenant": "other"}
    first = client.accepted(prompt, 60, acme)
    client.ask(_own(8), 4)  # the row has to leave
    foreign = client.accepted(prompt, 60, other)
    nobody = client.accepted(prompt, 60)
    own = client.accepted(prompt, 60, acme)
    assert own > first + 15
    assert foreign == pytest.approx(first, abs=10)
    assert nobody == pytest.approx(first, abs=10)


def test_a_restart_begins_without_memory(
    smollm2: Path, settings: dict[str, str], prompts: Prompts, plain_answers: list[str]
) -> None:
    acme = {"specrag_tenant": "acme"}
    for _ in range(2):
        with serving(smollm2, VLLM_SPECRAG, **settings) as client:
            first = client.accepted(_own(4), 40, acme)
            client.ask(_own(8), 4)
            assert client.accepted(_own(4), 40, acme) > first + 8
            assert client.ask_all(prompts[:6], 3) == plain_answers[:6]
