"""A config that grids are laid over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_run import REQUIRED_SECTIONS


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A valid one, ``base.toml``; nothing is trained by it."""
    path = tmp_path / "base.toml"
    path.write_text(REQUIRED_SECTIONS)
    return path
