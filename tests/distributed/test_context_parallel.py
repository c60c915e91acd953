"""Sequences divided over ranks: the loss and the gradients of one process, and equal work."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from config.training.objective import BlockDiffusionConfig
from ddp.context_parallel import PatternShard, split_batch
from ddp.mesh import Axis
from ddp.process_group import World
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.models.attention_backends import prepare_attention
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
from diffusionlm.training.block_wrapping import checkpoint_activations, compile_blocks
from tests.conftest import MakeConfig, MakeModel
from tests.distributed.forked import run_ranks

LENGTH, VOCABULARY = 16, 19
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 9 + [-1] * 2, [0] * 3 + [1] * 13])
SEGMENTS = torch.tensor([[0] * 5 + [1] * 3 + [2] * 6 + [-1] * 2, [0] * 3 + [1] * 6 + [2] * 7])
BIAS = torch.randn(1, 4, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
"""A window longer than the tokens of a rank."""
EVERYWHERE = tuple(range(LENGTH))


@dataclass(frozen=True)
class Case:
    """A pattern and how the model computes it."""

    pattern: AttentionPattern
    model: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[int, ...] = EVERYWHERE
    """Tokens that may be output positions; about half of them are."""
    wrapping: str = ""


CASES = {
    "masked": Case(Bidirectional()),
    "masked, packed, tiled": Case(Bidirectional(DOCUMENTS), {"backend": "tiled"}),
    "masked, window": Case(Bidirectional(), WINDOWS),
    "causal": Case(Causal(), {"qk_norm": True}),
    "causal, packed, eager, window": Case(Causal(DOCUMENTS), {"backend": "eager", "attention_bias": True, **WINDOWS}),
    "blocks of 1": Case(BlockDiffusion(1)),
    "blocks of 4, tiled": Case(BlockDiffusion(4), {"backend": "tiled", "num_key_value_heads": 4}),
    "token-causal halves, packed": Case(BlockDiffusion(4, DOCUMENTS, SEGMENTS, "token", "token")),
    "token-causal clean half, tiled": Case(BlockDiffusion(4, clean="token"), {"backend": "tiled"}),
    "one block": Case(BlockDiffusion(LENGTH), {"backend": "eager"}),
    "blocks, packed, window": Case(BlockDiffusion(4, DOCUMENTS, SEGMENTS), {"qk_norm": True, **WINDOWS}),
    "blocks, tiled, packed, window": Case(BlockDiffusion(3, DOCUMENTS), {"backend": "tiled", **WINDOWS}),
    "block-causal": Case(BlockCausal(4, DOCUMENTS)),
    "independent blocks": Case(PromptAndOwnBlock(4, torch.arange(LENGTH)[None] < 6)),
    "bias": Case(DenseBias(BIAS, DOCUMENTS), {"backend": "eager"}),
    "outputs of the first rank only": Case(BlockDiffusion(4), outputs=(0, 1, 2, 3)),
    "outputs of the last rank only": Case(Causal(), outputs=(5, 9, 10)),
    "no outputs": Case(Causal(), outputs=()),
    "recomputed": Case(BlockDiffusion(4, DOCUMENTS), outputs=(0, 1, 2), wrapping="full"),
    "recomputed in part": Case(Causal(), wrapping="selective"),
    "compiled": Case(BlockDiffusion(4), wrapping="compiled"),
}


def build_batch(case: Case) -> NoisedBatch:
    """Two sequences of random tokens, with outputs in each half of two streams."""
    generator = torch.Generator().manual_seed(3)
    S = LENGTH * case.pattern.positions_per_token
    may_be_output_S = torch.zeros(LENGTH, dtype=torch.bool)
    may_be_output_S[list(case.outputs)] = True
    is_output_BS = may_be_output_S.repeat(S // LENGTH) & (torch.rand(2, S, generator=generator) < 0.5)
    positions_N = is_output_BS.flatten().nonzero()[:, 0]
    targets_N = torch.randint(VOCABULARY, positions_N.shape, generator=generator)
    weights_N = torch.rand(positions_N.shape, generator=generator, dtype=torch.float64)
    inputs_BS = torch.randint(VOCABULARY, (2, S), generator=generator)
    return NoisedBatch(inputs_BS, case.pattern, positions_N, targets_N, weights_N)


def wrap(model: Transformer, wrapping: str) -> Transformer:
    if wrapping == "compiled":
        compile_blocks(model, backend="eager")
    elif wrapping:
        checkpoint_activations(model, wrapping)  # type: ignore[arg-type]
    return model


def measure(model: Transformer, batch: NoisedBatch) -> tuple[list[Tensor], Tensor]:
    """Loss and gradients, and the negative log-likelihood at each of the batch's positions, [B * S], else 0."""
    output = model(
        batch.inputs_BS,
        pattern=batch.pattern,
        output_positions=batch.positions_N,
        loss_inputs=LossInputs(batch.targets_N, batch.weights_N),
    )
    output.loss_sum.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    tensors = [torch.zeros(1) if gradient is None else gradient for gradient in gradients]
    nll_BS = output.nll_N.new_zeros(batch.inputs_BS.numel()).index_copy_(0, batch.positions_N, output.nll_N)
    return [output.loss_sum.detach(), *tensors], nll_BS.view(batch.inputs_BS.shape)


def assert_equal_to_one_process(
    tiny_model: MakeModel, case: Case, tmp_path: Path, num_ranks: int, dtype: torch.dtype, tolerance: float
) -> None:
    expected, expected_nll_BS = measure(tiny_model(dtype, **case.model), build_batch(case))

    def act(world: World) -> tuple[list[Tensor], int]:
        batch = split_batch(build_batch(case), Axis(world.size, world.rank, None))
        sums, nll_BI = measure(wrap(tiny_model(dtype, **case.model), case.wrapping), batch)
        assert isinstance(batch.pattern, PatternShard)
        torch.testing.assert_close(
            nll_BI, batch.pattern.select(expected_nll_BS, dim=1), rtol=10 * tolerance, atol=10 * tolerance
        )
        for tensor in sums:
            dist.all_reduce(tensor)
        return sums, len(batch.positions_N)

    results = run_ranks(act, tmp_path, num_ranks)
    assert sum(count for _, count in results) == len(build_batch(case).positions_N)
    for sums, _ in results:
        for ours, whole in zip(sums, expected, strict=True):
            assert (ours - whole).norm() <= tolerance * whole.norm()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "compiled" else ()) for name in CASES]
)
def test_two_ranks_have_the_loss_and_gradients_of_one_process(tiny_model: MakeModel, tmp_path: Path, name: str) -> None:
    assert_equal_to_one_process(tiny_model, CASES[name], tmp_path, 2, torch.float64, 1e-12)


def test_four_ranks_and_other_dtypes(tiny_model: MakeModel, tmp_path: Path) -> None:
    case = CASES["blocks, packed, window"]
    assert_equal_to_one_process(tiny_model, case, tmp_path, 4, torch.float64, 1e-12)
    assert_equal_to_one_process(tiny_model, case, tmp_path, 2, torch.float32, 1e-6)
    assert_equal_to_one_process(tiny_model, case, tmp_path, 2, torch.bfloat16, 2e-2)


def test_flex_has_the_logits_of_one_process(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Without gradients, which FlexAttention does not have on a CPU."""
    case = Case(BlockDiffusion(3, DOCUMENTS), WINDOWS)

    @torch.no_grad()
    def compute_logits(batch: NoisedBatch, backend: str) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is slow without the compiler
            return tiny_model(backend=backend, **case.model)(batch.inputs_BS, pattern=batch.pattern)

    expected_BSV = compute_logits(build_batch(case), "sdpa")

    def act(world: World) -> None:
        batch = split_batch(build_batch(case), Axis(world.size, world.rank, None))
        assert isinstance(batch.pattern, PatternShard)
        logits_BIV, own_BIV = compute_logits(batch, "flex"), batch.pattern.select(expected_BSV, dim=1)
        torch.testing.assert_close(logits_BIV, own_BIV, rtol=1e-5, atol=1e-5)

    run_ranks(act, tmp_path)


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("name", CASES)
def test_masks_are_rows_of_the_whole_mask(name: str, window: int | None) -> None:
    pattern = CASES[name].pattern
    num_tokens, num_ranks = LENGTH, 4
    S = num_tokens * pattern.positions_per_token
    whole = pattern.dense_mask(S, window=window)
    chunk_S = torch.arange(S) % num_tokens // (num_tokens // (2 * num_ranks))
    for rank in range(num_ranks):
        own_I = ((chunk_S == rank) | (chunk_S == 2 * num_ranks - 1 - rank)).nonzero()[:, 0]
        shard = PatternShard(pattern, Axis(num_ranks, rank, None))
        assert torch.equal(shard.default_positions(len(own_I), "cpu"), own_I % num_tokens)
        assert torch.equal(shard.dense_mask(len(own_I), window=window), whole[..., own_I, :])


@pytest.mark.parametrize("pattern", [Causal(), BlockCausal(4), BlockDiffusion(4), BlockDiffusion(32)], ids=str)
def test_ranks_compute_equally_many_pairs(pattern: AttentionPattern) -> None:
    num_ranks, num_tokens = 8, 512
    length = num_tokens * pattern.positions_per_token // num_ranks
    counts = []
    for rank in range(num_ranks):
        intervals = PatternShard(pattern, Axis(num_ranks, rank, None)).intervals(length)
        assert intervals is not None
        counts.append(int((intervals[1] - intervals[0]).sum()))
    assert sum(counts) == pattern.dense_mask(length * num_ranks).sum()
    assert max(counts) <= 1.01 * min(counts)


def test_the_backend_is_that_of_whole_sequences() -> None:
    """Tiles are selected by the share of the pairs that they compute, of those of this rank."""
    documents_BL = (torch.arange(512) >= 20).long()[None]
    for pattern, expected in ((BlockDiffusion(4), "tiled"), (Causal(), "tiled"), (Bidirectional(documents_BL), "sdpa")):
        length = 512 * pattern.positions_per_token
        q_BQNH = torch.zeros(1, length, 1, 4)
        assert prepare_attention(pattern, length, "cpu").backend_for(q_BQNH) == expected
        shard = PatternShard(pattern, Axis(4, 1, None))
        attention = prepare_attention(shard, length // 4, "cpu")
        assert attention.backend_for(q_BQNH[:, : length // 4]) == expected


def test_a_batch_is_divided_once(make_config: MakeConfig) -> None:
    """Each output position belongs to one rank, with all that belongs to it; the inputs are those of its tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens_BL = torch.randint(17, (4, LENGTH), generator=generator)
    clean = CleanBatch(
        tokens_BL,
        torch.ones_like(tokens_BL, dtype=torch.bool),
        DOCUMENTS.repeat(2, 1),
        is_eos_padding_BL=(torch.arange(LENGTH) >= 11).repeat(4, 1),
    )
    config = BlockDiffusionConfig(block_length=4, clean_attention="token", next_token_weight=0.5)
    objective = build_objective(config, make_config(clean_alignment="shifted"))
    whole = objective.build_noised_batch(clean, NoiseKey(0, 0, 0, 4))
    whole = replace(whole, answers_N=torch.arange(len(whole.positions_N)))
    assert split_batch(whole, Axis()) is whole
    num_parts = torch.zeros(len(whole.positions_N))
    for rank, chunks in enumerate(([0, 3], [1, 2])):
        part = split_batch(whole, Axis(2, rank, None))
        inputs_B24 = whole.inputs_BS.view(4, 2, 4, LENGTH // 4)[:, :, chunks]
        assert torch.equal(part.inputs_BS, inputs_B24.flatten(1))
        assert part.masked_BS is not None and torch.equal(part.masked_BS, part.inputs_BS == 18)
        assert part.answers_N is not None and (part.positions_N.diff() > 0).all()
        num_parts[part.answers_N] += 1
        for name in ("targets_N", "weights_N", "is_eos_padding_N", "is_next_token_N"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[part.answers_N])
        # An output position reads the same input as in the whole batch.
        assert torch.equal(
            part.inputs_BS.flatten()[part.positions_N], whole.inputs_BS.flatten()[whole.positions_N][part.answers_N]
        )
        assert (part.denominator, part.num_targets) == (whole.denominator, whole.num_targets)
    assert (num_parts == 1).all()


def test_lengths_that_do_not_fit(tiny_model: MakeModel) -> None:
    def split(length: int) -> NoisedBatch:
        inputs_BS, empty_N = torch.zeros(1, length, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        return split_batch(NoisedBatch(inputs_BS, BlockDiffusion(4), empty_N, empty_N, empty_N), Axis(2, 0, None))

    with pytest.raises(ValueError, match=r"18 tokens .* parallel.context = 2 .* data.row_length to a multiple .* = 4"):
        split(2 * 18)
    batch = split(2 * 80)
    with pytest.raises(ValueError, match="80 tokens are more than the model's context"):
        tiny_model()(batch.inputs_BS, pattern=batch.pattern)
