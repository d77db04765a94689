"""Constrained decoding with a grammar: JSON, JSON that satisfies a schema, tool calls. Grammars are ``llguidance``'s.

A :class:`Grammar` is a logits processor whose state follows a path of a draft tree. Drafted tokens are therefore
checked against the grammar just like sampled ones, and speculation changes no text.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specrag.engine import Logits
from specrag.errors import InputError
from specrag.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

#: Seconds that a grammar may take to compile; the grammar of a hundred tools takes a tenth of a second.
COMPILE_SECONDS = 2.0

_PROGRAM = "import sys, llguidance; llguidance.LLMatcher.validate_grammar(sys.stdin.read())"


def _check_compile_time(grammar: str, field: str) -> None:
    """Check that a grammar compiles in time, in a separate process that can be killed.

    llguidance compares every pattern of a schema with every other; 28 KB of patterns take a minute, and in a thread
    nothing could interrupt that. Whether the grammar is valid is not checked here.

    Raises:
        InputError: it takes too long.
    """
    try:
        subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            input=grammar.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=COMPILE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        remedy = f"it takes more than {COMPILE_SECONDS:g} seconds to compile; simplify it"
        raise InputError(field, "a JSON schema", remedy) from None


#: How JSON is written: like ``json.dumps``. If white space were free, small models would tend to write nothing else.
JSON_FORM: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_SMALL = 1000  # characters; any grammar up to this size compiles within 0.2 s


class GrammarVocabulary:
    """A tokenizer in the form that grammars need; made once per model, since that takes a moment.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: number of logits of a row, at least the number of the tokenizer's tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.ends = sorted(tokenizer.eos_tokens)

    @cached_property
    def backend(self) -> Any:
        """The tokenizer in llguidance's own form."""
        from llguidance import LLTokenizer

        return LLTokenizer(self._tokenizer.definition(), n_vocab=self.vocab_size, eos_token=self.ends)

    def json(self, schema: Mapping[str, Any] | None = None) -> Grammar:
        """JSON that satisfies a schema; by default any object.

        Raises:
            InputError: the schema cannot be understood, or demands something that no grammar can express.
        """
        from llguidance import LLMatcher

        given = {"type": "object"} if schema is None else dict(schema)
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(given), overrides=JSON_FORM)
        except (ValueError, RecursionError) as error:  # NaN, half a surrogate pair, too many digits or levels
            reason = " ".join(str(error).split())
            raise InputError("schema", "a JSON schema", f"{reason[:200]}; correct it") from None
        return self._checked(grammar, "schema")

    def is_token(self, text: str) -> bool:
        """Whether a text is a single added token, such as ``<tool_call>``; grammars name such a token without quotes.

        llguidance takes added tokens in angle brackets for control tokens, which spell no text.
        """
        return text.startswith("<") and text.endswith(">") and self._tokenizer.is_added(text)

    def lark(self, text: str, field: str) -> Grammar:
        """A grammar in llguidance's variant of Lark.

        Args:
            field: the field that the error names if the grammar is wrong.

        Raises:
            InputError: it is wrong.
        """
        from llguidance import LLMatcher

        return self._checked(LLMatcher.grammar_from_lark(text), field)

    def _checked(self, grammar: str, field: str) -> Grammar:
        from llguidance import LLMatcher

        if len(grammar) > _SMALL:
            _check_compile_time(grammar, field)
        # Log nothing: errors are raised below.
        matcher = LLMatcher(self.backend, grammar, log_level=0)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())
            raise InputError(field, "a JSON schema", f"{reason[:200]}; simplify it")
        return Grammar(self, matcher)


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """How far a text has come in its grammar; ``None`` after a token that the grammar does not allow."""

    matcher: Any


class Grammar:
    """Bans every token that does not continue a text of the grammar; made by :class:`GrammarVocabulary`.

    Args:
        vocabulary: the model's vocabulary.
        matcher: llguidance's matcher in its initial state.
    """

    def __init__(self, vocabulary: GrammarVocabulary, matcher: Any) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher

    def start(self, prompt: Sequence[int]) -> _State:  # noqa: ARG002 - the grammar is the output's
        return _State(self._matcher)

    def advance(self, state: _State, token: int) -> _State:
        if state.matcher is None or state.matcher.is_stopped():
            return state
        # A copy shares the compiled grammar and costs a microsecond.
        matcher = state.matcher.deep_copy()
        return _State(matcher if matcher.consume_token(token) else None)

    def apply(self, logits: Logits, state: _State) -> Logits:
        """See :class:`~specrag.engine.processors.LogitsProcessor`.

        Raises:
            InputError: the grammar has become too complex for this text.
        """
        return np.where(self._allowed(state, len(logits)), logits, logits.dtype.type(-np.inf))

    def _allowed(self, state: _State, vocab_size: int) -> NDArray[np.bool_]:
        allowed = np.zeros(vocab_size, dtype=np.bool_)
        if state.matcher is None or state.matcher.is_stopped():
            allowed[self._vocabulary.ends] = True
            return allowed
        bits = np.frombuffer(state.matcher.compute_bitmask(), dtype=np.uint8)
        if state.matcher.is_error():
            reason = " ".join(state.matcher.get_error().split())
            raise InputError("response_format", "its grammar", f"{reason[:200]}; simplify it")
        known = min(vocab_size, self._vocabulary.vocab_size)
        allowed[:known] = np.unpackbits(bits, count=known, bitorder="little").astype(np.bool_)
        return allowed
