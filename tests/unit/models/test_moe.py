"""Mixture of experts against a loop over tokens, its load-balancing loss, and its place in the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffusionlm.evaluation.nelbo import nelbo
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.models import moe
from diffusionlm.models.layers import Linear, SwiGLU
from diffusionlm.models.moe import MoE, Routing, compute_load_balancing_loss
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from profiling.flops import count_idle_parameters, count_parameters
from tests.conftest import MakeConfig, MakeModel
from tests.fake_cuda import even_experts, fake_cuda

SPARSE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10}


@pytest.fixture
def mixture(make_config: MakeConfig) -> Callable[..., MoE]:
    def make(dtype: torch.dtype = torch.float64, **overrides: Any) -> MoE:
        results = MoE(make_config(**{**SPARSE, **overrides}))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in results.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        return results.to(dtype)

    return make


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, 24, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()


def written_out(mixture: MoE, x: Tensor, renormalise: bool) -> Tensor:
    """One token after the other."""
    rows = []
    for token in x.flatten(0, -2):
        probabilities = torch.exp(mixture.gate.weight @ token)
        probabilities = probabilities / probabilities.sum()
        chosen = sorted(range(len(probabilities)), key=lambda index: -probabilities[index].item())[: mixture.top_k]
        total = sum(probabilities[index] for index in chosen) if renormalise else 1.0
        out = torch.zeros_like(token)
        for index in chosen:
            expert: Any = mixture.experts[index]
            inner = F.silu(expert.gate_proj.weight @ token) * (expert.up_proj.weight @ token)
            out = out + probabilities[index] / total * (expert.down_proj.weight @ inner)
        rows.append(out)
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("experts", "chosen"), [(6, 2), (6, 1), (4, 4), (40, 3), (1, 1)])
def test_forward_and_gradients(mixture: Callable[..., MoE], experts: int, chosen: int, renormalise: bool) -> None:
    results = mixture(num_experts=experts, num_experts_per_tok=chosen, norm_topk_prob=renormalise)
    x = inputs(2, 5)
    grad = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    expected = written_out(results, x, renormalise)
    out = results(x)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(results(x), expected, rtol=1e-12, atol=1e-12)
    parameters = [x, *results.parameters()]
    theirs = torch.autograd.grad(expected, parameters, grad, allow_unused=True)
    for one, other in zip(torch.autograd.grad(out, parameters, grad), theirs, strict=True):
        # An expert without tokens: zeros, so that every step has the same set of gradients.
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
def test_grouped_equals_one_module_after_the_other(
    mixture: Callable[..., MoE], act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a projection that is no plain one, as LoRA's will be: then it must be called."""

    class Doubled(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2.0 * super().forward(x)

    results, x = mixture(hidden_act=act), inputs(9)
    plain = results(x)
    with monkeypatch.context() as patch:
        patch.setattr(moe, "run_experts_grouped", lambda _, *rest: moe.run_experts_one_by_one(results.experts, *rest))
        torch.testing.assert_close(results(x), plain, rtol=1e-12, atol=1e-12)
    for expert in results.experts:
        assert isinstance(expert, SwiGLU)
        doubled = Doubled(10, 24)
        doubled.weight = expert.down_proj.weight
        expert.down_proj = doubled
    torch.testing.assert_close(results(x), 2.0 * plain, rtol=1e-12, atol=1e-12)


def test_experts_without_tokens_are_not_computed(mixture: Callable[..., MoE]) -> None:
    """Their weights may be anything, and still have a gradient."""
    results, x = mixture(num_experts=12), inputs(3)
    routings: list[Routing] = []
    expected = results(x, routings)
    idle = sorted(set(range(12)) - set(routings[0].experts_TK.flatten().tolist()))
    assert len(idle) >= 6
    with torch.no_grad():
        for index in idle:
            for parameter in results.experts[index].parameters():
                parameter.fill_(torch.nan)
    out = results(x)
    assert torch.equal(out, expected)
    out.sum().backward()
    for index in idle:
        grads = [parameter.grad for parameter in results.experts[index].parameters()]
        assert all(grad is not None and not grad.any() for grad in grads)
    assert x.grad is not None and x.grad.isfinite().all()


def test_frozen_weights_have_no_gradient(mixture: Callable[..., MoE]) -> None:
    results, x = mixture(), inputs(20)
    results.get_parameter("experts.0.up_proj.weight").requires_grad_(False)
    results.gate.weight.requires_grad_(False)
    results(x).sum().backward()
    without = [name for name, parameter in results.named_parameters() if parameter.grad is None]
    assert without == ["gate.weight", "experts.0.up_proj.weight"]


def test_no_tokens(mixture: Callable[..., MoE]) -> None:
    """The last layer where nothing is scored."""
    results = mixture()
    x = torch.zeros(0, 24, dtype=torch.float64, requires_grad=True)
    routings: list[Routing] = []
    out = results(x, routings)
    assert out.shape == (0, 24)
    (out.sum() + compute_load_balancing_loss(routings)).backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in results.parameters())


def test_bfloat16_autocast(mixture: Callable[..., MoE]) -> None:
    """The dtype that a feed-forward gives; probabilities and gradients in fp32; close to fp32."""
    results, x = mixture(torch.float32), inputs(40, dtype=torch.float32)
    routings: list[Routing] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = results(x, routings)
        assert out.dtype == results.experts[0](x).dtype == torch.bfloat16
    assert routings[0].probabilities_TE.dtype == torch.float32
    grads = torch.autograd.grad(out.float().square().sum(), [x, *results.parameters()])
    assert {grad.dtype for grad in grads} == {torch.float32}
    expected = results(x)
    same = (routings[0].experts_TK == torch.softmax(results.gate(x), -1).topk(2).indices).all(dim=1)
    assert same.sum() >= 36
    assert (out.float() - expected)[same].norm() < 0.02 * expected[same].norm()
    requested = torch.autograd.grad(expected.square().sum(), [x, *results.parameters()])
    assert all((one - other).norm() < 0.1 * other.norm() + 1e-3 for one, other in zip(grads, requested, strict=True))


def test_a_gpu_is_waited_for_once_in_a_layer(make_config: MakeConfig) -> None:
    """For the number of tokens of each expert; the balance loss counts them again, on the device."""
    routings: list[Routing] = []
    with fake_cuda() as record, torch.device("cuda"):
        mixture = MoE(make_config(**SPARSE))
        mixture(torch.ones(3, 24), routings)
        compute_load_balancing_loss(routings)
        grouped = dict(record.waits)
        moe.run_experts_one_by_one(mixture.experts, torch.ones(3, 24), torch.ones(3, 2), routings[0].experts_TK)
    assert grouped == {"diffusionlm/models/moe.py:from_experts": 6}  # one copy of six numbers
    assert record.waits == {"diffusionlm/models/moe.py:from_experts": 12}


def test_balance_loss_by_hand() -> None:
    """Two routers, three tokens: E sum_e f_e P_e over all three together."""
    first = Routing(torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]), torch.tensor([[0, 1], [2, 1]]))
    second = Routing(torch.tensor([[0.6, 0.0, 0.4]]), torch.tensor([[0, 2]]))
    expected = 3 * (2 / 3 * 1.2 / 3 + 2 / 3 * 0.5 / 3 + 2 / 3 * 1.3 / 3)
    assert compute_load_balancing_loss([first, second]).item() == pytest.approx(expected, rel=1e-6)


TOKENS = torch.randint(0, 17, (3, 8), generator=torch.Generator().manual_seed(0))
ROWS = torch.tensor([0, 3, 9, 17, 23])


def loss_inputs(load_balancing_weight: float = 0.0) -> LossInputs:
    return LossInputs(TOKENS.flatten()[ROWS], torch.ones(5), 18, load_balancing_weight=load_balancing_weight)


def test_load_balancing_loss_is_not_in_loss_sum(tiny_model: MakeModel) -> None:
    model = tiny_model(torch.float64, **SPARSE)
    without = model(TOKENS, pattern=Bidirectional(), output_positions=ROWS, loss_inputs=loss_inputs())
    assert without.load_balancing_loss is None
    assert without.total_loss is without.loss_sum
    output = model(TOKENS, pattern=Bidirectional(), output_positions=ROWS, loss_inputs=loss_inputs(0.25))
    assert torch.equal(output.loss_sum, without.loss_sum)
    assert output.load_balancing_loss is not None
    assert torch.equal(output.total_loss, output.loss_sum + output.load_balancing_loss)
    half = model(TOKENS, pattern=Bidirectional(), output_positions=ROWS, loss_inputs=loss_inputs(0.125))
    assert half.load_balancing_loss is not None
    torch.testing.assert_close(half.load_balancing_loss * 2, output.load_balancing_loss)
    gates = [parameter for name, parameter in model.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(gates) == len(model.model.layers)
    grads = torch.autograd.grad(output.load_balancing_loss, gates)
    assert all(grad.abs().max() > 1e-6 for grad in grads)
    dense = tiny_model(torch.float64)(
        TOKENS, pattern=Bidirectional(), output_positions=ROWS, loss_inputs=loss_inputs(0.25)
    )
    assert dense.load_balancing_loss is None


def test_balance_is_pooled_over_layers_with_their_tokens(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 24 positions in the first layer, the 5 scored rows in the last."""
    visible: list[list[Routing]] = []

    def spy(routings: list[Routing], *rest: Any) -> Tensor:
        visible.append(list(routings))
        return compute_load_balancing_loss(routings, *rest)

    monkeypatch.setattr("diffusionlm.models.transformer.compute_load_balancing_loss", spy)
    tiny_model(**SPARSE)(TOKENS, pattern=Bidirectional(), output_positions=ROWS, loss_inputs=loss_inputs(1.0))
    assert [len(routing.probabilities_TE) for routing in visible[0]] == [24, 5]


def test_evaluation_knows_no_balance_loss(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("made in evaluation")

    monkeypatch.setattr("diffusionlm.models.transformer.compute_load_balancing_loss", refuse)
    with_weight = tiny_model(**SPARSE, router_aux_loss_coef=100.0)
    without = tiny_model(**SPARSE)
    reports = [nelbo(model, TOKENS, num_mc_samples=2, seed=0) for model in (with_weight, without)]
    assert reports[0].nats_per_token == reports[1].nats_per_token


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": (3,)},
        {"num_experts": 0},
        {"sandwich_norms": True, "attention_bias": True, "attention_output_bias": True, "tie_word_embeddings": False},
    ],
)
def test_parameters_are_counted(make_config: MakeConfig, changes: dict[str, Any]) -> None:
    config = make_config(**{**SPARSE, **changes})
    model = Transformer(config)
    assert count_parameters(config, config.vocab_size)[0] == sum(parameter.numel() for parameter in model.parameters())
    sparse = [block.mlp for block in model.model.layers if isinstance(block.mlp, MoE)]
    assert count_idle_parameters(config) == 4 * 3 * 24 * 10 * len(sparse)
    assert len(sparse) == sum(map(config.is_sparse, range(config.num_hidden_layers)))


def test_weights_and_gradients_are_cast_together_on_a_gpu(make_config: MakeConfig) -> None:
    """Twice the experts have twice the products, and as many casts."""
    counts = []
    for num_experts in (4, 8):
        with fake_cuda() as record, even_experts():
            with torch.device("cuda"):
                mixture = MoE(make_config(**{**SPARSE, "num_experts": num_experts}))
            x = torch.empty(2, 8, 24, device="cuda", requires_grad=True)
            with torch.autocast("cuda", torch.bfloat16):
                mixture(x).sum().backward()
        counts.append(record.count())
    few, many = counts
    assert many["mm"] - few["mm"] == 4 * 8
    assert few["_to_copy"] == many["_to_copy"]
    assert few["_foreach_copy_"] == many["_foreach_copy_"] == 2
