"""Workers change nothing but the time: batches, states, errors, and the end of their processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from config.data import DataConfig, LocalFiles, MarkovChain, MixtureEntry
from config.model import ModelConfig
from config.training.objective import BlockDiffusionConfig
from diffusionlm.data.loader import LoaderSpec, WorkerLoader
from diffusionlm.data.tokenization import open_text_encoder
from diffusionlm.diffusion.noised_batch import NoisedBatch
from tests.tiny_run import MODEL
from tokenizer import Tokenizer, train_bpe

LENGTH = 16
NUM_STEPS = 30
"""Several epochs."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "a.jsonl"
    lines = [json.dumps({"text": f"the cat {index} sat on the mat" * (1 + index % 4)}) for index in range(80)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def build_spec(
    tokenizer: Tokenizer, texts: Path, workers: int, rank: int = 0, world_size: int = 1, **data: Any
) -> LoaderSpec:
    mixture = (
        MixtureEntry(source=LocalFiles(paths=(str(texts),)), weight=2.0),
        MixtureEntry(source=MarkovChain(documents_per_epoch=30), weight=1.0),
    )
    ids = {"vocab_size": tokenizer.vocab_size, "mask_token_id": tokenizer.mask_token_id}
    model = ModelConfig.model_validate({**MODEL, **ids})
    config = DataConfig(mixture=mixture, document_shuffle_window=40, row_shuffle_window=9, workers=workers, **data)
    objective = BlockDiffusionConfig(block_length=4)
    return LoaderSpec(config, tokenizer, LENGTH, objective, model, 12, 3, 1, rank, world_size)


def tensors(batches: list[NoisedBatch]) -> list[torch.Tensor]:
    return [
        tensor for batch in batches for tensor in (batch.inputs_BS, batch.positions_N, batch.targets_N, batch.weights_N)
    ]


def equal(a: list[NoisedBatch], b: list[NoisedBatch]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, tensors(a), tensors(b)))


Expected = tuple[list[list[NoisedBatch]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def expected(tokenizer: Tokenizer, texts: Path) -> Expected:
    """The batches of each step, and the state after it, without workers."""
    loader = build_spec(tokenizer, texts, 0).open()
    steps, states = [], []
    for step in range(NUM_STEPS):
        loaded = loader.next_step(step)
        steps.append(loaded.noised_batches)
        states.append(json.loads(json.dumps(loaded.state)))
    assert loader.epoch >= 1
    return steps, states


@pytest.mark.slow
def test_batches_and_states_are_those_without_workers(tokenizer: Tokenizer, texts: Path, expected: Expected) -> None:
    """Resumed from a state without workers, with two tokenizer processes; then resumed without workers again."""
    steps, states = expected
    loader = WorkerLoader(build_spec(tokenizer, texts, 3))
    try:
        loader.load_state_dict(states[4])
        for step in range(5, 20):
            loaded = loader.next_step(step)
            assert equal(loaded.noised_batches, steps[step])
            state = loaded.state | {"skip_logs": states[step]["skip_logs"]}  # tokenizers read ahead
            assert state == states[step], "the state of the last step returned, not of the last one built"
        assert loaded.tokens_per_second > 0 and 0 <= loaded.buffered_steps <= 4
    finally:
        loader.close()
    resumed = build_spec(tokenizer, texts, 0).open()
    resumed.load_state_dict(states[19])
    assert resumed.state_dict() == states[19]
    assert all(equal(resumed.next_step(step).noised_batches, steps[step]) for step in range(20, NUM_STEPS))


@pytest.mark.slow
def test_a_worker_that_dies_is_an_error(tokenizer: Tokenizer, texts: Path, expected: Expected) -> None:
    loader = WorkerLoader(build_spec(tokenizer, texts, 1, prefetch_steps=1))
    assert equal(loader.next_step(0).noised_batches, expected[0][0])
    for process in multiprocessing.active_children():
        process.kill()
    with pytest.raises(ChildProcessError, match=r"out of memory.*prefetch_steps"):
        [loader.next_step(step) for step in range(1, 1000)]
    loader.close()


@pytest.mark.slow
def test_errors_of_a_worker_are_raised_in_the_training(
    tokenizer: Tokenizer, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave no files of steps in the temporary directory; nor does the end of a training."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "valid"}\n{"body": "no text"}\n', encoding="utf-8")
    loader = WorkerLoader(build_spec(tokenizer, path, 1))
    with pytest.raises(ValueError, match=r"data\.mixture\.0\.source\.text_field"):
        loader.next_step(0)
    assert not list(folder.iterdir())
    loader = WorkerLoader(build_spec(tokenizer, texts, 1))
    loader.next_step(0)
    assert len(list(folder.iterdir())) == 1
    loader.close()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_rows_of_every_step(
    world_size: int, tokenizer: Tokenizer, texts: Path, expected: Expected
) -> None:
    steps, states = expected
    loaders = [build_spec(tokenizer, texts, 0, rank, world_size).open() for rank in range(world_size)]
    for step in range(10):
        batches = [batch for loader in loaders for batch in loader.next_step(step).noised_batches]
        inputs = torch.cat([batch.inputs_BS for batch in batches])
        assert torch.equal(inputs, torch.cat([batch.inputs_BS for batch in steps[step]])), "all rows, once, in order"
        assert all(loader.state_dict() == states[step] for loader in loaders), "a state serves any number of ranks"
        assert sum(batch.num_targets for batch in batches) == sum(batch.num_targets for batch in steps[step])


TRAINING = """
import multiprocessing, pickle, sys
from diffusionlm.data.loader import WorkerLoader
if __name__ == "__main__":
    loader = WorkerLoader(pickle.loads(bytes.fromhex(sys.argv[1])))
    loader.next_step(0)
    print(multiprocessing.active_children()[0].pid, flush=True)
    sys.stdin.readline()
    loader.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="asks /proc for the processes")
@pytest.mark.parametrize("is_killed", [True, False])
def test_no_worker_outlives_its_training(is_killed: bool, texts: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Nor do its files of steps; a training that ends by itself prints nothing of semaphores that are left."""
    spec = pickle.dumps(build_spec(tokenizer, texts, 2)).hex()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", TRAINING, spec],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as training:
        assert training.stdout is not None
        worker = int(training.stdout.readline())
        workers = [worker, *children(worker)]
        assert len(workers) >= 2, "the loader and its tokenizer"
        if is_killed:
            training.kill()
            training.wait()
        else:
            _, stderr = training.communicate("\n")
            assert (training.returncode, stderr) == (0, "")
        deadline = time.monotonic() + 60
        while any(is_running(process) for process in workers):
            assert time.monotonic() < deadline, "the workers are still running"
            time.sleep(0.05)
    assert not list(tmp_path.iterdir())


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_process_that_fails_to_start_is_an_error(tmp_path: Path) -> None:
    """A script without a main guard fails in its children; nothing waits for them forever."""
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from diffusionlm.data.tokenization import open_text_encoder\n"
        "from tokenizer import Tokenizer\n"
        "many = {f'<special token number {number}>': 256 + number for number in range(10_000)}\n"
        "tokenizer = Tokenizer({bytes([byte]): byte for byte in range(256)}, [], many, 'qwen')\n"
        "with open_text_encoder(tokenizer, 2) as encoder:\n"
        "    encoder.submit(['a'])()\n"
    )
    result = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert "ValueError: a tokenizer process ended" in result.stderr


def test_text_without_a_utf8_form_is_an_error_with_and_without_processes() -> None:
    tokenizer = train_bpe(["the cat sat on the mat"], vocab_size=262)
    for num_processes in (0, 1):
        with open_text_encoder(tokenizer, num_processes) as encoder:
            with pytest.raises(ValueError, match="surrogate"):
                encoder.submit(["one", "\ud800"])()
            assert [len(tokens) for tokens in encoder.submit(["", "a"])()] == [0, 1]
