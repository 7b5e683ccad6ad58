"""Find credentials in addresses, and strip them from text. Pure.

    scheme://USER:PASSWORD@host/path?secret_key=SECRET&region=eu-west-1

A credential is a password before the host (for S3, HTTP and HTTPS also a user name alone: an access key or a token), or
the value of a query parameter with a name such as `secret_key`. Percent-encoding and upper case make no difference. A
`${env:NAME}` reference is not a credential: each process resolves it, and only the name is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

HIDDEN = "***"
"""Text that replaces a credential."""
REMEDY = (
    "remove it, and give every machine its credentials in environment variables (such as AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY) or in the cloud's credentials files"
)
"""What to do about a refused address."""

_REFERENCE = re.compile(r"\$\{env:[^}$]*\}")
_STORES = "s3|gs|gcs|abfs|abfss|hdfs|viewfs"
_START = re.compile(r"(?i)(?<![\w+.-])[a-z][\w+.-]+(?::|%(?:25)*3a)(?:/|%(?:25)*2f)+")
"""Start of an address; `Path` reduces its two slashes to one."""
_PLACE = re.compile(r"(?:\$\{env:[^}$]*\}|[^/?#\\$]+|\$)*")
"""User and host, up to the first slash."""
_PARAMETER = re.compile(r"([?&;#])([^=?&;#]*)=((?:\$\{env:[^}$]*\}|[^?&;#$]+|\$)*)")
_SECRET = re.compile(r"secret|passw|passphrase|pwd|credential|signature|accesskey|apikey")
_SECRET_AT_END = re.compile(r"(?:key|keyid|token)$|^(?:sig|auth|authorization|bearer|pass|pw|jwt|sas)$")
_USER_IS_SECRET = ("s3", "http", "https")
_NEVER_A_PORT = ("s3", "gs", "gcs")
_WORD = re.compile(r"[^\s'\"`<>]*")
_LONGEST = 8192
"""Maximum characters of an address whose percent-encoding is decoded."""
_DEPTH = 8
"""Maximum depth of addresses inside addresses, and of layers of percent-encoding, that are examined."""


class _Cleaned(NamedTuple):
    text: str
    part: str
    """Description of the first credential; empty if there is none."""


def credential_in(value: str) -> str:
    """Describe the first credential in a setting, without repeating it; empty if there is none.

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
    """Return False for most texts without an address, at little cost: every event is checked."""
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
    """Return the end of the address that begins at `start` inside a longer text."""
    quote = text[start - 1 : start]
    line = _end_of_line(text, start, min(len(text), start + _LONGEST))
    if quote and quote in "'\"`" and (closing := text.find(quote, start, line)) >= 0:
        return closing
    end = _WORD.match(text, start, line).end()  # type: ignore[union-attr]
    if end < line and "@" not in text[start:end] and _has_odd_port(_place(text[start:end])):
        # The password may contain a space.
        user = text.find("@", end, line)
        return end if user < 0 else _WORD.match(text, user, line).end()  # type: ignore[union-attr]
    return end


def _one(address: str, depth: int) -> _Cleaned:
    """Clean one address; if its decoded form contains more credentials, return that form, cleaned."""
    if depth > _DEPTH:
        return _Cleaned(HIDDEN, f"more than {_DEPTH} nested addresses")
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
        # A password with a slash or a question mark ends at the @.
        host = _PLACE.match(address, later + 1)[0]  # type: ignore[index]
        return f"{HIDDEN}@{host}", later + 1 + len(host), said
    if odd and re.fullmatch(_STORES, scheme):
        return HIDDEN, after, said
    return place, after, ""


def _has_odd_port(place: str) -> bool:
    """Return whether the text after the colon is not a port, and so may be a password."""
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
