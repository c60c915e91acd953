"""Directories are read as what they say, or refused with the file, the key and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from config.model import Llama3Rope, YarnRope
from diffusionlm.checkpoints.huggingface import load_model, save_model
from diffusionlm.checkpoints.manifest import write_directory_atomically
from diffusionlm.checkpoints.model_files import MAX_LISTED_PROBLEMS
from diffusionlm.checkpoints.weights import open_weights, read_saved_dtype, read_weights
from diffusionlm.families.model_directory import read_model_config
from diffusionlm.families.registry import get_family
from tests.conftest import MakeModel

FULL, SLIDING = "full_attention", "sliding_attention"
BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
    "vocab_size": 200_000,
}
SLIDING_LAYERS: dict[str, Any] = {
    "model_type": "qwen3",
    "use_sliding_window": True,
    "sliding_window": 4,
    "layer_types": [FULL, SLIDING, FULL, SLIDING],
}
LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "attention_factor": None}


def read(folder: Path, **values: Any) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(BASE | values))
    return read_model_config(folder)


@pytest.fixture
def saved(tiny_model: MakeModel, tmp_path: Path) -> Path:
    """A directory in shards."""
    save_model(tiny_model(), tmp_path, max_shard_size=4_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    return tmp_path


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


# Families and their defaults.


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("sdar", (151669, 4, "same_position", None, "low_confidence_dynamic")),
        ("sdar_moe", (151669, 4, "same_position", None, "low_confidence_dynamic")),
        ("Dream", (151666, None, "shifted", None, "entropy")),
        ("wedlm", (151665, 32, "same_position", "shifted", "penalized_entropy")),
    ],
)
def test_defaults_of_diffusion_families(model_type: str, expected: tuple[Any, ...], tmp_path: Path) -> None:
    config = read(tmp_path, model_type=model_type)
    strategy = get_family(config).default_strategy
    alignments = config.logit_alignment, config.clean_alignment
    assert (config.mask_token_id, config.block_length, *alignments, strategy) == expected
    assert config.model_type == model_type


def test_defaults_of_llada(tmp_path: Path) -> None:
    values = {"d_model": 32, "n_layers": 2, "n_heads": 4, "mlp_ratio": 3, "max_sequence_length": 64}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llada", "vocab_size": 126_400, "embedding_size": 126_464, **values})
    )
    config = read_model_config(tmp_path)
    assert (config.mask_token_id, config.eos_token_id, config.pad_token_id) == (126336, 126081, 126081)
    assert config.stop_token_ids == (126081, 126348)
    assert (config.block_length, config.logit_alignment) == (None, "same_position")
    assert (config.vocab_size, config.num_key_value_heads, config.head_dim) == (126_464, 4, 8)
    assert (config.intermediate_size, config.rms_norm_eps, config.tie_word_embeddings) == (96, 1e-5, False)


def test_blocks_of_sdar_in_the_name_of_the_directory(tmp_path: Path) -> None:
    assert read(tmp_path / "SDAR-1.7B-Chat-b32", model_type="sdar").block_length == 32
    in_cache = tmp_path / "models--JetLM--SDAR-1.7B-Chat-b32" / "snapshots" / "0a1b2c"
    assert read(in_cache, model_type="sdar").block_length == 32
    assert read(tmp_path / "key-b32", model_type="sdar", block_size=8).block_length == 8
    assert read(tmp_path / "qwen-b32", model_type="qwen3").block_length == 1


def test_gemma_2(tmp_path: Path) -> None:
    config = read(tmp_path, model_type="gemma2", attn_logit_softcapping=None, hidden_act="gelu", head_dim=8)
    assert config.sandwich_norms and config.norm_offset and config.scale_embeddings and config.tie_word_embeddings
    assert config.layer_types == (SLIDING, FULL, SLIDING, FULL)
    assert (config.sliding_window, config.query_pre_attn_scalar) == (4096, 256)
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (None, 30.0)
    assert config.hidden_act == "gelu_pytorch_tanh"


# Spellings.


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 10_000.0, **LLAMA3}}, Llama3Rope(**LLAMA3)),
        ({"rope_scaling": YARN}, YarnRope(factor=4.0, original_max_position_embeddings=16)),
        *(
            ({"rope_scaling": rope, "rope_parameters": rope}, None)
            for rope in (None, {}, {"type": "default"}, {"rope_type": "default", "rope_theta": 10_000.0})
        ),
    ],
)
def test_rotations(rope: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    config = read(tmp_path, model_type="qwen3", **rope)
    assert (config.rope_scaling, config.rope_theta) == (expected, 10_000.0)
    if isinstance(expected, YarnRope):
        assert expected.attention_scaling == pytest.approx(1.1386294361)  # 0.1 ln 4 + 1


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (
            {"model_type": "qwen4"},
            r"model_type = 'qwen4' is not supported; .*qwen3.*Dream.*model_type",
        ),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias = True"),
        ({"model_type": "llama", "qk_norm": True}, "qk_norm = True contradicts"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.*longrope"),
        ({"model_type": "qwen3", "rope_scaling": YARN | {"mscale": 0.7}}, "mscale"),
        ({"model_type": "sdar", "block_size": 8, "block_length": 4}, "block_size = 8 contradicts block_length = 4"),
        (
            {"model_type": "qwen3", "rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            r"rope_parameters has rope_theta = 10000\.0, which contradicts 1000000\.0",
        ),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ({"model_type": "sdar", "vocab_size": 1000}, "mask_token_id = 151669 is outside the vocabulary"),
        ({"model_type": "llada", "alibi": True}, "alibi = True"),
        ({**SLIDING_LAYERS, "use_sliding_window": False}, "use_sliding_window"),
        ({**SLIDING_LAYERS, "model_type": "llama"}, "use_sliding_window|layer_types"),
        (
            {"model_type": "qwen3", "block_length": 4, "mask_token_id": 18, "is_causal": False},
            "is_causal = False contradicts block_length = 4",
        ),
    ],
)
def test_unsupported_options_are_named(values: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"(?s)config\.json.*{named}"):
        read(tmp_path, **values)


# Weights.


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.bfloat16, torch.float32), torch.float32),
        ((torch.bfloat16, torch.float16), torch.float32),  # neither holds the other
        ((torch.bfloat16, torch.int64), torch.bfloat16),
    ],
)
def test_widest_dtype_is_selected(dtypes: tuple[torch.dtype, ...], expected: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: torch.zeros(2, dtype=dtype) for name, dtype in zip("ab", dtypes, strict=True)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_saved_dtype(tmp_path) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_are_converted_or_preserved(dtype: torch.dtype, tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model(dtype=dtype)
    save_model(model, tmp_path)
    for loaded, expected in ((load_model(tmp_path), torch.float32), (load_model(tmp_path, dtype="keep"), dtype)):
        for name, parameter in loaded.named_parameters():
            assert parameter.dtype == expected
            assert torch.equal(parameter, model.get_parameter(name).to(expected))


def test_all_problems_are_one_error(saved: Path, tiny_model: MakeModel) -> None:
    with open_weights(saved) as weights, pytest.raises(ValueError, match=r"and \d+ more$") as caught:
        weights.check(tiny_model(num_hidden_layers=9))
    assert str(caught.value).count("missing") == MAX_LISTED_PROBLEMS
    (saved / "model.safetensors.index.json").unlink()
    everything: dict[str, Tensor] = {}
    for path in saved.glob("model-*.safetensors"):
        everything |= load_file(path)
        path.unlink()
    everything["strange.weight"] = torch.zeros(2)
    del everything["model.norm.weight"]
    everything["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 5)
    everything["model.layers.0.mlp.up_proj.weight"] = everything["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
    save_file(everything, saved / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        load_model(saved)
    for part in (
        str(saved),
        "missing model.norm.weight",
        "unexpected strange.weight in model.safetensors",
        "model.layers.1.mlp.up_proj.weight has shape [3, 5]",
        "model.layers.0.mlp.up_proj.weight has dtype torch.int8",
    ):
        assert part in str(caught.value)


def test_missing_shards_are_all_named(saved: Path) -> None:
    gone = sorted(saved.glob("model-*.safetensors"))[1:3]
    for path in gone:
        path.unlink()
    with pytest.raises(ValueError, match=rf"index\.json: missing shards: {gone[0].name}; {gone[1].name}"):
        load_model(saved)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.99])
def test_a_truncated_shard_is_named(keep: float, saved: Path) -> None:
    shard = sorted(saved.glob("model-*.safetensors"))[2]
    content = shard.read_bytes()
    shard.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(ValueError, match=shard.name):
        load_model(saved)


def test_a_flipped_bit_is_named_where_there_is_a_manifest(tiny_model: MakeModel, tmp_path: Path) -> None:
    target = tmp_path / "model"
    write_directory_atomically(target, lambda folder: save_model(tiny_model(), folder, max_shard_size=4_000))
    load_model(target)
    shard = sorted(target.glob("model-*.safetensors"))[2]
    content = bytearray(shard.read_bytes())
    content[-9] ^= 4
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{shard.name} is damaged"):
        load_model(target)


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ("{", "damaged index"),
        ("{}", "damaged index"),
        ('{"weight_map": {}}', "weight_map must name files"),
        ('{"weight_map": {"a": "../b.safetensors"}}', r"weight_map must name files beside it.*\.\./b"),
    ],
)
def test_a_damaged_index_is_named(index: str, named: str, saved: Path) -> None:
    (saved / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=rf"index\.json.*{named}"):
        load_model(saved)


def test_an_index_that_contradicts_the_shards_is_refused(saved: Path) -> None:
    path = saved / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, last = index["weight_map"]["model.embed_tokens.weight"], index["weight_map"]["model.norm.weight"]
    index["weight_map"]["model.embed_tokens.weight"] = last
    del index["weight_map"]["model.layers.0.self_attn.q_norm.weight"]
    path.write_text(json.dumps(index))
    assert first != last
    with pytest.raises(ValueError, match=rf"embed_tokens.weight is not in {last}.*q_norm.weight.*not in the index"):
        load_model(saved)


def test_a_tensor_in_two_shards_is_refused(saved: Path) -> None:
    """Which of them would be meant?"""
    first, *_, last = sorted(saved.glob("model-*.safetensors"))
    name = next(iter(load_file(last)))
    edit(first, lambda tensors: tensors.update({name: torch.zeros_like(load_file(last)[name])}))
    for reading in (load_model, read_weights):
        with pytest.raises(ValueError, match=rf"{name} is in {first.name} and in {last.name}"):
            reading(saved)


# The head.


def with_head(saved: Path, head: Tensor | None, **config: Any) -> None:
    tensors = read_weights(saved) | ({} if head is None else {"lm_head.weight": head})
    for path in saved.glob("model*.safetensors*"):
        path.unlink()
    save_file(tensors, saved / "model.safetensors")
    path = saved / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def test_a_tied_head(saved: Path) -> None:
    """It may be there twice if both are equal; without a head that is not tied the error names the key."""
    table = read_weights(saved)["model.embed_tokens.weight"]
    with_head(saved, table.clone())
    model = load_model(saved)
    assert model.lm_head.weight is model.model.embed_tokens.weight and torch.equal(model.lm_head.weight, table)
    with_head(saved, table + 1)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens.*tie_word_embeddings"):
        load_model(saved)
    tensors = read_weights(saved)
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}, saved / "model.safetensors"
    )
    with_head(saved, None, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"missing lm_head\.weight.*tie_word_embeddings = true"):
        load_model(saved)


# Pickles.


class Attack:
    """A pickle that would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def as_pickle(saved: Path, content: Any) -> None:
    for path in saved.glob("model*"):
        path.unlink()
    torch.save(content, saved / "pytorch_model.bin")


def test_pickle_weights_run_no_code(saved: Path) -> None:
    content = dict(read_weights(saved)) | {"attack": Attack(saved / "attacked")}
    as_pickle(saved, content)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: cannot be read"):
        load_model(saved)
    assert not (saved / "attacked").exists()


def test_other_pickles(saved: Path) -> None:
    weights = read_weights(saved)
    as_pickle(saved, weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)})
    load_model(saved)  # buffers of old files are passed over
    path = saved / "pytorch_model.bin"
    for content in (path.read_bytes()[:-100], b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"pytorch_model\.bin: cannot be read"):
            load_model(saved)
    for other in ([1, 2], {"model.norm.weight": "text"}):
        as_pickle(saved, other)
        with pytest.raises(ValueError, match=r"pytorch_model\.bin: .*state_dict"):
            load_model(saved)


def test_the_file_itself_is_loaded_and_not_changed(tmp_path: Path, tiny_model: MakeModel) -> None:
    save_model(tiny_model(), tmp_path)
    bytes_before = (tmp_path / "model.safetensors").read_bytes()
    model = load_model(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    assert (tmp_path / "model.safetensors").read_bytes() == bytes_before
    # Saved over the files that it was loaded from, it has the new values, there and in memory.
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    for (name, parameter), other in zip(tiny_model().named_parameters(), again.parameters(), strict=True):
        assert torch.equal(2.0 * parameter, other), name
    for parameter, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, other)
