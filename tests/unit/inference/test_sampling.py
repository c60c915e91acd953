"""Temperature, top-k, top-p and the choice of a token, against loops in plain Python.

`tests/reference/decoding` compares them together with a second implementation.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from diffusionlm.inference.sampling import distributions
from diffusionlm.inference.sampling.distributions import (
    choose_tokens,
    divide_by_temperature,
    exclude_tokens,
    keep_top_k,
    keep_top_p,
)

INF = float("inf")


def random_logits(rows: int = 40, vocab: int = 13) -> Tensor:
    logits = torch.randn(rows, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    logits[::3] = logits[::3].round()  # ties
    logits[:, 5] = -INF
    return logits


def naive_order(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


def naive_top_p(row: list[float], top_p: float) -> list[float]:
    total = sum(math.exp(value) for value in row)
    nucleus, cumulative = set(), 0.0
    for token in naive_order(row):
        if cumulative >= top_p:
            break
        nucleus.add(token)
        cumulative += math.exp(row[token]) / total
    return [value if token in nucleus else -INF for token, value in enumerate(row)]


@pytest.mark.parametrize("top_k", [1, 2, 5, 13, 50])
def test_top_k_keeps_exactly_k_lowest_ids_first(top_k: int) -> None:
    logits_NV = random_logits()
    for row, filtered_row in zip(logits_NV.tolist(), keep_top_k(logits_NV, top_k).tolist(), strict=True):
        best = naive_order(row)[:top_k]
        assert filtered_row == [value if token in best else -INF for token, value in enumerate(row)]


@pytest.mark.parametrize("num_candidates", [1, 5, 12, 1024])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.6, 0.95, 0.999])
def test_top_p_keeps_the_smallest_nucleus(num_candidates: int, top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also among equals, where candidates do not hold the nucleus, and in rows with fewer finite logits. A CPU sorts no
    ids: torch sorts them with the values, which takes longer than all else that top-p computes."""
    logits_NV = torch.cat([random_logits(), random_logits().round(), torch.zeros(1, 13, dtype=torch.float64)])
    logits_NV[0, 1:] = -INF
    expected = [naive_top_p(row, top_p) for row in logits_NV.tolist()]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("ids are sorted")

    monkeypatch.setattr(Tensor, "sort", refuse)
    monkeypatch.setattr(Tensor, "topk", refuse)
    monkeypatch.setattr(distributions, "NUM_TOP_P_CANDIDATES", num_candidates)
    assert keep_top_p(logits_NV, top_p).tolist() == expected
    for row_1V, expected_V in zip(logits_NV.split(1), expected, strict=True):
        assert keep_top_p(row_1V, top_p).tolist() == [expected_V]


def test_temperature() -> None:
    logits_NV = random_logits()
    expected = (logits_NV / 0.7).softmax(dim=1)
    assert (divide_by_temperature(logits_NV, 0.7).softmax(dim=1) - expected).abs().max() < 1e-14
    tiny = divide_by_temperature(random_logits(), 1e-310).softmax(dim=1)
    assert tiny.isfinite().all()


def test_samples_at_the_edges_have_positive_probability() -> None:
    probs_NV = torch.rand(500, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).pow(20)
    probs_NV[:, [0, 17, 36]] = 0.0
    for uniform in (0.0, 1.0 - 2.0**-53):
        tokens_N = choose_tokens(probs_NV, torch.full((500,), uniform, dtype=torch.float64))
        assert (probs_NV.gather(1, tokens_N[:, None]) > 0.0).all()


def test_excluded_tokens_are_not_in_the_softmax() -> None:
    """As if their logits were -inf; nothing is left of a row that has no other token."""
    logits_NV = random_logits()
    logits_NV[4, [index not in (2, 7) for index in range(13)]] = -INF
    probs_NV = logits_NV.softmax(dim=1)
    excluded = torch.tensor([2, 7])
    expected_NV = logits_NV.index_fill(1, excluded, -INF).softmax(dim=1).nan_to_num(0.0)
    torch.testing.assert_close(exclude_tokens(probs_NV, excluded), expected_NV, rtol=1e-13, atol=0.0)
    assert exclude_tokens(probs_NV, excluded[:0]) is probs_NV
