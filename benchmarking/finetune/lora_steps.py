"""Training steps of adapters: of this project, and of PEFT on transformers with the same weights, data and loss.

Shapes: B sequences, L tokens, V vocabulary.
"""

from __future__ import annotations

import importlib
import itertools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarking.implementations.decoding import convert_to_qwen3
from benchmarking.implementations.training import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    UNBOUNDED_STEPS,
    FixedRowReader,
    TrainCase,
    TrainImplementation,
    build_ours,
    build_train_state,
    synchronize,
    train_config,
)
from config.training.optimizer import AdamWConfig
from config.training.runtime import RuntimeConfig
from diffusionlm.checkpoints.adapter_files import save_adapter
from diffusionlm.data.loader import Loader
from diffusionlm.training.run import build_step_settings

PEFT = "peft"
METHOD_OF_PEFT = (
    "`peft.PeftModel` on `Qwen3ForCausalLM` (sdpa attention, no cache, a 4-D mask of zeros), with our weights, our A "
    "and B and our noise; logits of all positions; cross-entropy of `logits.float()` with our weights; "
    "`torch.optim.AdamW` at its defaults over the parameters that require gradients"
)


def build_peft(case: TrainCase) -> TrainImplementation:
    """Build the step of PEFT for a case with an adapter."""
    assert case.adapter is not None
    peft: Any = importlib.import_module("peft")
    config = train_config(case, RuntimeConfig())
    state = build_train_state(case, config)
    with tempfile.TemporaryDirectory() as folder:
        save_adapter(state.model, case.adapter, Path(folder))
        base = convert_to_qwen3(build_train_state(replace(case, adapter=None), config).model)
        model = peft.PeftModel.from_pretrained(base, folder, is_trainable=True).train()
    objective = build_step_settings(config, state.model, torch.device("cpu"), torch.float32, UNBOUNDED_STEPS).objective
    del state
    trained = [value for value in model.parameters() if value.requires_grad]
    assert isinstance(config.optimizer, AdamWConfig)
    first, second = config.optimizer.betas
    optimizer = torch.optim.AdamW(
        trained, lr=LEARNING_RATE, betas=(first, second), eps=config.optimizer.eps, weight_decay=0.1
    )
    size, length = case.shape.batch_size, case.shape.max_position_embeddings
    loader = Loader(FixedRowReader(case.tokens()), objective, size, size, case.seed)
    mask_B1LL = torch.zeros(size, 1, length, length)
    steps = itertools.count()

    def compute_loss() -> Tensor:
        [batch] = loader.next_step(next(steps))
        weights = torch.zeros(size * length)
        weights[batch.positions_N] = (batch.weights_N / batch.denominator).float()
        targets = torch.zeros(size * length, dtype=torch.int64)
        targets[batch.positions_N] = batch.targets_N
        with case.autocast():
            logits_BLV = model(input_ids=batch.inputs_BS, attention_mask=mask_B1LL, use_cache=False).logits
        logits = logits_BLV.float().flatten(0, 1)
        logits[:, case.shape.mask_token] = float("-inf")
        nll = F.cross_entropy(logits, targets, reduction="none")
        return (nll * weights).sum()

    def step() -> Tensor:
        loss = compute_loss()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return synchronize(loss)

    return TrainImplementation(model, [optimizer], step)


BUILDERS: Mapping[str, Callable[[TrainCase], TrainImplementation]] = {"diffusionlm": build_ours, PEFT: build_peft}
