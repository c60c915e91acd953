"""Resuming among bad records, and where an epoch ends exactly with a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from config.data import DataConfig, LocalFiles, PythonStdlib
from config.model import ModelConfig
from config.training.objective import MaskedDiffusionConfig
from diffusionlm.data.loader import Loader
from diffusionlm.data.pipeline import MixtureComponent, build_row_reader
from diffusionlm.data.sources import open_source
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.diffusion.objectives import build_objective

LENGTH, EOS, MASK = 16, 256, 257
MODEL = ModelConfig(
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=8,
    max_position_embeddings=LENGTH,
    vocab_size=258,
    mask_token_id=MASK,
)
BAD = [
    b"not json",
    b'{"text": 12}',
    b'{"text": null}',
    b'{"id": 1}',
    b'{"text": "x\xff"}',
    b'{"text": "\\ud800"}',
    b"[]",
]


def loader_of(source: Any, rows: str, batch_size: int, tokenizer: Any) -> Loader:
    config = DataConfig(source=PythonStdlib(), rows=rows, document_shuffle_window=5, row_shuffle_window=3)  # type: ignore[arg-type]
    reader = build_row_reader([MixtureComponent("only", 1.0, source)], config, tokenizer, LENGTH, 1)
    return Loader(reader, build_objective(MaskedDiffusionConfig(), MODEL), batch_size, batch_size, seed=1)


def read(loader: Loader, step: int) -> list[Any]:
    """Return the batches of a step as lists."""
    return [to_lists(batch) for batch in loader.next_step(step)]


def to_lists(batch: NoisedBatch) -> Any:
    return batch.inputs_BS.tolist(), batch.positions_N.tolist(), batch.targets_N.tolist(), batch.weights_N.tolist()


def texts(step: list[Any]) -> list[str]:
    """Return the clean rows of a step of masked diffusion."""
    texts_of_rows = []
    for inputs_BS, positions_N, targets_N, _ in step:
        flat = [token for row in inputs_BS for token in row]
        for index, target in zip(positions_N, targets_N, strict=True):
            flat[index] = target
        rows = [flat[first : first + LENGTH] for first in range(0, len(flat), LENGTH)]
        texts_of_rows += [bytes(token for token in row if token < EOS).decode() for row in rows]
    return texts_of_rows


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_a_run_over_bad_records_resumes_exactly(policy: str, tmp_path: Path, byte_tokenizer: Any) -> None:
    lines = []
    for index in range(21):
        lines += [b'{"text": "good %d %s"}' % (index, b"ab" * (index % 4)), BAD[index % len(BAD)]]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    config = LocalFiles.model_validate({"paths": (str(path),), "validation_paths": ("unused",), "on_bad_row": policy})

    def make() -> Loader:
        return loader_of(open_source(config, "train", "data.source"), "packed", 4, byte_tokenizer)

    loader = make()
    states, steps = [], []
    for step in range(9):
        states.append(json.loads(json.dumps(loader.state_dict())))
        steps.append(read(loader, step))
    assert loader.epoch >= 1
    for cut in range(1, 9):
        resumed = make()
        resumed.load_state_dict(states[cut])
        assert read(resumed, cut) == steps[cut]
    assert steps[1] != steps[2]


@pytest.mark.parametrize("kind", ["list", "file"])
def test_an_epoch_that_ends_exactly_at_a_checkpoint(
    kind: str, tmp_path: Path, list_reader: Any, byte_tokenizer: Any
) -> None:
    documents = [f"document {index:02}" for index in range(12)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))

    def make() -> Loader:
        config = LocalFiles(paths=(str(path),), validation_paths=("unused",))
        source = open_source(config, "train", "data.source") if kind == "file" else list_reader(documents)
        return loader_of(source, "padded", 4, byte_tokenizer)

    loader = make()
    states, steps = [], []
    for step in range(7):
        states.append(json.loads(json.dumps(loader.state_dict())))
        steps.append(read(loader, step))
    for first in (0, 3):  # an epoch is three steps
        assert sorted(text for step in steps[first : first + 3] for text in texts(step)) == documents
    for cut in (3, 6):
        resumed = make()
        resumed.load_state_dict(states[cut])
        assert [read(resumed, step) for step in range(cut, 7)] == steps[cut:]
