"""WikiText's tokenised form, turned back into ordinary text.

The corpus comes as words with blanks between them (``a two @-@ part episode``, ``1 @,@ 000``, ``it 's``,
`` = = Career = = ``); rare words are ``<unk>``. What is written together is joined as in EleutherAI's
lm-evaluation-harness, so that a heading becomes ``== Career ==``. The harness keeps ``<unk>``, which a byte-level
tokenizer reads as pieces that no other text has; here the unknown word is left out, with its possessive, a hyphen to
its neighbour, the digits in front of it, and brackets or quotation marks that held nothing else.
"""

from __future__ import annotations

import re
from typing import Final

#: Patterns and what takes their place, one after the other; what a line begins or ends with counts as a blank.
_STEPS: Final = tuple(
    (re.compile(pattern, re.MULTILINE), replacement)
    for pattern, replacement in (
        (r"[^\S\n]+", " "),
        (r"(?:\d+ @[,.]@ |@-@ )*<unk>(?: @[-,.]@(?= |$)| 's(?= |$)| '(?= [a-z]))*", ""),
        (r" +", " "),
        (r'" "|\( [,;:\u2013\u2014 ]*\)|\[ \]', ""),
        (r" @([-,.])@ ", r"\1"),
        (r"^ ?((?:= )*=) (.*?)((?: =)+) ?$", lambda line: _heading(line[1], line[2], line[3])),
        (r'"([^"\n]*)"', lambda part: f'"{part[1].strip(" ")}"'),
        (r"([(\[]) ", r"\1"),
        (r" ([)\]])", r"\1"),
        (r" '(s|t|m|d|re|ve|ll)\b", r"'\1"),
        (r"s ' (?=[a-z])", "s' "),
        (r"([$£€¥#]) (?=\d)", r"\1"),
        (r"(?<=\d) (?=%)", ""),
        (r"(?<=\d) ([\u2013/]) (?=\d)", r"\1"),
        (r" +(?=(?:[,.;:!?]|\.\.\.)(?:[ \"')\]]|$))", ""),
        (r"([,;:])(?: ?[,;])+", r"\1"),
        (r" +", " "),
        (r"^ | $", ""),
    )
)


def _heading(before: str, title: str, after: str) -> str:
    return f"{before.replace(' ', '')} {title} {after.replace(' ', '')}"


def detokenize(text: str) -> str:
    """The text as it was before it was split into words, as far as that can be told."""
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    return text
