"""Validation by several ranks: the numbers of one, from as many forwards on each as the strategy needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ddp.map_over_ranks import SINGLE_PROCESS_MAP, MapOverRanks
from ddp.process_group import SINGLE_PROCESS, World
from diffusionlm.data.packing import Row
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.evaluation.validation import EvaluationResult, evaluate
from diffusionlm.models.transformer import Transformer
from tests.distributed.forked import run_ranks
from tokenizer import Tokenizer, train_bpe


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["aaaa bbbb cccc"], vocab_size=262)


def rows(count: int) -> list[Row]:
    rng = np.random.default_rng(0)
    sequences = []
    for index in range(count):
        documents = np.where(np.arange(10) < 10 - index % 3, 0, -1).astype(np.int32)
        sequences.append(Row(rng.integers(0, 200, 10).astype(np.int32), documents, documents >= 0))
    return sequences


@pytest.mark.parametrize("is_collective", [False, True])
def test_distributed_validation_matches_a_single_process(
    tiny_model: Callable[..., Transformer], tokenizer: Tokenizer, tmp_path: Path, is_collective: bool
) -> None:
    model = tiny_model(vocab_size=tokenizer.vocab_size, mask_token_id=tokenizer.mask_token_id)
    forwards: list[int] = []
    model.register_forward_hook(lambda *_: forwards.append(1))

    def judged(world: World) -> tuple[list[EvaluationResult], int]:
        """Of a bidirectional model, and in blocks of 4: 3 batches x 3 draws + 2 x 3 fills, and 3 x 3."""
        forwards.clear()
        results = [
            evaluate(
                model,
                tokenizer,
                rows(7),
                num_mc_samples=3,
                batch_size=3,
                layout=InputLayout.from_config(model.config, length),
                majority_token=5,
                map_forwards=MapOverRanks(world, is_collective),
            )
            for length in (None, 4)
        ]
        return results, len(forwards)

    alone, count = judged(SINGLE_PROCESS)
    assert count == 9 + 2 * 3 + 9
    done = run_ranks(judged, tmp_path)
    for results, _ in done:
        assert results == alone
    # 9 = 5 + 4 and 3 = 2 + 1 forwards, unless all ranks make equally many.
    expected = [5 + 2 * 2 + 5] * 2 if is_collective else [5 + 2 * 2 + 5, 4 + 2 * 1 + 4]
    assert [number for _, number in done] == expected


def test_validation_error_of_one_rank_is_raised_on_all_ranks(tmp_path: Path) -> None:
    def act(world: World) -> tuple[str, list[int], list[int]]:
        computed: list[int] = []

        def work(index: int) -> int:
            computed.append(index)
            if index in (1, 3):
                raise ValueError(f"forward {index} is not finite")
            return 10 * index

        map_forwards = MapOverRanks(world)
        with pytest.raises(ValueError) as caught:
            map_forwards(5, work)
        return str(caught.value), computed, map_forwards(3, lambda index: index * index)

    first, second = run_ranks(act, tmp_path)
    assert "forward 1 is not finite" in first[0] and first[0] == second[0]
    assert first[1:] == ([0, 2, 4], [0, 1, 4])
    assert second[1:] == ([1], [0, 1, 4])


def test_more_ranks_than_forwards(tmp_path: Path) -> None:
    def act(world: World) -> list[int]:
        indices: list[int] = []

        def work(index: int) -> int:
            indices.append(index)
            return index + 7

        results = MapOverRanks(world, is_collective=True)(1, work)
        return [*results, *indices]

    assert run_ranks(act, tmp_path, world_size=3) == [[7, 0]] * 3
    assert SINGLE_PROCESS_MAP(2, lambda index: index) == [0, 1]
