"""Chat templates, rendered as transformers renders them but without importing it.

Reference: ``transformers.utils.chat_template_utils`` (a test compares the two).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

# The tokens that end a turn or a text in the common chat formats. GGUF names one end token only, but models
# stop with either; upstream's generation_config.json lists both.
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>")

# Marks what the assistant says, for training; nothing to do here but to keep what stands inside.
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


def render_chat(template: str, messages: Sequence[Mapping[str, str]], special: Mapping[str, str]) -> str:
    """The text of a conversation up to where the assistant's answer begins.

    Args:
        template: a Jinja chat template; runs in Jinja's sandbox.
        messages: ``{"role": ..., "content": ...}``, oldest first.
        special: the texts of ``bos_token`` and the like, which templates use.

    Raises:
        jinja2.TemplateError: the template is wrong or refuses the messages.
    """
    rendered: str = _compiled(template).render(
        messages=[dict(message) for message in messages], add_generation_prompt=True, **special
    )
    return rendered


@lru_cache(maxsize=8)  # compiling takes ten times as long as rendering
def _compiled(template: str) -> Any:
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
    plain = _GENERATION.sub(lambda m: m[1] + ("endif" if m[2] else "if true") + m[3], template)
    return environment.from_string(plain)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)
