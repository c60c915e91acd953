"""What is computed again gives the same numbers and is kept no more."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from diffusionlm.kernels.cross_entropy import LossInputs, LossOutput
from diffusionlm.models.attention_backends import PatternAttention
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockDiffusion, Causal
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.block_wrapping import checkpoint_activations
from tests.conftest import MakeModel

Choice = Literal["selective", "full"]

ROWS = torch.tensor([0, 3, 5, 12, 17])
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0, "sandwich_norms": True}
CASES: dict[str, tuple[AttentionPattern, dict[str, Any]]] = {
    "two streams, tiled": (BlockDiffusion(2), {"backend": "tiled"}),
    "causal, sdpa": (Causal(), {"backend": "sdpa", "attention_bias": True}),
    "experts": (Bidirectional(), EXPERTS),
    "soft caps": (Causal(), CAPS),
}


def score_of(model: Transformer, pattern: AttentionPattern) -> LossOutput:
    tokens = torch.randint(0, 19, (2, 10), generator=torch.Generator().manual_seed(3))
    loss_inputs = LossInputs(
        torch.arange(5), torch.linspace(0.5, 1.0, 5), load_balancing_weight=float(model.config.num_experts > 0)
    )
    return model(tokens, pattern=pattern, output_positions=ROWS, loss_inputs=loss_inputs)


def loss_and_gradients(model: Transformer, pattern: AttentionPattern) -> list[torch.Tensor]:
    """Loss, balance loss and gradients of scored rows."""
    scored = score_of(model, pattern)
    balance = torch.zeros(()) if scored.load_balancing_loss is None else scored.load_balancing_loss
    tensors = [scored.loss_sum, balance, *torch.autograd.grad(scored.total_loss, list(model.parameters()))]
    return [tensor.detach() for tensor in tensors]


@pytest.mark.parametrize("choice", ["selective", "full"])
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_same(tiny_model: MakeModel, case: str, choice: Choice) -> None:
    pattern, overrides = CASES[case]
    plain = loss_and_gradients(tiny_model(**overrides), pattern)
    model = tiny_model(**overrides)
    checkpoint_activations(model, choice)
    ours = loss_and_gradients(model, pattern)
    assert (float(plain[1]) > 0) == (case == "experts")
    for first, second in zip(plain, ours, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("choice", ["selective", "full"])
def test_saved_projections_are_not_recomputed(tiny_model: MakeModel, choice: Choice) -> None:
    """Else q, k, v, o, gate and up are once more; nobody needs again what comes out of down, the last one."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(model: Transformer) -> int:
        with FlopCounterMode(display=False) as counter:
            model(tokens, pattern=Causal(), output_positions=ROWS, loss_inputs=loss_inputs).loss_sum.backward()
        counts = counter.get_flop_counts()["Global"]
        return sum(value for operator, value in counts.items() if str(operator) in ("aten.mm", "aten.addmm"))

    tokens = torch.zeros(2, 10, dtype=torch.int64)
    loss_inputs = LossInputs(torch.arange(5), torch.ones(5))
    plain = flops(tiny_model(backend="sdpa"))
    model = tiny_model(backend="sdpa")
    checkpoint_activations(model, choice)
    width, inner = 24, 40
    # Of 20 positions in the first block; of the last one keys and values of all, the rest of 5 rows.
    first = 20 * 2 * (width * 24 + 2 * width * 12 + 24 * width + 2 * width * inner)
    last = 20 * 2 * 2 * width * 12 + 5 * 2 * (2 * width * 24 + 2 * width * inner)
    assert flops(model) - plain == (first + last if choice == "full" else 0)


def test_flex_attention_is_out_of_the_policys_sight(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no backward on a CPU: another stands for it here, and is seen by no dispatch mode, forward or again."""
    from torch._C import _len_torch_dispatch_stack

    saved_counts: list[int] = []
    original = PatternAttention.__call__

    def spy(self: PatternAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        saved_counts.append(_len_torch_dispatch_stack())
        monkeypatch.setattr(PatternAttention, "backend_for", lambda self, q: "sdpa")
        out = original(self, q, k, v)
        monkeypatch.setattr(PatternAttention, "backend_for", lambda self, q: "flex")
        return out

    plain = loss_and_gradients(tiny_model(backend="sdpa"), Causal())
    model = tiny_model(backend="sdpa")
    checkpoint_activations(model, "selective")
    monkeypatch.setattr(PatternAttention, "__call__", spy)
    monkeypatch.setattr(PatternAttention, "backend_for", lambda self, q: "flex")
    ours = loss_and_gradients(model, Causal())
    assert saved_counts == [0, 0, 0, 0]
    assert all(torch.equal(first, second) for first, second in zip(plain, ours, strict=True))
