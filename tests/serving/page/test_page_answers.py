"""Asking through the page: what is shown is what the server said."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from specrag.methods.citations import without_citations
from tests.serving.page.conftest import Visit
from tests.serving.page.live import LiveServer, serve, wait_until

QUESTION = "What did Johannes Gutenberg invent?"  # an answer that quotes its passage on any processor
LONG = "Write a very long story about the sea, with many chapters."


def served(server: LiveServer, question: str, method: str, max_tokens: int) -> dict[str, Any]:
    """The server's own answer to what the page asks, without a stream."""
    body = {
        "model": server.app.state.service.settings.name,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "seed": 0,
        "specrag": {"kb": "sample", "method": method},
    }
    answer = httpx.post(f"{server.url}v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_an_answer_with_its_sources(visit: Callable[..., Visit], server: LiveServer) -> None:
    here = visit()
    page = here.page
    # It guesses whenever it can; ReSpec guesses where that pays, which a busy machine may deny.
    here.choose("prompt-lookup", max_tokens="48")
    here.ask(QUESTION)
    expected = served(server, QUESTION, "prompt-lookup", 48)
    said = expected["choices"][0]["message"]["content"]
    assert page.inner_text("#turn-1-run-1-answer").strip() == said.strip()
    assert said.strip()

    # Tokens of more than one origin, each told by its class and in words; the legend's counts add up.
    kinds = set(
        page.eval_on_selector_all("#turn-1-run-1-answer .token", "all => all.map(one => one.className)")
    )
    assert "token target" in kinds
    assert len(kinds - {"token target", "token given"}) >= 1
    titles = page.eval_on_selector_all("#turn-1-run-1-answer .token", "all => all.map(one => one.title)")
    assert all(titles)
    counts = [int(text.split()[0]) for text in page.locator(".run .legend .muted").all_inner_texts()]
    tokens = expected["specrag"]["usage"]["completion_tokens"]
    assert sum(counts) == tokens

    # Sources as served, in their order; what the answer cites is marked, a citation leads there.
    sources = expected["specrag"]["sources"]
    assert page.locator(".source-title").all_inner_texts() == [source["title"] for source in sources]
    cited = [source["number"] for source in sources if source["cited"]]
    assert page.locator(".source.cited").count() == len(cited) >= 1
    passage = sources[cited[0] - 1]["text"]
    marked = page.locator(f"#turn-1-run-1-source-{cited[0]} mark").all_inner_texts()
    assert marked
    assert all(text in passage for text in marked)
    # A citation opens its passage at the words that its sentence shares with it.
    page.click("#turn-1-run-1-answer a.citation >> nth=0")
    assert page.evaluate("document.activeElement.id") == f"turn-1-run-1-source-{cited[0]}"
    sought = page.locator(f"#turn-1-run-1-source-{cited[0]} mark.sought")
    assert "printing press" in " ".join(sought.all_inner_texts())
    seen: Any = sought.first.bounding_box()
    composer: Any = page.locator("#ask").bounding_box()
    assert 0 <= seen["y"] < composer["y"]

    # The passes: one bar group each, and the same as a table.
    page.click(".passes summary")
    rows = page.locator(".passes tbody tr")
    rows.first.wait_for()
    assert 1 <= rows.count() < tokens
    texts = page.locator(".passes td.text").evaluate_all("all => all.map(one => one.textContent)")
    assert without_citations(said)[1:] in "".join(
        texts
    )  # citations are specrag's, passes have the model's tokens
    kept = [int(text) for text in page.locator(".passes tr td:nth-child(4)").all_inner_texts()]
    assert sum(kept) == expected["specrag"]["usage"]["accepted"]
    assert page.locator("svg[role=img] .block.verifying").count() == rows.count()
    label = page.get_attribute(".timeline svg[role=img]", "aria-label") or ""
    assert f"{rows.count()} rounds made {tokens} tokens" in label
    assert page.get_attribute("#turn-1-run-1-answer", "aria-busy") is None
    assert "done" in page.inner_text("#status")


def test_the_timeline_grows_while_the_answer_comes(visit: Callable[..., Visit]) -> None:
    here = visit()
    here.page.evaluate("""() => {
        window.drawn = [];
        const look = () => {
            const state = document.querySelector(".run-state")?.dataset.state;
            const blocks = document.querySelectorAll(".timeline .block.verifying").length;
            window.drawn.push([state, blocks]);
        };
        new MutationObserver(look).observe(document.getElementById("thread"), { childList: true, subtree: true });
    }""")
    here.choose("plain", max_tokens="60")
    here.ask(QUESTION)
    running = [blocks for state, blocks in here.page.evaluate("window.drawn") if state == "running"]
    assert running == sorted(running)
    assert len(set(running)) >= 4


def test_a_prompt_that_was_read_before_is_told(visit: Callable[..., Visit]) -> None:
    first, again = visit(), visit()
    for here in (first, again):
        here.choose("plain", max_tokens="4")
        here.ask("Which river did the first steamboat of Robert Fulton sail?")
    told = again.page.locator(".figures").text_content() or ""
    found = re.search(r"Prompt tokens known([\d,]+) of ([\d,]+)", told)
    assert found is not None, told
    known, whole = (int(number.replace(",", "")) for number in found.groups())
    assert whole - known < 3


def test_two_methods_one_after_the_other(visit: Callable[..., Visit]) -> None:
    here = visit()
    page = here.page
    page.evaluate("""() => {
        window.states = [];
        const look = () => [...document.querySelectorAll(".run-state")].map((place) => place.dataset.state).join(" ");
        new MutationObserver(() => window.states.push(look()))
            .observe(document.getElementById("thread"), { childList: true, subtree: true, attributes: true });
    }""")
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.post_data else None)
    here.choose("respec", "plain", max_tokens="40")
    here.ask(QUESTION)
    assert [body["specrag"].get("fresh") for body in sent] == [True, True]  # neither finds the prompt read
    states = set(page.evaluate("window.states"))
    assert {"running waiting", "done running", "done done"} <= states
    assert "running running" not in states
    answers = page.locator(".answer").all_inner_texts()
    assert answers[0] == answers[1]
    assert page.locator(".comparison").is_visible()
    assert "Both wrote the same text" in page.inner_text(".comparison")
    rates = [float(text) for text in page.locator(".comparison td.number:nth-child(5)").all_inner_texts()]
    shown = [float(text) for text in page.locator(".figures div:last-child dd").all_inner_texts()]
    assert rates == shown
    assert min(rates) > 0
    # The headline is about the whole time: what each run's own headline says.
    whole = [
        text.removesuffix(" s") for text in page.locator(".comparison td:nth-child(2)").all_inner_texts()
    ]
    headlines = page.locator(".headline").all_inner_texts()
    assert all(text.startswith(f"Answered in {time} s") for text, time in zip(headlines, whole, strict=True))
    assert all("s reading" in text for text in headlines)
    first, second = map(float, whole)
    verdict = page.inner_text(".comparison h3")
    if second > first * 1.04:
        assert verdict.startswith("respec answered ")
        assert verdict.endswith(" times as fast as plain")
    elif first > second * 1.04:
        assert verdict == f"respec was slower than plain: {whole[0]} s against {whole[1]} s"
    else:
        assert "respec" in verdict
    boxes = [page.locator(".run").nth(index).bounding_box() for index in (0, 1)]
    assert boxes[0]
    assert boxes[1]
    assert boxes[0]["y"] == boxes[1]["y"]


def test_stopping_frees_the_server(visit: Callable[..., Visit], server: LiveServer) -> None:
    here = visit()
    page = here.page
    here.choose("plain", kb="", max_tokens="2000")
    page.fill("#question", LONG)
    page.press("#question", "Enter")
    page.locator("#turn-1-run-1-answer .token").nth(5).wait_for()
    page.press("body", "Escape")
    page.wait_for_selector("#submit", state="visible")
    assert page.inner_text(".run-state") == "Stopped"
    assert "stopped" in page.inner_text("#status")
    so_far = page.inner_text("#turn-1-run-1-answer")
    wait_until(lambda: server.app.state.service.admission.running == 0, 5)
    assert page.inner_text("#turn-1-run-1-answer") == so_far != ""
    here.choose("plain", kb="", max_tokens="4")
    here.ask("Hello")
    assert here.last(".run-state").inner_text() == "Done"


def test_refusals_and_a_lost_server_are_told_in_words(visit: Callable[..., Visit]) -> None:
    here = visit()
    page = here.page
    here.choose("respec", k="99")
    here.ask(QUESTION)
    told = here.last(".run [role=alert]").inner_text()
    assert told.startswith("specrag.k: 99 is not usable: give a whole number from 1 to ")
    assert here.last(".run-state").inner_text() == "Failed"
    here.choose("respec", k="3")
    page.context.set_offline(True)
    here.ask(QUESTION)
    assert "does not answer" in here.last(".run [role=alert]").inner_text()
    page.context.set_offline(False)
    here.choose("respec", max_tokens="8")
    here.ask(QUESTION)
    assert here.last(".run [role=alert]").count() == 0
    assert here.last(".run-state").inner_text() == "Done"


def test_an_abstention_says_why_and_is_answered_all_the_same(visit: Callable[..., Visit]) -> None:
    here = visit()
    page = here.page
    here.choose("respec", max_tokens="12")
    here.ask("How do I reset my router password?")
    assert "holds nothing about this question" in page.inner_text(".answer")
    assert page.locator(".answer .token:not(.given)").count() == 0  # no model's text
    best = re.search(r"has a similarity of (0\.\d\d)", page.inner_text(".abstention"))
    assert best
    assert float(best[1]) < 0.4
    with page.expect_request("**/v1/chat/completions") as asked:
        page.click("text=Answer anyway")
    page.wait_for_selector("#submit", state="visible", timeout=60_000)
    body: Any = asked.value.post_data_json
    assert body["specrag"]["abstain"] is False
    assert page.locator(".turn").count() == page.locator(".run").count() == 1
    assert page.locator(".answer .token:not(.given)").count() > 0
    assert page.locator(".abstention").count() == 0


def test_drafts_of_speculative_rag(visit: Callable[..., Visit]) -> None:
    here = visit()
    page = here.page
    if not page.locator("#method-1 option[value=speculative-rag]").count():
        pytest.skip("this server has no Speculative RAG")
    here.choose("speculative-rag", k="5")
    page.fill("#option-1-drafts", "3")
    page.fill("#option-1-draft_tokens", "64")
    assert page.inner_text("#settings-changed") == "3 changed"
    here.ask(QUESTION)
    assert page.inner_text(".run-state") == "Done"
    assert page.locator(".draft-card").count() == 3
    assert page.locator(".draft-card.won").count() == 1
    won = page.locator(".draft-card.won")
    assert won.locator(".badge").inner_text() == "chosen"
    assert (
        page.inner_text("#turn-1-run-1-answer").strip() == won.locator(".draft-answer").inner_text().strip()
    )
    totals = [float(text) for text in page.locator(".draft-card .total dd").all_inner_texts()]
    assert float(won.locator(".total dd").inner_text()) == max(totals)
    assert all(re.search(r"from \d", text) for text in page.locator(".draft-head").all_inner_texts())


def test_options_of_every_kind_are_sent_as_what_they_are(visit: Callable[..., Visit]) -> None:
    here = visit()
    page = here.page

    here.choose("speculative-rag", max_tokens="8")
    page.fill("#option-1-without", "draft, self-reflect")
    page.fill("#option-1-drafts", "2")
    page.select_option("#option-1-decoder", "prompt-lookup")
    assert here.ask(QUESTION)["specrag"]["options"] == {
        "without": ["draft", "self-reflect"],
        "drafts": 2,
        "decoder": "prompt-lookup",
    }
    page.click("#new-chat")
    page.locator("#choices").evaluate("details => details.open = true")
    # What reads a long text of the question itself cannot be chosen with a knowledge base.
    assert page.locator("#method-1 option[value=rapid]").is_disabled()
    here.choose("rapid", kb="")
    assert page.input_value("#option-1-suffix") == ""
    page.select_option("#option-1-suffix", "false")
    page.check("#option-1-truncate_middle")
    told = here.ask("The ferry leaves at nine. " * 40)["specrag"]
    assert told == {
        "method": "rapid",
        "events": True,
        "options": {"suffix": False, "truncate_middle": True},
    }
    assert "no long text" in here.last(".run [role=alert]").inner_text()  # nothing is asked about it
    assert (
        page.locator("#about-1").text_content()
        == "RAPID: a drafter that reads the relevant part of a long text guesses for the model that reads all."
    )


def test_a_key_is_asked_for_and_kept_for_the_tab(visit: Callable[..., Visit]) -> None:
    with serve(ready=False, api_key="0123456789abcdef") as locked:  # the page waits for the model
        here = visit(url=locked.url)
        page = here.page
        page.wait_for_selector("#key-dialog[open]", timeout=60_000)
        page.fill("#key", "not-the-right-one")
        page.press("#key", "Enter")
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "0123456789abcdef")
        with page.expect_response(lambda response: response.status == 401):  # late, while a key is typed
            page.evaluate("import('/page/api.js').then((api) => void api.getJson('v1/models'))")
        page.evaluate("new Promise((done) => setTimeout(done, 200))")
        page.press("#key", "Enter")
        page.wait_for_selector("#method-1 option", state="attached")
        here.choose("plain", kb=None, max_tokens="4")
        here.ask("Hello")
        assert page.inner_text(".run-state") == "Done"
        page.reload()
        page.wait_for_selector("#method-1 option", state="attached")
        assert not page.locator("#key-dialog[open]").count()
        assert page.evaluate("JSON.stringify(localStorage)").count("0123456789abcdef") == 0
