"""Conversations through the page: what is sent along, what the browser keeps, and what it must not keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specrag.serving.keys import ApiKey
from tests.sample import build_sample
from tests.serving.page.conftest import Visit
from tests.serving.page.live import serve

FIRST = "What did Johannes Gutenberg invent?"
NEXT = "And when was he born?"


def kept(here: Visit, storage: str = "localStorage") -> list[dict[str, Any]]:
    """The conversations that the browser keeps."""
    texts = here.page.evaluate(
        f"Object.keys({storage}).filter((key) => key.startsWith('specrag-chat-')).map((key) => {storage}[key])"
    )
    return [json.loads(text) for text in texts]


def test_a_follow_up_is_asked_with_what_was_said(visit: Callable[..., Visit]) -> None:
    here = visit()
    page = here.page
    here.choose("plain", max_tokens="16")
    here.ask(FIRST)
    answer = here.last(".answer").inner_text().strip()
    body = here.ask(NEXT)
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert [message["content"].strip() for message in body["messages"]] == [FIRST, answer, NEXT]
    # The search knows of whom the question is.
    searched = here.last(".sources-place .note").inner_text()
    assert searched.startswith("Searched for: ")
    assert "Gutenberg" in searched
    assert here.last(".source-title").first.inner_text() == "Johannes Gutenberg"
    # Each turn has its own answer and sources, and their ids differ.
    assert page.locator(".turn").count() == page.locator(".run").count() == 2
    assert page.locator(".turn .asked").all_inner_texts() == [FIRST, NEXT]
    ids = page.eval_on_selector_all("[id]", "all => all.map(one => one.id)")
    assert len(ids) == len(set(ids))


def test_a_method_that_reads_no_conversation_is_asked_alone(visit: Callable[..., Visit]) -> None:
    here = visit()
    here.choose("plain", max_tokens="8")
    here.ask(FIRST)
    here.choose("ralmspec", max_tokens="8")
    body = here.ask(NEXT)
    assert [message["content"] for message in body["messages"]] == [NEXT]
    assert here.last(".run-state").inner_text() == "Done"
    assert "ralmspec answers each question by itself" in here.last("> .hint").inner_text()


def test_a_chat_is_there_again_as_it_was(visit: Callable[..., Visit]) -> None:
    here = visit()
    page = here.page
    here.choose("prompt-lookup", "plain", max_tokens="16")
    here.ask(FIRST)
    shown = ".answer, .legend, .headline, .figures, .comparison, .source-title"
    before = page.locator(shown).evaluate_all("all => all.map(one => one.textContent)")
    bars = page.locator(".timeline .kept").count()
    assert bars > 0
    page.reload()
    page.wait_for_selector(".comparison h3")
    assert page.locator(shown).evaluate_all("all => all.map(one => one.textContent)") == before
    page.wait_for_function(f"document.querySelectorAll('.timeline .kept').length === {bars}")
    assert page.inner_text("#status") == ""  # nothing is told twice
    # It goes on from there.
    here.choose("plain", max_tokens="8")
    assert len(here.ask(NEXT)["messages"]) == 3


def test_chats_are_listed_opened_and_deleted(visit: Callable[..., Visit]) -> None:
    here = visit()
    page = here.page
    assert page.locator("#no-chats").is_visible()
    here.choose("plain", kb="", max_tokens="4")
    here.ask("Hello there")
    page.click("#new-chat")
    assert page.locator(".turn").count() == 0
    assert page.locator("#empty").is_visible()
    here.ask("Good evening")
    assert page.locator(".chat").all_inner_texts() == ["Good evening", "Hello there"]
    page.click("text=Hello there")
    assert page.locator(".asked").all_inner_texts() == ["Hello there"]
    assert page.locator(".chat[aria-current]").inner_text() == "Hello there"
    page.click("[aria-label='Delete the chat: Hello there']")
    assert page.locator(".turn").count() == 0
    assert page.locator(".chat").all_inner_texts() == ["Good evening"]
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#forget-all")
    page.wait_for_selector("#no-chats", state="visible")
    assert kept(here) == []


def test_a_chat_is_opened_while_another_is_answered(visit: Callable[..., Visit]) -> None:
    here = visit()
    page = here.page
    here.choose("plain", kb="", max_tokens="2000")
    page.fill("#question", "Write a very long story about the sea, with many chapters.")
    page.press("#question", "Enter")
    page.locator(".answer .token").nth(5).wait_for()
    page.click("#new-chat")
    page.wait_for_selector("#submit", state="visible")
    assert page.locator(".turn").count() == 0
    [chat] = kept(here)
    assert chat["turns"][0]["runs"][0]["state"] == "stopped"


def test_without_room_the_oldest_chat_gives_way(visit: Callable[..., Visit]) -> None:
    here = visit()
    page = here.page
    here.choose("plain", kb="", max_tokens="4")
    here.ask("The first of all")
    # All room but a few characters is taken by a chat that is as old as can be.
    page.evaluate("""() => {
        const turn = { question: "Long ago", order: "after", context: 0, runs: [] };
        const old = { id: "old", at: 1, context: "", turns: [turn] };
        let fill = "";
        for (let size = 2 ** 22; size >= 1; size /= 2) {
            try {
                localStorage.setItem("specrag-chat-old", JSON.stringify({ ...old, fill: fill + "x".repeat(size) }));
                fill += "x".repeat(size);
            } catch { /* too much */ }
        }
    }""")
    page.click("#new-chat")
    here.ask("The newest of all")
    questions = {chat["turns"][0]["question"] for chat in kept(here)}
    assert questions == {"The first of all", "The newest of all"}
    assert page.locator("#notices .notice").count() == 0


def test_a_long_text_is_pasted_or_read_from_a_file(visit: Callable[..., Visit], tmp_path: Path) -> None:
    here = visit()
    page = here.page
    text = "The ferry to Orla leaves at nine from pier four. Tickets are sold on board.\n\n" * 20
    file = tmp_path / "timetable.txt"
    file.write_text(text)
    assert not page.locator("#context").is_visible()
    here.choose("rapid", kb="", max_tokens="16")
    picture = tmp_path / "photo.txt"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n\x00")
    page.set_input_files("#context-file", str(picture))
    page.wait_for_selector("#context-size:has-text('photo.txt is no text.')")
    page.set_input_files("#context-file", str(file))
    page.wait_for_selector(f"#context-size:has-text('{len(text.strip()):,} characters.')")
    body = here.ask("When does the ferry\n\nto Orla leave?")
    # The question is the last paragraph, whatever it looks like.
    assert body["messages"] == [
        {"role": "user", "content": f"{text.strip()}\n\nWhen does the ferry\nto Orla leave?"}
    ]
    assert here.last(".run-state").inner_text() == "Done"
    assert "nine" in here.last(".answer").inner_text()
    body = here.ask("And from where?")
    assert [message["content"][:9] for message in body["messages"][::2]] == ["The ferry", "And from "]
    assert here.last(".run-state").inner_text() == "Done"
    here.choose("plain", kb="sample", max_tokens="4")
    asked = [each["content"] for each in here.ask(FIRST)["messages"] if each["role"] == "user"]
    assert not any("Tickets are sold" in question for question in asked)  # the text was another method's


def test_a_kept_chat_is_text_and_nothing_else(visit: Callable[..., Visit]) -> None:
    here = visit()
    page = here.page
    hostile = "<img src=x onerror='window.injected=1'>"
    here.choose("plain", kb="", max_tokens="4")
    here.ask("Hello")
    [chat] = kept(here)
    chat["turns"][0]["question"] = hostile
    chat["turns"][0]["runs"][0] |= {"title": hostile, "error": hostile, "state": "failed"}
    write = "([id, text]) => localStorage.setItem('specrag-chat-' + id, text)"
    page.evaluate(write, [chat["id"], json.dumps(chat)])
    page.reload()
    page.wait_for_selector(".turn")
    assert page.inner_text(".asked") == hostile
    assert page.inner_text(".run h3") == page.inner_text("[role=alert]") == hostile
    assert page.locator("main img, nav img").count() == 0
    assert page.evaluate("window.injected") is None
    # One that another version left does not stop the page.
    chat["turns"] = [{"question": "Old", "runs": [{"news": 3}]}]
    page.evaluate(write, [chat["id"], json.dumps(chat)])
    page.reload()
    page.wait_for_selector("#notices .notice")
    here.choose("plain", kb="", max_tokens="4")
    here.ask("Hello again")
    assert here.last(".run-state").inner_text() == "Done"


def test_chats_stay_with_the_key_they_were_asked_with(visit: Callable[..., Visit], tmp_path: Path) -> None:
    kb = build_sample(tmp_path / "sample")
    names = {"anna": "anna-key-0123456789", "ben": "ben-key-0123456789ab"}
    keys = tuple(ApiKey(name=name, key=key, kbs=("sample",)) for name, key in names.items())
    with serve(keys=keys, kbs={"sample": kb}) as locked:
        here = visit(url=locked.url)
        page = here.page
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", names["anna"])
        page.press("#key", "Enter")
        page.wait_for_selector("#method-1 option", state="attached")
        here.choose("plain", max_tokens="4")
        here.ask(FIRST)
        assert kept(here) == []  # nothing is left for who opens the browser next
        assert len(kept(here, "sessionStorage")) == 1
        page.click("#open-key")
        page.fill("#key", names["ben"])
        page.press("#key", "Enter")
        page.wait_for_function("!document.querySelector('.turn')")
        assert kept(here, "sessionStorage") == []
        assert "Gutenberg" not in page.inner_text("body")
        here.ask("Hello")
        assert [turn["question"] for chat in kept(here, "sessionStorage") for turn in chat["turns"]] == [
            "Hello"
        ]
