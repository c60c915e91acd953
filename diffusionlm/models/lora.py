"""Low-rank adapters on the projections of a frozen model, and trained rows of its vocabulary.

The modules replace the model's own and share their weights, so that several adapters stand on one base, and the
parameters of the base keep their names.

Shapes: r rank, K trained rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.lora import ALL_LINEAR, LoraConfig
from diffusionlm.models.layers import Embedding, Linear
from diffusionlm.models.transformer import Transformer

FACTOR_INITS = ("pissa", "olora")
"""Initial values that are a part of the weight."""
HEAD = "lm_head"
ROUTER_SUFFIX = ".mlp.gate"
"""End of a router's name, which "all-linear" leaves out."""


class LoRALinear(Linear):
    """``W x + s B A dropout(x)`` (Hu et al. 2021, eq. 3); with DoRA the rows of ``W + s B A`` have trained norms.

    PiSSA and OLoRA begin with a product B0 A0 that is part of W: it is subtracted here, ``s (B A - B0 A0)``, so that
    the weight never changes.
    """

    def __init__(self, base: Linear, rank: int, scale: float, config: LoraConfig) -> None:
        with torch.device("meta"):
            super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.dropout, self.init = scale, config.dropout, config.init
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
        A, B = self.factors()
        low = F.linear(F.linear(F.dropout(x, self.dropout, self.training).to(self._input_dtype(x)), A), B) * self.scale
        if self.lora_magnitude is None:
            base = super().forward(x)
            return (base + low).to(base.dtype)
        base = F.linear(x, self.weight)
        out = ((base + low) * self._row_factor()).to(base.dtype)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def factors(self) -> tuple[Tensor, Tensor]:
        """A [r, in] and B [out, r], or of rank 2 r with the subtracted product."""
        if self.first_A is None or self.first_B is None:
            return self.lora_A, self.lora_B
        return torch.cat([self.lora_A, self.first_A]), torch.cat([self.lora_B, -self.first_B], dim=1)

    def effective_weight(self) -> Tensor:
        """The weight of the whole module [out, in], in at least fp32."""
        A, B = self.factors()
        weight = self.weight.to(A.dtype) + self.scale * (B @ A)
        return weight if self.lora_magnitude is None else weight * self._row_factor()[:, None]

    def _row_factor(self) -> Tensor:
        """DoRA: trained norm over the norm of each row of W + s B A, which has no gradient (Liu et al. 2024, 4.3)."""
        assert self.lora_magnitude is not None
        A, B = self.factors()
        norm: Tensor = (self.weight.to(A.dtype) + self.scale * (B @ A)).detach().norm(dim=1)
        return torch.where(norm > 0, self.lora_magnitude / norm, 1.0)

    def _input_dtype(self, x: Tensor) -> torch.dtype:
        return x.dtype if torch.is_autocast_enabled(x.device.type) else self.lora_A.dtype


class TrainedRowsEmbedding(Embedding):
    """An embedding whose rows of some tokens are trained."""

    def __init__(self, base: Embedding, token_ids: Sequence[int]) -> None:
        with torch.device("meta"):
            super().__init__(base.num_embeddings, base.embedding_dim)
        self.weight = base.weight
        self.trained_token_ids = nn.Buffer(torch.tensor(token_ids, device=base.weight.device), persistent=False)
        self.trained_rows = _copy_rows(base.weight, self.trained_token_ids)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [...] to rows [..., D]."""
        rows = super().forward(tokens)
        is_trained, index = (tokens[..., None] == self.trained_token_ids).max(dim=-1)
        return torch.where(is_trained[..., None], self.trained_rows.to(rows.dtype)[index], rows)

    def effective_weight(self) -> Tensor:
        """All rows [V, D]."""
        return replace_rows(self.weight, self.trained_token_ids, self.trained_rows)


class TrainedRowsLinear(Linear):
    """A head whose rows of some tokens are trained; with a tied embedding they are the embedding's."""

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
        return replace_rows(self.weight, self.trained_token_ids, self.trained_rows)


def replace_rows(weight: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """A copy of a matrix with other rows at the indices, in its dtype."""
    return weight.index_copy(0, indices, rows.to(weight.dtype))


def _copy_rows(weight: Tensor, indices: Tensor) -> nn.Parameter:
    rows = weight.detach()[indices]
    return nn.Parameter(rows.to(torch.promote_types(rows.dtype, torch.float32)))


def add_adapter(model: Transformer, config: LoraConfig, *, seed: int = 0, names: dict[str, str] | None = None) -> None:
    """Freeze a model and put adapters on the projections that the config names.

    Args:
        model: changed in place; its modules are replaced, its weights are shared.
        config: ranks, targets and initial values.
        seed: of the initial values.
        names: module name of the model -> name that targets and patterns mean; None: the same.

    Raises:
        ValueError: the model has an adapter; the targets match no projection, or the head; a rank exceeds the number of
            factors of a projection; a token id is not in the vocabulary.
    """
    if any(adapter_modules(model)):
        raise ValueError("the model has an adapter already: merge it first, or load the model again")
    targets = list_targets(model, config, names)
    _check_token_ids(model, config.trainable_tokens)
    model.requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(seed)
    for name, module in targets:
        target = name if names is None else names[name]
        rank = config.rank_of(target)
        if config.init in FACTOR_INITS and rank > min(module.weight.shape):
            raise ValueError(
                f"lora.rank = {rank} exceeds {name}, which is {module.out_features} x {module.in_features}, and "
                f'lora.init = "{config.init}" takes that many of its factors: use a smaller rank, or leave it out with '
                "lora.exclude"
            )
        adapted = LoRALinear(module, rank, config.scale_of(target), config)
        if not adapted.weight.is_meta:
            adapted.initialize(generator)
        model.set_submodule(name, adapted.train(module.training))
    if config.trainable_tokens:
        _add_trained_rows(model, config.trainable_tokens, config.trainable_head_rows)


def list_targets(
    model: Transformer, config: LoraConfig, names: dict[str, str] | None = None
) -> list[tuple[str, Linear]]:
    """The projections that a config adapts, with their names in the model.

    Raises:
        ValueError: there are none, or the head is one.
    """
    projections = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    target_names = {name: name if names is None else names[name] for name in projections}
    selected = [name for name, target in target_names.items() if config.selects(target) and not config.excludes(target)]
    if config.targets == ALL_LINEAR:
        selected = [name for name in selected if name != HEAD and not name.endswith(ROUTER_SUFFIX)]
    if HEAD in selected:
        raise ValueError(
            f"lora.targets selects {HEAD}, which has no low-rank adapter: leave it out with lora.exclude, and train "
            "rows of it with lora.trainable_tokens"
        )
    if not selected:
        known = ", ".join(sorted({target.rpartition(".")[2] for target in target_names.values()}))
        raise ValueError(f"lora.targets = {config.targets!r} selects no projection; the model has {known}")
    return [(name, projections[name]) for name in selected]


def _check_token_ids(model: Transformer, token_ids: Sequence[int]) -> None:
    outside = [id_ for id_ in token_ids if id_ >= model.config.vocab_size]
    if outside:
        raise ValueError(
            f"lora.trainable_tokens: {outside[0]} is not in the vocabulary of {model.config.vocab_size} tokens"
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


@torch.no_grad()
def merge_adapter(model: Transformer) -> None:
    """Replace the adapters by their whole weights: computed in at least fp32, rounded once to the dtype of the base.

    The weights of the base are not changed, because others may share them.
    """
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
