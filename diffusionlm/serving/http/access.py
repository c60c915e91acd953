"""Who may use the server: the address at which it listens, and API keys.

No torch, so that an address in use and a wrong file of keys are told before the model is loaded.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from pathlib import Path

from files.usage_error import UsageError

MIN_KEY_LENGTH = 16


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind a socket; it does not listen yet.

    Raises:
        UsageError: the address is in use, or none of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host.strip("[]"), port))
    except OSError as error:
        bound.close()
        raise UsageError(
            f"cannot listen at serve.host = {host!r}, serve.port = {port} ({error.strerror}): set another port with "
            "--port, or another host with --host"
        ) from None
    return bound


def is_loopback(host: str) -> bool:
    """Return whether only programs of this machine can use an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def format_url(host: str, port: int) -> str:
    """Format the address of a server."""
    return f"http://[{host.strip('[]')}]:{port}" if ":" in host else f"http://{host}:{port}"


class ApiKeys:
    """The keys that a server accepts. Only their hashes are kept, and all of them are compared in constant time."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """Read a file of keys, one per line.

        Raises:
            UsageError: a key is too short or has spaces, or there is none.
            OSError: the file cannot be read.
        """
        text = path.read_text("utf-8", "replace")
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
        keys = [(number, line) for number, line in lines if line and not line.startswith("#")]
        for number, key in keys:
            if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
                raise UsageError(
                    f"{path}:{number}: a key must be at least {MIN_KEY_LENGTH} ASCII characters without spaces: make "
                    'one with python -c "import secrets; print(secrets.token_urlsafe(32))"'
                )
        if not keys:
            raise UsageError(f"{path} has no keys: write one per line, or remove serve.api_keys_file")
        return cls(tuple(key for _, key in keys))

    def find_owner(self, authorization: str) -> str | None:
        """Return a name of the key in an ``Authorization`` header, which does not reveal it; None: it is none of these.

        The name is the salt of the prefix cache.
        """
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip())
        # No early end: the time says nothing about which key, or how much of one, was right.
        matches = [hmac.compare_digest(digest, other) for other in self._digests]
        return digest.hex() if any(matches) and scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
