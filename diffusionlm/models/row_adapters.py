"""Adapters of single rows: requests with different adapters, or none, in one forward.

Each projection of the base is computed once for all rows; each adapter adds its low-rank part to its own rows.

Shapes: Q inputs of a forward, P outputs out of Q, T rows of a tensor, S selected rows, r rank, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from diffusionlm.models.layers import Embedding, Linear
from diffusionlm.models.lora import LoRALinear, TrainedRowsEmbedding, TrainedRowsLinear, adapter_modules
from diffusionlm.models.moe import MoE
from diffusionlm.models.tensors import copy_to_device
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import VarlenBatch


@dataclass(frozen=True, eq=False)
class ModelAdapter:
    """An adapter apart from its model, whose weights it shares."""

    modules: Mapping[str, LoRALinear | TrainedRowsEmbedding | TrainedRowsLinear]
    """By name of the model's module that each one adapts."""
    parts: Mapping[str, _LowRankProduct | _HeadRows]
    """What it adds to projections, by the same names."""
    acts_on_masks: bool = False
    """It acts on masked positions alone."""
    number: int = field(default_factory=count().__next__)
    """No other adapter of the process has it, not even one that is gone: cached keys and values belong to it."""

    @classmethod
    def from_model(cls, model: Transformer) -> ModelAdapter:
        """The adapter that is on a model."""
        modules = dict(adapter_modules(model))
        projections = {name: module for name, module in modules.items() if isinstance(module, Linear)}
        parts = {name: _build_part(module) for name, module in projections.items()}
        return cls(modules, parts, acts_on_masks=model.masked_rows is not None)

    def check_model(self, model: Transformer, name: str) -> None:
        """Check that the adapter, which has this name, shares the weights of a model.

        Raises:
            ValueError: it is of another model.
        """
        weights = dict(model.named_parameters(remove_duplicate=False))
        for module_name, module in self.modules.items():
            weight = weights.get(f"{module_name}.weight")
            if weight is None or weight.data_ptr() != module.weight.data_ptr() or weight.shape != module.weight.shape:
                raise ValueError(
                    f"adapter {name!r} is of another model: its {module_name} has other weights in memory; read it for "
                    "the model that it is used with"
                )


RowGroup = tuple[ModelAdapter, slice | Tensor]
"""An adapter and its rows."""
ALL_ROWS = slice(None)


class AdapterRows:
    """Says which rows of a tensor in a forward belong to which adapter. Not thread-safe."""

    def __init__(self) -> None:
        self._num_inputs = 0
        self._groups: list[list[RowGroup]] = []
        """Of the Q inputs of a forward, and of its P outputs."""
        self._selected: list[RowGroup] | None = None

    @contextmanager
    def adapters_context(
        self,
        batch: VarlenBatch,
        adapters: Sequence[ModelAdapter | None],
        masked_Q: NDArray[np.bool_],
        device: torch.device,
    ) -> Iterator[None]:
        """Context of a forward.

        Args:
            adapters: that of each sequence; None: the model itself.
            masked_Q: True at masked inputs.
        """
        sequences_Q = np.repeat(np.arange(len(adapters)), [part.num_inputs for part in batch.sequences])
        output_positions = batch.output_positions()
        outputs = ALL_ROWS if output_positions is None else output_positions.numpy()
        self._groups, self._num_inputs = [], len(masked_Q)
        for sequences, is_masked in ((sequences_Q, masked_Q), (sequences_Q[outputs], masked_Q[outputs])):
            groups: list[RowGroup] = []
            for adapter in dict.fromkeys(adapter for adapter in adapters if adapter is not None):
                own = [index for index, other in enumerate(adapters) if other is adapter]
                is_own = np.isin(sequences, own)
                rows = np.flatnonzero(is_own & is_masked if adapter.acts_on_masks else is_own)
                if len(rows):
                    is_alone = len(rows) == len(sequences)
                    groups.append((adapter, ALL_ROWS if is_alone else copy_to_device(torch.from_numpy(rows), device)))
            self._groups.append(groups)
        try:
            yield
        finally:
            self._groups = []

    def groups(self, num_rows: int, *, is_output: bool = False) -> list[RowGroup]:
        """Groups of a tensor with so many rows, which are inputs or outputs; their number tells most of them apart."""
        if self._selected is not None:
            return self._selected
        return self._groups[is_output or num_rows != self._num_inputs]

    @contextmanager
    def select(self, num_rows: int, indices_S: Tensor) -> Iterator[None]:
        """Context of a module that gets some rows of a tensor, such as those of an expert."""
        selected: list[RowGroup] = []
        for adapter, rows in self.groups(num_rows):
            if isinstance(rows, slice):
                selected.append((adapter, rows))
                continue
            own_S = torch.isin(indices_S, rows).nonzero()[:, 0]
            if len(own_S):
                selected.append((adapter, own_S))
        self._selected = selected
        try:
            yield
        finally:
            self._selected = None


@dataclass(frozen=True)
class _LowRankProduct:
    """``s B A``, and with DoRA the factor of each row of ``W + s B A``."""

    A: Tensor
    B: Tensor
    scale: float
    row_factor: Tensor | None

    def adapt(self, x: Tensor, base: Tensor, bias: Tensor | None) -> Tensor:
        """Output of the adapted module for its rows.

        Args:
            x: inputs.
            base: outputs of the base.
            bias: what these have; None, and the caller adds it later, if any part has a row factor.
        """
        low = F.linear(F.linear(x.to(self.A.dtype), self.A), self.B) * self.scale
        out = base + low
        return (out if self.row_factor is None else out * self.row_factor).to(base.dtype)


@dataclass(frozen=True)
class _HeadRows:
    """Rows of a head, and the tokens whose rows they replace."""

    token_ids: Tensor
    weight: Tensor
    row_factor: None = None

    def adapt(self, x: Tensor, base: Tensor, bias: Tensor | None) -> Tensor:
        """Output of the adapted module for its rows, as of `_LowRankProduct`."""
        own_bias = None if bias is None else bias[self.token_ids]
        base[:, self.token_ids] = F.linear(x, self.weight.to(x.dtype), own_bias)
        return base


@torch.no_grad()
def _build_part(module: LoRALinear | TrainedRowsLinear) -> _LowRankProduct | _HeadRows:
    if isinstance(module, TrainedRowsLinear):
        return _HeadRows(module.trained_token_ids, module.trained_rows)
    A, B = module.factors()
    row_factor = None if module.lora_magnitude is None else module.row_factor().detach()
    return _LowRankProduct(A.detach(), B.detach(), module.scale, row_factor)


class RowAdaptedLinear(Linear):
    """A projection whose rows have adapters."""

    def __init__(self, name: str, base: Linear, rows: AdapterRows) -> None:
        """``name``: of the module in the model."""
        with torch.device("meta"):
            super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self._name, self._rows = name, rows

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        x_TD = x.flatten(0, -2)
        groups = self._rows.groups(len(x_TD), is_output=x.dim() == 2)
        parts = [(adapter.parts[self._name], rows) for adapter, rows in groups if self._name in adapter.parts]
        # A row factor is of the product alone, so the bias comes after it.
        is_bias_late = self.bias is not None and any(part.row_factor is not None for part, _ in parts)
        out_TD = F.linear(x_TD, self.weight) if is_bias_late else super().forward(x_TD)
        for part, rows in parts:
            out_TD[rows] = part.adapt(x_TD[rows], out_TD[rows], None if is_bias_late else self.bias)
        return (out_TD + self.bias if is_bias_late else out_TD).view(*x.shape[:-1], self.out_features)


class RowAdaptedEmbedding(Embedding):
    """An embedding whose rows have adapters."""

    def __init__(self, name: str, base: Embedding, rows: AdapterRows) -> None:
        """``name``: of the module in the model."""
        with torch.device("meta"):
            super().__init__(base.num_embeddings, base.embedding_dim)
        self.weight = base.weight
        self._name, self._rows = name, rows

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [...] to rows [..., D]."""
        flat_T = tokens.flatten()
        out_TD = super().forward(flat_T)
        for adapter, rows in self._rows.groups(len(flat_T)):
            if self._name in adapter.modules:
                out_TD[rows] = adapter.modules[self._name](flat_T[rows])
        return out_TD.view(*tokens.shape, self.embedding_dim)


def share_weights(model: Transformer) -> Transformer:
    """A model of the same modules with the same weights, whose modules can be replaced and which has no gradient."""
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    memo |= {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in model.parameters()}
    return copy.deepcopy(model, memo)


class RowAdaptedModel:
    """A copy of a model that shares its weights, and whose rows have adapters: any that share them too."""

    def __init__(self, model: Transformer) -> None:
        """
        Raises:
            ValueError: the model has an adapter itself.
        """
        if any(adapter_modules(model)):
            raise ValueError(
                "the model has an adapter already, which all requests would have: load the model without it"
            )
        self.model, self.rows = share_weights(model).eval(), AdapterRows()
        for mixture in self.model.modules():
            if isinstance(mixture, MoE):
                mixture.select_rows = self.rows.select

    def prepare(self, adapter: ModelAdapter) -> None:
        """Replace the modules that an adapter is the first one to adapt. Others are left: experts without adapters are
        computed faster. Another thread may compute the model meanwhile: without the adapter nothing changes.

        Raises:
            ValueError: it changes embedding or head of a model that is divided over ranks, or the vision tower, whose
                features requests share.
        """
        for name in adapter.modules:
            base = self.model.get_submodule(name)
            if name.startswith("model.visual."):
                raise ValueError(
                    f"an adapter of requests changes {name}, a part of the vision tower, whose features all requests "
                    "share: train one of the text alone, or merge it with diffusionlm-convert"
                )
            if self.model.vocabulary_shard is not None and name in ("lm_head", "model.embed_tokens"):
                raise ValueError(
                    f"an adapter of requests changes {name}, which is divided over ranks: train one without "
                    f"{name} and lora.trainable_tokens, or set tensor_parallel = 1"
                )
            if type(base) is Linear:
                self.model.set_submodule(name, RowAdaptedLinear(name, base, self.rows))
            elif type(base) is Embedding:
                self.model.set_submodule(name, RowAdaptedEmbedding(name, base, self.rows))
            else:
                assert isinstance(base, RowAdaptedLinear | RowAdaptedEmbedding), "no adapter is on another module"
