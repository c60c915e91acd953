"""Where the server listens. No torch, so that an address in use is told before the model is loaded."""

from __future__ import annotations

import ipaddress
import resource
import socket

from files.usage_error import UsageError

BACKLOG = 512
"""Connections that wait to be accepted. All of them can be accepted at once, before the first one is refused."""
_OTHER_DESCRIPTORS = 128
"""Open files besides connections, and connections beyond the limit that ask only whether the server lives."""


def fit_connections(max_connections: int) -> int:
    """Allow the process as many open files as connections need, if the system lets it.

    Returns:
        How many connections there can be.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_needed = max_connections + BACKLOG + _OTHER_DESCRIPTORS
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < num_needed:
        soft = num_needed if hard == unlimited else min(num_needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max_connections if soft == unlimited else max(1, min(max_connections, soft - BACKLOG - _OTHER_DESCRIPTORS))


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
