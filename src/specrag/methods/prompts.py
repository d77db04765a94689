"""The prompt of standard RAG: numbered passages, the instruction, then the question; and what is dropped to fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from specrag.errors import ContextLengthError, InputError
from specrag.methods.base import EncodesPrompts, Generator
from specrag.methods.citations import without_citations
from specrag.request import Options, Prompt
from specrag.retrieval import Passage

#: What the model is told between the passages and the question.
INSTRUCTION = "Answer the question in one short sentence from the passages above."

#: Beginning of the answers of small models, which are better if they choose a passage first (docs/answering.md). It is
#: not shown.
LEAD = "According to passage ["

#: From this number of parameters in its layers on, a model is not small.
_SMALL = 500_000_000

#: A passage cut to fewer words than this is useless.
FEWEST_WORDS = 16

Message: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Fitted:
    """A prompt that fits.

    Attributes:
        messages: the conversation to send.
        kept: how many passages are in it, starting from the best one.
        shortened: whether the best passage was cut because it did not fit even alone.
        history: how many of the earlier messages are in it, the newest ones.
    """

    messages: tuple[Message, ...]
    kept: int
    shortened: bool
    history: int


def check_history(history: Sequence[Message]) -> tuple[Message, ...]:
    """The earlier messages of a conversation, checked.

    Raises:
        InputError: they are not a list of ``{"role": "user" or "assistant", "content": text}``.
    """
    remedy = 'give a list of {"role": "user" or "assistant", "content": text}, oldest first'
    if isinstance(history, str | bytes) or not isinstance(history, Sequence):
        raise InputError("history", history, remedy)
    for message in history:
        if (
            not isinstance(message, Mapping)
            or message.get("role") not in ("user", "assistant")
            or not isinstance(message.get("content"), str)
        ):
            raise InputError("history", message, remedy)
    return tuple(history)


def build_prompt(
    question: str,
    passages: Sequence[Passage],
    *,
    history: Sequence[Message] = (),
    system: str | None = None,
    instruction: str = INSTRUCTION,
    label: str = "Question",
) -> tuple[Message, ...]:
    """The conversation that asks a question about passages, which are numbered from 1.

    The instruction comes after the passages: small models follow what they read last. Citations in earlier answers
    are removed, since their numbers mean other passages.
    """
    asked = "\n\n".join(
        [*(_numbered(number, passage) for number, passage in enumerate(passages, 1)), instruction]
    )
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages += [{"role": message["role"], "content": plain_words(message["content"])} for message in history]
    messages.append({"role": "user", "content": f"{asked}\n{label}: {question}"})
    return tuple(messages)


def is_small(llm: Any) -> bool:
    """Whether a model is so small that its answers are better if they choose a passage first (:data:`LEAD`).

    SmolLM2-135M is. Qwen2.5-Coder-1.5B is not: it answers 47.4 % of 650 questions correctly with the lead and 53.5 %
    without. The size of a model behind an endpoint is not known.

    Args:
        llm: a language model, or an object in its place.
    """
    config = getattr(getattr(getattr(llm, "loaded", None), "model", None), "config", None)
    # A layer of the Llama family has about twelve squares of its width.
    return config is not None and 12 * config.num_hidden_layers * config.hidden_size**2 < _SMALL


def fit_prompt(
    question: str,
    passages: Sequence[Passage],
    *,
    room: int,
    count: Callable[[Sequence[Message]], int],
    history: Sequence[Message] = (),
    system: str | None = None,
    instruction: str = INSTRUCTION,
    label: str = "Question",
) -> Fitted:
    """The prompt with as many passages as fit.

    Earlier messages are dropped first, oldest first, until they take at most half of the room; then passages from the
    end; the best one is shortened, never dropped.

    Args:
        passages: best first.
        room: maximum tokens of the prompt.
        count: returns the tokens of a conversation.
        instruction: the text between the passages and the question.
        label: the text in front of the question.

    Raises:
        ContextLengthError: the question leaves no room for a passage.
    """

    def build(kept: Sequence[Passage], old: Sequence[Message]) -> tuple[Message, ...]:
        return build_prompt(question, kept, history=old, system=system, instruction=instruction, label=label)

    bare = count(build((), ()))
    if bare > room:
        raise _too_long(question, bare, room)
    old = tuple(history)
    while old and count(build((), old)) - bare > (room - bare) // 2:
        old = old[1:]
    kept = most_that_fit(len(passages), lambda n: count(build(passages[:n], old)) <= room)
    if kept or not passages:
        return Fitted(build(passages[:kept], old), kept, False, len(old))
    words = passages[0].text.split()
    fitting = most_that_fit(len(words), lambda n: count(build([cut_passage(passages[0], n)], old)) <= room)
    if fitting < FEWEST_WORDS:
        raise _too_long(question, bare, room)
    return Fitted(build([cut_passage(passages[0], fitting)], old), 1, True, len(old))


def as_text(messages: Sequence[Message], lead: str = "") -> str:
    """The conversation for a model without a chat template, up to where the answer begins, or with its lead."""
    text = "\n\n".join(message["content"] for message in messages) + "\nAnswer:"
    return f"{text} {lead}" if lead else text


def plain_words(text: str) -> str:
    """An earlier message without citations, whose numbers mean other passages now."""
    return without_citations(text).removeprefix(LEAD.removesuffix("[").strip()).lstrip(", ")


def _numbered(number: int, passage: Passage) -> str:
    return f"[{number}]{passage_block(passage)}"


def passage_block(passage: Passage) -> str:
    """A passage as it appears in a prompt, after its number."""
    return f" {passage.title}\n{passage.text.strip()}" if passage.title else f" {passage.text.strip()}"


def cut_passage(passage: Passage, words: int) -> Passage:
    """A passage's first words; the passage itself if it has no more."""
    all_words = passage.text.split()
    if len(all_words) <= words:
        return passage
    text = " ".join(all_words[:words])
    return Passage(passage.id, passage.source, passage.title, passage.place, f"{text} ...", passage.metadata)


def most_that_fit(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest n up to ``limit`` that fits, given that smaller numbers fit if a larger one does; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _too_long(question: str, tokens: int, room: int) -> ContextLengthError:
    remedy = (
        f"the prompt has {tokens:,} tokens before any passage and room for {max(room, 0):,}; "
        "shorten the question or ask for fewer tokens"
    )
    return ContextLengthError("question", question, remedy)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """What the model reads, and the options that go with it.

    Attributes:
        prompt: token ids; the conversation itself for a model whose tokenizer is not here.
        size: upper bound for its tokens.
    """

    prompt: Prompt
    size: int
    options: Options


def encode_prompt(
    llm: Generator, messages: Sequence[Message], options: Options, lead: str = "", label: str = ""
) -> EncodedPrompt:
    """The conversation in the model's chat template, or as text if it has none.

    Args:
        options: of the generation; ``raw`` asks for the text.
        lead: how the answer begins.
        label: in front of the question. A small model's answer ends where it goes on with a question of its own.

    Raises:
        InputError: there is a lead, and the model's tokenizer is not here.
    """
    if not isinstance(llm, EncodesPrompts):
        if lead:
            raise InputError("lead", lead, "leave it out; a model behind an endpoint begins its own answers")
        return EncodedPrompt(messages, llm.count(messages), options)
    if not options.get("raw") and _has_chat_template(llm):
        tokens = [*llm.encode(messages), *_continuation(llm, lead)]
        return EncodedPrompt(tokens, len(tokens), _ending_at(label, options) if label else options)
    # Without end-of-turn tokens such a model would continue with another question of its own.
    plain: Options = {"stop": "\n", **options}
    tokens = llm.encode(as_text(messages, lead), raw=True)
    return EncodedPrompt(tokens, len(tokens), plain)


def _ending_at(label: str, options: Options) -> Options:
    stop = options.get("stop", ())
    own = (stop,) if isinstance(stop, str) else tuple(stop)
    # Both: a stream would show the first line's end, which the second string alone leaves in the text.
    return {**options, "stop": (*own, f"\n\n{label}:", f"\n{label}:")}


def _has_chat_template(llm: EncodesPrompts) -> bool:
    try:
        llm.encode([{"role": "user", "content": "?"}])
    except InputError:
        return False
    return True


def _continuation(llm: EncodesPrompts, text: str) -> list[int]:
    """The tokens of a text inside another, without those that the model expects in front of every text."""
    if not text:
        return []
    tokens = llm.encode(text, raw=True)
    other = llm.encode("0" if text[0] != "0" else "1", raw=True)
    shared = next((place for place, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), 0)
    return tokens[shared:]
