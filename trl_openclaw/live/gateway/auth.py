"""Who may ask: keys and their users, and what a browser must not be talked into."""

import hashlib
import hmac
import ipaddress
import re
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from ..records import DEFAULT_USER
from .api_errors import ApiError

MIN_KEY_CHARS = 16
_USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_HASHED = re.compile(r"sha256:([0-9a-f]{64})")


class Keys:
    """Users by their keys. Without any key everybody is the user `"default"`.

    Args:
        users: Users by the SHA-256 digests of their keys.
    """

    def __init__(self, users: Mapping[bytes, str] | None = None):
        self._users = dict(users or {})

    @classmethod
    def read(cls, path: Path) -> "Keys":
        """The keys in a file: one `user: key` a line, where a key may be given as `sha256:` and its digest in hex.

        Raises:
            ValueError: In one line, when the file cannot be used, or others than its owner can read it.
        """
        try:
            mode, text = path.stat().st_mode, path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"The keys in {path} cannot be read: {error}.") from error
        if stat.S_IMODE(mode) & 0o077:
            raise ValueError(f"{path} can be read or written by others: run `chmod 600 {path}`.")
        users: dict[bytes, str] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            digest, user = _entry(line, f"{path}:{number}")
            if users.setdefault(digest, user) != user:
                raise ValueError(f"{path}:{number}: two users have the same key.")
        if not users:
            raise ValueError(f"{path} holds no key: write one `user: key` a line.")
        return cls(users)

    def __bool__(self) -> bool:
        return bool(self._users)

    @property
    def users(self) -> list[str]:
        """Everybody who may ask."""
        return sorted(set(self._users.values())) or [DEFAULT_USER]

    def user_of(self, authorization: str | None) -> str | None:
        """The user whose key a header carries, or `None`. How long this takes says nothing about the keys."""
        if not self._users:
            return DEFAULT_USER
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip() if scheme.lower() == "bearer" else "")
        found = None
        for digest, user in self._users.items():
            if hmac.compare_digest(digest, given):
                found = user
        return found


def _entry(line: str, place: str) -> tuple[bytes, str]:
    """A line's digest and user."""
    user, colon, key = (part.strip() for part in line.partition(":"))
    if not colon or not _USER.fullmatch(user):
        raise ValueError(
            f"{place}: write `user: key`, where a user is a name of letters, digits, `_`, `.` and `-`, at most 64."
        )
    if key.startswith("sha256:"):
        hashed = _HASHED.fullmatch(key.lower())
        if hashed is None:
            raise ValueError(f"{place}: after `sha256:` stand the 64 hex digits of the key's digest.")
        digest = bytes.fromhex(hashed[1])
        if digest == _digest(""):
            raise ValueError(f"{place}: this is the digest of an empty key.")
        return digest, user
    if len(key) < MIN_KEY_CHARS:
        raise ValueError(f"{place}: the key of {user!r} has {len(key)} characters; give it {MIN_KEY_CHARS} or more.")
    return _digest(key), user


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


async def current_user(request: Request) -> str:
    """The user who asks; for every path that shows or changes what belongs to somebody.

    Raises:
        ApiError: 401 without a key that is known.
    """
    user = request.app.state.gateway.keys.user_of(request.headers.get("authorization"))
    if user is None:
        raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
    return user


CurrentUser = Annotated[str, Depends(current_user)]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address, by all that its name resolves to."""
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", None)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def check_bind(host: str, keys: Keys) -> None:
    """Refuse to serve others than this machine without keys.

    Raises:
        ValueError: In one line that says what to do.
    """
    if not keys and not is_loopback(host):
        raise ValueError(
            f"`--host {host}` can be reached from other machines, and no keys are set: anybody could chat, and read "
            "and train what others said. Give `--keys FILE` with one `user: key` a line, or leave out `--host`."
        )
