"""Each family's tiny random checkpoint gives the same logits here and in transformers, or in a plain reference.

Every norm gain and bias is moved from its default, files are sharded, and what is written here is read there again.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffusionlm.checkpoints.huggingface import load_model, read_config, save_model
from diffusionlm.models.patterns import Bidirectional, BlockCausal, Causal
from diffusionlm.models.transformer import Transformer

transformers = pytest.importorskip("transformers")

Values = dict[str, Any]
TOKENS = torch.randint(0, 40, (2, 13), generator=torch.Generator().manual_seed(5))
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
    "original_max_position_embeddings": 16,
}
EXPERTS: Values = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
GEMMA: Values = {"query_pre_attn_scalar": 20, "sliding_window": 4, "final_logit_softcapping": 3.0}
CASES = [
    pytest.param("Qwen3", {**WIDE, "tie_word_embeddings": True}, ROPE, id="qwen3-tied"),
    pytest.param("Qwen3", {**WIDE, "attention_bias": True}, LINEAR, id="qwen3-biases-linear-rope"),
    pytest.param("Qwen2", {}, ROPE, id="qwen2"),
    pytest.param("Qwen2", {"tie_word_embeddings": True}, ROPE, id="qwen2-tied"),
    pytest.param(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, ROPE, id="qwen2-sliding"
    ),
    pytest.param("Llama", WIDE, LLAMA3, id="llama3"),
    pytest.param("Llama", {"attention_bias": True, "tie_word_embeddings": True}, LINEAR, id="llama-biases"),
    pytest.param("Qwen3Moe", {**WIDE, **EXPERTS, "norm_topk_prob": True}, ROPE, id="qwen3-moe"),
    pytest.param("Qwen3Moe", {**WIDE, **EXPERTS, "decoder_sparse_step": 2}, ROPE, id="qwen3-moe-every-second"),
    pytest.param("Qwen3Moe", {**WIDE, **EXPERTS, "mlp_only_layers": [0]}, ROPE, id="qwen3-moe-mlp-only"),
    pytest.param("Gemma2", {**WIDE, **GEMMA, "attn_logit_softcapping": 2.0}, ROPE, id="gemma2"),
    pytest.param("Gemma2", {**WIDE, **GEMMA, "attn_logit_softcapping": None}, ROPE, id="gemma2-no-attention-cap"),
]
"""Name of transformers' classes, their config beside `SHAPE`, and the rotations."""


def foreign(name: str, changes: Values, rope: Values) -> Any:
    """A random model of transformers with no parameter at its default."""
    config = getattr(transformers, f"{name}Config")(
        **SHAPE, **changes, rope_parameters=rope, attn_implementation="eager"
    )
    if name == "Qwen3Moe":
        config._experts_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    perturb(dict(model.named_parameters()))
    return model


def perturb(weights: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for tensor in weights.values():
            tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(TOKENS).logits
    assert logits.std() > 0.1
    return logits


def ours_of(model: Transformer, pattern: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS, pattern=pattern)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """To 1e-5 of the largest logit; both compute in fp32, in another order."""
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(("name", "changes", "rope"), CASES)
def test_their_directory_here_and_ours_there(name: str, changes: Values, rope: Values, tmp_path: Path) -> None:
    theirs = foreign(name, changes, rope)
    expected = logits_of(theirs)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    ours = load_model(tmp_path / "theirs")
    assert ours.config.is_autoregressive
    assert_same(ours_of(ours, Causal()), expected)
    (tmp_path / "ours").mkdir()
    save_model(ours, tmp_path / "ours", max_shard_size="15KB")
    back, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not [value for value in report.values() if value]
    assert type(back) is type(theirs)
    for key, value in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key
    assert_same(logits_of(back.eval()), expected)
    again = load_model(tmp_path / "ours")
    assert again.config == ours.config
    assert torch.equal(ours_of(again, Causal()), ours_of(ours, Causal()))


@pytest.mark.parametrize(("name", "changes", "rope"), CASES)
def test_the_spelling_of_transformers_4(name: str, changes: Values, rope: Values, tmp_path: Path) -> None:
    foreign(name, changes, rope).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    expected = read_config(tmp_path)
    scaling = values.pop("rope_parameters")
    values["rope_theta"] = scaling.pop("rope_theta")
    if scaling["rope_type"] == "linear":
        scaling["type"] = scaling.pop("rope_type")
    values["rope_scaling"] = scaling if len(scaling) > 1 else None
    values["torch_dtype"] = values.pop("dtype")
    if "num_local_experts" in values:
        values["num_experts"] = values.pop("num_local_experts")
    values.pop("layer_types", None)  # the rules of Qwen and Gemma say them
    values |= {"hidden_act": "gelu"} if name == "Gemma2" else {}
    if name == "Gemma2":
        del values["tie_word_embeddings"]
    path.write_text(json.dumps(values))
    assert read_config(tmp_path) == expected


def test_a_single_pickle_is_read(tmp_path: Path) -> None:
    theirs = foreign("Llama", WIDE, LLAMA3)
    theirs.config.save_pretrained(tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    assert_same(ours_of(load_model(tmp_path), Causal()), logits_of(theirs))


def test_sharded_pickles_are_read(tmp_path: Path) -> None:
    theirs = foreign("Qwen3", WIDE, ROPE)
    theirs.config.save_pretrained(tmp_path)
    items = list(theirs.state_dict().items())
    parts = {"pytorch_model-00001-of-00002.bin": items[::2], "pytorch_model-00002-of-00002.bin": items[1::2]}
    for file, part in parts.items():
        torch.save(dict(part), tmp_path / file)
    weight_map = {name: file for file, part in parts.items() for name, _ in part}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_same(ours_of(load_model(tmp_path), Causal()), logits_of(theirs))


def test_stacked_experts_are_read(tmp_path: Path) -> None:
    """As transformers 5 holds them: gate and up of all experts in one tensor, down in another."""
    theirs = foreign("Qwen3Moe", {**WIDE, **EXPERTS}, ROPE)
    theirs.config.save_pretrained(tmp_path)
    state = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    save_file(state, tmp_path / "model.safetensors")
    assert_same(ours_of(load_model(tmp_path), Causal()), logits_of(theirs))


# What transformers lacks: plain references, in the words of the published code. B = 2 rows, L = 13 positions.


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3) * gain


def turned(x: Tensor, theta: float) -> Tensor:
    """Positions as complex numbers: dimension i is the real part of the pair, i + H / 2 the imaginary one."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def attended(q: Tensor, k: Tensor, v: Tensor, block: int | None) -> Tensor:
    """[B, L, N, H]; a key is seen if its block is not later than the query's. None: all keys."""
    k, v = (each.repeat_interleave(q.shape[2] // each.shape[2], dim=2) for each in (k, v))
    scores = torch.einsum("bqnh,bknh->bnqk", q, k) / math.sqrt(q.shape[-1])
    if block is not None:
        at = torch.arange(q.shape[1]) // block
        scores = scores.masked_fill(at[None, :] > at[:, None], float("-inf"))
    return torch.einsum("bnqk,bknh->bqnh", scores.softmax(-1), v).flatten(2)


def fed(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    inner = x @ gate.T
    return (inner * torch.sigmoid(inner) * (x @ up.T)) @ down.T


def heads(x: Tensor, weight: Tensor, bias: Tensor | None, width: int) -> Tensor:
    out = x @ weight.T if bias is None else x @ weight.T + bias
    return out.unflatten(-1, (-1, width))


def qwen_logits(w: dict[str, Tensor], *, block: int | None, top_k: int = 0, layers: int = 3) -> Tensor:
    """SDAR (norms on queries and keys), SDAR-MoE (experts) or Dream (biases): whatever the weights have."""
    x, width = w["model.embed_tokens.weight"][TOKENS], 12
    for layer in range(layers):
        p = f"model.layers.{layer}."
        n = norm(x, w[f"{p}input_layernorm.weight"])
        q, k, v = (
            heads(n, w[f"{p}self_attn.{c}_proj.weight"], w.get(f"{p}self_attn.{c}_proj.bias"), width) for c in "qkv"
        )
        if f"{p}self_attn.q_norm.weight" in w:
            q, k = norm(q, w[f"{p}self_attn.q_norm.weight"]), norm(k, w[f"{p}self_attn.k_norm.weight"])
        out = attended(turned(q, 500.0), turned(k, 500.0), v, block)
        x = x + out @ w[f"{p}self_attn.o_proj.weight"].T
        n = norm(x, w[f"{p}post_attention_layernorm.weight"])
        if f"{p}mlp.gate.weight" not in w:
            x = x + fed(n, *(w[f"{p}mlp.{c}_proj.weight"] for c in ("gate", "up", "down")))
            continue
        probabilities = (n @ w[f"{p}mlp.gate.weight"].T).softmax(-1)
        kept = torch.where(probabilities >= probabilities.sort(-1).values[..., -top_k, None], probabilities, 0.0)
        kept = kept / kept.sum(-1, keepdim=True)
        for expert in range(kept.shape[-1]):
            matrices = (w[f"{p}mlp.experts.{expert}.{c}_proj.weight"] for c in ("gate", "up", "down"))
            x = x + kept[..., expert, None] * fed(n, *matrices)
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def llada_logits(w: dict[str, Tensor]) -> Tensor:
    t = "model.transformer."
    x = w[f"{t}wte.weight"][TOKENS]
    for layer in range(3):
        p = f"{t}blocks.{layer}."
        n = norm(x, w[f"{p}attn_norm.weight"])
        q, k, v = (heads(n, w[f"{p}{c}_proj.weight"], None, 8) for c in "qkv")
        x = x + attended(turned(q, 500.0), turned(k, 500.0), v, None) @ w[f"{p}attn_out.weight"].T
        n = norm(x, w[f"{p}ff_norm.weight"])
        x = x + fed(n, w[f"{p}ff_proj.weight"], w[f"{p}up_proj.weight"], w[f"{p}ff_out.weight"])
    return norm(x, w[f"{t}ln_f.weight"]) @ w[f"{t}ff_out.weight"].T


def qwen_weights(*, norms: bool, biases: bool, experts: int) -> dict[str, Tensor]:
    D, A, K, F, E = 32, 48, 24, 56, 20
    w = {
        "model.embed_tokens.weight": torch.randn(40, D),
        "model.norm.weight": torch.rand(D) + 0.5,
        "lm_head.weight": torch.randn(40, D) * D**-0.5,
    }
    for layer in range(3):
        p = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            w[f"{p}{name}.weight"] = torch.rand(D) + 0.5
        for name, rows in (("q", A), ("k", K), ("v", K)):
            w[f"{p}self_attn.{name}_proj.weight"] = torch.randn(rows, D) * D**-0.5
            if biases:
                w[f"{p}self_attn.{name}_proj.bias"] = torch.randn(rows) * 0.3
        w[f"{p}self_attn.o_proj.weight"] = torch.randn(D, A) * A**-0.5
        if norms:
            w |= {f"{p}self_attn.{name}_norm.weight": torch.rand(12) + 0.5 for name in "qk"}
        prefixes = {f"{p}mlp.experts.{expert}.": E for expert in range(experts)} or {f"{p}mlp.": F}
        if experts:
            w[f"{p}mlp.gate.weight"] = torch.randn(experts, D) * D**-0.5
        for prefix, inner in prefixes.items():
            w[f"{prefix}gate_proj.weight"] = torch.randn(inner, D) * D**-0.5
            w[f"{prefix}up_proj.weight"] = torch.randn(inner, D) * D**-0.5
            w[f"{prefix}down_proj.weight"] = torch.randn(D, inner) * inner**-0.5
    return w


def llada_weights() -> dict[str, Tensor]:
    t, D, F = "model.transformer.", 32, 56
    w = {f"{t}wte.weight": torch.randn(40, D), f"{t}ln_f.weight": torch.rand(D) + 0.5}
    w[f"{t}ff_out.weight"] = torch.randn(40, D) * D**-0.5
    for layer in range(3):
        p = f"{t}blocks.{layer}."
        w |= {f"{p}{name}.weight": torch.rand(D) + 0.5 for name in ("attn_norm", "ff_norm")}
        shapes = {"q_proj": (D, D), "k_proj": (16, D), "v_proj": (16, D), "attn_out": (D, D)}
        shapes |= {"ff_proj": (F, D), "up_proj": (F, D), "ff_out": (D, F)}
        w |= {f"{p}{name}.weight": torch.randn(*shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    return w


QWEN_JSON: Values = {**SHAPE, **WIDE, "hidden_act": "silu", "rope_theta": 500.0, "rope_scaling": None}
QWEN_JSON |= {"tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": None, "mask_token_id": 39}
LLADA_JSON: Values = {
    "model_type": "llada",
    "d_model": 32,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "mlp_hidden_size": 56,
    "max_sequence_length": 64,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
    "vocab_size": 38,
    "embedding_size": 40,
    "weight_tying": False,
    "block_type": "llama",
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "rope": True,
    "mask_token_id": 39,
    "eos_token_id": 37,
    "pad_token_id": 37,
}


def wrote(folder: Path, values: Values, weights: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    save_file(weights, folder / "model.safetensors")
    return folder


def assert_comes_back(ours: Transformer, source: Path, target: Path, weights: dict[str, Tensor]) -> None:
    """Written as what it was: the same names with the same values, and keys that say the same."""
    target.mkdir()
    save_model(ours, target, max_shard_size="20KB")
    found: dict[str, Tensor] = {}
    for path in sorted(target.glob("*.safetensors")):
        found |= load_file(path)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, target))
    # The first end of text is kept; LLaDA's vocabulary is that of its tables; null and false say nothing.
    before |= {"bos_token_id": None, "eos_token_id": load_model(source).config.eos_token_id}
    before |= {"vocab_size": 40}
    assert {key: after.get(key) for key, value in before.items() if value} == {k: v for k, v in before.items() if v}
    assert load_model(target).config == ours.config


@pytest.mark.parametrize("experts", [0, 5], ids=["sdar", "sdar-moe"])
def test_sdar(experts: int, tmp_path: Path) -> None:
    weights = qwen_weights(norms=True, biases=False, experts=experts)
    values = {**QWEN_JSON, "model_type": "sdar_moe" if experts else "sdar", "block_size": 4}
    if experts:
        values |= {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
    source = wrote(tmp_path / "source", values, weights)
    ours = load_model(source)
    assert (ours.config.block_length, ours.config.logit_alignment) == (4, "same_position")
    assert_same(ours_of(ours, BlockCausal(block_length=4)), qwen_logits(weights, block=4, top_k=2))
    assert_comes_back(ours, source, tmp_path / "target", weights)


def test_dream(tmp_path: Path) -> None:
    weights = qwen_weights(norms=False, biases=True, experts=0)
    source = wrote(tmp_path / "source", {**QWEN_JSON, "model_type": "Dream"}, weights)
    ours = load_model(source)
    assert (ours.config.block_length, ours.config.logit_alignment) == (None, "shifted")
    assert_same(ours_of(ours, Bidirectional()), qwen_logits(weights, block=None))
    assert_comes_back(ours, source, tmp_path / "target", weights)


def test_llada(tmp_path: Path) -> None:
    weights = llada_weights()
    source = wrote(tmp_path / "source", LLADA_JSON, weights)
    ours = load_model(source)
    assert (ours.config.block_length, ours.config.logit_alignment) == (None, "same_position")
    assert ours.config.vocab_size == 40
    assert_same(ours_of(ours, Bidirectional()), llada_logits(weights))
    assert_comes_back(ours, source, tmp_path / "target", weights)
