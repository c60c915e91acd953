"""Idle OpenMP threads are ended, and the results of what comes after are the same."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from config.generation import GenerationConfig
from diffusionlm.serving.engine import Engine
from tests.conftest import MakeModel

CODE = """
import os, torch
from diffusionlm.serving.engine import release_team

torch.set_num_threads(2)
num_threads = lambda: len(os.listdir("/proc/self/task"))
x = torch.randn(600, 600)
before, product = num_threads(), x @ x
with_team = num_threads()
is_released = release_team()
print(before, with_team, is_released, num_threads(), torch.equal(x @ x, product), num_threads())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_the_team_of_a_thread_ends_and_begins_again() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    before, with_team, is_released, released, is_equal, again = result.stdout.split()
    if is_released == "False":
        pytest.skip("torch has another OpenMP runtime than GNU's")
    assert is_equal == "True" and int(with_team) > int(released) >= int(before) and again == with_team


def test_an_idle_engine_has_no_team(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    monkeypatch.setattr(
        "diffusionlm.serving.engine.release_team", lambda: threads.append(threading.current_thread().name)
    )
    with Engine(tiny_model(vocab_size=19, mask_token_id=18), cache_memory=1 << 16) as engine:
        engine.submit([2, 3], GenerationConfig(max_new_tokens=4)).result()
    assert threads[0] == threading.current_thread().name
    assert threads[1:] and set(threads[1:]) == {"diffusionlm-engine"}
