"""Prompts that ask a chat model for questions and statements, and the rules that accept or reject its answers.

Small models follow what they read last and copy what they are shown: examples, written for this project, show the form,
and every requirement on a question is checked by rule, not left to the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from specrag.bench.metrics import contains_answer, normalize_answer
from specrag.methods.speculative_rag.form import CUE
from specrag.models.roles import AnswerFormat, TextRequest
from specrag.retrieval.passage import Passage, passage_text

LEAD = "Question:"
STATEMENT_LEAD = "Statement:"
_QUESTION_TOKENS, _ANSWER_TOKENS, _STATEMENT_TOKENS = 48, 24, 64

#: What a question asks for; prompts name different ones, so that not all questions ask for what comes first.
ASPECTS = (
    "a person",
    "a place",
    "a year or a date",
    "a number",
    "an occupation or a profession",
    "a kind or a genre",
    "the name of a work, a group or a thing",
    "who made, wrote, led or founded it",
    "a term in a few words",
)

_ASK = (
    "Read the passage. Write one question about {title} that the passage answers, and the answer. Ask for {aspect} if "
    "the passage tells it, else for another thing. Whoever reads the question has not seen the passage, so the "
    "question names what it is about. The answer is one to four words copied from the passage, and never the title.\n"
    "Write two lines:\nQuestion: one question\nAnswer: words of the passage"
)


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """A question with the words of the passage that answer it."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A text that cannot be used.

    Attributes:
        reason: for human readers; the same for all texts that fail alike.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class _Shown:
    """An example passage with a question, to show the form."""

    title: str
    text: str
    aspect: str
    question: str
    answer: str
    statement: str


def question_request(passage: Passage, aspect: str) -> TextRequest:
    """Ask for a question about a passage.

    Args:
        aspect: one of :data:`ASPECTS`.
    """
    messages = []
    for shown in _SHOWN:
        messages.append({"role": "user", "content": _asked(shown.title, shown.text, shown.aspect)})
        messages.append({"role": "assistant", "content": f"{LEAD} {shown.question}{CUE} {shown.answer}"})
    messages.append({"role": "user", "content": _asked(passage.title, passage.text.strip(), aspect)})
    return TextRequest(
        messages,
        lead=LEAD,
        max_tokens=_QUESTION_TOKENS + _ANSWER_TOKENS,
        answer_format=AnswerFormat(CUE, _QUESTION_TOKENS),
        references=(passage.text,),
    )


def _asked(title: str, text: str, aspect: str) -> str:
    # People do not say what an encyclopedia adds to a title to tell it from others.
    name = re.sub(r"\s*\([^()]*\)$", "", title)
    return f"{passage_text(name, text)}\n\n{_ASK.format(title=name, aspect=aspect)}"


def statement_request(made: QuestionAnswer) -> TextRequest:
    """Ask to rewrite a question and its answer as one statement."""
    messages = []
    for shown in _SHOWN:
        asked = QuestionAnswer(shown.question, shown.answer)
        messages.append({"role": "user", "content": _to_state(asked)})
        messages.append({"role": "assistant", "content": f"{STATEMENT_LEAD} {shown.statement}"})
    messages.append({"role": "user", "content": _to_state(made)})
    return TextRequest(
        messages,
        lead=STATEMENT_LEAD,
        max_tokens=_STATEMENT_TOKENS,
        stop=("\n",),
        references=(made.question, made.answer),
    )


def _to_state(made: QuestionAnswer) -> str:
    return f"Question: {made.question}\nAnswer: {made.answer}\n\nWrite question and answer as one statement."


_BACK = re.compile(
    r"\b(?:the|this|that|above|given) (?:passage|text|article|paragraph|excerpt|context|document)\b"
    r"|\baccording to\b|\bmentioned\b",
    re.IGNORECASE,
)
_PRONOUN = re.compile(r"\b(?:he|she|they|his|her|their|him|them)\b", re.IGNORECASE)
_NAME = re.compile(r"(?<!^)\b[A-Z0-9][\w'-]*")
_ASKING = re.compile(r"\b(?:who|whom|whose|what|when|where|which|how|why)\b", re.IGNORECASE)
_BARE = {"who", "what", "is", "was", "are", "were", "name", "of", "film", "person", "place"}
_LONGEST_QUESTION, _FEWEST_WORDS = 30, 4
_YES_NO = {"yes", "no", "true", "false"}


def read_question(passage: Passage, text: str, answer_words: int) -> QuestionAnswer | Rejected:
    """The question and answer written after :data:`LEAD`, if they are fit for a row.

    A question must be understandable by itself: it names something that the passage is about and does not refer back
    to the passage. The answer occurs in the passage, as it is written there, and not in the question.

    Args:
        answer_words: most words of an answer.
    """
    question, found, rest = text.partition(CUE)
    question = " ".join(question.split()).rstrip("?. ")
    question = f"{question}?" if question else ""  # a cue may take the place of the mark
    answer = " ".join(rest.split("\n", 1)[0].split()).strip(" \"'“”").rstrip(".,;:")
    if not found or not question or not normalize_answer(answer):
        return Rejected("not in the form of question and answer")
    words = question.split()
    if not _ASKING.search(question) or not _FEWEST_WORDS <= len(words) <= _LONGEST_QUESTION:
        return Rejected("no question")
    if not _asks_something(passage, question):
        return Rejected("the question asks who or what it is and no more")
    if normalize_answer(answer) in _YES_NO or len(answer.split()) > answer_words:
        return Rejected("the answer is not short")
    if not contains_phrase(passage.text, answer):
        return Rejected("the answer does not stand in the passage")
    if contains_answer(question, answer) or _says_all(question, answer):
        return Rejected("the question holds the answer")
    if _BACK.search(question):
        return Rejected("the question points back to the passage")
    if not names_something(passage, question):
        return Rejected("the question names nothing")
    return QuestionAnswer(question, answer)


def contains_phrase(text: str, answer: str) -> bool:
    """Whether an answer occurs in a text as whole words, ignoring case, punctuation and articles."""
    wanted = normalize_answer(answer)
    return bool(wanted) and f" {wanted} " in f" {normalize_answer(text)} "


def names_something(passage: Passage, question: str) -> bool:
    """Whether a question can be understood without its passage: it contains a name or words of the title.

    A question of only pronouns and common words ("Where was she born?") cannot.
    """
    title = [word for word in normalize_answer(passage.title).split() if len(word) > 2]
    said = set(normalize_answer(question).split())
    if title and any(word in said for word in title):
        return True
    names = [name for name in _NAME.findall(question) if normalize_answer(name)]
    return bool(names) and not _PRONOUN.search(question)


def _asks_something(passage: Passage, question: str) -> bool:
    """Whether a question contains more than "What is" and the title."""
    known = {*normalize_answer(passage.title).split(), *_BARE}
    return not set(normalize_answer(question).split()) <= known


def _says_all(question: str, answer: str) -> bool:
    """Whether every long word of the answer occurs in the question."""
    words = [word for word in normalize_answer(answer).split() if len(word) > 3]
    said = set(normalize_answer(question).split())
    return bool(words) and all(word in said for word in words)


def read_statement(made: QuestionAnswer, text: str) -> str | Rejected:
    """The statement written after :data:`STATEMENT_LEAD`, if it gives the answer in one sentence."""
    statement = " ".join(text.split("\n", 1)[0].split())
    if len(re.findall(rf"(?<!\w){re.escape(made.answer)}(?!\w)", statement)) != 1:
        return Rejected("the statement does not hold the answer once")
    if not statement.endswith(".") or not _FEWEST_WORDS <= len(statement.split()) <= _LONGEST_QUESTION:
        return Rejected("no statement")
    names = {normalize_answer(name) for name in _NAME.findall(made.question)}
    if not names <= set(normalize_answer(statement).split()) | {""}:
        return Rejected("the statement leaves out a name")
    return statement


def replace_answer(statement: str, answer: str, other: str) -> str:
    """The statement with another answer in place of its own."""
    put = re.sub(rf"(?<!\w){re.escape(answer)}(?!\w)", lambda _: other, statement, count=1)
    return put[:1].upper() + put[1:]


_MONTH = re.compile(
    r"\b(?:january|february|march|april|may|june|july|august|september|october|november|december)\b",
    re.IGNORECASE,
)
_ASKS = ("who", "where", "when", "how many", "how much", "how")


def answer_kind(question: str, answer: str) -> str:
    """An answer's rough kind: a wrong option of the same kind is plausible, one of another kind is given away."""
    if re.fullmatch(r"(?:1\d|20)\d\d", answer):
        return "year"
    if _MONTH.search(answer) and re.search(r"\d", answer):
        return "date"
    if re.match(r"[\d$£€]", answer):
        return f"number of {len(re.sub(r'[^0-9]', '', answer))} digits"
    asked = normalize_answer(question)
    word = next((each for each in _ASKS if asked.startswith(each)), "")
    what = re.match(r"what (?:is|was|type of|kind of)?\s*(?:the )?(\w+)|which (\w+)", asked)
    noun = "" if word or what is None else what[1] or what[2] or ""
    shape = "name" if answer[:1].isupper() else "words"
    return f"{word or noun} {shape}"


_SHOWN: Sequence[_Shown] = (
    _Shown(
        "Maren Holtvik",
        "Maren Holtvik (3 May 1871 - 12 June 1940) was a Norwegian botanist who collected mosses in Svalbard. She was "
        "born in Bergen and taught at a school for girls there until 1903.",
        "an occupation or a profession",
        "What was Maren Holtvik's occupation?",
        "botanist",
        "Maren Holtvik was a botanist.",
    ),
    _Shown(
        "The Salt Road",
        "The Salt Road is a 1962 drama film directed by Peter Aldana and produced by Ines Kroll. It was shot in Sicily "
        "in eleven weeks and won the jury prize at Locarno.",
        "who made, wrote, led or founded it",
        "Who directed the film The Salt Road?",
        "Peter Aldana",
        "The film The Salt Road was directed by Peter Aldana.",
    ),
    _Shown(
        "Lake Orrin",
        "Lake Orrin is a reservoir in the north of the county. The dam was finished in 1934. The lake covers 310 "
        "hectares and supplies the town of Wexby with drinking water.",
        "a number",
        "How many hectares does Lake Orrin cover?",
        "310",
        "Lake Orrin covers 310 hectares.",
    ),
)
