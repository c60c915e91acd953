"""The same weights and tokens give the same experts, logits, balance loss and gradients as transformers' Qwen3-MoE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from config.model import ModelConfig
from diffusionlm.checkpoints.weights import open_weights
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.models.moe import compute_load_balancing_loss
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, Causal
from diffusionlm.models.transformer import Transformer
from tests.reference.family_cases import BOUNDS, difference, our_routings

transformers = pytest.importorskip("transformers")
load_balancing_loss_func = pytest.importorskip(
    "transformers.models.qwen3_moe.modeling_qwen3_moe"
).load_balancing_loss_func

TOKENS = torch.randint(0, 40, (2, 13), generator=torch.Generator().manual_seed(5))
ROWS = torch.arange(26)
COEFFICIENT = 0.3
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "vocab_size": 40,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "tie_word_embeddings": False,
}
CASES = [
    pytest.param({"norm_topk_prob": True}, id="all-sparse"),
    pytest.param({"norm_topk_prob": False}, id="not-normed"),
    pytest.param({"norm_topk_prob": True, "decoder_sparse_step": 2}, id="every-second"),
    pytest.param({"norm_topk_prob": True, "mlp_only_layers": [1]}, id="one-dense"),
    pytest.param({"norm_topk_prob": True, "num_experts": 5, "num_experts_per_tok": 1}, id="one-expert"),
    pytest.param({"norm_topk_prob": False, "num_experts": 4, "num_experts_per_tok": 4}, id="all-experts"),
]


def foreign(changes: dict[str, Any]) -> Any:
    """A random model of transformers, all gains and weights moved."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    extra = {"router_aux_loss_coef": COEFFICIENT, "attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**SHAPE, **changes, **rope, **extra}))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def their_output(model: Any, pattern: AttentionPattern) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """Logits, those of the routers, and their balance loss, which the whole model makes without masks only."""
    mask = {} if isinstance(pattern, Causal) else {"attention_mask": torch.zeros(2, 1, 13, 13)}
    out = model.model(TOKENS, **mask, output_router_logits=True)
    config = model.config
    balance = load_balancing_loss_func(out.router_logits, config.num_experts, config.num_experts_per_tok)
    return model.lm_head(out.last_hidden_state), out.router_logits, balance


def pair(changes: dict[str, Any], folder: Path) -> tuple[Transformer, Any]:
    """Theirs, and ours with the weights of their file."""
    theirs = foreign(changes)
    theirs.save_pretrained(folder)
    values = {**SHAPE, **changes, "mlp_only_layers": tuple(changes.get("mlp_only_layers", ()))}
    ours = Transformer(ModelConfig(**values, rope_theta=500.0, mask_token_id=39, router_aux_loss_coef=COEFFICIENT))
    with open_weights(folder / "model.safetensors") as weights:
        weights.check(ours)
        weights.copy_to(ours)
    return ours, theirs


@pytest.mark.parametrize("changes", CASES)
def test_names_on_disk_are_ours(changes: dict[str, Any], tmp_path: Path) -> None:
    """Theirs has experts stacked in memory, in files one by one."""
    ours, _ = pair(changes, tmp_path)
    file = {name: list(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert {name: list(parameter.shape) for name, parameter in ours.named_parameters()} == file
    assert "model.layers.1.mlp.experts.0.gate_proj.weight" in file or 1 in changes.get("mlp_only_layers", ())


@pytest.mark.parametrize("changes", CASES)
def test_experts_logits_and_balance_loss(changes: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = pair(changes, tmp_path)
    for pattern in (Bidirectional(), Causal()):
        with torch.no_grad():
            expected, router_logits, balance = their_output(theirs, pattern)
            assert difference(ours(TOKENS, pattern=pattern), expected) <= BOUNDS["float32"]
        routings = our_routings(ours, TOKENS, pattern)
        # A layer without experts has no router logits there.
        assert len(routings) == len(router_logits)
        for routing, layer in zip(routings, router_logits, strict=True):
            probabilities = layer.softmax(dim=-1)
            torch.testing.assert_close(routing.probabilities_TE, probabilities, rtol=1e-4, atol=1e-6)
            assert torch.equal(routing.experts_TK, probabilities.topk(theirs.config.num_experts_per_tok).indices)
        torch.testing.assert_close(compute_load_balancing_loss(routings), balance, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes", CASES)
def test_gradients_of_both_losses(changes: dict[str, Any], tmp_path: Path) -> None:
    """Theirs by name of file: a stacked gradient is cut into the experts' ones."""
    ours, theirs = pair(changes, tmp_path)
    weights = torch.rand(26, generator=torch.Generator().manual_seed(7)) / 26
    targets = TOKENS.flatten().roll(3)
    scored = ours(
        TOKENS,
        pattern=Bidirectional(),
        output_positions=ROWS,
        loss_inputs=LossInputs(targets, weights, load_balancing_weight=COEFFICIENT),
    )
    scored.total_loss.backward()
    logits, _, balance = their_output(theirs, Bidirectional())
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
    total = (nll * weights).sum() + COEFFICIENT * balance
    total.backward()
    torch.testing.assert_close(scored.total_loss, total)
    expected = their_gradients(theirs)
    assert expected.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        error = (parameter.grad - expected[name]).norm()
        assert error <= 2e-5 * expected[name].norm() + 1e-7, name


def their_gradients(model: Any) -> dict[str, torch.Tensor]:
    gradients = {}
    for name, parameter in model.named_parameters():
        stem, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj"):
            gradients[name] = parameter.grad
            continue
        for expert, grad in enumerate(parameter.grad):
            halves = {"gate_proj": grad.chunk(2)[0], "up_proj": grad.chunk(2)[1]}
            parts = {"down_proj": grad} if kind == "down_proj" else halves
            gradients |= {f"{stem}.{expert}.{part}.weight": value for part, value in parts.items()}
    return gradients
