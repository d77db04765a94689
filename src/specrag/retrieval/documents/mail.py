"""E-mail saved as .eml files: the text, and the documents attached to it."""

from __future__ import annotations

import contextlib
import mimetypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC
from email import message_from_bytes, policy
from email.message import EmailMessage
from email.utils import getaddresses, parsedate_to_datetime
from typing import Any

from specrag.retrieval.documents.converters import (
    BOMS,
    Converted,
    Markup,
    Part,
    ReadingLimits,
    UnreadableError,
    check_characters,
    clean,
    decode,
    decode_html,
    guard,
    html_part,
)

_HEAD = ("From", "To", "Cc", "Date")
_KNOWN = ("From", "To", "Subject", "Date", "Message-ID", "Received")
_NO_DOCUMENT = (
    "image/",
    "audio/",
    "video/",
    "application/pgp-",
    "application/pkcs7-",
    "application/x-pkcs7-",
)
_ENCRYPTED = ("multipart/encrypted", "application/pkcs7-mime", "application/x-pkcs7-mime")
_LONGEST_NAME = 100
_MOST_TOLD = 3  # the most attachments without text that are named


def convert_mail(data: bytes, limits: ReadingLimits, read: Callable[[str, bytes], Converted]) -> Converted:
    """Convert an e-mail; the title is its subject. Sender, recipients and date precede its text and become metadata.

    If a message is both in plain text and in HTML, the plain text is used. Attached documents become separate parts;
    pictures, sounds, films and signatures are ignored.

    Args:
        data: the message.
        limits: limits for the message and its attachments together.
        read: converts an attachment, given its name and content.

    Raises:
        UnreadableError: it is not an e-mail, is encrypted, or exceeds the limits.
    """

    def work() -> Converted:
        content = decode(data).encode() if data.startswith(BOMS) else data
        message = message_from_bytes(content, policy=policy.default)
        if not any(name in message for name in _KNOWN):
            raise UnreadableError("its content is no e-mail: it has no sender, subject or date")
        if message.get_content_type() in _ENCRYPTED:
            raise UnreadableError("encrypted e-mail; save it decrypted")
        leaves = list(_leaves(message))
        parts, lost = [_body(message, leaves)], []
        for leaf in leaves:
            if _is_text(leaf) or leaf.get_content_type().startswith(_NO_DOCUMENT):
                continue
            name = _file_name(leaf)
            try:
                attached = read(name, _content(leaf))
            except Exception as error:  # one bad attachment must not affect the others
                lost.append(f"{name} ({error})")
                continue
            parts += (_within(f"attachment {name}", part) for part in attached.parts)
            lost += [f"{name} ({attached.missing})"] if attached.missing else []
            check_characters(sum(len(part.text) for part in parts), limits)
        return Converted(_header(message, "Subject"), tuple(parts), _told(lost), _metadata(message))

    return guard("e-mail", work)


def _leaves(message: Any, *, wanted: bool = True) -> Iterator[Any]:
    """The leaf parts of a message; of alternatives only one text, but everything attached to any of them."""
    parts = message.get_payload()
    if message.get_content_maintype() != "multipart" or isinstance(parts, str):
        if wanted or not _is_text(message):
            yield message
        return
    chosen = parts
    if message.get_content_subtype() == "alternative":
        plain = [part for part in parts if part.get_content_type() == "text/plain" and _text(part).strip()]
        chosen = plain[:1] or parts[-1:]
    for part in parts:
        yield from _leaves(part, wanted=wanted and any(part is each for each in chosen))


def _is_text(leaf: Any) -> bool:
    """Whether a leaf is part of the text that the sender wrote."""
    if leaf.get_content_disposition() == "attachment" or leaf.get_filename():
        return False
    # A multipart message without boundaries between its parts is one text.
    return (
        leaf.get_content_type() in ("text/plain", "text/html") or leaf.get_content_maintype() == "multipart"
    )


def _body(message: EmailMessage, leaves: Sequence[Any]) -> Part:
    texts = [(leaf.get_content_type() == "text/html", _text(leaf)) for leaf in leaves if _is_text(leaf)]
    written = "\n\n".join(html_part(text).text if is_html else text.strip() for is_html, text in texts)
    head = "".join(f"{name}: {value}\n" for name in _HEAD if (value := _header(message, name)))
    markup: Markup = "markdown" if any(is_html for is_html, _ in texts) else "plain"
    return Part(f"{head}\n{written}".strip(), markup=markup)


def _text(leaf: Any) -> str:
    content = _content(leaf)
    try:
        return clean(content.decode(leaf.get_content_charset() or ""))
    except (LookupError, UnicodeDecodeError):  # no encoding is given, or a wrong one
        return decode_html(content) if content else ""


def _content(leaf: Any) -> bytes:
    if leaf.get_content_maintype() == "message" and leaf.is_multipart():  # a forwarded message
        return b"\n".join(part.as_bytes(policy=policy.compat32) for part in leaf.get_payload())
    return leaf.get_payload(decode=True) or b""


def _file_name(leaf: Any) -> str:
    """The name of an attachment, or the subject of an attached message, with an ending that says what it is."""
    name, ending = leaf.get_filename(), ""
    if leaf.get_content_type() == "message/rfc822":
        name, ending = name or _header(leaf.get_payload(0), "Subject"), ".eml"
    name = " ".join(clean(name or "").replace("\\", "/").rpartition("/")[2].split())
    if not name:
        return f"unnamed{ending or mimetypes.guess_extension(leaf.get_content_type()) or ''}"
    return name[-_LONGEST_NAME:].removesuffix(ending) + ending


def _within(place: str, part: Part) -> Part:
    return replace(part, place=f"{place}, {part.place}" if part.place else place)


def _header(message: EmailMessage, name: str) -> str:
    try:
        return clean(" ".join(str(message[name] or "").split()))
    except Exception:  # the library raises various exceptions for malformed headers
        return ""


def _metadata(message: EmailMessage) -> dict[str, Any]:
    """``from``, ``to`` and ``date``, as far as given; the date is in UTC, so that dates can be compared."""
    senders = _addresses(message, "From")
    found: dict[str, Any] = {"to": _addresses(message, "To") + _addresses(message, "Cc")}
    if senders:
        found["from"] = senders[0]
    with contextlib.suppress(ValueError, TypeError, OverflowError, IndexError):
        moment = parsedate_to_datetime(_header(message, "Date"))
        moment = moment.replace(tzinfo=moment.tzinfo or UTC)
        found["date"] = moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {name: value for name, value in found.items() if value}


def _addresses(message: EmailMessage, name: str) -> list[str]:
    return [address for _, address in getaddresses([_header(message, name)]) if address]


def _told(lost: Sequence[str]) -> str:
    if not lost:
        return ""
    more = f", and {len(lost) - _MOST_TOLD} more" if len(lost) > _MOST_TOLD else ""
    return f"attachments without readable text: {', '.join(lost[:_MOST_TOLD])}{more}"
