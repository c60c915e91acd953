"""Every estimate of the NELBO against enumeration: the sum over all masks M of CE(M) / (|M| C(L, |M|))."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch

from config.objective import Bernoulli, Counts, MaskedDiffusion
from diffusionlm.diffusion.batch import Batch, DrawKey
from diffusionlm.diffusion.corruption import masked_draw
from diffusionlm.diffusion.likelihood import nelbo
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer

MakeModel = Callable[..., Transformer]

VOCAB, MASK, L = 4, 3, 4
SUBSETS = [M for size in range(1, L + 1) for M in itertools.combinations(range(L), size)]
X = torch.tensor([[0, 2, 1, 1]])
TWO = torch.tensor([[0, 2, 1, 1], [2, 2, 0, 1]])


@pytest.fixture(scope="module")
def model(tiny_model: MakeModel) -> Transformer:
    return tiny_model(torch.float64, vocab_size=VOCAB, mask_token_id=MASK, eos_token_id=0, pad_token_id=0, scale=0.4)


def conditionals(model: Transformer, x_BL: torch.Tensor) -> torch.Tensor:
    """log p(x_i | the unmasked of x) [B, subsets, L], by the full logits: none of the code under test."""
    masked = torch.tensor([[i in M for i in range(L)] for M in SUBSETS])
    inputs = torch.where(masked, MASK, x_BL[:, None]).flatten(0, 1)
    logits = model(inputs, pattern=Bidirectional()).clone()
    logits[..., MASK] = -torch.inf
    log_p = logits.log_softmax(-1).view(len(x_BL), len(SUBSETS), L, VOCAB)
    return log_p.gather(-1, x_BL[:, None, :, None].expand(-1, len(SUBSETS), -1, 1))[..., 0]


def cross_entropies(model: Transformer, x_BL: torch.Tensor) -> torch.Tensor:
    """CE(M) in nats, [B, subsets]."""
    log_p = conditionals(model, x_BL)
    return -torch.stack([log_p[:, s, list(M)].sum(-1) for s, M in enumerate(SUBSETS)], dim=1)


def exact_nelbo(model: Transformer, x_BL: torch.Tensor) -> torch.Tensor:
    """In nats, [B]."""
    weights = torch.tensor([1.0 / (len(M) * math.comb(L, len(M))) for M in SUBSETS], dtype=torch.float64)
    return cross_entropies(model, x_BL) @ weights


def exact_truncated(model: Transformer, x_BL: torch.Tensor, epsilon: float) -> torch.Tensor:
    """E of the Bernoulli estimator: the integral over p from epsilon to 1 of f(p) / p, over 1 - epsilon; [B]."""
    nodes, node_weights = np.polynomial.legendre.leggauss(16)  # exact: the integrand is a polynomial
    p = (nodes * (1 - epsilon) + 1 + epsilon) / 2
    weights = [float(np.sum(node_weights / 2 * p ** (len(M) - 1) * (1 - p) ** (L - len(M)))) for M in SUBSETS]
    return cross_entropies(model, x_BL) @ torch.tensor(weights, dtype=torch.float64)


def test_quadrature_without_truncation_is_the_nelbo(model: Transformer) -> None:
    torch.testing.assert_close(exact_truncated(model, TWO, 0.0), exact_nelbo(model, TWO), rtol=1e-12, atol=1e-12)


def test_enumerated_count_estimator_and_its_gradient(model: Transformer) -> None:
    """k uniform, then the mask uniform, weight L / k, through the objective's own draw and score."""
    objective = build_objective(MaskedDiffusion(), MASK)
    total: torch.Tensor = torch.zeros((), dtype=torch.float64)
    for M in SUBSETS:
        masked = np.zeros((1, L), dtype=bool)
        masked[0, list(M)] = True
        draw = masked_draw(
            Batch(X, torch.ones_like(X, dtype=torch.bool)), masked, masked * np.float32(L / len(M)), MASK
        )
        assert draw.num_targets == L
        probability = 1.0 / (L * math.comb(L, len(M)))
        scored = model(
            draw.inputs_BL,
            pattern=draw.pattern,
            rows=draw.rows_R,
            score=objective.score(draw, denominator=draw.num_targets),
        )
        total = total + probability * scored.loss_sum
    exact = exact_nelbo(model, X)[0] / L
    torch.testing.assert_close(total, exact, rtol=1e-6, atol=1e-7)
    names, parameters = zip(*model.named_parameters(), strict=True)
    for name, ours, expected in zip(
        names, torch.autograd.grad(total, parameters), torch.autograd.grad(exact, parameters), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def estimates(model: Transformer, estimator: Counts | Bernoulli, steps: int, rows: int) -> np.ndarray:
    """For each step the mean over its rows (TWO, alternating) of the weighted sum per target token."""
    objective = build_objective(MaskedDiffusion(estimator=estimator), MASK)
    tokens = TWO.repeat(rows // 2, 1)
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool))
    values = []
    with torch.no_grad():
        for step in range(steps):
            draw = objective.draw(batch, DrawKey(seed=11, step=step, first_row=0, rows_in_step=rows))
            score = objective.score(draw, denominator=draw.num_targets)
            scored = model(draw.inputs_BL, pattern=draw.pattern, rows=draw.rows_R, score=score)
            values.append(float(scored.loss_sum))
    return np.array(values)


@pytest.mark.parametrize(
    "estimator", [Counts(), Bernoulli(epsilon=0.5), Bernoulli(epsilon=0.02)], ids=["counts", "b-0.5", "b-0.02"]
)
def test_objective_is_unbiased(model: Transformer, estimator: Counts | Bernoulli) -> None:
    with torch.no_grad():
        full = float(exact_nelbo(model, TWO).mean()) / L
        exact = (
            full if isinstance(estimator, Counts) else float(exact_truncated(model, TWO, estimator.epsilon).mean()) / L
        )
    values = estimates(model, estimator, steps=150, rows=64)
    error = values.std(ddof=1) / math.sqrt(len(values))
    assert abs(values.mean() - exact) < 4 * error, (values.mean(), exact, error)
    assert error < 0.02 * exact, "too weak a test"
    if isinstance(estimator, Bernoulli) and estimator.epsilon == 0.5:
        assert abs(full - exact) > 6 * error, "truncation could not be told from the full integral"


def test_estimate_of_a_fixed_order_is_unbiased_per_row(model: Transformer) -> None:
    """Strata tied to the rows' places would give each row one count for ever."""
    objective = build_objective(MaskedDiffusion(), MASK)
    tokens = X.repeat(4, 1)
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool))
    sums = np.zeros((600, 4))
    ce = {M: float(value) for M, value in zip(SUBSETS, cross_entropies(model, X).detach()[0], strict=True)}
    for step in range(len(sums)):
        draw = objective.draw(batch, DrawKey(5, step, 0, 4))
        masked = draw.inputs_BL == MASK
        for row in range(4):
            M = tuple(masked[row].nonzero()[:, 0].tolist())
            sums[step, row] = L / len(M) * ce[M]
    exact = float(exact_nelbo(model, X).detach())
    errors = sums.std(axis=0, ddof=1) / math.sqrt(len(sums))
    assert (np.abs(sums.mean(axis=0) - exact) < 4 * errors).all()


@pytest.mark.parametrize("num_draws", [1, 3])
def test_evaluated_nelbo_is_unbiased_and_its_error_plausible(model: Transformer, num_draws: int) -> None:
    tokens = X.repeat(24, 1)  # equal rows: draws are all that varies
    reports = [nelbo(model, tokens, num_draws=num_draws, seed=seed) for seed in range(60)]
    values = np.array([report.nats_per_token for report in reports])
    spread = values.std(ddof=1)
    exact = float(exact_nelbo(model, X).detach()) / L
    assert abs(values.mean() - exact) < 4 * spread / math.sqrt(len(values))
    reported = np.mean([report.standard_error for report in reports])
    # Counts are spread over the rows, which the error per row cannot see: it may well be larger than the spread.
    assert 0.5 < spread / reported < 1.4
    assert reports[0].num_tokens == 24 * L
    assert reports[0].nats == pytest.approx(reports[0].nats_per_token * 24 * L)


def test_evaluated_nelbo_with_one_row_per_count_is_exact_in_counts(model: Transformer) -> None:
    """As many draws as targets: every count comes once in each row, whatever the seed."""
    for seed in range(5):
        report = nelbo(model, TWO, num_draws=L, seed=seed)
        assert [round(high, 3) for _, high, _ in report.by_masked_fraction] == [0.3, 0.5, 0.8, 1.0]


def test_evaluation_does_not_depend_on_the_batch_size(model: Transformer) -> None:
    tokens = TWO.repeat(5, 1)
    whole = nelbo(model, tokens, seed=3)
    for batch_size in (1, 3, 10):
        part = nelbo(model, tokens, seed=3, batch_size=batch_size)
        assert part.nats == pytest.approx(whole.nats, rel=1e-6)
        assert part.standard_error == pytest.approx(whole.standard_error, rel=1e-5)


def test_prompt_and_padding_are_context_only(model: Transformer) -> None:
    """Targets 1 and 2 alone: the NELBO over two tokens, the others always visible (position 3 plays the prompt)."""
    is_target = torch.tensor([[False, True, True, False]])
    ce = dict(zip(SUBSETS, cross_entropies(model, X).detach()[0].tolist(), strict=True))
    exact = ((ce[(1,)] + ce[(2,)]) / 2 * 2 + ce[(1, 2)]) / 2  # k = 1: weight 2, mean of two masks; k = 2: weight 1
    reports = [nelbo(model, X.repeat(16, 1), is_target.repeat(16, 1), num_draws=2, seed=s) for s in range(40)]
    values = np.array([report.nats / 16 for report in reports])
    assert abs(values.mean() - exact) < 4 * values.std(ddof=1) / math.sqrt(len(values)) + 1e-9
    assert reports[0].num_tokens == 32


def test_rows_without_targets_add_nothing(model: Transformer) -> None:
    is_target = torch.tensor([[True] * L, [False] * L])
    report = nelbo(model, TWO, is_target, num_draws=2, seed=0, batch_size=2)
    assert report.num_tokens == L and math.isfinite(report.nats)
    alone = nelbo(model, TWO, is_target, num_draws=2, seed=0, batch_size=1)
    assert alone.nats == pytest.approx(report.nats, rel=1e-6)
    with pytest.raises(ValueError, match="is_target_BL"):
        nelbo(model, TWO, torch.zeros_like(is_target))
    assert nelbo(model, X).standard_error == math.inf


def test_nelbo_bounds_the_random_order_likelihood(model: Transformer) -> None:
    """-log of the mean over orders is below the mean of -log (Jensen), and these likelihoods sum to one."""
    everything = torch.tensor(list(itertools.product(range(VOCAB - 1), repeat=L)))
    with torch.no_grad():
        log_p = conditionals(model, everything)
        bound = exact_nelbo(model, everything)
    index = {M: s for s, M in enumerate(SUBSETS)}

    @cache
    def probability(M: tuple[int, ...]) -> torch.Tensor:
        """Of the tokens in M given the others, one at a time in random order, [81]."""
        if not M:
            return torch.ones(len(everything), dtype=torch.float64)
        parts = [log_p[:, index[M], i].exp() * probability(tuple(j for j in M if j != i)) for i in M]
        return torch.stack(parts).mean(0)

    likelihood = probability(tuple(range(L)))
    torch.testing.assert_close(likelihood.sum(), torch.ones((), dtype=torch.float64), rtol=1e-6, atol=1e-6)
    gap = bound + likelihood.log()
    assert gap.min() > -1e-9
    assert gap.max() > 1e-3, "a consistent model would make this test empty"
