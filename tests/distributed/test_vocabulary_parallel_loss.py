"""The fused loss of a head whose rows are divided over ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp.process_group import World
from diffusionlm.kernels import chunked_loss
from diffusionlm.kernels.cross_entropy import LossInputs, linear_cross_entropy
from diffusionlm.kernels.loss_types import HeadRows, VocabularyShard
from tests.distributed.forked import run_ranks
from tests.distributed.test_tensor_parallel import assert_close
from tests.kernels.oracle import compute_expected, make_inputs


def cut_head(head_VD: Tensor, world: World) -> tuple[Tensor, VocabularyShard]:
    """This rank's rows, with padding."""
    vocab_size, num_rows = len(head_VD), -(-len(head_VD) // world.size)
    first = min(world.rank * num_rows, vocab_size)
    own = head_VD.detach()[first : first + num_rows]
    padded = torch.cat([own, own.new_zeros(num_rows - len(own), own.shape[1])]).requires_grad_()
    all_reduce_max = partial(dist.all_reduce, op=dist.ReduceOp.MAX)
    return padded, VocabularyShard(first, len(own), vocab_size, all_reduce_max, dist.all_reduce, torch.clone)


LOSSES: list[tuple[float | None, dict[str, Any]]] = [
    (None, {}),
    (None, {"label_smoothing": 0.1, "excluded_token": 6}),
    (0.5, {"z_loss": 0.01, "excluded_token": 0}),
    (2.0, {"label_smoothing": 0.2, "z_loss": 0.02, "excluded_token": 3}),
]


@pytest.mark.parametrize("chunk_bytes", [1, 32 << 20])
def test_the_loss_of_a_divided_head_equals_its_definition(chunk_bytes: int, tmp_path: Path) -> None:
    """In chunks of 64 positions, and in one chunk of several parts. Three ranks have 3, 3 and 1 of 7 tokens."""

    def act(world: World) -> None:
        chunked_loss.CPU_CHUNK_BYTES = chunk_bytes
        for softcap, options in LOSSES:
            hidden, head, loss_inputs = make_inputs(300, 7, 3, **options)
            own, shard = cut_head(head, world)
            output = linear_cross_entropy(hidden, own, loss_inputs, softcap, shard=shard)
            expected = compute_expected(hidden, head, loss_inputs, softcap)
            assert_close(output.loss_sum.detach(), expected.loss_sum, "loss")
            assert_close(output.nll_N, expected.nll_N, "nll")
            grad_hidden, grad_head = torch.autograd.grad(output.loss_sum, (hidden, own))
            dist.all_reduce(grad_hidden)
            assert_close(grad_hidden, expected.grad_hidden, "hidden states")
            rows = expected.grad_head[shard.first_token : shard.first_token + shard.num_tokens]
            assert_close(grad_head[: shard.num_tokens], rows, "head")
            assert grad_head[shard.num_tokens :].eq(0.0).all()

    run_ranks(act, tmp_path, 3)


def test_an_excluded_target_and_one_outside_the_vocabulary(tmp_path: Path) -> None:
    """The first has infinite loss, but no gradient at weight 0; the second raises on every rank, so that none waits."""

    def act(world: World) -> None:
        hidden, head, _ = make_inputs(3, 5, 4)
        own, shard = cut_head(head, world)
        loss_inputs = LossInputs(torch.tensor([4, 1, 0]), torch.tensor([0.0, 1.0, 2.0]), 4)
        output = linear_cross_entropy(hidden, own, loss_inputs, shard=shard)
        expected = linear_cross_entropy(hidden, head, loss_inputs)
        assert output.nll_N.isinf().tolist() == [True, False, False]
        assert_close(output.loss_sum.detach(), expected.loss_sum.detach(), "loss")
        assert torch.autograd.grad(output.loss_sum, hidden)[0].isfinite().all()
        for target in (-1, 5, 6):
            with pytest.raises((RuntimeError, IndexError), match="out of"):
                linear_cross_entropy(hidden, own, LossInputs(torch.full((3,), target), torch.ones(3)), shard=shard)

    run_ranks(act, tmp_path)


def test_backends_of_a_divided_head(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, loss_inputs = make_inputs(3, 4, 2)
    shard = VocabularyShard(0, 4, 4, lambda tensor: None, lambda tensor: None, torch.clone)
    rows = HeadRows(torch.tensor([0]), head[:1])
    with pytest.raises(ValueError, match=r'"triton" needs a head with all rows: choose "eager"'):
        linear_cross_entropy(hidden, head, loss_inputs, backend="triton", shard=shard)
    with pytest.raises(ValueError, match="no trained rows"):
        linear_cross_entropy(hidden, head, loss_inputs, head_rows=rows, shard=shard)
    backends: list[str] = []

    def select(backend: str, *_: object) -> str:
        backends.append(backend)
        return "eager"

    monkeypatch.setattr(chunked_loss, "select_loss_backend", select)
    output = linear_cross_entropy(hidden, head, loss_inputs, shard=shard)
    assert torch.equal(output.nll_N, linear_cross_entropy(hidden, head, loss_inputs, backend="eager").nll_N)
    assert backends == ["eager", "eager"]
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    with pytest.raises(ValueError, match="is not compiled: compile the blocks only"):
        linear_cross_entropy(hidden, head, loss_inputs, shard=shard)
