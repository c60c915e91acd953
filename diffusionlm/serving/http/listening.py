"""Where the server listens. No torch, so that an address in use is told before the model is loaded."""

from __future__ import annotations

import ipaddress
import socket

from files.usage_error import UsageError


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
