"""Chat templates, rendered the way transformers does but without importing it.

Reference: ``transformers.utils.chat_template_utils`` (a test compares the two).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

# The tokens that end a turn or a text in common chat formats. GGUF names only one end token, but models stop with
# either; the generation_config.json of the original model lists both.
END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|end|>",
)

# Marks the assistant's words, for training; here the tags are dropped and their content is kept.
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The text of a conversation up to where the assistant's answer begins.

    Args:
        template: a Jinja chat template; runs in Jinja's sandbox.
        messages: ``{"role": ..., "content": ...}``, oldest first.
        special: the texts of ``bos_token`` and similar tokens, which templates use.
        tools: tools that the model may call, ``{"type": "function", "function": {...}}``.

    Raises:
        jinja2.TemplateError: the template is wrong or refuses the messages.
    """
    rendered: str = _compiled(template).render(
        messages=[dict(message) for message in messages], tools=tools, add_generation_prompt=True, **special
    )
    return rendered


@lru_cache(maxsize=8)
def takes_tools(template: str) -> bool:
    """Whether a chat template presents tools to the model."""
    from jinja2 import TemplateSyntaxError
    from jinja2.meta import find_undeclared_variables

    try:
        return "tools" in find_undeclared_variables(_environment().parse(_plain(template)))
    except TemplateSyntaxError:  # rendering it will raise the error
        return False


@lru_cache(maxsize=8)  # compiling takes ten times as long as rendering
def _compiled(template: str) -> Any:
    return _environment().from_string(_plain(template))


def _plain(template: str) -> str:
    return _GENERATION.sub(lambda m: m[1] + ("endif" if m[2] else "if true") + m[3], template)


def _environment() -> Any:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)
