"""Around a step: skipping on the device, the metrics queue, prefetching, the garbage collector, memory."""

from __future__ import annotations

import gc
import math
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from config.train import TrainConfig
from config.training.optimizer import AdamWConfig, LionConfig, MuonConfig
from config.training.runtime import RuntimeConfig
from config.training.training import RunConfig
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockDiffusion
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import build_optimizers
from diffusionlm.training import block_wrapping
from diffusionlm.training.block_wrapping import MIN_CPU_FLOPS, should_compile_blocks
from diffusionlm.training.loop import MetricsTracker, collect_garbage, pause_garbage_collection
from diffusionlm.training.metrics import StepMetrics, TrainingProgress
from diffusionlm.training.setup import MASK_NOISE_STD, build_perturbations, check_triton, set_up_device
from diffusionlm.training.step import Prefetcher
from logger import LoggerGroup
from profiling import triton_setup
from tests.conftest import MakeModel
from tests.tiny_run import build_changed_run, change_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def give_gradients(model: Transformer, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def named(model: Transformer) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    "config", [AdamWConfig(), LionConfig(weight_decay=0.3), MuonConfig()], ids=lambda config: config.kind
)
def test_step_skipped_on_device_leaves_state_unchanged(
    config: AdamWConfig | LionConfig | MuonConfig, tiny_model: Any
) -> None:
    """The ones after it are what they would have been without, and those that it does not skip as if it could not."""
    nan, inf = float("nan"), float("inf")
    states = []
    for values in ((nan, 1.0, inf, 0.5), (1.0, 0.5), None):
        model = tiny_model()
        optimizers = build_optimizers(config, named(model))
        assert optimizers.can_skip_on_device
        for value in values or (1.0, 0.5):
            give_gradients(model, value)
            optimizers.step(1.0, torch.tensor(value in (nan, inf)) if values else None)
        states.append(optimizers.state_dict() | named(model))
    for name, expected in states[2].items():
        assert torch.equal(states[0][name], expected), name
        assert torch.equal(states[1][name], expected), name


def test_many_unread_numbers_are_read_from_the_oldest_on() -> None:
    counted: list[int] = []
    run: Any = SimpleNamespace(
        settings=SimpleNamespace(reads_metrics_each_step=False),
        config=SimpleNamespace(training=SimpleNamespace(max_nonfinite_steps=3)),
        progress=TrainingProgress(),
        skipped_batches=SimpleNamespace(release=counted.append),
    )
    loaded: Any = None
    tracker = MetricsTracker(run, LoggerGroup())
    num_counted = []
    for step in range(1, 41):
        tracker.add_step(StepMetrics(step, *torch.tensor([1.0, 1.0, 0.0, 1.0])), loaded, set())
        num_counted.append(len(counted))
    assert counted == list(range(1, 33))
    assert [num_counted[step - 1] for step in (15, 16, 23, 24, 31, 32, 39, 40)] == [0, 8, 8, 16, 16, 24, 24, 32]


def test_prefetcher_state_matches_the_consumed_step(config: TrainConfig, tmp_path: Path) -> None:
    plain = build_changed_run(config, tmp_path / "plain").loader
    ahead = Prefetcher(build_changed_run(config, tmp_path / "ahead").loader, CPU)
    for step in range(3):
        expected, loaded = plain.next_step(step), ahead.next_step(step)
        ahead.prefetch(step + 1)
        ahead.prefetch(step + 1)
        assert torch.equal(expected.noised_batches[0].inputs_BS, loaded.noised_batches[0].inputs_BS)
        assert loaded.state == expected.state
    again = Prefetcher(build_changed_run(config, tmp_path / "again").loader, CPU)
    again.load_state_dict(loaded.state)
    inputs = [loader.next_step(3).noised_batches[0].inputs_BS for loader in (again, plain)]
    assert torch.equal(*inputs)


@pytest.fixture
def frozen_by_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs freeze objects and release them, which they do not in other tests."""
    monkeypatch.setattr("diffusionlm.training.loop.gc", gc)
    yield
    gc.freeze()


@pytest.mark.usefixtures("frozen_by_runs")
def test_garbage_collection_runs_at_loop_intervals() -> None:
    assert gc.isenabled()
    with pause_garbage_collection(3):
        assert not gc.isenabled()
        ring: list[Any] = []
        ring.append(ring)
        del ring
        collect_garbage(2, 3)
        before = gc.get_stats()[2]["collections"]
        collect_garbage(3, 3)
        assert gc.get_stats()[2]["collections"] == before + 1
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    with pause_garbage_collection(0):
        assert gc.isenabled()


@pytest.mark.parametrize(
    ("compile", "checkpointing", "device", "chosen"),
    [
        ("auto", "none", CPU, False),
        ("auto", "none", CUDA, True),
        ("auto", "full", CUDA, True),
        ("auto", "selective", CUDA, False),
        ("blocks", "none", CPU, True),
        ("none", "none", CUDA, False),
    ],
)
def test_when_blocks_are_compiled(
    compile: Any, checkpointing: Any, device: torch.device, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RuntimeConfig(compile=compile, activation_checkpointing=checkpointing)
    monkeypatch.setattr(triton_setup, "find_triton_problem", lambda: None)
    assert should_compile_blocks(config, device) == chosen


def test_long_runs_on_a_cpu_with_amx_compile_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """There products in bfloat16 take about a quarter of a step, and compiling shortens the rest."""
    monkeypatch.setattr(block_wrapping, "has_amx", lambda: True)
    monkeypatch.setattr(triton_setup, "find_cpp_problem", lambda: None)
    auto, bfloat16 = RuntimeConfig(), torch.bfloat16
    assert should_compile_blocks(auto, CPU, bfloat16, MIN_CPU_FLOPS)
    assert not should_compile_blocks(auto, CPU, bfloat16, MIN_CPU_FLOPS / 2)
    assert not should_compile_blocks(auto, CPU, torch.float32, MIN_CPU_FLOPS)
    selective = RuntimeConfig(activation_checkpointing="selective")
    assert not should_compile_blocks(selective, CPU, bfloat16, MIN_CPU_FLOPS)
    monkeypatch.setattr(triton_setup, "find_cpp_problem", lambda: "needs g++")
    assert not should_compile_blocks(auto, CPU, bfloat16, MIN_CPU_FLOPS)
    monkeypatch.setattr(block_wrapping, "has_amx", lambda: False)
    monkeypatch.setattr(triton_setup, "find_cpp_problem", lambda: None)
    assert not should_compile_blocks(auto, CPU, bfloat16, MIN_CPU_FLOPS)


def test_a_torch_whose_compiler_is_wrong_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its users get an error instead of queries and keys that never learn; a GPU has other norms."""
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(triton_setup, "find_triton_problem", lambda: None)
    with pytest.raises(ValueError, match=r'runtime\.compile.*torch 2\.11\.0\+cu130.*set runtime\.compile = "none"'):
        should_compile_blocks(RuntimeConfig(compile="blocks"), CPU)
    assert should_compile_blocks(RuntimeConfig(compile="blocks"), CUDA)
    assert not should_compile_blocks(RuntimeConfig(), CPU)


def test_a_gpu_without_pythons_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler alone is not enough: what launches Triton's kernels includes Python.h, as of Debian's python3-dev."""
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(triton_setup, "is_triton_installed", lambda: True)
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    find_problem = triton_setup._find_own_compiler_problem
    monkeypatch.setattr(triton_setup, "_find_own_compiler_problem", find_problem.__wrapped__)
    warning = check_triton(RuntimeConfig(), CUDA)
    assert warning is not None and f"Python.h, which is not in {tmp_path}" in warning and "python3-dev" in warning
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "Python.h").write_text("")
    monkeypatch.setenv("CPATH", f"/nonexistent{os.pathsep}{tmp_path / 'own'}")
    assert check_triton(RuntimeConfig(), CUDA) is None


@pytest.mark.skipif(not triton_setup.is_triton_installed(), reason="needs triton")
def test_headers_are_sought_where_triton_seeks_them() -> None:
    from triton.runtime import build  # type: ignore[import-untyped,import-not-found,unused-ignore]

    with patch("subprocess.check_call") as call:
        build._build("name", "source.c", ".", [], [], [], [])
    assert f"-I{triton_setup.python_include_folder()}" in call.call_args.args[0]


def test_a_gpu_without_a_c_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`auto` does without Triton and the run warns; what asks for it is refused before the run starts."""
    problem = triton_setup.find_c_compiler_problem({"PATH": str(tmp_path)})
    assert problem is not None and "gcc" in problem
    wrong_name = triton_setup.find_c_compiler_problem({"PATH": str(tmp_path), "CC": "mycc"})
    assert wrong_name is not None and 'CC = "mycc"' in wrong_name
    monkeypatch.setattr(triton_setup, "is_triton_installed", lambda: True)
    monkeypatch.setattr(triton_setup, "_find_own_compiler_problem", lambda: problem)
    warning = check_triton(RuntimeConfig(), CUDA)
    assert warning is not None and problem in warning
    assert not should_compile_blocks(RuntimeConfig(), CUDA)
    assert check_triton(RuntimeConfig(compile="blocks"), CPU) is None
    for config in (RuntimeConfig(compile="blocks"), RuntimeConfig(attention_backend="flex")):
        with pytest.raises(ValueError, match=r"runtime\.(compile|attention_backend) = .*C compiler.*\"auto\""):
            check_triton(config, CUDA)


def test_conflicting_activation_checkpointing_options_are_rejected() -> None:
    with pytest.raises(ValueError, match='set compile = "none" or "auto"'):
        RuntimeConfig(compile="blocks", activation_checkpointing="selective")


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


MASK, ALPHA, STEP, FIRST_ROW = 18, 5.0, 3, 4
NEFTUNE: dict[str, Any] = {"training": {"neftune_alpha": ALPHA}}
MASK_NOISE: dict[str, Any] = {"objective": {"kind": "masked_diffusion", "mask_noise_steps": STEP + 1}}
DOCUMENTS_BL = torch.tensor([[0] * 3 + [1] * 5 + [-1] * 2, [0] * 9 + [1]])
LENGTHS = [[3] * 3 + [5] * 5 + [0] * 2, [9] * 9 + [1]]
"""Of each token's conversation in two packed rows; padding has none."""


def make_batch(inputs_BS: torch.Tensor, pattern: AttentionPattern) -> NoisedBatch:
    nothing = torch.zeros(0)
    return NoisedBatch(inputs_BS, pattern, nothing, nothing, nothing, first_row=FIRST_ROW)


def measure_noise(
    config: TrainConfig, model: Transformer, batch: NoisedBatch, changes: dict[str, Any], step: int = STEP
) -> torch.Tensor:
    """What the context of a training forward adds to the embeddings, [B, S, D]."""
    [perturb] = build_perturbations(change_config(config, **changes), model)
    embed = model.model.embed_tokens
    clean = embed(batch.inputs_BS)
    with perturb(step, batch):
        noisy = embed(batch.inputs_BS)
    assert torch.equal(embed(batch.inputs_BS), clean), "no noise after the step"
    return (noisy - clean).detach()


def test_noise_is_at_mask_tokens_of_the_noisy_half(config: TrainConfig, tiny_model: MakeModel) -> None:
    model = tiny_model(torch.float64)
    tokens = torch.tensor([[1, MASK, 2, MASK, 1, MASK, 2, 3], [MASK] * 8])
    batch = make_batch(tokens, BlockDiffusion(2))
    noise = measure_noise(config, model, batch, MASK_NOISE)
    is_noisy = (noise != 0).any(-1)
    assert is_noisy.tolist() == [[False, True, False, True] + [False] * 4, [True] * 4 + [False] * 4]
    alone = replace(batch, inputs_BS=tokens[1:], first_row=FIRST_ROW + 1)
    assert torch.equal(measure_noise(config, model, alone, MASK_NOISE)[0], noise[1]), "it is that of the row"
    assert not torch.equal(noise[0, 1], noise[0, 3]) and not torch.equal(noise[0, 1], noise[1, 1])
    assert not measure_noise(config, model, batch, MASK_NOISE, step=STEP + 1).any()
    assert not measure_noise(config, model, replace(batch, is_auxiliary=True), MASK_NOISE).any()


def test_distribution_of_the_noise_on_the_mask(config: TrainConfig, tiny_model: MakeModel) -> None:
    noise = measure_noise(config, tiny_model(), make_batch(torch.full((8, 200), MASK), Bidirectional()), MASK_NOISE)
    noise /= MASK_NOISE_STD
    assert abs(noise.std().item() - 1) < 0.04 and abs(noise.mean().item()) < 0.04


def test_neftune_is_its_formula(config: TrainConfig, tiny_model: MakeModel) -> None:
    """For each token of a conversation alpha / sqrt(L D) times a number from -1 to 1, whichever forward it is in."""
    model = tiny_model(torch.float64)
    D, inputs_BS = model.config.hidden_size, torch.arange(40).reshape(2, 20) % 15
    batch = make_batch(inputs_BS, BlockDiffusion(2, DOCUMENTS_BL))
    noise = measure_noise(config, model, batch, NEFTUNE)
    for row, lengths in enumerate(LENGTHS):
        seed = keyed_rng(config.run.seed, RngStream.EMBEDDING_NOISE, STEP, FIRST_ROW + row).integers(2**62)
        uniform_LD = torch.rand((10, D), generator=torch.Generator().manual_seed(int(seed))).double() * 2 - 1
        for position, length in enumerate(lengths):
            expected = uniform_LD[position] * (ALPHA / math.sqrt(length * D) if length else 0.0)
            for half in (0, 10):
                torch.testing.assert_close(noise[row, half + position], expected, rtol=1e-6, atol=1e-7)
    pattern = BlockDiffusion(2, DOCUMENTS_BL[1:])
    alone = replace(batch, inputs_BS=inputs_BS[1:], pattern=pattern, first_row=FIRST_ROW + 1)
    assert torch.equal(measure_noise(config, model, alone, NEFTUNE)[0], noise[1]), "it is that of the row"


def test_distribution_of_neftune(config: TrainConfig, tiny_model: MakeModel) -> None:
    model, batch = tiny_model(), make_batch(torch.zeros(8, 400, dtype=torch.int64), Bidirectional())
    noise = measure_noise(config, model, batch, NEFTUNE) * math.sqrt(400 * model.config.hidden_size) / ALPHA
    assert 0.99 < noise.abs().max() <= 1.001
    assert abs(noise.mean().item()) < 0.02 and noise.var().item() == pytest.approx(1 / 3, rel=0.03)
