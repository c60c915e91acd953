"""Measure how fast this machine runs the operators of a recorded step, each alone, and predict the step from it."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from profiling.roofline.operators import Operator, read_clock

COLD_BYTES = 48 << 20
"""Bytes of the tensors that the calls of a sample go through: more than fit in the caches, as in a step."""
CHAIN_LENGTH = 500
"""Operators of the chain that measures what the host does beside them."""


def kind_of(operator: Operator) -> Hashable:
    """What has a rate of its own: products of the same shapes, else an operator on tensors of the same dtypes, which
    are contiguous or not, and of sizes within a factor of four.

    Small products are slower than large ones, so each shape is measured; other operators take time for each byte.
    """
    if operator.products:
        return operator.name, operator.products
    assert operator.call is not None
    size = operator.num_bytes.bit_length() // 2
    return operator.name, size, frozenset((spec.dtype, spec.is_contiguous) for spec in operator.call.tensors)


@dataclass
class _Sampler:
    """Measures the largest call of a kind."""

    operator: Operator
    seconds: list[float] = field(default_factory=list)
    """Seconds of a call, one value for each sample."""

    def sample(self) -> None:
        """Call it several times, each on tensors that are not in the caches; the sample is the median call. A product
        reads each value many times, so few calls are enough."""
        assert self.operator.call is not None
        num_bytes = 0 if self.operator.products else self.operator.num_bytes
        num_calls = max(3, min(100, COLD_BYTES // num_bytes)) if num_bytes else 3
        calls = [self.operator.call.prepare() for _ in range(num_calls)]
        times = []
        for call in calls:
            start = read_clock()
            call()
            times.append(read_clock() - start)
        self.seconds.append(statistics.median(times))

    def predict(self, num_bytes: int, overhead: float, sample: int | None) -> float:
        """Seconds of a call that moves so many bytes."""
        seconds = _choose(self.seconds, sample)
        if self.operator.products or not self.operator.num_bytes:
            return seconds
        return overhead + max(0.0, seconds - overhead) * num_bytes / self.operator.num_bytes


class Calibration:
    """Rates of this machine for the operators of a step."""

    def __init__(self, operators: Iterable[Operator]) -> None:
        largest: dict[Hashable, Operator] = {}
        for operator in operators:
            kind = kind_of(operator)
            if kind not in largest or operator.num_bytes > largest[kind].num_bytes:
                largest[kind] = operator
        self._samplers = {kind: _Sampler(operator) for kind, operator in largest.items()}
        self._overheads: list[float] = []
        self._host_seconds: list[float] = []

    @property
    def num_kinds(self) -> int:
        return len(self._samplers)

    def sample(self) -> None:
        """Measure each kind once, and what an operator costs beside its computation."""
        with torch.no_grad():
            for sampler in self._samplers.values():
                sampler.sample()
            self._overheads.append(_measure_call())
        self._host_seconds.append(max(0.0, _measure_differentiated_call() - self._overheads[-1]))

    def predict(self, operator: Operator, sample: int | None = None) -> float:
        """Seconds of an operator; ``sample``: by this sample alone. None: by the medians."""
        return self._samplers[kind_of(operator)].predict(operator.num_bytes, _choose(self._overheads, sample), sample)

    def predict_host(self, num_operators: int, sample: int | None = None) -> float:
        """Seconds that Python and autograd take beside the operators of a step."""
        return num_operators * _choose(self._host_seconds, sample)


def _choose(values: Sequence[float], sample: int | None) -> float:
    return statistics.median(values) if sample is None else values[sample]


def _measure_call() -> float:
    """Seconds of an operator that has almost nothing to compute."""
    x = torch.ones(1)
    start = read_clock()
    for _ in range(CHAIN_LENGTH):
        x * x
    return (read_clock() - start) / CHAIN_LENGTH


def _measure_differentiated_call() -> float:
    """The same within a chain with its backward, which has two operators for each one of the forward."""
    x = torch.ones(1, requires_grad=True)
    y = x
    start = read_clock()
    for _ in range(CHAIN_LENGTH):
        y = y * x
    torch.autograd.backward(y)
    return (read_clock() - start) / (3 * CHAIN_LENGTH)
