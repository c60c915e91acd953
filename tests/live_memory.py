"""The most memory that tensors take at a time, on any device, also a fake one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of the tensors that operators read and make in the context, as long as something holds them."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        """``tensors``: in use from the beginning."""
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self._add(tensors)

    def live_bytes(self) -> int:
        """Bytes of the tensors that are in use now."""
        live = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        self._storages = live
        return sum(num_bytes for _, num_bytes in live.values())

    def _add(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._storages or self._storages[storage._cdata][0].expired():
                    self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.live_bytes())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self._add(tree_leaves((args, kwargs, output)))
        return output
