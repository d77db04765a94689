"""A follow-up question made fit for retrieval: "Where was she born?" names nobody that a search could find."""

from __future__ import annotations

from collections.abc import Sequence

from specrag.methods.citations import content_words
from specrag.methods.prompts import Message, plain_words

#: Maximum tokens of a rewritten question.
MAX_TOKENS = 48

#: Earlier messages that the rewriting reads.
MESSAGES = 4

# A rewriting that is this many characters longer than the question is an answer or a ramble.
_MOST_GROWTH = 200


def rewriting_prompt(question: str, history: Sequence[Message]) -> tuple[Message, ...]:
    """The conversation that asks for the question with its references resolved."""
    turns = [
        f"{'User' if message['role'] == 'user' else 'Assistant'}: {plain_words(message['content'])}"
        for message in history[-MESSAGES:]
    ]
    asked = (
        "\n".join([*turns, f"User: {question}"])
        + "\n\nRewrite the last question of the user as one complete question that can be understood without the "
        "conversation: put names in place of words such as it, he, she or they. Write the question only."
    )
    return ({"role": "user", "content": asked},)


def retrieval_question(question: str, rewritten: str) -> str:
    """The search text: the rewritten question together with the user's own words.

    A model may rewrite badly, so nothing of the question is lost: its words follow the rewriting unless
    the rewriting contains them all. A rewriting that is empty or far too long is not used.
    """
    line = next((line.strip() for line in rewritten.splitlines() if line.strip()), "")
    line = line.removeprefix("User:").strip().strip('"')
    if not content_words(line) or len(line) > len(question) + _MOST_GROWTH:
        return question
    if set(content_words(question)) <= set(content_words(line)):
        return line
    return f"{line} {question}"
