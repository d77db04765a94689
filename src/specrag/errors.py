"""Every error that specrag raises on purpose.

A message is one line that names the field, the value and the remedy, so the command line can print it as is. Any other
exception that reaches a user is a bug.
"""

from __future__ import annotations


class SpecragError(Exception):
    """Base of all errors raised on purpose. ``str(error)`` is one line, fit for a user."""


class InputError(SpecragError, ValueError):
    """A value given by the caller cannot be used.

    Args:
        field: name of the argument, option or file that holds the value.
        value: the value itself; shown with ``repr`` and shortened to 80 characters.
        remedy: what to give instead, as a sentence fragment.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        shown = repr(value)
        if len(shown) > 80:  # the end of a long path tells more than its beginning
            shown = f"{shown[:28]}...{shown[-49:]}"
        super().__init__(f"{field}: {shown} is not usable: {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy


class ModelFilesError(SpecragError):
    """A model's files are missing, damaged, incomplete or cannot be written."""


class ContextLengthError(InputError):
    """The requested tokens do not fit the model's context; raised before any work is done."""


class Cancelled(SpecragError):  # noqa: N818 - as in asyncio and concurrent.futures
    """The request was cancelled by its owner between two passes."""


class DeadlineExceeded(SpecragError):  # noqa: N818 - the field's name for it
    """The request ran past its deadline and was stopped between two passes."""


class StoreUnavailable(SpecragError):  # noqa: N818 - says what is the matter, as the two above do
    """A remote store of passages cannot be reached, went away, or did not answer in time."""


class EndpointUnavailable(SpecragError):  # noqa: N818 - as above
    """A remote model cannot be reached, went away, did not answer in time, or sent an unusable answer."""


class UpstreamError(EndpointUnavailable):
    """An upstream of the gateway could not answer; the message names it and shows neither address nor key.

    Args:
        upstream: its name.
        reason: what went wrong, as a sentence fragment.
        status: HTTP status for the gateway's client.
        retry_after: seconds after which to try again; ``None`` if not known.
    """

    def __init__(
        self, upstream: str, reason: str, *, status: int = 502, retry_after: float | None = None
    ) -> None:
        super().__init__(f"upstream {upstream}: {reason}")
        self.upstream = upstream
        self.status = status
        self.retry_after = retry_after
