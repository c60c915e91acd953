"""The tiny run, for several ranks."""

from __future__ import annotations

from tests.unit.training.conftest import config

__all__ = ["config"]
