"""The beginning of a source, as text to learn a tokenizer from."""

from __future__ import annotations

from collections.abc import Iterator

from diffusionlm.data.reader import ResumableReader

DOCUMENTS_AT_ONCE = 64


def first_documents(source: ResumableReader[str], max_bytes: int) -> Iterator[str]:
    """Documents of the first epoch in order, up to and with the one that brings them to ``max_bytes`` of UTF-8.

    Raises:
        ValueError: (while it is read) the source cannot read on.
    """
    left, position = max_bytes, None
    while left > 0:
        documents, position = source.read(0, position, DOCUMENTS_AT_ONCE)
        for text in documents:
            yield text
            left -= len(text.encode("utf-8", "surrogatepass"))
            if left <= 0:
                return
        if position is None:
            return
