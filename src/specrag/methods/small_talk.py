"""What people say between questions and no document answers: greetings, thanks, farewells, assent."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PHRASES: Mapping[str, tuple[str, ...]] = {
    "thanks": ("thanks", "thank you", "thank u", "thx", "ty", "many thanks", "much appreciated", "cheers"),
    "farewell": (
        "bye",
        "bye bye",
        "goodbye",
        "good bye",
        "good night",
        "see you",
        "see you later",
        "farewell",
    ),
    "greeting": (
        *(
            "hello",
            "hi",
            "hey",
            "hiya",
            "howdy",
            "greetings",
            "good morning",
            "good afternoon",
            "good evening",
        ),
        *("how are you", "how are you doing", "how do you do", "nice to meet you"),
    ),
    "assent": (
        *(
            "ok",
            "okay",
            "yes",
            "no",
            "sure",
            "right",
            "i see",
            "got it",
            "understood",
            "good",
            "great",
            "nice",
        ),
        *("cool", "perfect", "excellent", "wonderful", "awesome", "well done", "good job", "never mind"),
    ),
    # What may accompany these; on its own it is not small talk.
    "": (
        *(
            "there",
            "all",
            "everyone",
            "again",
            "a lot",
            "a bunch",
            "so much",
            "very much",
            "and",
            "so",
            "oh",
            "well",
        ),
        *(
            "then",
            "now",
            "today",
            "for now",
            "for your help",
            "for the help",
            "for that",
            "thats all",
            "that is all",
        ),
        *("that helps", "that helped", "that was helpful", "very helpful", "very good", "to you", "too"),
    ),
}
_KINDS = {phrase: kind for kind, phrases in _PHRASES.items() for phrase in phrases}
_LONGEST = max(len(phrase.split()) for phrase in _KINDS)
_REPLIES = {
    "thanks": "You are welcome. Ask on whenever you like.",
    "farewell": "Goodbye!",
    "greeting": "Hello! What would you like to know?",
    "assent": "Good. Ask on whenever you like.",
}


def small_talk(text: str) -> str | None:
    """The reply to a text that only greets, thanks, says goodbye or agrees; ``None`` for any other.

    The rule: ignoring capitals and punctuation, the text consists only of phrases from a short English list, such
    as "thank you", "hello" or "got it", and of words that go along with them, such as "very much". With one more word
    it is a question: "Thanks, and tin?" is searched for. If several kinds occur, the reply is that to the
    first of thanks, farewell, greeting, assent.
    """
    words = re.sub(r"[^\w\s]", "", text.casefold()).split()
    kinds = set()
    while words:
        for length in range(min(_LONGEST, len(words)), 0, -1):
            kind = _KINDS.get(" ".join(words[:length]))
            if kind is not None:
                kinds.add(kind)
                del words[:length]
                break
        else:
            return None
    return next((reply for kind, reply in _REPLIES.items() if kind in kinds), None)
