"""Open the document source that a config section describes."""

from __future__ import annotations

from typing import assert_never

from config.data import HubDataset, LocalFiles, PythonStdlib, Synthetic, TextSource
from diffusionlm.data.reader import DocumentSource, Split


def open_source(config: TextSource, split: Split) -> DocumentSource:
    """The documents of a config section.

    Raises:
        ValueError: nothing to read; names the path or dataset.
    """
    match config:
        case PythonStdlib():
            from diffusionlm.data.local_files import StdlibSource

            return StdlibSource.open(config, split)
        case LocalFiles():
            from diffusionlm.data.local_files import open_local_files

            return open_local_files(config, split)
        case HubDataset():
            from diffusionlm.data.hub import open_hub

            return open_hub(config, split)
        case Synthetic():
            from diffusionlm.data.synthetic import SyntheticSource

            return SyntheticSource.open(config, split)
        case _:
            assert_never(config)
