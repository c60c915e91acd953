"""Reduce gradient buckets while the last backward of a step is still running."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.buckets import Bucket
from ddp.process_group import World


def scale_to_norm(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place by ``max_norm / norm`` if that is less than one, as `torch.nn.utils.clip_grad_norm_`.

    The host does not wait for ``norm``, which is 0-d on the device.
    """
    if gradients and max_norm != math.inf:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))


class GradientReducer:
    """Collects gradients in buckets as autograd produces them, and starts the collective of each complete bucket.

    Buckets are launched strictly in their order, so all ranks make the same calls, whichever gradients a rank has. A
    gradient that is in its bucket is removed from its parameter: there is no second copy. A parameter that is used
    twice has one gradient, the sum. Frozen parameters are in no bucket.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        launch: Callable[[Bucket], None],
        world: World,
        before_first_gradient: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            launch: starts the collective of a bucket.
            world: ranks that sum gradients.
            before_first_gradient: called in each step before the first gradient is copied into a bucket.
        """
        self.buckets = buckets
        self._launch = launch
        self._world = world
        self._before_first_gradient = before_first_gradient
        self._has_first_gradient = False
        self._bucket_of_parameter = {
            parameter: (index, name)
            for index, bucket in enumerate(buckets)
            for name, parameter in bucket.parameters.items()
        }
        self._names = [name for bucket in buckets for name in bucket.parameters]
        self._is_last = False
        self._num_missing = [0] * len(buckets)
        self._next_bucket = 0
        self._used = torch.zeros(len(self._names), dtype=torch.int32)
        self._used_work: dist.Work | None = None
        for parameter in self._bucket_of_parameter:
            parameter.register_post_accumulate_grad_hook(self._on_gradient_ready)  # type: ignore[no-untyped-call]

    @contextmanager
    def backward(self, is_last: bool) -> Iterator[None]:
        """Wrap the forward and backward of a micro-batch. After the last one every bucket is launched."""
        self._is_last, self._next_bucket = is_last, 0
        self._num_missing = [len(bucket.parameters) for bucket in self.buckets]
        yield
        if is_last:
            self._launch_remaining()

    def _on_gradient_ready(self, parameter: nn.Parameter) -> None:
        """Move a parameter's gradient of this micro-batch into its bucket, and launch the buckets that are complete.

        An autograd hook calls this.
        """
        index, name = self._bucket_of_parameter[parameter]
        assert index >= self._next_bucket, f"{name} has a second gradient, but its bucket was launched in this backward"
        assert parameter.grad is not None
        self._notify_first_gradient()
        self.buckets[index].add(name, parameter.grad)
        parameter.grad = None
        if self._is_last:
            self._num_missing[index] -= 1
            while self._next_bucket < len(self.buckets) and self._num_missing[self._next_bucket] <= 0:
                self._launch_next()

    def _notify_first_gradient(self) -> None:
        if not self._has_first_gradient:
            self._has_first_gradient = True
            self._before_first_gradient()

    def _launch_next(self) -> None:
        bucket = self.buckets[self._next_bucket]
        self._next_bucket += 1
        assert bucket.work is None, "another collective still uses the bucket's memory"
        bucket.zero_missing_gradients()
        self._launch(bucket)

    def _launch_remaining(self) -> None:
        self._notify_first_gradient()
        while self._next_bucket < len(self.buckets):
            self._launch_next()
        self._is_last, self._next_bucket = False, 0
        has_gradient = set[str]().union(*(bucket.has_gradient for bucket in self.buckets))
        self._used = torch.tensor([name in has_gradient for name in self._names], dtype=torch.int32)
        self._used_work = dist.all_reduce(self._used, async_op=True, group=self._world.group)

    def wait(self) -> set[str]:
        """Wait for all buckets, end the step and return the names of parameters that have a gradient on any rank.

        A parameter that no rank used has no gradient, as in one process, so the optimizer does not update it.
        """
        assert self._used_work is not None, "call backward(is_last=True) before"
        for bucket in self.buckets:
            bucket.wait()
            bucket.has_gradient.clear()
        self._used_work.wait()
        self._used_work = None
        self._has_first_gradient = False
        return {name for name, count in zip(self._names, self._used.tolist(), strict=True) if count}
