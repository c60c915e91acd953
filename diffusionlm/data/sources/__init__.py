"""Open the document source that a config section describes. Modules are imported when they are needed."""

from __future__ import annotations

from typing import assert_never

from config.data import ChatTasks, HubDataset, LocalFiles, PythonStdlib, Synthetic, TextSource
from diffusionlm.data.reader import DocumentSource, Split


def open_source(config: TextSource, split: Split, key: str) -> DocumentSource:
    """Open the documents of one split.

    Args:
        key: the config key of the section, such as ``data.source``; errors name it.

    Raises:
        ValueError: a path or dataset cannot be read or holds no documents.
    """
    match config:
        case PythonStdlib():
            from diffusionlm.data.sources.local_files import open_stdlib

            return open_stdlib(config, split, key)
        case LocalFiles():
            from diffusionlm.data.sources.local_files import open_local_files

            return open_local_files(config, split, key)
        case HubDataset():
            from diffusionlm.data.sources.hub import open_hub

            return open_hub(config, split, key)
        case ChatTasks():
            from diffusionlm.data.sources.chat_tasks import ChatTaskSource

            return ChatTaskSource(config, split, key)
        case Synthetic():
            from diffusionlm.data.sources.synthetic import open_synthetic

            return open_synthetic(config, split)
        case _:
            assert_never(config)
