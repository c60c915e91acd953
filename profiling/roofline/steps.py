"""Record the operators of a training step on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarking.implementations.training import (
    PRECISIONS,
    UNBOUNDED_STEPS,
    FixedRowReader,
    TrainCase,
    train_config,
)
from config.training.optimizer import AdamWConfig, MuonConfig
from config.training.runtime import RuntimeConfig
from ddp.parallelism import NoParallel
from diffusionlm.data.loader import Loader
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import build_optimizers
from diffusionlm.optim.ema import WeightAverage
from diffusionlm.training.block_wrapping import prepare_model
from diffusionlm.training.monitor import StepMonitor
from diffusionlm.training.run import build_step_settings
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.spike_guard import SpikeGuard
from diffusionlm.training.step import TrainState, load_step_batch, train_step
from diffusionlm.training.step_metrics import compute_batch_flops
from profiling.roofline.fake_gpu import FakeGpuRecorder, fake_gpu
from profiling.roofline.operators import Operator, OperatorRecorder, record_operators

CUDA = torch.device("cuda")


@dataclass(frozen=True)
class RecordedStep:
    """A step of a case on a GPU."""

    operators: Sequence[Operator]
    required_flops: float
    """FLOPs of its batch that shape and noise require."""


def record_gpu_step(
    case: TrainCase, runtime: RuntimeConfig, optimizer: AdamWConfig | MuonConfig, *, has_average: bool
) -> RecordedStep:
    """Record one training step of a case on a GPU, without torch.compile."""
    runtime = runtime.model_copy(update={"compile": "none"})
    config = train_config(case, runtime).model_copy(update={"optimizer": optimizer})
    model_config = case.shape.to_model_config().model_copy(update={"logit_alignment": config.model.logit_alignment})
    reader = FixedRowReader(case.tokens())
    recorders: list[OperatorRecorder] = []
    with fake_gpu(lambda: recorders[-1]):
        with CUDA:
            model = Transformer(model_config, attention_backend=runtime.attention_backend)
        precision, parallel = PRECISIONS[case.precision], NoParallel(model)
        masters = prepare_model(model, runtime, precision, CUDA)
        optimizers = build_optimizers(config.optimizer, parallel.trainable_parameters())
        guard = SpikeGuard(None, config.training.spike_window, CUDA)
        average = WeightAverage(model, 0.999) if has_average else None
        state = TrainState(model, parallel, optimizers, masters, average, guard)
        settings = build_step_settings(config, model, CUDA, precision, UNBOUNDED_STEPS)
        monitor = StepMonitor(config.logging, UNBOUNDED_STEPS, model, parallel, masters)
        size = case.shape.batch_size
        loader = Loader(reader, settings.objective, size, size, case.seed)
        with torch.utils._python_dispatch._disable_current_modes(), StopRequest() as stop:
            batch = load_step_batch(loader, 0, parallel.world, stop)
        with record_operators(model, optimizers.optimizers, FakeGpuRecorder) as recorder:
            recorders.append(recorder)
            for _ in range(2):  # the first step allocates the moments of the optimizer
                recorder.clear()
                train_step(state, loader, replace(batch, step=UNBOUNDED_STEPS), settings, monitor)
    flops = sum(compute_batch_flops(model_config, noised_batch) for noised_batch in batch.noised_batches)
    return RecordedStep(recorder.operators, flops)
