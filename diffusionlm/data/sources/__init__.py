"""The sources of documents. Each is a section of `config.data` and a class or function that opens a split."""

from __future__ import annotations

from importlib import import_module

from config.data import TextSource
from diffusionlm.data.reader import DocumentSource, Split


def open_source(config: TextSource, split: Split, key: str) -> DocumentSource:
    """Open the documents of one split with the section's `opener`, whose module is imported now.

    Args:
        key: the config key of the section, such as ``data.source``; errors name it.

    Raises:
        ValueError: a path or dataset cannot be read or holds no documents.
    """
    module, _, name = config.opener.partition(":")
    source: DocumentSource = getattr(import_module(f"diffusionlm.data.sources.{module}"), name)(config, split, key)
    return source
