"""The whole model: output positions, windows, position ids, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from diffusionlm.kernels.cross_entropy import LossInputs, linear_cross_entropy
from diffusionlm.models import transformer
from diffusionlm.models.attention_backends import PatternAttention, prepare_attention
from diffusionlm.models.patterns import (
    AttentionPattern,
    Bidirectional,
    BlockCausal,
    BlockDiffusion,
    Causal,
    DenseBias,
    PromptAndOwnBlock,
)
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel

DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0, 0, -1, -1, -1]])
ROWS = torch.tensor([0, 3, 4, 8, 11, 19])
FULL, SLIDING = "full_attention", "sliding_attention"


def tokens(rows: int = 2, length: int = 10) -> torch.Tensor:
    return torch.randint(0, 19, (rows, length), generator=torch.Generator().manual_seed(3))


def test_last_layer_computes_only_the_queries_it_needs(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    query_lengths: list[int] = []
    original = PatternAttention.__call__

    def spy(self: PatternAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        query_lengths.append(q.shape[1])
        return original(self, q, k, v)

    monkeypatch.setattr(PatternAttention, "__call__", spy)
    for rows, needed in [([0, 3, 4, 16], 7), ([9], 10), ([0, 10], 1), ([], 1)]:
        model(tokens(), pattern=BlockDiffusion(2), output_positions=torch.tensor(rows, dtype=torch.int64))
        assert query_lengths == [10, needed]
        query_lengths.clear()


@pytest.mark.parametrize("layer_types", [(SLIDING, FULL), (FULL, SLIDING), (SLIDING, SLIDING)])
def test_layers_have_windows_of_their_own(tiny_model: MakeModel, layer_types: tuple[str, ...]) -> None:
    """How far back an output looks: a window of 3 reaches two positions in each sliding layer."""
    model = tiny_model(torch.float64, layer_types=layer_types, sliding_window=3)
    reach = 4 if layer_types == (SLIDING, SLIDING) else 9
    before = model(tokens(), pattern=Causal())
    for distance in range(10):
        changed = tokens()
        changed[:, 9 - distance] = (changed[:, 9 - distance] + 1) % 17
        is_same = torch.equal(model(changed, pattern=Causal())[:, 9], before[:, 9])
        assert is_same == (distance > reach), distance


def test_layers_with_one_window_share_their_attention(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[int | None] = []

    def spy(*args: Any) -> PatternAttention:
        results.append(args[4])
        return prepare_attention(*args)

    monkeypatch.setattr(transformer, "prepare_attention", spy)
    tiny_model(num_hidden_layers=4, layer_types=(SLIDING, FULL) * 2, sliding_window=3)(tokens(), pattern=Causal())
    assert results == [3, None]


def test_no_output_positions(tiny_model: MakeModel) -> None:
    model = tiny_model()
    none = torch.zeros(0, dtype=torch.int64)
    assert model(tokens(), pattern=Bidirectional(), output_positions=none).shape == (0, 19)
    scored = model(
        tokens(),
        pattern=Bidirectional(),
        output_positions=none,
        loss_inputs=LossInputs(none, torch.zeros(0), excluded_token=18),
    )
    assert scored.nll_N.shape == (0,)
    assert scored.loss_sum.item() == 0.0
    scored.loss_sum.backward()


def test_positions_of_each_row_are_its_own(tiny_model: MakeModel) -> None:
    """[B, L] positions: the default and any offset change nothing, a stretch does, for its row alone."""
    model = tiny_model()
    default = model(tokens(), pattern=Causal())
    line = torch.arange(10)
    for positions in (line, torch.stack([line, line]), torch.stack([line, line + 30])):
        torch.testing.assert_close(
            model(tokens(), pattern=Causal(), positions=positions), default, rtol=1e-3, atol=2e-4
        )
    stretched = model(tokens(), pattern=Causal(), positions=torch.stack([line, line * 3]))
    torch.testing.assert_close(stretched[0], default[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(stretched[1, 1:], default[1, 1:], atol=1e-2)


def test_errors_name_value_and_remedy(tiny_model: MakeModel) -> None:
    model = tiny_model(max_position_embeddings=8)
    with pytest.raises(ValueError, match=r"9 tokens.*max_position_embeddings = 8"):
        model(tokens(1, 9), pattern=Causal())
    model(tokens(1, 8), pattern=Causal())
    loss_inputs = LossInputs(torch.zeros(1, dtype=torch.int64), torch.ones(1))
    untyped: Any = model  # The overloads of a typed model exclude this call.
    with pytest.raises(ValueError, match="output_positions"):
        untyped(tokens(1, 8), pattern=Causal(), loss_inputs=loss_inputs)


HALVES = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
IS_PROMPT = torch.tensor([[True] * 4 + [False] * 6])
BIAS = torch.randn(10, 10, generator=torch.Generator().manual_seed(1))
CASES: dict[str, tuple[AttentionPattern, dict[str, Any]]] = {
    "noisy and clean halves of documents": (BlockDiffusion(2, HALVES), {}),
    "answer blocks": (PromptAndOwnBlock(3, IS_PROMPT), {}),
    "a bias": (DenseBias(BIAS), {}),
    "windows": (Causal(), {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 3}),
    "packed": (BlockCausal(3, HALVES.repeat_interleave(2, dim=1)), {"attention_bias": True}),
    "soft caps": (
        BlockDiffusion(2),
        {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0, "sandwich_norms": True, "norm_offset": True},
    ),
    "experts": (Causal(), {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
}


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa", "tiled"])
@pytest.mark.parametrize("case", CASES)
def test_output_positions_equal_the_full_forward(tiny_model: MakeModel, case: str, backend: str) -> None:
    pattern, overrides = CASES[case]
    if (case == "a bias" and backend == "tiled") or (case == "soft caps" and backend in ("sdpa", "tiled")):
        pytest.skip("refused, as other tests have it")
    model = tiny_model(torch.float64, backend=backend, **overrides)
    tokens = torch.randint(0, 19, (2, 10), generator=torch.Generator().manual_seed(3))
    stretched = torch.stack([torch.arange(10) + 5, torch.arange(10) * 3])
    positions = None if pattern.positions_per_token == 2 else stretched
    full = model(tokens, pattern=pattern, positions=positions).flatten(0, 1)[ROWS]
    part = model(tokens, pattern=pattern, positions=positions, output_positions=ROWS)
    torch.testing.assert_close(part, full, rtol=1e-12, atol=1e-12)
    parameters, cotangent = list(model.parameters()), torch.randn(full.shape, dtype=torch.float64)
    ours = torch.autograd.grad(part, parameters, cotangent)
    for first, second in zip(ours, torch.autograd.grad(full, parameters, cotangent), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-10)


TOKENS = torch.randint(0, 18, (20, 12), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(0, 240, 3)
TARGETS = torch.randint(0, 18, (80,), generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.rand(80, generator=torch.Generator().manual_seed(2)) * 3
WEIGHTS[::7] = 0.0


def compute_loss(model: Transformer, **options: float) -> tuple[torch.Tensor, ...]:
    """Sum, likelihood of each target and gradients."""
    loss_inputs = LossInputs(TARGETS, WEIGHTS, excluded_token=18, **options)
    output = model(TOKENS, pattern=Bidirectional(), output_positions=POSITIONS, loss_inputs=loss_inputs)
    return output.loss_sum, output.nll_N, *torch.autograd.grad(output.loss_sum, list(model.parameters()))


def expect_loss(model: Transformer, smoothing: float = 0.0, z_loss: float = 0.0) -> tuple[torch.Tensor, ...]:
    """The same from the logits; of the token 18 there are none."""
    logits = model(TOKENS, pattern=Bidirectional()).flatten(0, 1)[POSITIONS][:, :18]
    nll_N = F.cross_entropy(logits, TARGETS, reduction="none")
    loss = F.cross_entropy(logits, TARGETS, reduction="none", label_smoothing=smoothing)
    total = ((loss + z_loss * logits.logsumexp(-1).square()) * WEIGHTS).sum()
    return total, nll_N, *torch.autograd.grad(total, list(model.parameters()))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("softcap", "smoothing", "z_loss"), [(None, 0.0, 0.0), (4.0, 0.2, 0.03)], ids=["plain", "all options"]
)
def test_the_loss_is_that_of_the_logits(
    tiny_model: MakeModel, softcap: float | None, smoothing: float, z_loss: float, tied: bool
) -> None:
    model = tiny_model(torch.float64, final_logit_softcapping=softcap, tie_word_embeddings=tied)
    ours = compute_loss(model, label_smoothing=smoothing, z_loss=z_loss)
    torch.testing.assert_close(ours, expect_loss(model, smoothing, z_loss), rtol=1e-8, atol=1e-10)
    assert not ours[1].requires_grad


def test_bfloat16_autocast_is_within_its_precision(tiny_model: MakeModel) -> None:
    model = tiny_model(tie_word_embeddings=False, scale=0.1)
    _, expected_nll, *theirs = expect_loss(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, nll_N, *ours = compute_loss(model)
    torch.testing.assert_close(nll_N, expected_nll, rtol=0.05, atol=0.05)
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == torch.float32
        assert F.cosine_similarity(our.flatten(), their.flatten(), dim=0) > 0.99


@pytest.mark.parametrize(("is_tied", "expected"), [(False, [1, 2, 2]), (True, [2, 3, 3])], ids=["untied", "tied"])
def test_memory_of_the_gradients_of_the_head(is_tied: bool, expected: list[int]) -> None:
    """Tensors of the size of the head, beside its weights, in each of three micro-batches. The gradient that the
    forward makes becomes that of the parameter without a copy; a later micro-batch has one to add, and a tied embedding
    one more. All are added in place."""
    vocab, width = 5000, 64
    head = torch.nn.Parameter(torch.randn(vocab, width, generator=torch.Generator().manual_seed(0)))
    counts = []
    for micro_batch in range(3):
        tokens = torch.arange(4) + micro_batch
        live_bytes = peak = 0 if head.grad is None else head.grad.nbytes
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            hidden = torch.tanh(F.embedding(tokens, head) if is_tied else torch.ones(4, width, requires_grad=True))
            loss_inputs = LossInputs(tokens, torch.ones(4, dtype=torch.float64))
            linear_cross_entropy(hidden, head, loss_inputs).loss_sum.backward()
        timeline: Any = profiler.profiler  # the public events are not in the order of allocations
        for event in timeline.kineto_results.events():
            if event.name() == "[memory]":
                live_bytes += event.nbytes()
                peak = max(peak, live_bytes)
        assert peak % head.nbytes < head.nbytes // 4, "logits and hidden states are small"
        counts.append(peak // head.nbytes)
    assert counts == expected
