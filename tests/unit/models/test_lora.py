"""Low-rank adapters: merging, dropout, the base that stays as it is, and what the config selects."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from config.finetune.lora import LoraConfig
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.kernels.low_rank import dropout_mask, hash_tokens, low_rank_linear
from diffusionlm.models.lora import (
    LoRALinear,
    adapter_modules,
    add_adapter,
    before_training,
    find_dropout,
    list_targets,
    merge_adapter,
)
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.row_adapters import share_weights
from diffusionlm.models.transformer import Transformer
from profiling.adapter_size import measure_adapter
from tests.conftest import MakeModel

TOKENS = torch.randint(0, 18, (2, 9), generator=torch.Generator().manual_seed(5))
TWO_LAYERS_DENSE = 7 * 2
MLP, ATTENTION = "layers.1.mlp", "self_attn"
BIAS_OF_Q = {"self_attn.q_proj.bias"}


def logits_of(model: Transformer) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS, pattern=Bidirectional())


@pytest.mark.parametrize(("delta", "merged"), [(0.003, 1.0), (0.00391, 1.0078125)])
def test_merging_rounds_once(delta: float, merged: float, tiny_model: MakeModel) -> None:
    """Casting 0.00391 to bfloat16 before the sum would give 1.0."""
    model = tiny_model(dtype=torch.bfloat16)
    add_adapter(model, LoraConfig(rank=1, alpha=1.0, targets=("q_proj",)))
    module = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert isinstance(module, LoRALinear)
    assert module.lora_A.dtype == torch.float32
    with torch.no_grad():
        module.weight.fill_(1.0)
        module.lora_A.fill_(1.0)
        module.lora_B.fill_(delta)
    merge_adapter(model)
    weight = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert set(weight.flatten().tolist()) == {merged}


@pytest.mark.parametrize("init", ["default", "gaussian", "pissa", "olora"])
@pytest.mark.parametrize("dora", [False, True])
def test_a_new_adapter_changes_nothing(init: Any, dora: bool, tiny_model: MakeModel) -> None:
    model = tiny_model()
    before, weights = logits_of(model), {name: value.clone() for name, value in model.named_parameters()}
    add_adapter(model, LoraConfig(rank=3, init=init, dora=dora, trainable_tokens=(18, 2)))
    after = logits_of(model)
    if init in ("default", "gaussian") and not dora:
        assert torch.equal(after, before)
    torch.testing.assert_close(after, before, atol=2e-5, rtol=1e-4)
    for name, value in weights.items():
        assert torch.equal(dict(model.named_parameters())[name], value)


@pytest.mark.parametrize("tied", [False, True])
def test_only_the_adapter_is_trained(tied: bool, tiny_model: MakeModel) -> None:
    """Number of trained values: r (in + out) of each projection, and the rows."""
    model = tiny_model(tie_word_embeddings=tied)
    sizes = [module.in_features + module.out_features for _, module in list_targets(model, LoraConfig())]
    assert len(sizes) == TWO_LAYERS_DENSE
    add_adapter(model, LoraConfig(rank=3, trainable_tokens=(18, 2)))
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert sum(value.numel() for value in trained.values()) == 3 * sum(sizes) + (2 if not tied else 1) * 2 * 24
    positions = torch.arange(TOKENS.numel())
    output = model(
        TOKENS,
        pattern=Bidirectional(),
        output_positions=positions,
        loss_inputs=LossInputs(TOKENS.flatten(), torch.ones(len(positions))),
    )
    output.total_loss.backward()
    for name, value in model.named_parameters():
        assert (value.grad is not None) == (name in trained)


@pytest.mark.parametrize(
    ("options", "tied", "expected"),
    [
        ({"modules_to_save": ("lm_head", "model.norm")}, False, {"lm_head.weight", "model.norm.weight"}),
        ({"modules_to_save": ("lm_head",)}, True, {"model.embed_tokens.weight"}),
        (
            {"modules_to_save": ("layers.1.mlp",)},
            False,
            {f"{MLP}.{name}_proj.weight" for name in ("gate", "up", "down")},
        ),
        ({"bias": "all", "trainable_tokens": "mask"}, False, {f"{ATTENTION}.{name}_proj.bias" for name in "qkv"}),
        ({"bias": "lora_only", "modules_to_save": ("embed_tokens",)}, False, BIAS_OF_Q | {"model.embed_tokens.weight"}),
    ],
)
def test_parameters_of_the_base_are_trained_whole(
    options: dict[str, Any], tied: bool, expected: set[str], tiny_model: MakeModel
) -> None:
    """An update changes them and the adapter, and neither another parameter nor the weights of the base itself."""
    base = tiny_model(tie_word_embeddings=tied, attention_bias=True)
    before = {name: value.clone() for name, value in base.named_parameters()}
    model = share_weights(base)
    config = LoraConfig(rank=3, targets=("q_proj", "layers.1.mlp.up_proj"), **options)
    size = measure_adapter(config, model.config)
    add_adapter(model, config)
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert size.parameters == sum(model.get_parameter(name).numel() for name in trained)
    assert size.base_parameters == sum(model.get_parameter(name).numel() for name in trained & before.keys())
    assert all(any(name.endswith(end) for end in expected) for name in trained & before.keys())
    assert all(any(name.endswith(end) for name in trained) for end in expected)
    for step in range(2):  # the first one of A has no gradient, because B is zero
        positions = torch.arange(TOKENS.numel())
        targets = LossInputs((TOKENS + 1 + step).flatten() % 18, torch.ones(len(positions)))
        inputs = torch.where(TOKENS > 9, model.config.required_mask_token_id, TOKENS)
        model(inputs, pattern=Bidirectional(), output_positions=positions, loss_inputs=targets).total_loss.backward()
        torch.optim.SGD([value for value in model.parameters() if value.requires_grad], 0.1).step()
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, start[name])}
    assert changed == trained
    assert all(torch.equal(value, before[name]) for name, value in base.named_parameters())


@pytest.mark.parametrize("dora", [False, True])
def test_the_loss_of_an_adapted_head_is_that_of_its_logits(dora: bool, tiny_model: MakeModel) -> None:
    """With its gradients, and without the adapter."""
    model = tiny_model(torch.float64, tie_word_embeddings=False)
    add_adapter(model, LoraConfig(rank=3, targets=("lm_head", "o_proj"), dora=dora))
    randomize_b(model)
    trained = [value for value in model.parameters() if value.requires_grad]
    positions = torch.arange(TOKENS.numel())

    def losses() -> tuple[torch.Tensor, torch.Tensor]:
        inputs = LossInputs(TOKENS.flatten(), torch.ones(len(positions)))
        logits = model(TOKENS, pattern=Bidirectional()).flatten(0, 1)
        fused = model(TOKENS, pattern=Bidirectional(), output_positions=positions, loss_inputs=inputs).total_loss
        return fused, torch.nn.functional.cross_entropy(logits, TOKENS.flatten(), reduction="sum")

    actual, expected = losses()
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(loss, trained) for loss in (actual, expected)]
    torch.testing.assert_close(*gradients)
    with before_training(model), torch.no_grad():
        base, base_of_logits = losses()
    torch.testing.assert_close(base, base_of_logits)
    assert abs(float(base - actual.detach())) > 1e-3


class TestDropout:
    ROWS = torch.tensor([3, 7])
    ALL = torch.arange(TOKENS.numel())

    @pytest.fixture
    def model(self, tiny_model: MakeModel) -> Transformer:
        model = tiny_model()
        add_adapter(model, LoraConfig(rank=3, dropout=0.5, trainable_tokens=(1,)))
        randomize_b(model)
        return model

    def logits(self, model: Transformer, key: int, rows: slice = slice(None), positions: Any = None) -> torch.Tensor:
        dropout = find_dropout(model)
        assert dropout is not None
        tokens = TOKENS[rows]
        positions = torch.arange(tokens.numel()) if positions is None else positions
        with torch.no_grad(), dropout.dropout_context(key, self.ROWS[rows], TOKENS.shape[1], positions):
            return model(tokens, pattern=Bidirectional(), output_positions=positions)

    def test_only_in_a_training_forward(self, model: Transformer) -> None:
        state, plain = torch.get_rng_state(), logits_of(model.train()).flatten(0, 1)
        first = self.logits(model, 1)
        assert not torch.allclose(first, plain, atol=1e-3)
        assert torch.equal(logits_of(model).flatten(0, 1), plain)
        assert torch.equal(self.logits(model, 1), first)
        assert not torch.allclose(self.logits(model, 2), first, atol=1e-3)
        assert torch.equal(torch.get_rng_state(), state)

    def test_masks_depend_on_row_and_position_only(self, model: Transformer) -> None:
        """Not on the other rows of the micro-batch, nor on the output positions."""
        whole = self.logits(model, 1).unflatten(0, (2, -1))
        torch.testing.assert_close(self.logits(model, 1, slice(1, 2)), whole[1], atol=1e-5, rtol=1e-5)
        some = torch.tensor([2, 9, 10])
        torch.testing.assert_close(
            self.logits(model, 1, positions=some), whole.flatten(0, 1)[some], atol=1e-5, rtol=1e-5
        )

    def test_gradient_is_that_of_the_plain_formula(self) -> None:
        generator = torch.Generator().manual_seed(0)
        weight, A, B, x, bias = (
            torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in ((5, 4), (2, 4), (5, 2), (3, 6, 4), (5,))
        )
        tokens = hash_tokens(9, torch.arange(3), 6)
        keep = dropout_mask(tokens, 11, 4, 0.4)
        inputs = [value.requires_grad_() for value in (x, A, B, bias)]
        expected = x @ weight.T + bias + 0.5 * (x * keep.view(x.shape)) @ A.T @ B.T
        probe = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        expected_gradients = torch.autograd.grad((expected * probe).sum(), inputs)
        actual = low_rank_linear(x, weight, bias, A, B, 0.5, keep)
        torch.testing.assert_close(actual, expected)
        gradients = torch.autograd.grad((actual * probe).sum(), inputs)
        torch.testing.assert_close(gradients, expected_gradients)

    def test_share_of_zeros_and_independence(self) -> None:
        """Shares by token and feature, and correlations of all pairs, spread as those of independent coins."""
        keep = dropout_mask(hash_tokens(1, torch.arange(4), 128), 2, 256, 0.25).double()
        sigma = math.sqrt(0.25 * 0.75)
        assert keep.mean().item() == pytest.approx(0.75, abs=4 * sigma / math.sqrt(keep.numel()))
        centered = (keep - 0.75) / sigma
        for values in (centered, centered.T):
            assert (values.mean(1) * math.sqrt(values.shape[1])).std().item() == pytest.approx(1.0, abs=0.15)
            products = values @ values.T / math.sqrt(values.shape[1])
            off_diagonal = products[~torch.eye(len(products), dtype=torch.bool)]
            assert off_diagonal.std().item() == pytest.approx(1.0, abs=0.05)
        other = dropout_mask(hash_tokens(1, torch.arange(4), 128), 3, 256, 0.25).double()
        assert abs(((other - 0.75) / sigma * centered).sum().item()) < 4 * math.sqrt(keep.numel())


def test_backward_ends_at_the_lowest_adapter(tiny_model: MakeModel) -> None:
    """Counted: with an adapter on the last down_proj alone, the backward has its products of A and B only."""
    model = tiny_model()
    add_adapter(model, LoraConfig(rank=3, targets=("layers.1.mlp.down_proj",)))
    positions = torch.arange(TOKENS.numel())
    loss = LossInputs(TOKENS.flatten(), torch.ones(len(positions)))
    output = model(TOKENS, pattern=Bidirectional(), output_positions=positions, loss_inputs=loss)
    with FlopCounterMode(display=False) as counter:
        output.total_loss.backward()
    grad_h, grad_a, grad_b = 24 * 3, 3 * 40, 24 * 3
    assert counter.get_total_flops() == 2 * len(positions) * (grad_h + grad_a + grad_b)


def test_experts_without_tokens_have_adapters(tiny_model: MakeModel) -> None:
    model = tiny_model(num_experts=8, num_experts_per_tok=1, moe_intermediate_size=10)
    add_adapter(model, LoraConfig(rank=2, targets=("gate_proj", "down_proj")))
    model(TOKENS[:1, :3], pattern=Bidirectional()).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(gradient is not None for gradient in gradients.values())
    zeros = [name for name, gradient in gradients.items() if gradient is not None and not gradient.any()]
    assert sum(name.endswith("down_proj.lora_B") for name in zeros) >= 2 * 5  # three tokens use at most three of eight


@pytest.mark.parametrize("bias", [False, True])
def test_training_forward_equals_inference(bias: bool, tiny_model: MakeModel) -> None:
    model = tiny_model(attention_bias=bias)
    add_adapter(model, LoraConfig(rank=3))
    randomize_b(model)
    torch.testing.assert_close(model(TOKENS, pattern=Bidirectional()), logits_of(model), atol=1e-5, rtol=1e-5)


def randomize_b(model: Transformer) -> None:
    with torch.no_grad():
        for _, module in adapter_modules(model):
            if isinstance(module, LoRALinear):
                module.lora_B.normal_(generator=torch.Generator().manual_seed(1))


def test_a_second_adapter_is_refused(tiny_model: MakeModel) -> None:
    model = tiny_model()
    add_adapter(model, LoraConfig(rank=3))
    with pytest.raises(ValueError, match="adapter already"):
        add_adapter(model, LoraConfig(rank=3))


def test_dora_with_a_zero_row_and_a_bias_under_autocast(tiny_model: MakeModel) -> None:
    model = tiny_model(attention_bias=True)
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.q_proj.weight")[0] = 0.0
    before = logits_of(model)
    add_adapter(model, LoraConfig(rank=3, dora=True))
    torch.testing.assert_close(logits_of(model), before, atol=1e-5, rtol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.get_submodule("model.layers.0.self_attn.q_proj")(torch.ones(2, 24)).dtype == torch.bfloat16


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("init", ["default", "pissa"])
@pytest.mark.parametrize("tied", [False, True])
def test_merged_equals_adapter(dora: bool, init: Any, tied: bool, tiny_model: MakeModel) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    add_adapter(model, LoraConfig(rank=3, dora=dora, init=init, trainable_tokens=(18,)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(0.1 * torch.randn(value.shape, generator=generator))
    expected = logits_of(model)
    base = tiny_model(tie_word_embeddings=tied)
    merge_adapter(model)
    assert not list(adapter_modules(model))
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in base.named_parameters()]
    torch.testing.assert_close(logits_of(model), expected, atol=1e-5, rtol=1e-4)


def test_experts_are_adapted_and_routers_are_not(tiny_model: MakeModel) -> None:
    model = tiny_model(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    names = [name for name, _ in list_targets(model, LoraConfig())]
    assert "model.layers.0.mlp.experts.3.up_proj" in names
    assert "model.layers.0.mlp.gate" not in names
    before = logits_of(model)
    add_adapter(model, LoraConfig(rank=2))
    torch.testing.assert_close(logits_of(model), before, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"targets": r"model\.layers\.\d+\.self_attn\.[qk]_proj"}, {"self_attn.q_proj", "self_attn.k_proj"}),
        ({"targets": ("mlp.up_proj",), "exclude": ("down_proj",)}, {"mlp.up_proj"}),
        (
            {"exclude": ("self_attn.o_proj", "q_proj", "k_proj", "v_proj", "up_proj")},
            {"mlp.gate_proj", "mlp.down_proj"},
        ),
        ({"exclude": r".*\.(self_attn|mlp)\..*_proj(?<!up_proj)"}, {"mlp.up_proj"}),
    ],
)
def test_targets(options: dict[str, Any], expected: set[str], tiny_model: MakeModel) -> None:
    names = [name for name, _ in list_targets(tiny_model(), LoraConfig(**options))]
    assert {
        name.removeprefix(f"model.layers.{layer}.") for layer in (0, 1) for name in names if f".{layer}." in name
    } == (expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 25, "init": "pissa"}, ("lora.rank = 25", "lora.exclude")),
        ({"targets": ("qproj",)}, ("lora.targets", "q_proj")),
        ({"targets": ("lm_head",)}, ("lora.targets", "lora.modules_to_save", "diffusion.untie_head")),
        (
            {"modules_to_save": ("lm_head",), "trainable_tokens": (1,)},
            ("modules_to_save", "remove lora.trainable_tokens"),
        ),
        ({"layers_to_transform": (7,)}, ("lora.targets", "selects no projection")),
        ({"rank": 2, "trainable_tokens": (19,)}, ("lora.trainable_tokens", "19")),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], words: tuple[str, ...], tiny_model: MakeModel) -> None:
    with pytest.raises(ValueError, match="lora") as error:
        add_adapter(tiny_model(tie_word_embeddings=True), LoraConfig(**options))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 0},
        {"targets": "("},
        {"targets": ()},
        {"rank_patterns": {"(": 2}},
        {"dropout": 1.0},
        {"trainable_tokens": (3, 3)},
        {"exclude": "("},
        {"layers_to_transform": (0,), "targets": ".*q_proj"},
        {"modules_to_save": ("",)},
    ],
)
def test_invalid_configs(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        LoraConfig(**options)
