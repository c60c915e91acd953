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

Values = dict[str, Any]
Weights = dict[str, Tensor]
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
MINISTRAL: Values = {
    "rope_theta": 500.0,
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 5,
    "beta_fast": 0.4,
    "beta_slow": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
"""Queries have three scales; of the frequencies some stay, some are in between and some are divided."""
EXPERTS: Values = {**WIDE, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
GEMMA: Values = {**WIDE, "query_pre_attn_scalar": 20, "sliding_window": 4, "final_logit_softcapping": 3.0}
SLIDING: Values = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


PUBLISHED: Values = {
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
    "mask_token_id": 39,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
    "vocab_size": 40,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": [2, 4],
    "hidden_act": "silu",
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": None,
}
"""config.json of SDAR and Dream, whose published code is that of Qwen with other masks."""
NEMOTRON: Values = {
    **{key: value for key, value in PUBLISHED.items() if not key.startswith("rope")},
    "model_type": "nemotron_labs_diffusion",
    "block_size": BLOCK,
    "rope_parameters": MINISTRAL,
    "mlp_bias": False,
    "attention_bias": False,
    "dlm_paradigm": "bidirectional",
    "ar_loss_weight": 1.0,
}
SDAR_EXPERTS: Values = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
LLADA: Values = {
    "model_type": "llada",
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
    "mask_token_id": 39,
    "d_model": 32,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "mlp_hidden_size": 56,
    "max_sequence_length": 64,
    "vocab_size": 38,
    "embedding_size": 40,
    "weight_tying": False,
    "block_type": "llama",
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "rope": True,
    "eos_token_id": 37,
    "pad_token_id": 37,
}
"""config.json of LLaDA-8B: Llama in OLMo's names."""
LLADA_NAMES = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "model.layers": "model.transformer.blocks",
    "input_layernorm": "attn_norm",
    "self_attn.o_proj": "attn_out",
    "self_attn.": "",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.down_proj": "ff_out",
    "mlp.": "",
}
NAMES = {"llada": LLADA_NAMES, "nemotron_labs_diffusion": {"model.": "encoder.", "lm_head.": "diffusion_head."}}
"""Parts of the names of tensors in transformers -> the family's, in the order in which they are replaced."""


@dataclass(frozen=True)
class Case:
    """A checkpoint of transformers: its class, its config beside `SHAPE`, and its rotations."""

    name: str
    """Of the classes, without Config and ForCausalLM."""
    changes: Values
    rope: Values
    published: Values | None = None
    """config.json of a family that transformers lacks, whose layers are those of the class."""
    attention: str = "causal"
    """Of the family."""

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
        return Foreign(model.eval(), self)


CASES: dict[str, Case] = {
    "qwen3-tied": Case("Qwen3", {**WIDE, "tie_word_embeddings": True}, ROPE),
    "qwen3-one-key": Case("Qwen3", {**WIDE, "num_key_value_heads": 1}, ROPE),
    "qwen3-biases": Case("Qwen3", {**WIDE, "attention_bias": True}, LINEAR),
    "qwen3-moe": Case("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}, ROPE),
    "qwen3-moe-every-second": Case("Qwen3Moe", {**EXPERTS, "decoder_sparse_step": 2}, ROPE),  # not normed
    "qwen3-moe-mlp-only": Case("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [0]}, ROPE),
    "sdar": Case(
        "Qwen3", WIDE, ROPE, {**PUBLISHED, "model_type": "sdar", "block_size": BLOCK}, attention="block-causal"
    ),
    "sdar-moe": Case(
        "Qwen3Moe",
        {**WIDE, **SDAR_EXPERTS},
        ROPE,
        {**PUBLISHED, **SDAR_EXPERTS, "model_type": "sdar_moe", "block_size": BLOCK},
        attention="block-causal",
    ),
    "llada": Case("Llama", {}, ROPE, LLADA, attention="bidirectional"),
    "dream": Case("Qwen2", WIDE, ROPE, {**PUBLISHED, "model_type": "Dream"}, attention="bidirectional"),
    "nemotron": Case("Ministral3", WIDE, MINISTRAL, NEMOTRON),
    "wedlm-qwen2": Case("Qwen2", WIDE, ROPE, {**PUBLISHED, "model_type": "wedlm"}),
    "wedlm-qwen3": Case(
        "Qwen3", WIDE, ROPE, {**PUBLISHED, "model_type": "wedlm", "qk_norm": True, "attention_bias": False}
    ),
    "qwen2": Case("Qwen2", {}, ROPE),
    "qwen2-tied": Case("Qwen2", {"tie_word_embeddings": True}, ROPE),
    "qwen2-sliding": Case("Qwen2", SLIDING, ROPE),
    "llama3": Case("Llama", WIDE, LLAMA3),
    "llama-biases": Case("Llama", {"attention_bias": True, "tie_word_embeddings": True}, LINEAR),
    "llama-all-keys": Case("Llama", {"num_key_value_heads": 4}, ROPE),
    "ministral3": Case("Ministral3", WIDE, MINISTRAL),
    "ministral3-tied": Case(
        "Ministral3", {**WIDE, "tie_word_embeddings": True}, {**MINISTRAL, "mscale": None, "mscale_all_dim": None}
    ),
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
    case: Case

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
        """Causal logits of the real tokens, with their mask of padding; of other attentions without padding."""
        if self.case.attention != "causal":
            assert torch.equal(tokens[is_real], TOKENS.flatten())
            return self.logits(self.case.attention)
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
        """In shards; of a family that transformers lacks with its config.json and names."""
        self.model.save_pretrained(folder, max_shard_size="20KB")
        assert (folder / "model.safetensors.index.json").is_file()
        if self.case.published is not None:
            weights = {self._publish_name(name): tensor for name, tensor in load_weights(folder).items()}
            for path in (*folder.glob("model*"), folder / "generation_config.json"):
                path.unlink()
            (folder / "config.json").write_text(json.dumps(self.case.published))
            save_file(weights, folder / "model.safetensors")

    def _publish_name(self, name: str) -> str:
        for part, published in NAMES.get((self.case.published or {}).get("model_type", ""), {}).items():
            name = name.replace(part, published)
        return name

    def reload(self, folder: Path) -> Foreign:
        """What they make of a directory; nothing of it is left over, and nothing made up."""
        import transformers

        if self.case.published is not None:
            folder = self._unpublish(folder)
        auto_model: Any = transformers.AutoModelForCausalLM  # Its stub omits the loading report.
        model, report = auto_model.from_pretrained(folder, output_loading_info=True, **_options(self.case.name))
        assert not [value for value in report.values() if value]
        assert type(model) is type(self.model)
        return Foreign(model.eval(), self.case)

    def _unpublish(self, folder: Path) -> Path:
        """The directory in the form of transformers. Its config.json must say what the published one does, as far as
        that says anything."""
        written, expected = json.loads((folder / "config.json").read_text()), dict(self.case.published or {})
        # The first end of text is kept, and LLaDA's vocabulary is that of its tables.
        ends = expected["eos_token_id"]
        expected |= {"eos_token_id": ends[0] if isinstance(ends, list) else ends, "vocab_size": 40}
        for key in ("bos_token_id", "dlm_paradigm", "ar_loss_weight"):
            expected.pop(key, None)
        assert {key: written.get(key) for key, value in expected.items() if value} == {
            key: value for key, value in expected.items() if value
        }
        self.model.save_pretrained(folder / "theirs")
        weights = load_weights(folder)
        names = load_weights(folder / "theirs")
        assert weights.keys() == {self._publish_name(name) for name in names}
        save_file({name: weights[self._publish_name(name)] for name in names}, folder / "theirs" / "model.safetensors")
        return folder / "theirs"

    def rounded(self) -> Foreign:
        """In bf16; this one changes."""
        return Foreign(self.model.to(torch.bfloat16), self.case)


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


def same_experts(ours: Transformer, theirs: Foreign, attention: str) -> Tensor:
    """[layers with experts, B, L]: whether a token goes to the same ones."""
    pairs = zip(our_routings(ours, TOKENS, pattern_of(attention)), theirs.experts(attention), strict=True)
    same = [(a.experts_TK.sort().values == b.sort().values).all(-1).view(TOKENS.shape) for a, b in pairs]
    return torch.stack(same) if same else torch.ones(0, *TOKENS.shape, dtype=torch.bool)


def padded_difference(ours: Transformer, theirs: Foreign, side: str) -> float:
    """Of the real tokens; whatever the padding is, which is a document of its own in our model."""
    differences = []
    for filling in (0, 3):
        padding, nothing = torch.full((2, PADDING), filling), torch.zeros(2, PADDING, dtype=torch.bool)
        there = torch.ones_like(TOKENS, dtype=torch.bool)
        tokens = torch.cat([padding, TOKENS] if side == "left" else [TOKENS, padding], dim=1)
        is_real = torch.cat([nothing, there] if side == "left" else [there, nothing], dim=1)
        documents = is_real.long() - 1
        logits = ours(tokens, pattern=pattern_of(theirs.case.attention, documents))
        differences.append(difference(logits[is_real].unflatten(0, (2, LENGTH)), theirs.padded(tokens, is_real)))
    return max(differences)


def cached_difference(ours: Transformer, theirs: Foreign) -> float:
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


def assert_same_logits(ours: Transformer, theirs: Foreign) -> None:
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
