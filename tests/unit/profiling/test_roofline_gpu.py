"""Predicted kernels and times on a GPU, against counts on paper and against the same step on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarking.implementations.matrix_products import MatrixProduct, MatrixSpec
from benchmarking.implementations.training import TrainCase, build_ours
from config.bench.training import BenchShape
from config.training.optimizer import AdamWConfig, MuonConfig
from config.training.runtime import RuntimeConfig
from diffusionlm.models.patterns import Bidirectional, BlockDiffusion, Causal
from profiling.accelerators import H200
from profiling.flops import count_visible_pairs
from profiling.roofline.__main__ import main
from profiling.roofline.fake_gpu import ATTENTION, ATTENTION_BACKWARD, count_tile_pairs
from profiling.roofline.gpus import KERNEL_SECONDS, GpuModel
from profiling.roofline.kernels import Kernel, list_kernels
from profiling.roofline.operators import Operator, OperatorCall, Phase, TensorUse, record_operators
from profiling.roofline.steps import RecordedStep, record_gpu_step

SIZES = "vocab_size = 64, batch_size = 2, num_hidden_layers = 2, hidden_size = 32, num_attention_heads = 2"
SIZES += ", num_key_value_heads = 2, head_dim = 16, intermediate_size = 48, max_position_embeddings = 16"
SHAPE = BenchShape.model_validate(
    {
        "name": "small",
        "vocab_size": 64,
        "batch_size": 2,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "max_position_embeddings": 16,
    }
)


def record(runtime: RuntimeConfig | None = None, *, has_average: bool = False, muon: bool = False) -> RecordedStep:
    case = TrainCase(SHAPE, "bfloat16", "cuda", 1, 0)
    optimizer = MuonConfig() if muon else AdamWConfig()
    return record_gpu_step(case, runtime or RuntimeConfig(), optimizer, has_average=has_average)


@pytest.fixture(scope="module")
def step() -> RecordedStep:
    return record()


def count_flops(operators: Sequence[Operator]) -> Counter[tuple[str, str]]:
    flops: Counter[tuple[str, str]] = Counter()
    for operator in operators:
        flops[operator.part, operator.phase] += operator.flops
    return +flops


def test_products_are_those_of_a_cpu(step: RecordedStep) -> None:
    """The same batch on the CPU has the same products, but in attention."""
    implementation = build_ours(TrainCase(SHAPE, "bfloat16", "cpu", 1, 0))
    model = implementation.model
    with record_operators(model, implementation.optimizers) as recorder:  # type: ignore[arg-type]
        implementation.step()
    on_cpu, on_gpu = count_flops(recorder.operators), count_flops(step.operators)
    assert len(on_gpu) == len(on_cpu) == 7
    for part, phase in on_cpu:
        if part != "attention":
            assert on_gpu[part, phase] == on_cpu[part, phase], (part, phase)


def test_attention_of_the_gpu(step: RecordedStep) -> None:
    """Two products forward and five backward of all pairs, of 2 sequences, 2 heads and 2 layers."""
    one = 2 * 16 * 16 * 16 * 2 * 2 * 2
    flops = count_flops(step.operators)
    assert flops["attention", "forward"] == 2 * one and flops["attention", "backward"] == 5 * one
    counts = Counter(operator.name for operator in step.operators)
    assert counts[ATTENTION] == counts[ATTENTION_BACKWARD] == 2


def test_required_flops(step: RecordedStep) -> None:
    """Beside attention, all products are required."""
    flops = count_flops(step.operators)
    executed = sum(flops.values()) - flops["attention", "forward"] - flops["attention", "backward"]
    scored = next(op for op in step.operators if op.name == "loss_kernel").reads[1].num_bytes // 8
    assert step.required_flops - executed == 12 * 16 * (32 + scored) * 32  # pairs of both layers


def test_backward_makes_each_gradient_once(step: RecordedStep) -> None:
    """Matrices get float32 gradients by a cast, and nothing is copied."""
    casts = [op for op in step.operators if op.part == "casts" and op.phase == "backward"]
    weights = [op for op in casts if op.writes[0].dtype == torch.float32 and op.writes[0].num_bytes in (4096, 6144)]
    assert len(weights) >= 2 * 7
    assert not [op for op in step.operators if op.part == "gradients"]


def test_update_is_launched_together(step: RecordedStep) -> None:
    """Clipping takes all gradients at once, and so does AdamW those of a group."""
    counts = Counter(operator.name for operator in step.operators if operator.phase == "update")
    assert counts["_foreach_norm"] == counts["_foreach_mul_"] == 1 and counts["_fused_adamw_"] <= 3
    assert counts.total() < 40


def test_options_of_a_step(step: RecordedStep) -> None:
    flops = count_flops(record(RuntimeConfig(activation_checkpointing="full")).operators)
    assert flops["projections", "recomputed"] == flops["projections", "forward"]
    operators = record(has_average=True, muon=True).operators
    assert sum(op.flops for op in operators if op.part == "optimizer") > 0
    num_parameters = 64 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32 + 2 * 16) + 32
    moved = sum(op.num_bytes for op in operators if op.part == "averages")
    assert moved >= 3 * 4 * num_parameters  # averages are read and written, weights read
    assert not [op for op in step.operators if op.part == "averages" and op.num_bytes > 100]


@pytest.mark.parametrize("length", [100, 256, 300])
def test_tiles_of_patterns(length: int) -> None:
    assert count_tile_pairs(Bidirectional(), length) == length**2
    assert count_tile_pairs(Causal(), length) == count_visible_pairs("causal", length, tile=128)
    expected = count_visible_pairs("block_diffusion", length, 16, tile=128)
    assert count_tile_pairs(BlockDiffusion(16), 2 * length) == expected


def use(storage: int, num_bytes: int) -> TensorUse:
    return TensorUse(storage, num_bytes, torch.float32)


def operator(
    reads: Sequence[TensorUse], writes: Sequence[TensorUse], phase: Phase = "forward", *, is_product: bool = False
) -> Operator:
    spec = MatrixSpec((2, 2), False, torch.float32)
    products = (MatrixProduct(spec, spec),) if is_product else ()
    call = OperatorCall(torch.ops.aten.mul.Tensor, (), {})
    return Operator("name", "norms", phase, 0, products, tuple(reads), tuple(writes), call, 0.0)


class TestFusion:
    """Operators of one block, with tensors that are named by numbers."""

    def test_what_stays_inside_is_not_moved(self) -> None:
        chain = [operator([use(1, 100)], [use(2, 30)]), operator([use(2, 30), use(1, 100)], [use(3, 7)])]
        product = operator([use(3, 7)], [use(4, 1)], is_product=True)
        fused, alone = list_kernels([*chain, product], is_compiled=True)
        assert (fused.num_bytes, fused.is_compiled) == (107, True)
        assert (alone.num_bytes, alone.flops) == (8, 16)
        assert [kernel.num_bytes for kernel in list_kernels(chain, is_compiled=False)] == [130, 137]

    def test_backward_computes_again_what_is_not_stored(self) -> None:
        """Tensor 2 is read by the backward alone, 3 by a product as well."""
        forward = operator([use(1, 100)], [use(2, 30), use(3, 7)])
        product = operator([use(3, 7)], [use(4, 1)], is_product=True)
        backward = operator([use(2, 30), use(3, 7), use(4, 1)], [use(5, 9)], "backward")
        last = operator([use(5, 9)], [], "backward", is_product=True)
        kernels = list_kernels([forward, product, backward, last], is_compiled=True)
        assert [kernel.num_bytes for kernel in kernels] == [100 + 7, 8, 100 + 7 + 1 + 9, 9]

    def test_a_product_separates_what_it_reads(self) -> None:
        """As in SwiGLU: the activation of 1 waits for the product 4, and is multiplied with it in one kernel. The cast
        5 is a kernel before the product that reads it."""
        activation = operator([use(1, 20)], [use(2, 20)])
        cast = operator([use(3, 8)], [use(5, 4)])
        up = operator([use(5, 4)], [use(4, 20)], is_product=True)
        multiplied = operator([use(2, 20), use(4, 20)], [use(6, 20)])
        down = operator([use(6, 20)], [use(7, 9)], is_product=True)
        kernels = list_kernels([activation, cast, up, multiplied, down], is_compiled=True)
        assert [(kernel.is_compiled, kernel.num_bytes) for kernel in kernels] == [
            (True, 12),
            (False, 24),
            (True, 60),
            (False, 29),
        ]

    def test_a_step_moves_less(self, step: RecordedStep) -> None:
        eager, compiled = (list_kernels(step.operators, is_compiled=value) for value in (False, True))
        assert sum(kernel.flops for kernel in eager) == sum(kernel.flops for kernel in compiled)
        assert sum(kernel.num_bytes for kernel in compiled) < sum(kernel.num_bytes for kernel in eager)
        assert len(compiled) < len(eager) == len(step.operators)


def test_a_kernel_takes_the_longest_of_three_times() -> None:
    gpu = GpuModel(H200, 1e12)
    spec = MatrixSpec((2048, 2048), False, torch.bfloat16)
    small = MatrixSpec((2048, 64), False, torch.bfloat16)
    large = MatrixProduct(spec, spec)

    def seconds(products: tuple[MatrixProduct, ...], num_bytes: int, name: str = "mm") -> float:
        return gpu.seconds(Kernel(name, "norms", "forward", products, num_bytes))

    assert seconds((large,), 0) == pytest.approx(2 * 2048**3 / 0.8e12)
    assert seconds((MatrixProduct(spec, small),), 0) == pytest.approx(2 * 2048**2 * 64 / 0.7e12)
    assert seconds((large,), 0, ATTENTION) == pytest.approx(2 * 2048**3 / 0.3e12)
    assert seconds((), 10**12) == pytest.approx(1 / (0.9 * 4.8))
    assert seconds((), 10) == KERNEL_SECONDS


class TestCommand:
    def write_config(self, path: Path, extra: str = "") -> list[str]:
        config = path / "shapes.toml"
        config.write_text(
            f'[bench]\nprecisions = ["bfloat16"]\n{extra}\n[[shapes]]\nname = "small"\n' + SIZES.replace(", ", "\n")
        )
        return ["--config", str(config)]

    def test_tables(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        page = tmp_path / "page.md"
        main([*self.write_config(tmp_path), "--device", "h100", "--output", str(page)])
        text = capsys.readouterr().out
        assert text.strip() in page.read_text(encoding="utf-8")
        rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| head and loss")]
        assert len(rows) == 1
        assert "small, masked diffusion" in text and "H100 / H200 / B200" in text

    def test_attention_share(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        """It is in the text, and attention that its products bound takes longer at a lower share."""
        main([*self.write_config(tmp_path), "--attention-share", "0.4"])
        assert "40% (fused attention" in capsys.readouterr().out
        kernel = Kernel(ATTENTION, "attention", "forward", (), 0)
        assert GpuModel(H200, 1e12).product_share(kernel) == 0.3
        assert GpuModel(H200, 1e12, 0.4).product_share(kernel) == 0.4

    @pytest.mark.parametrize(
        ("extra", "arguments", "remedy"),
        [
            ('objectives = ["unknown"]', [], "bench.objectives"),
            ("", ["--set", 'bench.precisions=["float32"]'], "--device cpu"),
            ("", ["--device", "cpu", "--optimizer", "muon"], "--optimizer"),
            ("", ["--device", "tpu"], "h100"),
            ("", ["--attention-share", "40"], "'40' is no share: give a number above 0 and at most 1"),
            ("", ["--attention-share", "nan"], "'nan' is no share"),
            ("", ["--device", "cpu", "--attention-share", "0.4"], "--attention-share"),
        ],
    )
    def test_errors(
        self, extra: str, arguments: list[str], remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main([*self.write_config(tmp_path, extra), *arguments])
        assert ended.value.code == 2
        assert remedy in capsys.readouterr().err
