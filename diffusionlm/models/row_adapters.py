"""Adapters of single rows: requests with different adapters, or none, in one forward.

Each projection of the base is computed once for all rows; each adapter adds its low-rank part to its own rows.

Shapes: Q inputs of a forward, P outputs out of Q, T rows of a tensor, S selected rows, r rank, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusionlm.models.layers import Embedding, Linear
from diffusionlm.models.lora import LoRALinear, TrainedRowsEmbedding, TrainedRowsLinear, adapter_modules
from diffusionlm.models.moe import MoE
from diffusionlm.models.tensors import copy_to_device
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import VarlenBatch


@dataclass(frozen=True)
class ModelAdapter:
    """An adapter apart from its model, whose weights it shares."""

    modules: Mapping[str, LoRALinear | TrainedRowsEmbedding | TrainedRowsLinear]
    """By name of the model's module that each one adapts."""

    @classmethod
    def from_model(cls, model: Transformer) -> ModelAdapter:
        """The adapter that is on a model."""
        return cls(dict(adapter_modules(model)))


RowGroup = tuple[str, slice | Tensor]
"""Name of an adapter and its rows."""
ALL_ROWS = slice(None)


class AdapterRows:
    """Says which rows of a tensor in a forward belong to which adapter. Not thread-safe."""

    def __init__(self) -> None:
        self._groups: dict[int, list[RowGroup]] = {}
        """Number of rows -> groups. A forward has Q inputs and P outputs in their order, so equal numbers are equal
        rows."""
        self._selected: list[RowGroup] | None = None

    @contextmanager
    def adapters_context(
        self, batch: VarlenBatch, adapters: Sequence[str | None], device: torch.device
    ) -> Iterator[None]:
        """Context of a forward.

        Args:
            adapters: name of the adapter of each sequence; None: the model itself.
        """
        inputs = [np.full(part.num_inputs, index) for index, part in enumerate(batch.sequences)]
        outputs = [np.full(len(part.output_offsets), index) for index, part in enumerate(batch.sequences)]
        self._groups = {}
        for sequences in (np.concatenate(inputs), np.concatenate(outputs)):
            groups: list[RowGroup] = []
            for name in dict.fromkeys(name for name in adapters if name is not None):
                own = [index for index, other in enumerate(adapters) if other == name]
                rows = np.flatnonzero(np.isin(sequences, own))
                if len(rows):
                    is_alone = len(rows) == len(sequences)
                    groups.append((name, ALL_ROWS if is_alone else copy_to_device(torch.from_numpy(rows), device)))
            self._groups[len(sequences)] = groups
        try:
            yield
        finally:
            self._groups = {}

    def groups(self, num_rows: int) -> list[RowGroup]:
        """Groups of a tensor with so many rows."""
        return self._groups[num_rows] if self._selected is None else self._selected

    @contextmanager
    def select(self, num_rows: int, indices_S: Tensor) -> Iterator[None]:
        """Context of a module that gets some rows of a tensor, such as those of an expert."""
        selected: list[RowGroup] = []
        for name, rows in self._groups[num_rows]:
            if isinstance(rows, slice):
                selected.append((name, rows))
                continue
            own_S = torch.isin(indices_S, rows).nonzero()[:, 0]
            if len(own_S):
                selected.append((name, own_S))
        self._selected = selected
        try:
            yield
        finally:
            self._selected = None


class RowAdaptedLinear(Linear):
    """A projection with low-rank adapters of single rows."""

    def __init__(self, base: Linear, adapters: Mapping[str, LoRALinear], rows: AdapterRows) -> None:
        with torch.device("meta"):
            super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self._rows = rows
        self._products = {name: _LowRankProduct.from_module(module) for name, module in adapters.items()}

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        x_TD = x.flatten(0, -2)
        groups = [(self._products[name], rows) for name, rows in self._rows.groups(len(x_TD)) if name in self._products]
        if not any(product.row_factor is not None for product, _ in groups) or self.bias is None:
            out_TD = super().forward(x_TD)
            bias = None
        else:
            out_TD, bias = F.linear(x_TD, self.weight), self.bias
        for product, rows in groups:
            out_TD[rows] = product.adapt(x_TD[rows], out_TD[rows])
        return (out_TD if bias is None else out_TD + bias).view(*x.shape[:-1], self.out_features)


@dataclass(frozen=True)
class _LowRankProduct:
    """``s B A``, and with DoRA the factor of each row of ``W + s B A``."""

    A: Tensor
    B: Tensor
    scale: float
    row_factor: Tensor | None

    @classmethod
    @torch.no_grad()
    def from_module(cls, module: LoRALinear) -> _LowRankProduct:
        A, B = module.factors()
        row_factor = None if module.lora_magnitude is None else module.row_factor().detach()
        return cls(A.detach(), B.detach(), module.scale, row_factor)

    def adapt(self, x: Tensor, base: Tensor) -> Tensor:
        """Output of the adapted projection.

        Args:
            base: output of the base; with DoRA without its bias.
        """
        low = F.linear(F.linear(x.to(self.A.dtype), self.A), self.B) * self.scale
        out = base + low
        return (out if self.row_factor is None else out * self.row_factor).to(base.dtype)


class RowAdaptedEmbedding(Embedding):
    """An embedding in which adapters have rows of their own."""

    def __init__(self, base: Embedding, adapters: Mapping[str, TrainedRowsEmbedding], rows: AdapterRows) -> None:
        with torch.device("meta"):
            super().__init__(base.num_embeddings, base.embedding_dim)
        self.weight = base.weight
        self._rows, self._adapters = rows, dict(adapters)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [...] to rows [..., D]."""
        flat_T = tokens.flatten()
        out_TD = super().forward(flat_T)
        for name, rows in self._rows.groups(len(flat_T)):
            if name in self._adapters:
                out_TD[rows] = self._adapters[name](flat_T[rows])
        return out_TD.view(*tokens.shape, self.embedding_dim)


class RowAdaptedHead(Linear):
    """A head in which adapters have rows of their own."""

    def __init__(self, base: Linear, adapters: Mapping[str, TrainedRowsLinear], rows: AdapterRows) -> None:
        with torch.device("meta"):
            super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self._rows = rows
        self._trained = {name: (module.trained_token_ids, module.trained_rows) for name, module in adapters.items()}

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., V]."""
        x_TD = x.flatten(0, -2)
        out_TV = super().forward(x_TD)
        for name, rows in self._rows.groups(len(x_TD)):
            if name in self._trained:
                ids, weight = self._trained[name]
                bias = None if self.bias is None else self.bias[ids]
                own_TV = out_TV[rows]
                own_TV[:, ids] = F.linear(x_TD[rows], weight.to(x.dtype), bias)
                out_TV[rows] = own_TV
        return out_TV.view(*x.shape[:-1], self.out_features)


def share_weights(model: Transformer) -> Transformer:
    """A model of the same modules with the same weights, whose modules can be replaced and which has no gradient."""
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    memo |= {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in model.parameters()}
    return copy.deepcopy(model, memo)


def add_row_adapters(model: Transformer, adapters: Mapping[str, ModelAdapter]) -> tuple[Transformer, AdapterRows]:
    """A model with adapters of single rows, which shares the weights of another one.

    Raises:
        ValueError: the model has an adapter itself, or one of these is of another model.
    """
    if any(adapter_modules(model)):
        raise ValueError("the model has an adapter already, which all requests would have: load the model without it")
    adapted, rows = share_weights(model), AdapterRows()
    by_module: dict[str, dict[str, LoRALinear | TrainedRowsEmbedding | TrainedRowsLinear]] = {}
    weights = dict(model.named_parameters(remove_duplicate=False))
    for name, adapter in adapters.items():
        for module_name, module in adapter.modules.items():
            weight = weights.get(f"{module_name}.weight")
            if weight is None or weight.data_ptr() != module.weight.data_ptr() or weight.shape != module.weight.shape:
                raise ValueError(
                    f"adapter {name!r} is of another model: its {module_name} has other weights in memory; read it for "
                    "the model that it is used with"
                )
            by_module.setdefault(module_name, {})[name] = module
    for module_name, modules in by_module.items():
        adapted.set_submodule(module_name, _build_module(adapted.get_submodule(module_name), modules, rows))
    for mixture in adapted.modules():
        if isinstance(mixture, MoE):
            mixture.select_rows = rows.select
    return adapted.eval(), rows


def _build_module(
    base: nn.Module,
    modules: Mapping[str, LoRALinear | TrainedRowsEmbedding | TrainedRowsLinear],
    rows: AdapterRows,
) -> nn.Module:
    if isinstance(base, Embedding):
        embeddings = {name: module for name, module in modules.items() if isinstance(module, TrainedRowsEmbedding)}
        return RowAdaptedEmbedding(base, embeddings, rows)
    assert isinstance(base, Linear), "adapters are on projections and the embedding"
    heads = {name: module for name, module in modules.items() if isinstance(module, TrainedRowsLinear)}
    if heads:
        return RowAdaptedHead(base, heads, rows)
    return RowAdaptedLinear(
        base, {name: module for name, module in modules.items() if isinstance(module, LoRALinear)}, rows
    )
