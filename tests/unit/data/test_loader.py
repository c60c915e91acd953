"""The loader: an interrupted run reads the same batches as an uninterrupted one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from config.data import DataConfig, LocalFiles, PythonStdlib
from config.model import ModelConfig
from config.training.objective import MaskedDiffusionConfig
from diffusionlm.data.loader import Loader, count_rows
from diffusionlm.data.packing import Row
from diffusionlm.data.pipeline import MixtureComponent, build_row_reader
from diffusionlm.data.reader import ResumableReader
from diffusionlm.data.sources import open_source
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective
from tests.tiny_run import MODEL

Drain = Callable[..., list[Any]]
DOCUMENTS = [f"<{index}>" + "abcdefghij"[: index % 9] * (1 + index % 3) for index in range(29)]
LENGTH, BATCH = 16, 6
OBJECTIVE = build_objective(
    MaskedDiffusionConfig(), ModelConfig.model_validate({**MODEL, "vocab_size": 258, "mask_token_id": 257})
)


class RecordingObjective:
    """An objective that records its batches and keys."""

    def __init__(self) -> None:
        self.inner = OBJECTIVE
        self.batches: list[CleanBatch] = []
        self.keys: list[NoiseKey] = []

    def build_noised_batch(self, batch: CleanBatch, key: NoiseKey) -> NoisedBatch:
        self.batches.append(batch)
        self.keys.append(key)
        return self.inner.build_noised_batch(batch, key)

    def build_auxiliary_batch(self, batch: CleanBatch) -> None:
        return None

    def build_loss_inputs(self, noised_batch: NoisedBatch, denominator: float) -> Any:
        return self.inner.build_loss_inputs(noised_batch, denominator)


def build_rows(source: Any, config: DataConfig, tokenizer: Any, length: int, seed: int) -> ResumableReader[Row]:
    return build_row_reader([MixtureComponent("only", 1.0, source)], config, tokenizer, length, seed)


def config_of(rows: str, documents: int = 5, window: int = 4) -> DataConfig:
    return DataConfig(source=PythonStdlib(), rows=rows, document_shuffle_window=documents, row_shuffle_window=window)  # type: ignore[arg-type]


def equal(x: list[NoisedBatch], y: list[NoisedBatch]) -> bool:
    return all(
        torch.equal(a.inputs_BS, b.inputs_BS)
        and torch.equal(a.positions_N, b.positions_N)
        and torch.equal(a.targets_N, b.targets_N)
        and torch.equal(a.weights_N, b.weights_N)
        and a.num_targets == b.num_targets
        for a, b in zip(x, y, strict=True)
    )


def check_resuming(make: Callable[[], Loader], num_steps: int, length: int) -> tuple[Loader, list[list[NoisedBatch]]]:
    """Take steps without an interruption, and resume before each of them for ``length`` steps. Returns the loader and
    its steps."""
    loader, states, steps = make(), [], []
    for step in range(num_steps):
        states.append(json.loads(json.dumps(loader.state_dict())))
        steps.append(loader.next_step(step).noised_batches)
    for resumed_at in range(num_steps):
        resumed = make()
        resumed.load_state_dict(states[resumed_at])
        for step in range(resumed_at, min(resumed_at + length, num_steps)):
            assert equal(resumed.next_step(step).noised_batches, steps[step]), (resumed_at, step)
    return loader, steps


@pytest.fixture(params=["packed", "best_fit", "padded"])
def rows(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("windows", [(5, 4), (0, 0), (1, 3), (100, 100)])
def test_resumed_tail_equals_the_uninterrupted_run(
    rows: str, windows: tuple[int, int], list_reader: Any, byte_tokenizer: Any
) -> None:
    def make() -> Loader:
        reader = build_rows(list_reader(DOCUMENTS), config_of(rows, *windows), byte_tokenizer, LENGTH, seed=1)
        return Loader(reader, RecordingObjective(), BATCH, 3, seed=1)

    loader, steps = check_resuming(make, 16, length=6)  # about 29 rows an epoch, 6 a step: three epochs
    assert loader.epoch >= 2 and not equal(steps[0], steps[5])


BAD = [b"not json", b'{"text": 12}', b'{"id": 1}', b'{"text": "x\xff"}', b'{"text": "\\ud800"}', b"[]"]


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_a_run_over_bad_records_resumes_exactly(policy: str, tmp_path: Path, byte_tokenizer: Any) -> None:
    good = [b'{"text": "good %d %s"}' % (index, b"ab" * (index % 4)) for index in range(21)]
    lines = [line for index, text in enumerate(good) for line in (text, BAD[index % len(BAD)])]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    config = LocalFiles.model_validate({"paths": [str(path)], "validation_paths": ["unused"], "on_bad_row": policy})

    def make() -> Loader:
        source = open_source(config, "train", "data.source")
        return Loader(build_rows(source, config_of("packed"), byte_tokenizer, LENGTH, 1), RecordingObjective(), 4, 4, 1)

    loader, steps = check_resuming(make, 9, length=1)
    assert loader.epoch >= 1 and not equal(steps[1], steps[2])


def test_an_epoch_has_every_row_once(rows: str, list_reader: Any, byte_tokenizer: Any, drain: Drain) -> None:
    config = config_of(rows)
    reader = build_rows(list_reader(DOCUMENTS), config, byte_tokenizer, LENGTH, seed=1)
    total = count_rows(reader)
    objective = RecordingObjective()
    loader = Loader(reader, objective, total, total, seed=1)  # a step is an epoch
    for step in range(2):
        loader.next_step(step)
        batch = objective.batches[-1]
        texts = bytes(batch.tokens_BL[batch.loss_mask_BL & (batch.tokens_BL != 256)].tolist())
        longest = LENGTH - 1 if rows == "padded" else None
        assert sorted(texts) == sorted("".join(text[:longest] for text in DOCUMENTS).encode())
    assert not torch.equal(objective.batches[0].tokens_BL, objective.batches[1].tokens_BL)


def test_step_larger_than_the_epoch(list_reader: Any, byte_tokenizer: Any) -> None:
    reader = build_rows(list_reader(["one", "two"]), config_of("padded"), byte_tokenizer, LENGTH, seed=1)
    loader = Loader(reader, RecordingObjective(), 7, 7, seed=1)
    assert loader.next_step(0).noised_batches[0].inputs_BS.shape == (7, LENGTH)
    assert loader.epoch >= 3


def test_no_documents_is_an_error(rows: str, list_reader: Any, byte_tokenizer: Any) -> None:
    reader = build_rows(list_reader([]), config_of(rows), byte_tokenizer, LENGTH, seed=1)
    with pytest.raises(ValueError, match=r"\[data\]"):
        Loader(reader, RecordingObjective(), 4, 4, seed=1).next_step(0)
    assert count_rows(reader) == 0


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_steps_are_split_with_the_configured_probability(
    probability: float, list_reader: Any, byte_tokenizer: Any
) -> None:
    def batches(micro: int) -> list[CleanBatch]:
        reader = build_rows(list_reader(["x" * 3000]), config_of("packed"), byte_tokenizer, LENGTH, seed=1)
        objective = RecordingObjective()
        loader = Loader(reader, objective, BATCH, micro, 1, random_length_probability=probability)
        for step in range(60):
            loader.next_step(step)
        return objective.batches

    whole = batches(BATCH)
    # Except at the ends of epochs a row has one document.
    share = sum(batch.document_BL is not None and int(batch.document_BL.max()) > 1 for batch in whole) / len(whole)
    assert share == pytest.approx(probability, abs=0.15)
    assert probability not in (0.0, 1.0) or share == probability
    parts = [batch.document_BL for batch in batches(2)]
    assert torch.equal(torch.cat([batch.document_BL for batch in whole]), torch.cat(parts))  # type: ignore[arg-type, misc]
