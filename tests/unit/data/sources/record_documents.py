"""A source of documents with a policy for bad records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from config.data import LocalFiles
from diffusionlm.data.reader import DocumentSource
from diffusionlm.data.sources import open_source


def open_documents(path: Path, on_bad_row: str, **options: Any) -> DocumentSource:
    config = LocalFiles.model_validate(
        {"paths": (str(path),), "validation_paths": ("unused",), "on_bad_row": on_bad_row, **options}
    )
    return open_source(config, "train", "data.source")
