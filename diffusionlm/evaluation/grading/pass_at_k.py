"""pass@k: the probability that one of k samples is right."""

from __future__ import annotations

import math


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate ``1 - C(n - c, k) / C(n, k)`` of one item (Chen et al. 2021, equation 1).

    Args:
        n: samples of the item.
        c: right samples among them.
        k: samples that are drawn without replacement.

    Raises:
        ValueError: not ``0 <= c <= n`` or not ``1 <= k <= n``.
    """
    if not 0 <= c <= n:
        raise ValueError(f"c = {c} right samples of n = {n}: expected 0 to n")
    if not 1 <= k <= n:
        raise ValueError(f"k = {k} with n = {n} samples: expected 1 to n; draw more samples or lower k")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))
