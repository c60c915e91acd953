"""Every family's tiny random checkpoint, of transformers or a plain reference, and its comparison with ours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffusionlm.models.cache import PagedCache
from diffusionlm.models.moe import Routing
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockCausal, Causal
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import SequenceSlice, VarlenBatch
from tests.reference.plain_models import (
    EXPERTS_JSON,
    LLADA_JSON,
    QWEN_JSON,
    Weights,
    llada_logits,
    llada_weights,
    qwen_logits,
    qwen_weights,
)

Values = dict[str, Any]
LENGTH, BLOCK, PADDING = 13, 4, 7
TOKENS = torch.randint(0, 40, (2, LENGTH), generator=torch.Generator().manual_seed(5))
BOUNDS = {"float32": 1e-5, "bfloat16": 1e-1}
"""Of the largest difference between logits, relative to the largest logit."""
OTHER_EXPERTS = {"float32": 0.0, "bfloat16": 0.1}
"""Bounds of the share of choices that are not theirs: rounding decides between experts that are nearly level."""
ATTENTIONS = ("causal", "bidirectional", "block-causal")
SIDES = ("left", "right")

SHAPE: Values = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "vocab_size": 40,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": [2, 4],
}
WIDE: Values = {"head_dim": 12}
ROPE: Values = {"rope_theta": 500.0, "rope_type": "default"}
LINEAR: Values = {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0}
LLAMA3: Values = {
    "rope_theta": 500.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""Of the six frequencies of a head one stays, one is in between and four are divided."""
EXPERTS: Values = {**WIDE, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
GEMMA: Values = {**WIDE, "query_pre_attn_scalar": 20, "sliding_window": 4, "final_logit_softcapping": 3.0}
SLIDING: Values = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@dataclass(frozen=True)
class Case:
    """A checkpoint of transformers: its class, its config beside `SHAPE`, and its rotations."""

    name: str
    """Of the classes, without Config and ForCausalLM."""
    changes: Values
    rope: Values

    def config(self) -> Any:
        """Theirs."""
        import transformers

        return getattr(transformers, f"{self.name}Config")(**{**SHAPE, **self.changes}, rope_parameters=self.rope)

    def peer(self) -> Foreign:
        """A random model of transformers with no parameter at its default."""
        import transformers

        model = getattr(transformers, f"{self.name}ForCausalLM")._from_config(self.config(), **_options(self.name))
        generator = torch.Generator().manual_seed(11)
        for tensor in model.parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.data += 0.2 * noise + (0.1 * noise.sign() if tensor.ndim == 1 else 0.0)
        return Foreign(model.eval(), self.name)


@dataclass(frozen=True)
class PlainCase:
    """A checkpoint of a family that transformers lacks."""

    attention: str
    """Of the family."""
    values: Values
    """Its config.json."""
    weights: Values
    """Arguments of `qwen_weights`; LLaDA has none."""

    def peer(self) -> Plain:
        """Random weights with no gain and no bias at its default."""
        is_llada = self.values["model_type"] == "llada"
        return Plain(self.values, llada_weights() if is_llada else qwen_weights(**self.weights), self.attention)


CASES: dict[str, Case | PlainCase] = {
    "qwen3-tied": Case("Qwen3", {**WIDE, "tie_word_embeddings": True}, ROPE),
    "qwen3-one-key": Case("Qwen3", {**WIDE, "num_key_value_heads": 1}, ROPE),
    "qwen3-biases": Case("Qwen3", {**WIDE, "attention_bias": True}, LINEAR),
    "qwen3-moe": Case("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}, ROPE),
    "qwen3-moe-every-second": Case("Qwen3Moe", {**EXPERTS, "decoder_sparse_step": 2}, ROPE),  # not normed
    "qwen3-moe-mlp-only": Case("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [0]}, ROPE),
    "sdar": PlainCase("block-causal", {**QWEN_JSON, "model_type": "sdar", "block_size": BLOCK}, {"norms": True}),
    "sdar-moe": PlainCase(
        "block-causal",
        {**QWEN_JSON, **EXPERTS_JSON, "model_type": "sdar_moe", "block_size": BLOCK},
        {"norms": True, "experts": 5},
    ),
    "llada": PlainCase("bidirectional", LLADA_JSON, {}),
    "dream": PlainCase("bidirectional", {**QWEN_JSON, "model_type": "Dream"}, {"biases": True}),
    "qwen2": Case("Qwen2", {}, ROPE),
    "qwen2-tied": Case("Qwen2", {"tie_word_embeddings": True}, ROPE),
    "qwen2-sliding": Case("Qwen2", SLIDING, ROPE),
    "llama3": Case("Llama", WIDE, LLAMA3),
    "llama-biases": Case("Llama", {"attention_bias": True, "tie_word_embeddings": True}, LINEAR),
    "llama-all-keys": Case("Llama", {"num_key_value_heads": 4}, ROPE),
    "gemma2": Case("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0}, ROPE),
    "gemma2-biases": Case("Gemma2", {**GEMMA, "attention_bias": True}, ROPE),
    "gemma2-no-attention-cap": Case("Gemma2", {**GEMMA, "attn_logit_softcapping": None}, ROPE),
}


def _options(name: str) -> Values:
    experts = {"experts_implementation": "eager"} if name == "Qwen3Moe" else {}
    return {"attn_implementation": "eager", "dtype": torch.float32, **experts}


def sees(attention: str, length: int) -> Tensor:
    """[L, L]: whether the query of a row sees the key of a column."""
    at = torch.arange(length)
    if attention == "bidirectional":
        return torch.ones(length, length, dtype=torch.bool)
    block = BLOCK if attention == "block-causal" else 1
    return at[None, :] // block <= at[:, None] // block


def pattern_of(attention: str, documents_BL: Tensor | None = None) -> AttentionPattern:
    """The same as our models are told it."""
    if attention == "block-causal":
        return BlockCausal(BLOCK, documents_BL)
    return Causal(documents_BL) if attention == "causal" else Bidirectional(documents_BL)


@dataclass(frozen=True)
class Foreign:
    """A model of transformers."""

    model: Any
    name: str
    attention: str = "causal"

    def _mask(self, attention: str) -> Any:
        """A dense one, by kind of layer where there are several; none for causal, which is theirs to make."""
        if attention == "causal":
            return None
        is_visible, config = sees(attention, LENGTH), self.model.config
        at = torch.arange(LENGTH)
        window = getattr(config, "sliding_window", None) or LENGTH
        kinds = {"full_attention": is_visible, "sliding_attention": is_visible & ((at[:, None] - at).abs() < window)}
        lowest = torch.finfo(self.model.dtype).min
        biases = {
            kind: torch.zeros(1, 1, LENGTH, LENGTH, dtype=self.model.dtype).masked_fill(~is_visible, lowest)
            for kind, is_visible in kinds.items()
        }
        has_kinds = "sliding_attention" in (getattr(config, "layer_types", None) or ())
        return biases if has_kinds else biases["full_attention"]

    def logits(self, attention: str) -> Tensor:
        """Of `TOKENS`."""
        return self.model(TOKENS, attention_mask=self._mask(attention)).logits

    def padded(self, tokens: Tensor, is_real: Tensor) -> Tensor:
        """Causal logits of the real tokens, with their mask of padding."""
        out = self.model(tokens, attention_mask=is_real.long()).logits
        return out[is_real].unflatten(0, (2, LENGTH))

    def experts(self, attention: str) -> list[Tensor]:
        """What each token chose in each layer that has experts."""
        if not hasattr(self.model.config, "num_experts"):
            return []
        out = self.model.model(TOKENS, attention_mask=self._mask(attention), output_router_logits=True)
        return [layer.topk(self.model.config.num_experts_per_tok).indices for layer in out.router_logits]

    def values(self) -> Weights:
        """By their name, copied."""
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def save(self, folder: Path) -> None:
        """In shards."""
        self.model.save_pretrained(folder, max_shard_size="20KB")
        assert (folder / "model.safetensors.index.json").is_file()

    def reload(self, folder: Path) -> Foreign:
        """What they make of a directory; nothing of it is left over, and nothing made up."""
        import transformers

        auto_model: Any = transformers.AutoModelForCausalLM  # Its stub omits the loading report.
        model, report = auto_model.from_pretrained(folder, output_loading_info=True, **_options(self.name))
        assert not [value for value in report.values() if value]
        assert type(model) is type(self.model)
        return Foreign(model.eval(), self.name)

    def rounded(self) -> Foreign:
        """In bf16; this one changes."""
        return Foreign(self.model.to(torch.bfloat16), self.name)


@dataclass(frozen=True)
class Plain:
    """A plain reference, which computes in fp32."""

    json: Values
    weights: Weights
    attention: str

    def _call(self, attention: str) -> tuple[Tensor, list[Tensor]]:
        call = llada_logits if self.json["model_type"] == "llada" else qwen_logits
        return call({name: tensor.float() for name, tensor in self.weights.items()}, TOKENS, sees(attention, LENGTH))

    def logits(self, attention: str) -> Tensor:
        """Of `TOKENS`."""
        return self._call(attention)[0]

    def padded(self, tokens: Tensor, is_real: Tensor) -> Tensor:
        """It knows no padding: the logits of the real tokens alone."""
        assert torch.equal(tokens[is_real], TOKENS.flatten())
        return self.logits(self.attention)

    def experts(self, attention: str) -> list[Tensor]:
        """What each token chose in each layer that has experts."""
        return self._call(attention)[1]

    def values(self) -> Weights:
        """By their name."""
        return self.weights

    def save(self, folder: Path) -> None:
        """As the family's own code would."""
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.json))
        save_file(self.weights, folder / "model.safetensors")

    def reload(self, folder: Path) -> Plain:
        """The weights of a directory; its config.json must say what this one's does, as far as that says anything."""
        written_config = json.loads((folder / "config.json").read_text())
        # The first end of text is kept, and LLaDA's vocabulary is that of its tables.
        ends = self.json["eos_token_id"]
        expected_config = {**self.json, "eos_token_id": ends[0] if isinstance(ends, list) else ends, "vocab_size": 40}
        expected_config.pop("bos_token_id", None)
        assert {key: written_config.get(key) for key, value in expected_config.items() if value} == {
            k: v for k, v in expected_config.items() if v
        }
        return Plain(self.json, load_weights(folder), self.attention)

    def rounded(self) -> Plain:
        """Weights in bf16, computed with in fp32."""
        return Plain(self.json, {name: w.to(torch.bfloat16) for name, w in self.weights.items()}, self.attention)


def load_weights(folder: Path) -> Weights:
    """All tensors of a directory, as the files have them."""
    weights: Weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    return weights


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest one, relative to the largest logit of theirs."""
    assert theirs.std() > 0.1
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())


def our_routings(model: Transformer, tokens: Tensor, pattern: AttentionPattern) -> list[Routing]:
    """What the routers of our model decide."""
    collected: list[Routing] = []
    hooks = [
        block.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "routings": collected}), with_kwargs=True
        )
        for block in model.model.layers
    ]
    with torch.no_grad():
        model(tokens, pattern=pattern)
    for hook in hooks:
        hook.remove()
    return collected


def same_experts(ours: Transformer, theirs: Foreign | Plain, attention: str) -> Tensor:
    """[layers with experts, B, L]: whether a token goes to the same ones."""
    pairs = zip(our_routings(ours, TOKENS, pattern_of(attention)), theirs.experts(attention), strict=True)
    same = [(a.experts_TK.sort().values == b.sort().values).all(-1).view(TOKENS.shape) for a, b in pairs]
    return torch.stack(same) if same else torch.ones(0, *TOKENS.shape, dtype=torch.bool)


def padded_difference(ours: Transformer, theirs: Foreign | Plain, side: str) -> float:
    """Of the real tokens; whatever the padding is, which is a document of its own in our model."""
    differences = []
    for filling in (0, 3):
        padding, nothing = torch.full((2, PADDING), filling), torch.zeros(2, PADDING, dtype=torch.bool)
        there = torch.ones_like(TOKENS, dtype=torch.bool)
        tokens = torch.cat([padding, TOKENS] if side == "left" else [TOKENS, padding], dim=1)
        is_real = torch.cat([nothing, there] if side == "left" else [there, nothing], dim=1)
        documents = is_real.long() - 1
        logits = ours(tokens, pattern=pattern_of(theirs.attention, documents))
        differences.append(difference(logits[is_real].unflatten(0, (2, LENGTH)), theirs.padded(tokens, is_real)))
    return max(differences)


def cached_difference(ours: Transformer, theirs: Foreign | Plain) -> float:
    """Block-causal, as decoding reads it: each forward has a block and, once more, the one before it."""
    num_pages = -(-LENGTH // BLOCK)
    cache = PagedCache(ours.config, len(TOKENS) * num_pages, BLOCK, "cpu", torch.float32)
    parts = []
    for start in range(0, LENGTH, BLOCK):
        first, end = max(0, start - BLOCK), min(start + BLOCK, LENGTH)
        sequences = [
            SequenceSlice(first, end, end, BlockCausal(BLOCK), pages=range(row * num_pages, (row + 1) * num_pages))
            for row in range(len(TOKENS))
        ]
        logits = ours(TOKENS[:, first:end].reshape(1, -1), pattern=VarlenBatch(sequences, cache))
        parts.append(logits.view(len(TOKENS), end - first, -1)[:, start - first :])
    return difference(torch.cat(parts, dim=1), theirs.logits("block-causal"))


def assert_same_logits(ours: Transformer, theirs: Foreign | Plain) -> None:
    """Logits of all attentions, and the choices of routers: few tokens may go to other experts in bfloat16, and are not
    compared. In float32 also those with padding and with a cache."""
    dtype = str(next(ours.parameters()).dtype).removeprefix("torch.")
    others, choices = 0, 0
    for attention in ATTENTIONS:
        same = same_experts(ours, theirs, attention)
        others, choices = others + int((~same).sum()), choices + same.numel()
        same_routing = same.all(0)
        mine, their = ours(TOKENS, pattern=pattern_of(attention)), theirs.logits(attention)
        assert difference(mine[same_routing], their[same_routing]) <= BOUNDS[dtype], attention
    assert others <= OTHER_EXPERTS[dtype] * choices and (choices > 0) == (ours.config.num_experts > 0)
    if dtype == "float32":
        assert all(padded_difference(ours, theirs, side) <= BOUNDS[dtype] for side in SIDES)
        assert cached_difference(ours, theirs) <= BOUNDS[dtype]
