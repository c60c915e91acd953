"""The page at ``/``: `page.html`, which needs nothing but this server, and the headers that hold it to that."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class ServedPage:
    """A page and its headers."""

    content: bytes
    headers: dict[str, str]


@cache
def load_page() -> ServedPage:
    """Read the page. Its policy allows its own script and style, by their hashes, and connections to the server."""
    text = resources.files("diffusionlm.serving").joinpath("page.html").read_text(encoding="utf-8")
    policy = [
        "default-src 'none'",
        f"script-src {_hash_element(text, 'script')}",
        f"style-src {_hash_element(text, 'style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-cache",
    }
    return ServedPage(text.encode(), headers)


def _hash_element(text: str, name: str) -> str:
    """The source expression of the only element of this name, in Content Security Policy 3."""
    [content] = re.findall(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
