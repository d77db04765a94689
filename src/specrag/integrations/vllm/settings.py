"""Settings for the operator: in the environment, or under ``specrag`` in vLLM's ``--additional-config``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrag.checks import check_whole
from specrag.errors import InputError

#: Environment variables, by the field that they set.
VARIABLES = {
    "corpus": "SPECRAG_CORPUS",
    "answer_memory": "SPECRAG_ANSWER_MEMORY",
    "answer_folder": "SPECRAG_ANSWER_FOLDER",
    "tenant": "SPECRAG_TENANT",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the drafter copies from besides each request's own text.

    Args:
        corpus: folder of a corpus that all requests may copy from; empty for none.
        answer_memory: tokens of earlier answers to keep, for all tenants together; 0 for none.
        tenant: of requests that name none. If empty, such a request is not remembered and copies from no memory.
        answer_folder: where answers are kept across restarts; empty for in memory only.

    Raises:
        InputError: a value has the wrong type or is negative, or a folder is given but no answers are kept.
    """

    corpus: str = ""
    answer_memory: int = 0
    tenant: str = ""
    answer_folder: str = ""

    def __post_init__(self) -> None:
        for field in ("corpus", "answer_folder", "tenant"):
            value = getattr(self, field)
            if not isinstance(value, str):
                raise InputError(field, value, "give a text")
        check_whole("answer_memory", self.answer_memory, 0, remedy="give a number of tokens, 0 for none")
        if self.answer_folder and not self.answer_memory:
            raise InputError(
                "answer_folder", self.answer_folder, "set answer_memory to the tokens that are kept there"
            )

    @classmethod
    def read(cls, config: object, environment: Mapping[str, str] = os.environ) -> Settings:
        """The settings of a server.

        Args:
            config: vLLM's ``VllmConfig``; values under ``specrag`` in its ``additional_config`` override the
                environment.
            environment: with the variables of :data:`VARIABLES`.

        Raises:
            InputError: a field is unknown, or a value cannot be used.
        """
        given: dict[str, Any] = {
            field: _number(variable, environment[variable])
            if field == "answer_memory"
            else environment[variable]
            for field, variable in VARIABLES.items()
            if environment.get(variable)
        }
        additional = getattr(config, "additional_config", None)
        ours = additional.get("specrag", {}) if isinstance(additional, Mapping) else {}
        if not isinstance(ours, Mapping):
            raise InputError("additional_config.specrag", ours, f"give an object with {', '.join(VARIABLES)}")
        for field, value in ours.items():
            if field not in VARIABLES:
                raise InputError("additional_config.specrag", field, f"give one of {', '.join(VARIABLES)}")
            given[field] = value
        return cls(**given)


def _number(variable: str, value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise InputError(variable, value, "give a number of tokens, 0 for none") from error
