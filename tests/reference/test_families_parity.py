"""Each family's tiny random checkpoint gives the same logits here and in transformers.

The cases are in `family_cases`. Then: which options the logits see, gradients, other spellings of files, and whole
directories of ours in transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from config.model import ModelConfig, YarnRope
from diffusionlm.checkpoints.huggingface import load_model, save_model, save_model_directory
from diffusionlm.families.family import read_rope
from diffusionlm.families.model_directory import read_model_config
from diffusionlm.families.registry import FAMILIES
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.models.layers import RotaryEmbedding
from diffusionlm.models.patterns import Bidirectional, BlockCausal, Causal
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tests.reference.family_cases import (
    BOUNDS,
    CASES,
    MINISTRAL,
    TOKENS,
    Foreign,
    assert_same_logits,
    difference,
    load_weights,
)
from tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")


THEIR_NAMES = [name for name, case in CASES.items() if case.published is None]


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_logits_and_files(name: str, tmp_path: Path) -> None:
    """Theirs, loaded here; what is written here, loaded there; theirs in bfloat16. No value changes on the way."""
    theirs = CASES[name].peer()
    values = theirs.values()
    theirs.save(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    assert_same_logits(ours, theirs)
    (tmp_path / "ours").mkdir()
    save_model(ours, tmp_path / "ours", max_shard_size=15_000)
    assert_same_tensors(load_weights(tmp_path / "ours"), load_weights(tmp_path / "theirs"))
    again, back = load_model(tmp_path / "ours"), theirs.reload(tmp_path / "ours")
    assert again.config == ours.config
    assert_same_tensors(back.values(), values)
    assert_same_logits(again, back)
    rounded = theirs.rounded()
    rounded.save(tmp_path / "rounded")
    narrow = load_model(tmp_path / "rounded", dtype="keep")
    assert_same_logits(narrow, rounded)
    (tmp_path / "narrow").mkdir()
    save_model(narrow, tmp_path / "narrow")
    assert_same_tensors(load_weights(tmp_path / "narrow"), load_weights(tmp_path / "rounded"))


def assert_same_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert not [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


def test_every_family_is_compared() -> None:
    """Those with a vision tower in `tests/unit/checkpoints/test_qwen3_vl_files.py`."""
    types = {case.published["model_type"] if case.published else case.config().model_type for case in CASES.values()}
    assert types == {model_type for model_type, family in FAMILIES.items() if not family.has_vision}


def foreign(name: str) -> Foreign:
    with torch.no_grad():
        return CASES[name].peer()


# What the logits see, and gradients.

RIGHT_SCALING = {key: value for key, value in MINISTRAL.items() if key[:6] not in ("rope_t", "mscale")} | {
    "rope_type": "yarn",
    "attention_factor": 1.0,
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma2", {"query_pre_attn_scalar": None}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"hidden_act": "silu"}),
        ("gemma2", {"norm_offset": False}),
        ("gemma2", {"scale_embeddings": False}),
        ("gemma2", {"layer_types": ("full_attention", "sliding_attention", "full_attention")}),
        ("gemma2", {"sliding_window": 5}),
        ("qwen2-sliding", {"layer_types": None, "sliding_window": None}),
        ("llama3", {"rope_scaling": None}),
        ("llama3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("llama-biases", {"rope_scaling": None}),
        ("ministral3", {"rope_scaling": RIGHT_SCALING | {"llama_4_scaling_beta": None}}),
        ("ministral3", {"rope_scaling": RIGHT_SCALING | {"attention_factor": None}}),
    ],
    ids=str,
)
def test_each_option_is_seen_in_the_logits(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Otherwise the parity would say nothing of it."""
    theirs = foreign(name)
    theirs.save(tmp_path)
    right = load_model(tmp_path)
    wrong = Transformer(ModelConfig(**{**right.config.model_dump(), **changes}))
    wrong.load_state_dict(right.state_dict())
    with torch.no_grad():
        expected = theirs.logits("causal")
        assert difference(right(TOKENS, pattern=Causal()), expected) <= BOUNDS["float32"]
        assert difference(wrong(TOKENS, pattern=Causal()), expected) > 1e-3


@pytest.mark.parametrize(("smoothing", "z_loss", "excluded"), [(0.0, 0.0, None), (0.1, 0.02, 39)])
@pytest.mark.parametrize(
    "name", ["gemma2-biases", "llama3", "ministral3", "qwen3-moe", "qwen3-moe-every-second", "qwen3-moe-mlp-only"]
)
def test_gradients_of_the_scored_loss(
    name: str, smoothing: float, z_loss: float, excluded: int | None, tmp_path: Path
) -> None:
    """The chunked loss, cap and balance of experts and all, against autograd through their logits, in double."""
    peer = CASES[name].peer()
    peer.save(tmp_path)
    theirs, ours = peer.model.double(), load_model(tmp_path, dtype="float64").train()
    is_sparse = "moe" in name
    # With experts all rows: the balance of the last layer is over the tokens that it computes.
    rows = torch.arange(0, TOKENS.numel(), 1 if is_sparse else 2)
    targets = TOKENS.flatten().roll(3)[rows].clamp(max=38)
    weights = torch.rand(len(rows), dtype=torch.float64)
    coefficient = 0.3 if is_sparse else 0.0
    loss_inputs = LossInputs(
        targets, weights, excluded, label_smoothing=smoothing, z_loss=z_loss, load_balancing_weight=coefficient
    )
    total = ours(TOKENS, pattern=Causal(), output_positions=rows, loss_inputs=loss_inputs).total_loss
    output = theirs(TOKENS, **({"output_router_logits": True} if is_sparse else {}))
    logits = output.logits.flatten(0, 1)[rows]
    allowed = logits if excluded is None else logits[:, :excluded]
    loss = F.cross_entropy(allowed, targets, reduction="none", label_smoothing=smoothing)
    expected = ((loss + z_loss * allowed.logsumexp(-1).square()) * weights).sum()
    expected = expected + (coefficient * output.aux_loss if is_sparse else 0.0)
    # They take norms, rotations and softmax in fp32 whatever the dtype.
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0.0)
    total.backward()
    expected.backward()
    their_gradients = gradients_by_file_name(theirs)
    assert their_gradients.keys() == dict(ours.named_parameters()).keys()
    for parameter_name, parameter in ours.named_parameters():
        their = their_gradients[parameter_name]
        assert parameter.grad is not None
        assert (parameter.grad - their).norm() <= 1e-4 * their.norm() + 1e-7, parameter_name


def gradients_by_file_name(model: Any) -> dict[str, Tensor]:
    """Gradients of transformers' parameters; a stacked one is cut into those of the experts."""
    gradients = {}
    for name, parameter in model.named_parameters():
        stem, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj"):
            gradients[name] = parameter.grad
            continue
        for expert, grad in enumerate(parameter.grad):
            halves = {"gate_proj": grad.chunk(2)[0], "up_proj": grad.chunk(2)[1]}
            parts = {"down_proj": grad} if kind == "down_proj" else halves
            gradients |= {f"{stem}.{expert}.{part}.weight": value for part, value in parts.items()}
    return gradients


@pytest.mark.parametrize(
    ("options", "head_dim", "theta"),
    [
        ({"factor": 4.0}, 128, 1e6),
        ({"factor": 4.0}, 16, 100.0),
        ({"factor": 1.0}, 16, 100.0),
        ({"factor": 40.0, "attention_factor": 1.25}, 32, 1e4),
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 32, 1e4),
        ({"factor": 16.0, "mscale": 0.7, "mscale_all_dim": 0.7, "attention_factor": 1.25}, 32, 1e4),
        ({"factor": 3.0, "beta_fast": 4.0, "beta_slow": 0.5}, 32, 1e3),
        ({"factor": 3.0, "beta_fast": 900.0, "beta_slow": 800.0}, 8, 1e3),  # one place for both ends of the ramp
    ],
)
def test_yarn_is_that_of_transformers(options: dict[str, Any], head_dim: int, theta: float) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 32, **options}
    config = transformers.Qwen3Config(
        head_dim=head_dim, max_position_embeddings=128, rope_parameters={**scaling, "rope_theta": theta}
    )
    frequencies, length = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    positions = torch.tensor([[0, 1, 2, 5]])
    problems: list[str] = []
    read = YarnRope.model_validate(read_rope({"rope_parameters": scaling}, problems)["rope_scaling"])
    assert not problems
    cos, sin = RotaryEmbedding(head_dim, theta, read)(positions)
    angles = positions[..., None] * frequencies
    for part, sign in ((slice(head_dim // 2), -1.0), (slice(head_dim // 2, None), 1.0)):
        torch.testing.assert_close(cos[:, :, 0, part], angles.cos() * length, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(sin[:, :, 0, part], sign * angles.sin() * length, rtol=1e-5, atol=1e-6)
    plain, _ = RotaryEmbedding(head_dim, theta)(positions)
    assert torch.allclose(cos, plain) == (options["factor"] == 1.0), "the case can tell them apart"


# Other spellings of config.json, and other files.


@pytest.mark.parametrize("name", THEIR_NAMES)
def test_the_spelling_of_transformers_4(name: str, tmp_path: Path) -> None:
    is_gemma = name.startswith("gemma2")
    CASES[name].config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    expected = read_model_config(tmp_path)
    scaling = values.pop("rope_parameters")
    values["rope_theta"] = scaling.pop("rope_theta")
    if scaling["rope_type"] == "linear":
        scaling["type"] = scaling.pop("rope_type")
    values["rope_scaling"] = scaling if len(scaling) > 1 else None
    values["torch_dtype"] = values.pop("dtype", "float32")
    if "num_local_experts" in values:
        values["num_experts"] = values.pop("num_local_experts")
    values.pop("layer_types", None)  # the rules of Qwen and Gemma say them
    values |= {"hidden_act": "gelu"} if is_gemma else {}
    if is_gemma:
        del values["tie_word_embeddings"]
    path.write_text(json.dumps(values))
    assert read_model_config(tmp_path) == expected


def assert_read(folder: Path, theirs: Foreign) -> None:
    with torch.no_grad():
        logits: Tensor = load_model(folder)(TOKENS, pattern=Causal())
        assert difference(logits, theirs.logits("causal")) <= BOUNDS["float32"]


def test_sharded_pickles_are_read(tmp_path: Path) -> None:
    theirs = foreign("qwen3-one-key")
    theirs.model.config.save_pretrained(tmp_path)
    items = list(theirs.values().items())
    parts = {"pytorch_model-00001-of-00002.bin": items[::2], "pytorch_model-00002-of-00002.bin": items[1::2]}
    for file, part in parts.items():
        torch.save(dict(part), tmp_path / file)
    weight_map = {name: file for file, part in parts.items() for name, _ in part}
    index: dict[str, Any] = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert_read(tmp_path, theirs)


def test_stacked_experts_are_read(tmp_path: Path) -> None:
    """As transformers 5 holds them: gate and up of all experts in one tensor, down in another."""
    theirs = foreign("qwen3-moe")
    theirs.model.config.save_pretrained(tmp_path)
    state = theirs.values()
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    save_file(state, tmp_path / "model.safetensors")
    assert_read(tmp_path, theirs)


# Whole directories of ours in transformers, which adds its own attention: config.json and the tokenizer are enough.


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"tie_word_embeddings": False, "num_key_value_heads": 1}, id="qwen3"),
        pytest.param({"qk_norm": False, "attention_bias": True, "attention_output_bias": True}, id="llama"),
        pytest.param({"qk_norm": False, "attention_bias": True, "attention_output_bias": False}, id="qwen2"),
        pytest.param({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}, id="moe"),
        pytest.param(
            {"qk_norm": False, "sandwich_norms": True, "norm_offset": True, "scale_embeddings": True}
            | {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
            id="gemma2",
        ),
        pytest.param(
            {"qk_norm": False, "rope_scaling": YarnRope.model_validate(RIGHT_SCALING)},
            id="ministral3",
        ),
    ],
)
def test_bidirectional_model_in_transformers(
    overrides: dict[str, Any], tiny_model: MakeModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """config.json alone makes transformers compute our attention: without a mask, in each of its implementations."""
    ours = tiny_model(vocab_size=tokenizer.vocab_size, mask_token_id=tokenizer.mask_token_id, **overrides)
    save_model_directory(ours, tokenizer, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["is_causal"] is False
    for implementation in ("eager",) if "sandwich_norms" in overrides else ("eager", "sdpa"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation=implementation, dtype=torch.float32
        )
        with torch.no_grad():
            logits, their_logits = ours(TOKENS, pattern=Bidirectional()), theirs.eval()(TOKENS).logits
        assert difference(logits, their_logits) <= BOUNDS["float32"]
    assert load_model(tmp_path).config == ours.config


@pytest.mark.parametrize("block_length", [1, 4])
def test_block_diffusion_model_in_transformers(
    block_length: int, tiny_model: MakeModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Blocks of one token are causal attention; longer ones need a mask, as the model card says."""
    ours = tiny_model(vocab_size=tokenizer.vocab_size, mask_token_id=tokenizer.mask_token_id, block_length=block_length)
    save_model_directory(ours, tokenizer, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    pattern = BlockCausal(block_length)
    mask = None if block_length == 1 else pattern.dense_mask(TOKENS.shape[1]).expand(2, 1, -1, -1)
    with torch.no_grad():
        logits, their_logits = ours(TOKENS, pattern=pattern), theirs(TOKENS, attention_mask=mask).logits
    assert difference(logits, their_logits) <= BOUNDS["float32"]
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert ("block-causal `attention_mask`" in card) == (block_length > 1) and "is_causal" not in card
    words = "the cat sat"
    their_ids = transformers.AutoTokenizer.from_pretrained(tmp_path)(words)["input_ids"]
    assert their_ids == tokenizer.encode(words)


def test_bidirectional_sliding_layers_in_transformers(
    tiny_model: MakeModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Their window counts the positions on each side, ours also the query itself, as the model card says."""
    layer_types = ("sliding_attention", "full_attention")
    vocabulary = {"vocab_size": tokenizer.vocab_size, "mask_token_id": tokenizer.mask_token_id}
    ours = tiny_model(layer_types=layer_types, sliding_window=4, **vocabulary)
    save_model_directory(ours, tokenizer, tmp_path)
    with torch.no_grad():
        expected = ours(TOKENS, pattern=Bidirectional())
        for window, is_same in ((3, True), (4, False)):
            theirs = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path, sliding_window=window, dtype=torch.float32)
            assert (difference(theirs.eval()(TOKENS).logits, expected) < 1e-3) == is_same
