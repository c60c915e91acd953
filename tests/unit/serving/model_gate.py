"""A model that waits, so that a test knows in which state a request is."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from diffusionlm.models.transformer import Transformer


class ModelGate:
    """Holds a model at its next forwards until it is opened."""

    def __init__(self, model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self._open = threading.Semaphore(0), threading.Event()
        forward = model.forward

        def wait(*args: Any, **kwargs: Any) -> Any:
            self.entered.release()
            assert self._open.wait(30)
            return forward(*args, **kwargs)

        monkeypatch.setattr(model, "forward", wait)

    def open(self) -> None:
        self._open.set()
