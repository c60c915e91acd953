"""Training steps on conversations in packed and in padded rows, by the data pipeline of a run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from benchmarking.implementations.training import (
    UNBOUNDED_STEPS,
    TrainCase,
    build_train_state,
    synchronize,
    train_config,
)
from config.bench.training import BenchShape
from config.data import DataConfig, LocalFiles
from config.finetune.chat import ChatRowsConfig
from config.training.runtime import RuntimeConfig
from diffusionlm.data.loader import LoaderSpec
from diffusionlm.training.monitor import StepMonitor
from diffusionlm.training.run import build_step_settings
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.step import load_step_batch, train_step
from tokenizer import Tokenizer, train_bpe

RowFill = Literal["padded", "best_fit"]
ROWS: tuple[RowFill, ...] = ("padded", "best_fit")
TOKENIZER_BYTES = 400_000
"""Text that the tokenizer is trained on."""


@dataclass
class RowSteps:
    """The steps of one way to fill rows, and the tokens that they trained on."""

    step: Callable[[], Tensor]
    tokens_of_steps: list[int] = field(default_factory=list)
    """Positions of each step without padding."""
    padding_share: float = 0.0


def build_row_steps(data: Path, shape: BenchShape) -> dict[str, RowSteps]:
    """Build the steps of full training on the conversations of a file, by the name of the rows."""
    tokenizer = train_chat_tokenizer(data, shape.vocab_size)
    return {rows: _build_steps(data, shape, tokenizer, rows) for rows in ROWS}


def train_chat_tokenizer(data: Path, vocab_size: int) -> Tokenizer:
    """Train a tokenizer with the special tokens of ChatML on the first questions and answers of a file."""
    texts, size = [], 0
    with data.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            texts.append(f"{record['question']}\n{record['answer']}")
            size += len(texts[-1])
            if size > TOKENIZER_BYTES:
                break
    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|mask|>")
    return train_bpe(texts, vocab_size=vocab_size, special_tokens=special)


def _build_steps(data: Path, shape: BenchShape, tokenizer: Tokenizer, rows: RowFill) -> RowSteps:
    case = TrainCase(shape, "float32", "cpu", torch.get_num_threads(), seed=0)
    chat = ChatRowsConfig(
        columns={"prompt": "question", "completion": "answer"}, template="chatml", fill="none", turns="last"
    )
    section = DataConfig(
        source=LocalFiles(paths=(str(data),), chat=chat),
        rows=rows,
        row_length=shape.max_position_embeddings,
        document_shuffle_window=0,
        row_shuffle_window=256,
    )
    config = train_config(case, RuntimeConfig()).model_copy(update={"data": section})
    state = build_train_state(case, config)
    settings = build_step_settings(config, state.model, torch.device("cpu"), torch.float32, UNBOUNDED_STEPS)
    monitor = StepMonitor(config.logging, UNBOUNDED_STEPS, state.model, state.parallel, state.master_weights)
    size = shape.batch_size
    loader = LoaderSpec(
        section, tokenizer, shape.max_position_embeddings, case.objective, state.model.config, size, size, case.seed
    ).open()
    stop, steps = StopRequest(), itertools.count()
    result = RowSteps(lambda: torch.zeros(()))

    def step() -> Tensor:
        before = loader.state_dict()
        batch = load_step_batch(loader, next(steps), state.parallel.world, stop)
        after = loader.state_dict()
        positions, padding = (after[key] - before[key] for key in ("places", "padding"))
        result.tokens_of_steps.append(positions - padding)
        result.padding_share = after["padding"] / after["places"]
        return synchronize(train_step(state, loader, batch, settings, monitor).loss)

    result.step = step
    return result
