"""The number of threads of a run: its key, else OMP_NUM_THREADS, else the cores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from config.training.training import RunConfig
from diffusionlm.training.setup import set_up_device


@pytest.mark.parametrize(
    ("key", "variable", "ranks", "expected"),
    [(3, "2", "1", 3), (None, "2", "1", 2), (None, "", "1", 8), (None, "1", "4", 2), (None, "many", "1", 8)],
)
def test_number_of_threads(
    key: int | None, variable: str, ranks: str, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torchrun sets the variable to 1 for several ranks: then the cores are divided."""
    monkeypatch.setattr("diffusionlm.training.setup.usable_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    set_up_device(RunConfig(directory=tmp_path, device="cpu", threads=key), keep_freed_memory=False)
    assert torch.get_num_threads() == expected
