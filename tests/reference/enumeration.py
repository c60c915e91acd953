"""What the truth tests share: a second implementation of the model, exact values by enumeration, stand-ins for a model.

Only `score_batch` and what uses it calls the code under test. The mask token is the last one everywhere.

Shapes: B rows, L tokens, Q queries and S keys of them, N query heads, K key-value heads, H width of a head, V tokens
without the mask token, M masks, R scored outputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from config.model import ModelConfig
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.kernels.cross_entropy import LossInputs, LossOutput
from diffusionlm.models.patterns import AttentionPattern, Bidirectional
from diffusionlm.models.transformer import Transformer

Places = tuple[int, ...]
Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [B, K, S, H]."""


def subsets(places: Sequence[int]) -> list[Places]:
    """All but the empty one."""
    return [M for size in range(1, len(places) + 1) for M in itertools.combinations(places, size)]


def as_masks(sets: Sequence[Places], length: int) -> Tensor:
    """Boolean [M, L]."""
    return torch.tensor([[place in M for place in range(length)] for M in sets])


# ----------------------------------------------------------------------------------------------------------------------
# The model, written again


class PlainModel:
    """The same parameters, read by name, in a forward of a few lines with a cache of its own."""

    def __init__(self, model: Transformer) -> None:
        self.config, self.parameters = model.config, dict(model.named_parameters())

    def __call__(
        self, tokens_BQ: Tensor, positions_Q: Tensor, may_see_QS: Tensor | None = None, past: Cache | None = None
    ) -> tuple[Tensor, Cache]:
        """Logits [B, Q, V + 1], and the cache with these tokens behind the past ones, for which there must be as many
        rows or one. Without a mask all queries see all keys."""
        c, keys_values = self.config, []
        x = self.parameters["model.embed_tokens.weight"][tokens_BQ]
        for layer in range(c.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            normed = self._norm(x, prefix + "input_layernorm")
            q = self._heads(normed, prefix + "self_attn.q", positions_Q)
            k = self._heads(normed, prefix + "self_attn.k", positions_Q)
            v = self._linear(normed, prefix + "self_attn.v_proj").unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
            if past is not None:
                k = torch.cat([past[layer][0].expand(len(k), -1, -1, -1), k], dim=2)
                v = torch.cat([past[layer][1].expand(len(v), -1, -1, -1), v], dim=2)
            keys_values.append((k, v))
            repeats = c.num_attention_heads // c.num_key_value_heads
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
            scores_BNQS = torch.einsum("bnqh,bnsh->bnqs", q, k) / math.sqrt(c.head_dim)
            if may_see_QS is not None:
                hidden = ~(may_see_QS[:, None] if may_see_QS.dim() == 3 else may_see_QS)
                scores_BNQS = scores_BNQS.masked_fill(hidden, -torch.inf)
            attended = torch.einsum("bnqs,bnsh->bqnh", scores_BNQS.softmax(-1), v).flatten(2)
            x = x + self._linear(attended, prefix + "self_attn.o_proj")
            normed = self._norm(x, prefix + "post_attention_layernorm")
            gate, up = self._linear(normed, prefix + "mlp.gate_proj"), self._linear(normed, prefix + "mlp.up_proj")
            x = x + self._linear(gate * gate.sigmoid() * up, prefix + "mlp.down_proj")
        head = self.parameters.get("lm_head.weight", self.parameters["model.embed_tokens.weight"])
        return self._norm(x, "model.norm") @ head.T, keys_values

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.parameters[name + ".weight"], self.parameters.get(name + ".bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return x * scale * self.parameters[name + ".weight"]

    def _heads(self, normed: Tensor, name: str, positions_Q: Tensor) -> Tensor:
        """Queries or keys, normed and turned, [B, N or K, Q, H]."""
        H = self.config.head_dim
        x = self._norm(self._linear(normed, name + "_proj").unflatten(-1, (-1, H)), name + "_norm").transpose(1, 2)
        # Angles are fp32, as in Hugging Face's models, whatever the weights are.
        frequencies = self.config.rope_theta ** -(torch.arange(0, H, 2, dtype=torch.float32) / H)
        angles = positions_Q[:, None].float() * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x[..., : H // 2], x[..., H // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def log_probabilities(logits: Tensor) -> Tensor:
    """Of the tokens other than the mask token, which gets none."""
    return logits[..., :-1].log_softmax(-1)


# ----------------------------------------------------------------------------------------------------------------------
# Exact values


@dataclass(frozen=True)
class Unit:
    """A block with all its masks."""

    sets: list[Places]
    """Non-empty sets of its target places."""
    ce_M: Tensor
    """Cross-entropy of the masked tokens given the rest of the block and what is before it, for each."""

    def bound(self, epsilon: float = 0.0) -> Tensor:
        """Integral of f(p) / p over p from epsilon to 1; from 0 it is the NELBO."""
        size = max(len(M) for M in self.sets)
        weight = {m: mask_weight(m, size, epsilon) for m in range(1, size + 1)}
        return self.ce_M @ torch.tensor([weight[len(M)] for M in self.sets], dtype=self.ce_M.dtype)


def mask_weight(masked: int, size: int, epsilon: float = 0.0) -> float:
    """Integral of p^(m - 1) (1 - p)^(n - m) over p from epsilon to 1; from 0 it is 1 / (m C(n, m))."""
    nodes, weights = np.polynomial.legendre.leggauss(16)
    p = (nodes * (1 - epsilon) + 1 + epsilon) / 2
    return float(np.sum(weights * (1 - epsilon) / 2 * p ** (masked - 1) * (1 - p) ** (size - masked)))


def spans(document_ids_L: Tensor | None, length: int) -> list[tuple[int, int]]:
    """Start and end of each document."""
    numbers = [0] * length if document_ids_L is None else document_ids_L.tolist()
    starts = [i for i in range(length) if i == 0 or numbers[i] != numbers[i - 1]]
    return list(zip(starts, [*starts[1:], length], strict=True))


def exact_units(
    model: Transformer,
    tokens_L: Tensor,
    block_length: int | None = None,
    *,
    document_ids_L: Tensor | None = None,
    loss_mask_L: Tensor | None = None,
) -> list[Unit]:
    """Every block of a row under every mask: one stream, each time only up to the block's end, and no earlier noise."""
    plain, units, mask_token = PlainModel(model), [], model.config.required_mask_token_id
    shifted = int(model.config.logit_alignment == "shifted")
    for start, end in spans(document_ids_L, len(tokens_L)):
        length = block_length or end - start
        for first in range(start, end, length):
            last = min(first + length, end)
            targets = [
                i
                for i in range(max(first, start + shifted), last)
                if (loss_mask_L is None or loss_mask_L[i]) and tokens_L[i] != mask_token
            ]
            if not targets:
                continue
            sets = subsets(targets)
            masked = as_masks(sets, last)[:, start:]
            block = torch.arange(last - start) // length
            logits, _ = plain(
                torch.where(masked, mask_token, tokens_L[start:last]),
                torch.arange(start, last),
                block[:, None] >= block,
            )
            log_p = log_probabilities(logits)
            ce: list[Any] = [-sum(log_p[m, i - start - shifted, tokens_L[i]] for i in M) for m, M in enumerate(sets)]
            units.append(Unit(sets, torch.stack(ce)))
    return units


def exact_nelbo(
    model: Transformer, tokens_BL: Tensor, block_length: int | None = None, *, epsilon: float = 0.0
) -> Tensor:
    """In nats, [B]; see `exact_units` and `Unit.bound`."""
    rows = [exact_units(model, tokens_L, block_length) for tokens_L in tokens_BL]
    return torch.stack([torch.stack([unit.bound(epsilon) for unit in units]).sum() for units in rows])


# ----------------------------------------------------------------------------------------------------------------------
# Denoisers that are functions


class StandIn:
    """What likelihoods and objectives ask of a model with bidirectional attention, answered by a function."""

    def __init__(self, nats: Callable[[Tensor, Tensor], Tensor], config: ModelConfig) -> None:
        """``nats`` of each scored token, [R], from the inputs of its row, [R, L], and the token, [R]."""
        self.nats, self.config = nats, config
        self.lm_head = SimpleNamespace(weight=torch.zeros(1))

    def __call__(
        self,
        inputs_BL: Tensor,
        *,
        pattern: AttentionPattern,
        images: None = None,
        masked_BL: Tensor | None = None,
        output_positions: Tensor,
        loss_inputs: LossInputs,
    ) -> LossOutput:
        assert images is None and pattern == Bidirectional() and loss_inputs.excluded_token == self.config.mask_token_id
        nll_N = self.nats(inputs_BL[output_positions // inputs_BL.shape[1]], loss_inputs.targets_N).double()
        return LossOutput((nll_N * loss_inputs.weights_N).sum(), nll_N)


def table_config(num_tokens: int, length: int, **overrides: Any) -> ModelConfig:
    """The config of a stand-in; of the sizes, only those of vocabulary and context mean anything."""
    sizes = dict.fromkeys(("hidden_size", "head_dim", "intermediate_size"), 2)
    layers = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    values: dict[str, Any] = {
        "vocab_size": num_tokens + 1,
        "mask_token_id": num_tokens,
        "max_position_embeddings": length,
    }
    return ModelConfig(**{**sizes, **layers, **values, **overrides})


# ----------------------------------------------------------------------------------------------------------------------
# Steps of training


def score_batch(model: Any, objective: Any, draw: NoisedBatch, denominator: float) -> LossOutput:
    """The forward of a noised batch in a step with this denominator."""
    loss_inputs = objective.build_loss_inputs(draw, denominator)
    output: LossOutput = model(
        draw.inputs_BS, pattern=draw.pattern, output_positions=draw.positions_N, loss_inputs=loss_inputs
    )
    return output


def loss_and_gradient(model: Transformer, objective: Any, draws: Sequence[NoisedBatch]) -> tuple[Tensor, list[Tensor]]:
    """Of a step of several batches, over the denominators of all."""
    denominator = sum(draw.denominator for draw in draws)
    total = torch.stack([score_batch(model, objective, draw, denominator).loss_sum for draw in draws]).sum()
    return total.detach(), list(torch.autograd.grad(total, list(model.parameters())))


# ----------------------------------------------------------------------------------------------------------------------
# Statistics


def assert_mean(values: np.ndarray, expected: float | np.ndarray, relative_error: float, sigmas: float = 4.0) -> None:
    """The mean of independent values is what was expected, and its error is small enough to tell."""
    error = values.std(axis=0, ddof=1) / math.sqrt(len(values))
    off = np.abs(values.mean(axis=0) - expected)
    assert (off <= sigmas * error + 1e-12).all(), (values.mean(axis=0), expected, error)
    assert (error <= relative_error * np.abs(expected)).all(), f"too weak a test: {error} of {expected}"
