"""Find credentials in addresses, and strip them from text. Pure.

    scheme://USER:PASSWORD@host/path?secret_key=SECRET&region=eu-west-1

A credential is a password before the host (for S3, HTTP and HTTPS also a user name alone: an access key or a token), or
the value of a query parameter with a name such as `secret_key`. Percent-encoding and upper case make no difference. A
`${env:NAME}` reference is no credential: each process resolves it, and only the name is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

HIDDEN = "***"
"""What stands in place of a credential."""
REMEDY = (
    "remove it, and let every machine find its credentials itself: in environment variables (AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, say) or in the cloud's own credentials files"
)
"""What to do about an address that is refused."""

_REFERENCE = re.compile(r"\$\{env:[^}$]*\}")
_STORES = "s3|gs|gcs|abfs|abfss|hdfs|viewfs"
_START = re.compile(r"(?i)(?<![\w+.-])[a-z][\w+.-]+(?::|%(?:25)*3a)(?:/|%(?:25)*2f)+")
"""How an address begins; `Path` leaves one slash of two."""
_PLACE = re.compile(r"(?:\$\{env:[^}$]*\}|[^/?#\\$]+|\$)*")
"""User and host, which end with the first slash."""
_PARAMETER = re.compile(r"([?&;#])([^=?&;#]*)=((?:\$\{env:[^}$]*\}|[^?&;#$]+|\$)*)")
_SECRET = re.compile(r"secret|passw|passphrase|pwd|credential|signature|accesskey|apikey")
_SECRET_AT_END = re.compile(r"(?:key|keyid|token)$|^(?:sig|auth|authorization|bearer|pass|pw|jwt|sas)$")
_USER_IS_SECRET = ("s3", "http", "https")
_NEVER_A_PORT = ("s3", "gs", "gcs")
_WORD = re.compile(r"[^\s'\"`<>]*")
_LONGEST = 8192
"""Characters of an address; nobody decodes one that is longer."""
_DEPTH = 8
"""Addresses inside one another, and layers of percent-encoding, that are looked into."""


class _Cleaned(NamedTuple):
    text: str
    part: str
    """What the first credential is, in words; empty if there is none."""


def credential_in(value: str) -> str:
    """Return what the first credential in a setting is, in words, without the credential; empty if there is none.

    >>> credential_in("s3://KEY:SECRET@bucket/runs")
    'a user name or password before the host'
    >>> credential_in("s3://bucket/runs?region=eu-west-1&Secret%5Fkey=SECRET")
    "the query parameter 'Secret_key'"
    >>> credential_in("s3://bucket/runs?endpoint_override=http://localhost:9000")
    ''
    """
    return _cleaned(value, whole=True).part if _may_hold_address(value) else ""


def without_credentials(text: str, *, whole: bool = False) -> str:
    """Return text with `***` for every credential in an address.

    `whole`: the text is one address if it begins as one; otherwise addresses end with white space or a quote.

    >>> without_credentials("cannot parse 's3://KEY:SECRET@bucket/runs?region=x'")
    "cannot parse 's3://***@bucket/runs?region=x'"
    """
    return _cleaned(text, whole).text if _may_hold_address(text) else text


def hide_credentials(value: Any) -> Any:
    """Return plain values with `without_credentials` applied to every text, those in mappings and lists too."""
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, Mapping):
        return {hide_credentials(key): hide_credentials(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [hide_credentials(one) for one in value]
    return value


def _may_hold_address(text: str) -> bool:
    """Rule out most texts at little cost: every event passes through here."""
    return ":/" in text or "%" in text


def _cleaned(text: str, whole: bool, depth: int = 0) -> _Cleaned:
    done, at, part = [], 0, ""
    while (found := _START.search(text, at)) is not None:
        start = found.start()
        end = _end_of_line(text, start, len(text)) if whole and start == 0 else _end(text, start)
        cleaned = _one(text[start:end], depth)
        done += [text[at:start], cleaned.text]
        at, part = end, part or cleaned.part
    return _Cleaned("".join([*done, text[at:]]), part)


def _end_of_line(text: str, start: int, limit: int) -> int:
    end = text.find("\n", start, limit)
    return limit if end < 0 else end


def _end(text: str, start: int) -> int:
    """Return where the address that begins at `start` ends, in a text that says more than it."""
    quote = text[start - 1 : start]
    line = _end_of_line(text, start, min(len(text), start + _LONGEST))
    if quote and quote in "'\"`" and (closing := text.find(quote, start, line)) >= 0:
        return closing
    end = _WORD.match(text, start, line).end()  # type: ignore[union-attr]
    if end < line and "@" not in text[start:end] and _has_odd_port(_place(text[start:end])):
        # A password with a space in it.
        user = text.find("@", end, line)
        return end if user < 0 else _WORD.match(text, user, line).end()  # type: ignore[union-attr]
    return end


def _one(address: str, depth: int) -> _Cleaned:
    """Clean one address; if more is found in what its percent-encoding stands for, that is returned, decoded."""
    if depth > _DEPTH:
        return _Cleaned(HIDDEN, f"an address inside more than {_DEPTH} others")
    cleaned = _raw(address, depth)
    if len(address) > _LONGEST:
        return cleaned
    decoded = cleaned.text
    for _ in range(_DEPTH):
        decoded = unquote(decoded)
    if decoded == cleaned.text:
        return cleaned
    found = _raw(decoded, depth)
    return _Cleaned(found.text, cleaned.part or found.part) if found.part else cleaned


def _raw(address: str, depth: int) -> _Cleaned:
    begun = _START.match(address)
    if begun is None or "%" in begun[0]:
        return _Cleaned(address, "")
    place = _place(address)
    after = begun.end() + len(place)
    place, after, part = _clean_place(address, place, after)
    rest, in_rest = _clean_rest(address[after:], depth)
    return _Cleaned(begun[0] + place + rest, part or in_rest)


def _place(address: str) -> str:
    begun = _START.match(address)
    return "" if begun is None else _PLACE.match(address, begun.end())[0]  # type: ignore[index]


def _clean_place(address: str, place: str, after: int) -> tuple[str, int, str]:
    """Return user and host without a credential, where the rest of the address begins, and what was found."""
    scheme = address.partition(":")[0].lower()
    said = "a user name or password before the host"
    user, at, host = place.rpartition("@")
    if at:
        name, _, password = _REFERENCE.sub("", user).partition(":")
        if password not in ("", HIDDEN) or (scheme in _USER_IS_SECRET and name not in ("", HIDDEN)):
            return f"{HIDDEN}@{host}", after, said
        return place, after, ""
    odd = _has_odd_port(place)
    later = address.rfind("@")
    if later >= after and (odd or (scheme in _NEVER_A_PORT and ":" in place)):
        # A slash or a question mark in a password: it ends with the @.
        host = _PLACE.match(address, later + 1)[0]  # type: ignore[index]
        return f"{HIDDEN}@{host}", later + 1 + len(host), said
    if odd and re.fullmatch(_STORES, scheme):
        return HIDDEN, after, said
    return place, after, ""


def _has_odd_port(place: str) -> bool:
    """Whether what follows the colon is no port, and thus perhaps a password."""
    host, colon, port = _REFERENCE.sub("0", place).rpartition(":")
    return bool(colon) and not port.isdecimal() and port != "" and not host.startswith("[")


def _clean_rest(rest: str, depth: int) -> tuple[str, str]:
    """Clean the path and parameters of an address, with the addresses inside them."""
    found: list[str] = []

    def parameter(one: re.Match[str]) -> str:
        name, value = unquote(one[2]), _REFERENCE.sub("", one[3])
        plain = re.sub("[^a-z0-9]", "", name.lower())
        if value in ("", HIDDEN) or not (_SECRET.search(plain) or _SECRET_AT_END.search(plain)):
            return one[0]
        found.append(f"the query parameter '{name[:40]}'")
        return f"{one[1]}{one[2]}={HIDDEN}"

    rest = _PARAMETER.sub(parameter, rest)
    inner = _cleaned(rest, False, depth + 1)
    return inner.text, found[0] if found else inner.part
