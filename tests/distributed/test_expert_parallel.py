"""Experts divided over ranks: each rank has its own batch, and one process with the whole model has all batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from config.finetune.lora import LoraConfig
from ddp.expert_parallel import apply_expert_parallel
from ddp.mesh import Axis
from ddp.process_group import World
from diffusionlm.inference.model_runner import prepare_for_tiles
from diffusionlm.kernels.cross_entropy import LossInputs, LossOutput
from diffusionlm.models.lora import add_adapter
from diffusionlm.models.moe import MoE, Routing, compute_load_balancing_loss
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.row_adapters import RowAdaptedModel
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.block_wrapping import checkpoint_activations
from tests.conftest import MakeConfig, MakeModel
from tests.distributed.forked import run_ranks
from tests.distributed.toys import recorded
from tests.fake_cuda import even_experts, fake_cuda

EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 10}
TOP_ONE: dict[str, Any] = {"num_experts_per_tok": 1, "norm_topk_prob": False}
BALANCE_WEIGHT = 0.25
SHAPES = [(2, 8), (1, 5), (3, 4), (1, 1)]
"""Sequences and length of each rank's batch."""
OUTPUTS = [7, 3, 0, 1]
"""Output positions of each rank's batch: the last layer of rank 2 has no tokens of its own."""


@dataclass(frozen=True)
class Result:
    """What one process computes."""

    logits: list[Tensor]
    losses: list[Tensor]
    balance: Tensor
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    num_ranks: int = 2
    config: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    prepare: Callable[[Transformer], None] = lambda model: None
    """Applied to the whole model, and before the experts are divided."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    is_meta: bool = False
    """The divided model is built without memory."""


def prefer_two_experts(model: Transformer) -> None:
    """Route each token to expert 0 or to expert 1, both of rank 0: |w x| is larger than 0."""
    for mixture in mixtures_of(model):
        with torch.no_grad():
            mixture.gate.weight[1] = -mixture.gate.weight[0]
            mixture.gate.weight[2:] = 0.0


def adapt(model: Transformer, is_uneven: bool = False, **options: Any) -> None:
    """Add adapters with values that change the output."""
    if is_uneven:
        prefer_two_experts(model)
    add_adapter(model, LoraConfig(rank=2, **options))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def train_only(model: Transformer, part: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)


CASES = {
    "silu": Case(),
    "float32": Case(dtype=torch.float32),
    "plain probabilities": Case(config={"norm_topk_prob": False}),
    "four ranks": Case(num_ranks=4, config={"norm_topk_prob": False}),
    "GELU": Case(config={"hidden_act": "gelu_pytorch_tanh"}),
    "GELU, four ranks": Case(num_ranks=4, config={"hidden_act": "gelu_pytorch_tanh"}),
    "a dense layer": Case(config={"mlp_only_layers": (0,)}),
    "idle ranks": Case(4, config=TOP_ONE, prepare=prefer_two_experts),
    "idle ranks, GELU": Case(config={**TOP_ONE, "hidden_act": "gelu_pytorch_tanh"}, prepare=prefer_two_experts),
    "LoRA": Case(prepare=partial(adapt, targets=("gate_proj", "up_proj", "down_proj", "q_proj"))),
    "LoRA on experts of one rank": Case(prepare=partial(adapt, targets=("experts.5.down_proj",))),
    "idle ranks, LoRA": Case(
        4, config=TOP_ONE, prepare=partial(adapt, targets=("gate_proj", "down_proj"), is_uneven=True)
    ),
    "idle ranks, DoRA": Case(config=TOP_ONE, prepare=partial(adapt, targets=("up_proj",), dora=True, is_uneven=True)),
    "one expert is trained": Case(prepare=partial(train_only, part="experts.1.up_proj")),
    "routers are trained": Case(prepare=partial(train_only, part="mlp.gate.")),
    "full checkpointing": Case(checkpointing="full"),
    "full checkpointing, one expert": Case(prepare=partial(train_only, part="experts.1.up_proj"), checkpointing="full"),
    "selective checkpointing": Case(checkpointing="selective"),
    "meta": Case(is_meta=True, config={"tie_word_embeddings": False}),
}


def mixtures_of(model: Transformer) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def batch_of(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, output positions and their targets."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(17, SHAPES[rank], generator=generator)
    positions = torch.randperm(tokens.numel(), generator=generator)[: OUTPUTS[rank]].sort().values
    return tokens, positions, torch.randint(17, (len(positions),), generator=generator)


def forward(model: Transformer, rank: int) -> LossOutput:
    tokens, positions, targets = batch_of(rank)
    loss_inputs = LossInputs(
        targets, torch.full((len(targets),), 0.1), excluded_token=18, load_balancing_weight=BALANCE_WEIGHT
    )
    return model(tokens, pattern=Bidirectional(), output_positions=positions, loss_inputs=loss_inputs)


def compute(model: Transformer, ranks: list[int], routings: list[Routing] | None = None) -> Result:
    """The batches of some ranks. ``routings``: those of all batches, whose balance is computed together."""
    with torch.no_grad():
        logits = [model(batch_of(rank)[0], pattern=Bidirectional()) for rank in ranks]
    outputs = [forward(model, rank) for rank in ranks]
    if routings:
        balance = BALANCE_WEIGHT * compute_load_balancing_loss(routings)
    else:
        assert outputs[0].load_balancing_loss is not None
        balance = outputs[0].load_balancing_loss
    losses = [output.loss_sum for output in outputs]
    (torch.stack(losses).sum() + balance).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return Result(logits, [loss.detach() for loss in losses], balance.detach(), gradients)


def compute_whole(model: Transformer, num_ranks: int) -> Result:
    routings: list[Routing] = []

    def collect(layers: list[Routing], *rest: Any) -> Tensor:
        routings.extend(layers)
        return torch.zeros(())

    with patch("diffusionlm.models.transformer.compute_load_balancing_loss", collect):
        return compute(model, list(range(num_ranks)), routings)


def sum_over_ranks(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values


@pytest.mark.parametrize("name", CASES)
def test_equals_a_single_process(name: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    case = CASES[name]
    whole = tiny_model(case.dtype, **{**EXPERTS, **case.config})
    case.prepare(whole)
    expected = compute_whole(whole, case.num_ranks)

    def act(world: World) -> Result:
        model = tiny_model(case.dtype, **{**EXPERTS, **case.config})
        case.prepare(model)
        if case.is_meta:
            with torch.device("meta"):
                model = Transformer(whole.config)
        apply_expert_parallel(model, Axis(world.size, world.rank, dist.group.WORLD))
        if case.is_meta:
            assert all(weight.is_meta for weight in model.parameters())
            model = model.to_empty(device="cpu").to(case.dtype)
            model.load_state_dict({key: whole.state_dict()[key] for key in model.state_dict()})
        model.sum_over_ranks = sum_over_ranks
        checkpoint_activations(model, case.checkpointing)
        return compute(model, [world.rank])

    results = run_ranks(act, tmp_path, case.num_ranks, timeout=20)
    for rank, result in enumerate(results):
        assert_close(result.logits[0], expected.logits[rank], "logits")
        assert_close(result.losses[0], expected.losses[rank], "loss")
    assert_close(torch.stack([result.balance for result in results]).sum(), expected.balance, "load-balancing loss")
    assert expected.gradients.keys() == set().union(*(result.gradients for result in results))
    for key, gradient in expected.gradients.items():
        parts = {rank: result.gradients[key] for rank, result in enumerate(results) if key in result.gradients}
        if ".experts." in key:
            expert = int(key.split(".experts.")[1].split(".")[0])
            assert list(parts) == [expert // (EXPERTS["num_experts"] // case.num_ranks)]
        assert_close(torch.stack(list(parts.values())).sum(dim=0), gradient, key)
    used = {key for key, gradient in expected.gradients.items() if gradient.abs().max() > 1e-3}
    assert used
    if "idle" in name:
        assert {key.split(".experts.")[1][:2] for key in used if ".experts." in key} <= {"0.", "1."}


def assert_close(actual: Tensor, expected: Tensor, name: str) -> None:
    error = (actual - expected).abs().max() if actual.numel() else 0.0
    scale = max(1.0, float(expected.abs().max())) if actual.numel() else 1.0
    assert error <= (1e-12 if expected.dtype == torch.float64 else 1e-6) * scale, f"{name}: {error}"


def test_matrix_products_and_messages_have_autocast_dtype(make_config: MakeConfig, tmp_path: Path) -> None:
    """Rows in bfloat16 travel four times: to the experts and back, and so do their gradients."""
    generator = torch.Generator().manual_seed(1)
    whole = MoE(make_config(**EXPERTS))
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    x_TD = torch.randn(40, 24, generator=generator)

    def run(mixture: MoE) -> tuple[Tensor, Tensor]:
        x = x_TD.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = mixture(x)
        out.float().square().sum().backward()
        assert out.dtype == torch.bfloat16
        assert x.grad is not None
        return out.detach().float(), x.grad

    expected = run(whole)

    def act(world: World) -> list[int]:
        model = Transformer(make_config(**EXPERTS, num_hidden_layers=1))
        apply_expert_parallel(model, Axis(world.size, world.rank, dist.group.WORLD))
        mixture = mixtures_of(model)[0]
        mixture.load_state_dict({key: whole.state_dict()[key] for key in mixture.state_dict()})
        with recorded() as events:
            results = run(mixture)
        for result, reference in zip(results, expected, strict=True):
            assert (result - reference).norm() < 0.01 * reference.norm()
        return [num_bytes for _, num_bytes in events]

    messages = run_ranks(act, tmp_path)
    # A rank sends 40 * 3 rows, and one of the two receives no more.
    assert all(len(sizes) == 4 and len(set(sizes)) == 1 for sizes in messages)
    assert min(messages[0] + messages[1]) == 40 * 3 * 24 * 2


def test_frozen_layers_have_no_backward(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Two exchanges of rows in the forward of each layer, and one in the backward: for the experts of the last one."""

    def act(world: World) -> int:
        model = tiny_model(**EXPERTS)
        train_only(model, "layers.1.mlp.experts.6.")
        apply_expert_parallel(model, Axis(world.size, world.rank, dist.group.WORLD))
        with recorded() as events:
            forward(model, 0).loss_sum.backward()
        return len(events)

    assert run_ranks(act, tmp_path) == [2 * 2 + 1] * 2


def test_a_gpu_is_waited_for_three_times_in_a_layer(make_config: MakeConfig) -> None:
    """For counts: of own pairs, of received rows, and of the rows of each own expert. Never in the backward."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=2, store=fake_pg.FakeStore())
    try:
        with fake_cuda() as record, even_experts():
            with torch.device("cuda"):
                model = Transformer(make_config(**EXPERTS))
            apply_expert_parallel(model, Axis(2, 0, dist.group.WORLD))
            mixture = mixtures_of(model)[0]
            x = torch.empty(2, 8, 24, device="cuda", requires_grad=True)
            with torch.autocast("cuda", torch.bfloat16):
                mixture(x).sum().backward()
    finally:
        dist.destroy_process_group()
    counts, to_experts, back, *gradients = [launch for launch in record.launches if "alltoall" in launch.name]
    assert {tensor.dtype for tensor in counts.inputs} == {torch.int64}
    assert {tensor.dtype for launch in (to_experts, back, *gradients) for tensor in launch.inputs} == {torch.bfloat16}
    assert [launch.is_backward for launch in (to_experts, back, *gradients)] == [False, False, True, True]
    assert record.product_dtypes() == {torch.bfloat16}
    # As many values: of 8 experts, of 2 ranks with a flag each, and of 4 experts.
    assert record.waits == {
        "diffusionlm/models/moe.py:from_experts": 8 + 4,
        "ddp/expert_parallel.py:run_divided_experts": 2 * 2,
    }


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_divide_the_parameters_of_experts(num_ranks: int, make_config: MakeConfig) -> None:
    config = make_config(**EXPERTS)
    whole = dict(Transformer(config).named_parameters())
    names = [name for name in whole if ".experts." in name]
    divided: list[str] = []
    for rank in range(num_ranks):
        model = Transformer(config)
        apply_expert_parallel(model, Axis(num_ranks, rank))
        parameters = dict(model.named_parameters())
        assert model.has_collective_forwards
        assert all(parameters[name].shape == whole[name].shape for name in parameters)
        assert whole.keys() - parameters.keys() < set(names)
        divided += [name for name in parameters if ".experts." in name]
    assert sorted(divided) == sorted(names)


def test_one_rank_has_the_whole_model(tiny_model: MakeModel) -> None:
    for model in (tiny_model(**EXPERTS), tiny_model()):
        names = list(model.state_dict())
        apply_expert_parallel(model, Axis())
        assert list(model.state_dict()) == names
        model(batch_of(0)[0], pattern=Bidirectional())


def test_errors_name_the_keys(tiny_model: MakeModel) -> None:
    with pytest.raises(ValueError, match=r"parallel\.expert = 3 must divide num_experts = 8: set parallel\.expert"):
        apply_expert_parallel(tiny_model(**EXPERTS), Axis(3))
    for settings in ({}, {**EXPERTS, "mlp_only_layers": (0, 1)}):
        with pytest.raises(ValueError, match=r"no layer of the model has experts .*: set parallel\.expert = 1"):
            apply_expert_parallel(tiny_model(**settings), Axis(2))


@pytest.mark.parametrize("copy", [prepare_for_tiles, lambda model: RowAdaptedModel(model).model])
def test_decoding_that_needs_whole_layers_is_refused(
    copy: Callable[[Transformer], Transformer], tiny_model: MakeModel
) -> None:
    model = tiny_model(**EXPERTS)
    apply_expert_parallel(model, Axis(2))
    with pytest.raises(ValueError, match=r"parallel\.expert > 1 supports neither"), torch.no_grad():
        copy(model)(batch_of(0)[0], pattern=Bidirectional())
