"""Each family's tiny random checkpoint gives the same logits here and in transformers, or in a plain reference.

Files are sharded, and what is written here is read there again. The cases and their measures are in `family_cases`; the
table of docs/checkpoints.md has a line for each case.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from config.families.model_directory import read_model_config
from config.families.registry import FAMILIES
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.models.patterns import Causal
from tests.reference.family_cases import (
    ATTENTIONS,
    BOUNDS,
    CASES,
    OTHER_EXPERTS,
    ROWS,
    SIDES,
    TOKENS,
    Case,
    Foreign,
    Measured,
    changed,
    difference,
    measure,
)
from tests.reference.family_table import format_case

pytest.importorskip("transformers")

GUIDE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
THEIR_NAMES = [name for name, case in CASES.items() if isinstance(case, Case)]
PLAIN_CONFIGS = {
    "sdar": (4, "same_position"),
    "sdar-moe": (4, "same_position"),
    "llada": (None, "same_position"),
    "dream": (None, "shifted"),
}
"""Block length and alignment."""


@pytest.fixture(params=CASES)
def measured(request: pytest.FixtureRequest) -> Measured:
    return measure(request.param)


@pytest.mark.parametrize("row", ROWS, ids="-".join)
@pytest.mark.parametrize("name", CASES)
def test_row(name: str, row: tuple[str, str]) -> None:
    row_result, bound = measure(name).rows[row], BOUNDS[row[1]]
    assert row_result.logits.keys() == set(ATTENTIONS)
    assert max(row_result.logits.values()) <= bound
    assert row_result.padded.keys() == (set(SIDES) if row[1] == "float32" else set())
    assert max(row_result.padded.values(), default=0.0) <= bound
    assert (row_result.cached is None) == (row[1] != "float32")
    assert (row_result.cached or 0.0) <= bound
    assert row_result.changed == 0
    others, choices = row_result.other_experts
    assert others <= OTHER_EXPERTS[row[1]] * choices
    assert (choices > 0) == ("moe" in name)


def test_no_gain_and_no_bias_is_at_its_default(measured: Measured) -> None:
    """Otherwise one that is not applied would not be seen. Gemma's gains are added to one."""
    vectors = {name: values for name, values in measured.values.items() if values.ndim == 1}
    assert len(vectors) >= 7
    for name, values in vectors.items():
        default = 0.0 if name.endswith("bias") or measured.model_type == "gemma2" else 1.0
        assert (values - default).abs().min() > 0.09, name
    assert all(values.std() > 0.05 for values in measured.values.values())


def test_config_comes_back(measured: Measured) -> None:
    ours, again = measured.configs
    assert again == ours


@pytest.mark.parametrize("name", CASES)
def test_diffusion_of_a_silent_config(name: str) -> None:
    config = measure(name).configs[0]
    if name not in PLAIN_CONFIGS:
        assert config.is_autoregressive
        return
    assert (config.block_length, config.logit_alignment) == PLAIN_CONFIGS[name]
    assert config.vocab_size == 40


def test_every_family_is_compared() -> None:
    assert {measure(name).model_type for name in CASES} == FAMILIES.keys()


def test_the_guide_has_a_line_for_each_family_case() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    lines = [format_case(name, measure(name)) for name in CASES]
    assert all(f"| {title} | {label} |" in guide for title, label, *_ in lines)


def test_measures_see_a_difference() -> None:
    weights = {"a": torch.ones(2, 3), "b": torch.ones(4)}
    other = {"a": torch.tensor([[1.0, 1.0, 2.0], [1.0, 1.0, 1.0]]), "c": torch.ones(5)}
    assert changed(weights, other) == 1 + 4 + 5
    logits = torch.tensor([1.0, -4.0, 2.0])
    assert math.isclose(difference(logits + torch.tensor([0.0, 0.0, -0.2]), logits), 0.05, rel_tol=1e-6)


# Other spellings of config.json, and other files.


def case(name: str) -> Case:
    case = CASES[name]
    assert isinstance(case, Case)
    return case


def foreign(name: str) -> Foreign:
    with torch.no_grad():
        return case(name).peer()


@pytest.mark.parametrize("name", THEIR_NAMES)
def test_the_spelling_of_transformers_4(name: str, tmp_path: Path) -> None:
    is_gemma = name.startswith("gemma2")
    case(name).config().save_pretrained(tmp_path)
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


def test_a_single_pickle_is_read(tmp_path: Path) -> None:
    theirs = foreign("llama3")
    theirs.model.config.save_pretrained(tmp_path)
    torch.save(theirs.values(), tmp_path / "pytorch_model.bin")
    assert_read(tmp_path, theirs)


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
