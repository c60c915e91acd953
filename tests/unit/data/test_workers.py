"""Workers change nothing but the time: draws, states, errors and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from config.data import DataConfig, LocalFiles, MarkovChain, MixtureEntry
from config.model import ModelConfig
from config.objective import BlockDiffusionConfig
from diffusionlm.data.loader import LoaderSpec, StepLoader, WorkerLoader
from diffusionlm.diffusion.noised_batch import NoisedBatch
from tokenizer import Tokenizer, train_bpe

LENGTH = 16


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["the cat sat on the mat"], vocab_size=262)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "a.jsonl"
    lines = [json.dumps({"text": f"the cat {index} sat on the mat" * (1 + index % 4)}) for index in range(80)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def plan(
    tokenizer: Tokenizer, texts: Path, workers: int, rank: int = 0, world_size: int = 1, **data: Any
) -> LoaderSpec:
    parts = (
        MixtureEntry(source=LocalFiles(paths=(str(texts),)), weight=2.0),
        MixtureEntry(source=MarkovChain(documents_per_epoch=30), weight=1.0),
    )
    model = ModelConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=8,
        max_position_embeddings=LENGTH,
        vocab_size=tokenizer.vocab_size,
        mask_token_id=tokenizer.mask_token_id,
    )
    config = DataConfig(mixture=parts, document_shuffle_window=40, row_shuffle_window=9, workers=workers, **data)
    objective = BlockDiffusionConfig(block_length=4)
    return LoaderSpec(config, tokenizer, LENGTH, objective, model, 12, 3, 1, rank, world_size)


def open_loader(planned: LoaderSpec) -> StepLoader:
    return WorkerLoader(planned) if planned.data.workers else planned.open()


def flat(noised_batches: list[NoisedBatch]) -> list[torch.Tensor]:
    return [
        tensor
        for draw in noised_batches
        for tensor in (draw.inputs_BS, draw.positions_N, draw.targets_N, draw.weights_N)
    ]


def same(one: list[NoisedBatch], other: list[NoisedBatch]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, flat(one), flat(other)))


@pytest.fixture(scope="module")
def expected(tokenizer: Tokenizer, texts: Path) -> tuple[list[list[NoisedBatch]], list[dict[str, Any]]]:
    """Draws of each step, and the state behind it, without workers."""
    loader = open_loader(plan(tokenizer, texts, 0))
    steps, states = [], []
    for step in range(40):  # several epochs
        steps.append(loader.next_step(step))
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert loader.metrics().epoch >= 1
    return steps, states


@pytest.mark.parametrize("workers", [1, 3])
def test_draws_and_states_are_those_without_workers(
    workers: int, tokenizer: Tokenizer, texts: Path, expected: tuple[list[list[NoisedBatch]], list[dict[str, Any]]]
) -> None:
    steps, states = expected
    loader = open_loader(plan(tokenizer, texts, workers))
    try:
        for step in range(20):
            assert same(loader.next_step(step), steps[step])
            assert loader.state_dict() == states[step], "of what was taken, not of what was drawn ahead"
        metrics = loader.metrics()
        assert metrics.tokens_per_second > 0 and 0 <= metrics.buffered_steps <= 4
    finally:
        loader.close()
    resumed = open_loader(plan(tokenizer, texts, 0))  # by another number of workers
    resumed.load_state_dict(json.loads(json.dumps(states[19])))
    assert all(same(resumed.next_step(step), steps[step]) for step in range(20, 40))


def test_a_run_resumes_with_workers_where_it_stopped_without(
    tokenizer: Tokenizer, texts: Path, expected: tuple[list[list[NoisedBatch]], list[dict[str, Any]]]
) -> None:
    steps, states = expected
    loader = open_loader(plan(tokenizer, texts, 2, prefetch_steps=1))
    try:
        loader.load_state_dict(states[10])
        assert all(same(loader.next_step(step), steps[step]) for step in range(11, 30))
        assert loader.state_dict() == states[29]
    finally:
        loader.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_rows_of_every_step(
    world_size: int, tokenizer: Tokenizer, texts: Path, expected: tuple[list[list[NoisedBatch]], list[dict[str, Any]]]
) -> None:
    steps, states = expected
    loaders = [open_loader(plan(tokenizer, texts, 0, rank, world_size)) for rank in range(world_size)]
    for step in range(10):
        drawn = [loader.next_step(step) for loader in loaders]
        inputs = torch.cat([draw.inputs_BS for noised_batches in drawn for draw in noised_batches])
        assert torch.equal(inputs, torch.cat([draw.inputs_BS for draw in steps[step]])), "everything, once, in order"
        assert all(loader.state_dict() == states[step] for loader in loaders), "a state serves any number of ranks"
        assert sum(draw.num_targets for noised_batches in drawn for draw in noised_batches) == sum(
            d.num_targets for d in steps[step]
        )


def test_ranks_must_divide_the_batch(tokenizer: Tokenizer, texts: Path) -> None:
    with pytest.raises(ValueError, match=r"training\.batch_size = 12 must be a multiple of the 5 ranks"):
        plan(tokenizer, texts, 0, 0, 5).open()


def test_what_a_worker_cannot_read_is_said_in_the_training(tokenizer: Tokenizer, texts: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"body": "not fine"}\n', encoding="utf-8")
    loader = open_loader(plan(tokenizer, bad, 1))
    with pytest.raises(ValueError, match="text_field"):
        loader.next_step(0)
    loader.close()


def test_a_worker_that_dies_is_said(tokenizer: Tokenizer, texts: Path) -> None:
    loader = WorkerLoader(plan(tokenizer, texts, 1, prefetch_steps=1))
    loader.next_step(0)
    os.kill(loader._process.pid, signal.SIGKILL)
    with pytest.raises(ChildProcessError, match=r"exit code -9.*out of memory.*prefetch_steps"):
        [loader.next_step(step) for step in range(1, 1000)]
    loader.close()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="asks /proc for the processes")
def test_no_worker_outlives_a_training_that_is_killed(texts: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import sys, time
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
from pathlib import Path
from test_workers import plan
from diffusionlm.data.loader import WorkerLoader
from tokenizer import train_bpe
if __name__ == "__main__":
    loader = WorkerLoader(plan(train_bpe(["the cat"], vocab_size=260), Path({str(texts)!r}), 2))
    loader.next_step(0)
    print(loader._process.pid, flush=True)
    time.sleep(60)
""",
        encoding="utf-8",
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        worker = int(training.stdout.readline())
        family = [worker, *children(worker)]
        assert len(family) >= 2, "the one that loads, and the one that tokenises"
        training.kill()
        training.wait()
        deadline = time.monotonic() + 30
        while any(is_running(process) for process in family):
            assert time.monotonic() < deadline, "the workers go on"
            time.sleep(0.05)


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
