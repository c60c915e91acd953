"""Low-rank adapters on the projections of a frozen model, and trained rows of its vocabulary.

The modules replace the model's own and share their weights, so that several adapters stand on one base, and the
parameters of the base keep their names.

Shapes: r rank, K trained rows.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.finetune.lora import HEAD, ROUTER_SUFFIX, LoraConfig
from config.model import ModelConfig
from diffusionlm.kernels.loss_types import HeadRows
from diffusionlm.kernels.low_rank import low_rank_linear
from diffusionlm.kernels.precision import compute_dtype
from diffusionlm.models.adapter_inputs import AdapterDropout, MaskedRows
from diffusionlm.models.layers import Embedding, Linear
from diffusionlm.models.transformer import Transformer

FACTOR_INITS = ("pissa", "olora")
"""Initial values that are a part of the weight."""
AdapterValues = Literal["trained", "start", "none"]
"""Values a module computes with: its parameters, the values of `keep_start`, or its base alone (`before_training`)."""
_START = "start_"
"""Begins the names of the buffers of `keep_start`."""
NF4_BLOCK_SIZE = 64
"""Weights that share one scale."""


class NF4Weight:
    """A frozen weight [out, in] in four bits: NormalFloat of QLoRA (Dettmers et al. 2023), by bitsandbytes."""

    def __init__(self, weight: Tensor) -> None:
        """Quantize a weight, on its device.

        Raises:
            ValueError: bitsandbytes does not work here.
        """
        try:
            self._functional: Any = importlib.import_module("bitsandbytes.functional")
            self.packed, self._state = self._functional.quantize_4bit(
                weight.detach().contiguous(), blocksize=NF4_BLOCK_SIZE, quant_type="nf4"
            )
        except Exception as error:  # without a library for this device, the import and the call may raise anything
            raise ValueError(
                f'lora.base = "nf4": the package bitsandbytes does not work on {weight.device} here ({error!r}): set '
                'lora.base = "bfloat16"'
            ) from error
        self.shape = weight.shape

    def to(self, dtype: torch.dtype) -> Tensor:
        """Dequantize to a dense weight, [out, in]."""
        dense: Tensor = self._functional.dequantize_4bit(self.packed, self._state)
        return dense.to(dtype)


class LoRALinear(Linear):
    """``W x + s B A dropout(x)`` (Hu et al. 2021, eq. 3); with DoRA the rows of ``W + s B A`` have trained norms.
    With ``masked_rows`` it is ``W x`` at all other positions.

    PiSSA and OLoRA begin with a product B0 A0 that is part of W: it is subtracted here, ``s (B A - B0 A0)``, so that
    the weight never changes.
    """

    adapter_values: AdapterValues = "trained"

    def __init__(
        self,
        base: Linear,
        rank: int,
        scale: float,
        config: LoraConfig,
        *,
        name: str = "",
        dropout: AdapterDropout | None = None,
        masked_rows: MaskedRows | None = None,
    ) -> None:
        """
        Args:
            name: of the module, which is part of the key of its dropout masks.
            dropout: None: no dropout.
            masked_rows: that the adapter acts on. None: it acts on all.
        """
        with torch.device("meta"):
            super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.quantized: NF4Weight | None = None
        self.scale, self.init, self.dropout, self.masked_rows = scale, config.init, dropout, masked_rows
        # A tensor, and on the CPU: the compiler would compile a number into the code, and so each module anew.
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        self.dropout_key = torch.tensor(key, device="cpu")
        dtype = torch.promote_types(base.weight.dtype, torch.float32)
        self.lora_A = nn.Parameter(base.weight.new_empty(rank, base.in_features, dtype=dtype))
        self.lora_B = nn.Parameter(base.weight.new_empty(base.out_features, rank, dtype=dtype))
        self.lora_magnitude = (
            nn.Parameter(base.weight.new_empty(base.out_features, dtype=dtype)) if config.dora else None
        )
        has_first_product = config.init in FACTOR_INITS
        self.first_A = nn.Buffer(torch.empty_like(self.lora_A)) if has_first_product else None
        self.first_B = nn.Buffer(torch.empty_like(self.lora_B)) if has_first_product else None

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Initialize the adapter; the module then computes what its base does."""
        rank = len(self.lora_A)
        if self.init == "gaussian":
            self.lora_A.copy_(torch.randn(self.lora_A.shape, generator=generator) / rank)
        else:
            bound = 1 / math.sqrt(self.in_features)
            self.lora_A.copy_(torch.rand(self.lora_A.shape, generator=generator) * (2 * bound) - bound)
        self.lora_B.zero_()
        if self.first_A is not None and self.first_B is not None:
            factors = _principal_factors if self.init == "pissa" else _orthogonal_factors
            B, A = factors(self.weight.to(self.lora_A.dtype), rank, self.scale)
            for parameter, first, value in ((self.lora_A, self.first_A, A), (self.lora_B, self.first_B, B)):
                parameter.copy_(value)
                first.copy_(value)
        if self.lora_magnitude is not None:
            self.lora_magnitude.copy_(self.weight.to(self.lora_A.dtype).norm(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        if self.adapter_values == "none" or (self.masked_rows is not None and self.masked_rows.of(x) is None):
            return self._project(x)
        A, B = self.factors()
        keep, scale = self._select_inputs(x)
        low_dtype = compute_dtype(x) if torch.is_autocast_enabled(x.device.type) else A.dtype
        if self._is_fused(x, low_dtype):
            return low_rank_linear(x.to(low_dtype), self.frozen_weight, self.bias, A, B, scale, keep)
        dropped = x if keep is None else x * keep.view(*x.shape[:-1], keep.shape[1])
        low = F.linear(F.linear(dropped.to(low_dtype), A), B) * scale
        if self.lora_magnitude is None:
            base = self._project(x)
            return (base + low).to(base.dtype)
        base = F.linear(x, self.frozen_weight.to(compute_dtype(x)))
        out = ((base + low) * self.row_factor()).to(base.dtype)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def _select_inputs(self, x: Tensor) -> tuple[Tensor | None, float]:
        """Mask of what A reads, [T, in] or [T, 1], and the scale of the product. None: A reads all."""
        keep, scale = None, self.scale
        if self.dropout is not None and self.adapter_values == "trained":
            keep = self.dropout.mask(x, self.dropout_key)
            scale = scale if keep is None else scale / (1 - self.dropout.probability)
        is_masked_T1 = None if self.masked_rows is None else self.masked_rows.of(x)
        if is_masked_T1 is not None:
            keep = is_masked_T1 if keep is None else keep & is_masked_T1
        return keep, scale

    def _project(self, x: Tensor) -> Tensor:
        """The projection of the base."""
        if self.quantized is None and self.weight.dtype == x.dtype:
            return super().forward(x)
        out = F.linear(x, self.frozen_weight.to(compute_dtype(x)))
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def _is_fused(self, x: Tensor, low_dtype: torch.dtype) -> bool:
        """True in training, where the gradients are computed with fewer passes. A compiler fuses the plain form."""
        return (
            torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and self.lora_magnitude is None
            and not self.weight.requires_grad
            and compute_dtype(x) == low_dtype
        )

    @property
    def frozen_weight(self) -> Tensor | NF4Weight:
        """The weight of the base."""
        return self.weight if self.quantized is None else self.quantized

    def quantize(self) -> None:
        """Replace the weight of the base by four bits for each value. `weight` has no values then.

        Raises:
            ValueError: bitsandbytes does not work here.
        """
        self.quantized = NF4Weight(self.weight)
        self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def factors(self) -> tuple[Tensor, Tensor]:
        """A [r, in] and B [out, r], or of rank 2 r with the subtracted product."""
        if self.first_A is None or self.first_B is None:
            return _current_value(self, "lora_A"), _current_value(self, "lora_B")
        return torch.cat([self.lora_A, self.first_A]), torch.cat([self.lora_B, -self.first_B], dim=1)

    def effective_weight(self) -> Tensor:
        """The weight of the whole module [out, in], in at least fp32."""
        if self.adapter_values == "none":
            return self.frozen_weight.to(self.lora_A.dtype)
        A, B = self.factors()
        weight = self.frozen_weight.to(A.dtype) + self.scale * (B @ A)
        return weight if self.lora_magnitude is None else weight * self.row_factor()[:, None]

    def row_factor(self) -> Tensor:
        """DoRA: trained norm over the norm of each row of W + s B A, which has no gradient (Liu et al. 2024, 4.3)."""
        A, B = self.factors()
        norm: Tensor = (self.frozen_weight.to(A.dtype) + self.scale * (B @ A)).detach().norm(dim=1)
        return torch.where(norm > 0, _current_value(self, "lora_magnitude") / norm, 1.0)


class TrainedRowsEmbedding(Embedding):
    """An embedding whose rows of some tokens are trained."""

    adapter_values: AdapterValues = "trained"

    def __init__(self, base: Embedding, token_ids: Sequence[int]) -> None:
        with torch.device("meta"):
            super().__init__(base.num_embeddings, base.embedding_dim)
        self.weight = base.weight
        self.trained_token_ids = nn.Buffer(torch.tensor(token_ids, device=base.weight.device), persistent=False)
        self.trained_rows = _copy_rows(base.weight, self.trained_token_ids)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [...] to rows [..., D]."""
        rows = super().forward(tokens)
        if self.adapter_values == "none":
            return rows
        is_trained, index = (tokens[..., None] == self.trained_token_ids).max(dim=-1)
        trained_rows = _current_value(self, "trained_rows")
        return torch.where(is_trained[..., None], trained_rows.to(rows.dtype)[index], rows)

    def effective_weight(self) -> Tensor:
        """All rows [V, D]."""
        return replace_rows(self.weight, self.trained_token_ids, self.trained_rows)


class TrainedRowsLinear(Linear):
    """A head whose rows of some tokens are trained; with a tied embedding they are the embedding's."""

    adapter_values: AdapterValues = "trained"

    def __init__(self, base: Linear, token_ids: Tensor, rows: nn.Parameter | None) -> None:
        with torch.device("meta"):
            super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.trained_token_ids = nn.Buffer(token_ids, persistent=False)
        self.trained_rows = _copy_rows(base.weight, token_ids) if rows is None else rows

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., V]."""
        return F.linear(x, self.effective_weight(), self.bias)

    def effective_weight(self) -> Tensor:
        """All rows [V, D]."""
        rows = self.head_rows()
        return self.weight if rows is None else replace_rows(self.weight, rows.indices_K, rows.rows_KD)

    def head_rows(self) -> HeadRows | None:
        """Rows that replace those of the head, with their token ids. None: the adapter is switched off."""
        if self.adapter_values == "none":
            return None
        return HeadRows(self.trained_token_ids, _current_value(self, "trained_rows"))


def replace_rows(weight: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """A copy of a matrix with other rows at the indices, in its dtype."""
    return weight.index_copy(0, indices, rows.to(weight.dtype))


def _copy_rows(weight: Tensor, indices: Tensor) -> nn.Parameter:
    rows = weight.detach()[indices]
    return nn.Parameter(rows.to(torch.promote_types(rows.dtype, torch.float32)))


def add_adapter(model: Transformer, config: LoraConfig, *, seed: int = 0, names: dict[str, str] | None = None) -> None:
    """Freeze a model but for the parameters that the config trains whole, and put adapters on the projections that it
    names.

    Args:
        model: changed in place; its modules are replaced, its frozen weights are shared.
        config: ranks, targets and initial values.
        seed: of the initial values.
        names: module name of the model -> name that targets and patterns mean; None: the same.

    Raises:
        ValueError: the model has an adapter; the targets match no projection, or a tied head; a rank exceeds the number
            of factors of a projection; a token id is not in the vocabulary, or there is no mask token; rows of a table
            are trained that is trained whole; masked positions alone cannot have the adapter.
    """
    if any(adapter_modules(model)):
        raise ValueError("the model has an adapter already: merge it first, or load the model again")
    targets = list_targets(model, config, names)
    if config.positions == "masks":
        _check_masked_positions(model.config, [name for name, _ in targets])
        model.masked_rows = MaskedRows()
    config.check_token_ids(model.config.vocab_size)
    model.requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(seed)
    dropout = AdapterDropout(config.dropout) if config.dropout else None
    for name, module in targets:
        target = name if names is None else names[name]
        rank = config.rank_of(target)
        if config.init in FACTOR_INITS and rank > min(module.weight.shape):
            raise ValueError(
                f"lora.rank = {rank} exceeds {name}, which is {module.out_features} x {module.in_features}, and "
                f'lora.init = "{config.init}" takes that many of its factors: use a smaller rank, or leave it out with '
                "lora.exclude"
            )
        scale, rows = config.scale_of(target), model.masked_rows
        adapted = LoRALinear(module, rank, scale, config, name=name, dropout=dropout, masked_rows=rows)
        if not adapted.weight.is_meta:
            adapted.initialize(generator)
        model.set_submodule(name, adapted.train(module.training))
    trained = trained_base_parameters(model, config, names)
    if config.trainable_tokens:
        if "model.embed_tokens.weight" in trained:
            raise ValueError("lora.modules_to_save trains all rows of the embedding: remove lora.trainable_tokens")
        token_ids = config.token_ids(model.config.mask_token_id)
        if not token_ids:
            raise ValueError('lora.trainable_tokens = "mask": the model has no mask token: name ids of tokens')
        is_frozen_head = "lm_head.weight" not in trained and not isinstance(model.lm_head, LoRALinear)
        _add_trained_rows(model, token_ids, config.trainable_head_rows and is_frozen_head)
    copies: dict[Tensor, nn.Parameter] = {}
    for name in trained:
        module_name, _, key = name.rpartition(".")
        weight = model.get_parameter(name)
        copies.setdefault(weight, nn.Parameter(weight.detach().clone()))  # one for a tied head and embedding
        setattr(model.get_submodule(module_name), key, copies[weight])


def trained_base_parameters(
    model: Transformer, config: LoraConfig, names: dict[str, str] | None = None
) -> dict[str, str]:
    """The parameters of the base that a config trains whole: name in the model -> name as PEFT writes it.

    A tied table has two names.
    """
    if not config.trains_base:
        return {}
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name.endswith((".weight", ".bias"))
    }
    stored_names: dict[str, str] = {}
    trained: set[nn.Parameter] = set()
    for name, parameter in parameters.items():
        module_name, _, key = name.rpartition(".")
        target = module_name if names is None else names[module_name]
        is_adapted = isinstance(model.get_submodule(module_name), LoRALinear)
        stored_names[name] = f"{target}.base_layer.{key}" if is_adapted else f"{target}.{key}"
        if config.trains(f"{target}.{key}", is_adapted=is_adapted):
            trained.add(parameter)
    return {name: stored for name, stored in stored_names.items() if parameters[name] in trained}


def list_targets(
    model: Transformer, config: LoraConfig, names: dict[str, str] | None = None
) -> list[tuple[str, Linear]]:
    """The projections that a config adapts, with their names in the model.

    Raises:
        ValueError: there are none, or a tied head is one.
    """
    projections = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    target_names = {name: name if names is None else names[name] for name in projections}
    selected = [name for name, target in target_names.items() if config.adapts(name, target)]
    if HEAD in selected and model.config.tie_word_embeddings:
        raise ValueError(
            f"lora.targets selects {HEAD}, whose weight is the embedding's: leave it out with lora.exclude, and train "
            "both with lora.modules_to_save or lora.trainable_tokens, or make the base with diffusion.untie_head = true"
        )
    if not selected:
        known = ", ".join(sorted({target.rpartition(".")[2] for target in target_names.values()}))
        raise ValueError(f"lora.targets = {config.targets!r} selects no projection; the model has {known}")
    return [(name, projections[name]) for name in selected]


def _check_masked_positions(model: ModelConfig, targets: Sequence[str]) -> None:
    """Check that an adapter of these projections can act on masked positions alone.

    Raises:
        ValueError: the model has no token-causal text, which the adapter would leave as it is, or no masks; or a
            projection is the head, whose product is part of the loss, or of a mixture of experts.
    """
    if model.mask_token_id is None or not (model.is_autoregressive or model.clean_alignment == "shifted"):
        raise ValueError(
            'lora.positions = "masks" adapts a drafter, and needs a model with a mask token that predicts next tokens '
            '(clean_alignment = "shifted" in its config.json, or an autoregressive model): set lora.positions = "all"'
        )
    for name in targets:
        if name == HEAD or name.endswith(ROUTER_SUFFIX) or ".experts." in name:
            raise ValueError(
                f'lora.positions = "masks" is not supported for {name}: leave it out with lora.targets or lora.exclude'
            )


def _add_trained_rows(model: Transformer, token_ids: Sequence[int], has_head_rows: bool) -> None:
    embedding = TrainedRowsEmbedding(model.model.embed_tokens, token_ids).train(model.training)
    model.model.embed_tokens = embedding
    tied_rows = embedding.trained_rows if model.config.tie_word_embeddings else None
    if tied_rows is not None or has_head_rows:
        head = TrainedRowsLinear(model.lm_head, embedding.trained_token_ids, tied_rows)
        model.lm_head = head.train(model.training)


def adapter_modules(model: nn.Module) -> Iterator[tuple[str, LoRALinear | TrainedRowsEmbedding | TrainedRowsLinear]]:
    """The adapters of a model, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear | TrainedRowsEmbedding | TrainedRowsLinear):
            yield name, module


def keep_start(model: nn.Module) -> None:
    """Keep the values that a model's trained parameters have now, for `before_training`."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                module.register_buffer(_START + name, parameter.detach().clone(), persistent=False)


def start_values(model: nn.Module) -> dict[str, Tensor]:
    """The values of `keep_start`, by name; none if it was not called."""
    return {name: value for name, value in model.named_buffers() if name.rpartition(".")[2].startswith(_START)}


def _current_value(module: nn.Module, name: str) -> Tensor:
    """A trained parameter of an adapter, or in `before_training` its first value."""
    value: Tensor = getattr(module, name if module.adapter_values == "trained" else _START + name)
    return value


@contextmanager
def before_training(model: nn.Module) -> Iterator[None]:
    """Context in which a model computes what it did at `keep_start`, or if that was not called, what its base does.

    Parameters of the base that are trained whole keep their values (`LoraConfig.trains_base`).
    """
    modules = [module for _, module in adapter_modules(model)]
    has_start = bool(start_values(model))
    for module in modules:
        module.adapter_values = "start" if has_start else "none"
    try:
        yield
    finally:
        for module in modules:
            module.adapter_values = "trained"


def find_dropout(model: nn.Module) -> AdapterDropout | None:
    """The dropout of a model's adapters. None: there is none."""
    modules = (module for _, module in adapter_modules(model) if isinstance(module, LoRALinear))
    return next((module.dropout for module in modules), None)


@torch.no_grad()
def merge_adapter(model: Transformer) -> None:
    """Replace the adapters by their whole weights: computed in at least fp32, rounded once to the dtype of the base.

    The weights of the base are not changed, because others may share them.

    Raises:
        ValueError: the adapter acts on masked positions alone.
    """
    if model.masked_rows is not None:
        raise ValueError(
            'an adapter with positions = "masks" has no merged weights, because other positions have those of the '
            "base: use it beside its base, such as with --adapter"
        )
    merged: dict[Tensor, nn.Parameter] = {}
    for name, module in list(adapter_modules(model)):
        with torch.device("meta"):
            plain: Linear | Embedding = (
                Embedding(module.num_embeddings, module.embedding_dim)
                if isinstance(module, TrainedRowsEmbedding)
                else Linear(module.in_features, module.out_features, bias=module.bias is not None)
            )
        weight = merged.get(module.weight)
        if weight is None:
            weight = merged[module.weight] = nn.Parameter(module.effective_weight().to(module.weight.dtype))
        plain.weight = weight
        if isinstance(plain, Linear) and isinstance(module, Linear):
            plain.bias = module.bias
        model.set_submodule(name, plain)


def _principal_factors(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """B [out, r] and A [r, in] with ``s B A`` the part of the r largest singular values (Meng et al. 2024, eq. 2-3)."""
    U, S, Vh = torch.linalg.svd(weight, full_matrices=False)
    root = (S[:rank] / scale).sqrt()
    return U[:, :rank] * root, root[:, None] * Vh[:rank]


def _orthogonal_factors(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """B [out, r] and A [r, in] of the QR decomposition of the weight, over s (Büyükakyüz 2024, algorithm 1)."""
    Q, R = torch.linalg.qr(weight)
    root = math.sqrt(scale)
    return Q[:, :rank] / root, R[:rank] / root
