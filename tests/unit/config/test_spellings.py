"""Keys of older versions and of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from config.base import Section
from config.bench.training import BenchTrainConfig
from config.data import DataConfig
from config.load import ConfigError, load_config
from config.serving.server import ServeConfig
from config.spellings import FOREIGN_KEYS, RENAMED
from config.train import TrainConfig
from config.training.objective import MaskedDiffusionConfig, ObjectiveConfig

RESOURCES = Path(__file__).parents[3] / "config" / "resources"


class ConfigOfObjective(Section):
    objective: ObjectiveConfig = MaskedDiffusionConfig()


def load_objective(tmp_path: Path, text: str, *overrides: str) -> dict[str, Any]:
    path = tmp_path / "train.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(ConfigOfObjective, path, overrides).objective.model_dump()


@pytest.mark.parametrize(
    ("kind", "loss", "expected"),
    [
        ("masked_diffusion", "guidelines", ("rows", 0.0, None)),
        ("masked_diffusion", "soft_ce", ("rows", 0.1, None)),
        ("masked_diffusion", "masked_mean", ("masked", 0.0, None)),
        ("block_diffusion", "dllm", ("rows", 0.0, "uniform")),
    ],
)
def test_old_names_of_losses_mean_the_same(kind: str, loss: str, expected: Any, tmp_path: Path) -> None:
    length = "block_length = 4\n" if kind == "block_diffusion" else ""
    names = ("normalizer", "label_smoothing")
    in_file = load_objective(tmp_path, f'[objective]\nkind = "{kind}"\n{length}loss = "{loss}"\n')
    overridden = load_objective(tmp_path, f'[objective]\nkind = "{kind}"\n{length}', f"objective.loss={loss}")
    assert in_file == overridden
    assert (*(in_file[name] for name in names), in_file["estimator"]["weight"]) == expected


def test_both_spellings_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"objective\.loss: is the old name of objective\.normalizer: remove one"):
        load_objective(tmp_path, '[objective]\nloss = "guidelines"\nnormalizer = "targets"\n')
    with pytest.raises(ConfigError, match=r"objective\.estimator"):
        load_objective(tmp_path, '[objective]\nkind = "block_diffusion"\nloss = "dllm"\nestimator = "counts"\n')
    with pytest.raises(ConfigError, match='expected "targets", "rows"'):
        load_objective(tmp_path, '[objective]\nnormalizer = "dllm"\n')


def test_old_keys_are_accepted() -> None:
    assert not load_config(BenchTrainConfig, RESOURCES / "bench_train.toml", ["bench.details=false"]).bench.memory
    assert load_config(ServeConfig, None, ["serve.max_rows=7"]).serve.max_num_batched_tokens == 7
    assert load_config(ServeConfig, None, ["serve.max_holes=7"]).serve.max_masked_spans == 7
    keys = {"bench.details", "objective.loss", "serve.max_holes", "serve.max_rows"}
    assert {row.key for row in RENAMED} == {*keys, "fill", "objective.fill_weight", "objective.beta"}


def test_the_old_strength_of_the_reference_is_that_of_the_loss(tmp_path: Path) -> None:
    preference = '[objective]\nkind = "preference"\n'
    for text, overrides in ((preference + "beta = 0.3\n", []), (preference, ["objective.beta=0.3"])):
        assert load_objective(tmp_path, text, *overrides)["loss"] == {"kind": "dpo", "beta": 0.3}
    named = preference + 'loss = "simpo"\n'
    assert load_objective(tmp_path, named)["loss"] == {"kind": "simpo", "beta": 2.0, "gamma_beta_ratio": 0.5}
    with pytest.raises(ConfigError, match=r"objective\.beta: is the old name of objective\.loss\.beta: write obj"):
        load_objective(tmp_path, named + "beta = 2.5\n")


def test_old_keys_of_chats_are_accepted_in_every_source(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    source = 'kind = "files", paths = ["x"], chat = { fill = "length:9" }'
    path.write_text(f'rows = "padded"\nmixture = [{{ weight = 1.0, source = {{ {source} }} }}]\n', encoding="utf-8")
    assert load_config(DataConfig, path).chats[0].eos_padding == "length:9"
    (overridden,) = load_config(DataConfig, path, ["mixture.0.source.chat.fill=none"]).chats
    assert overridden.eos_padding == "none"
    with pytest.raises(
        ConfigError,
        match=r"mixture\.0\.source\.chat\.fill.* is the old name of mixture\.0\.source\.chat\.eos_padding: rem",
    ):
        load_config(DataConfig, path, ["mixture.0.source.chat.fill=none", "mixture.0.source.chat.eos_padding=block"])
    assert load_objective(tmp_path, "[objective]\nfill_weight = 0.5\n")["eos_padding_weight"] == 0.5


@pytest.mark.parametrize("key", sorted(FOREIGN_KEYS))
def test_keys_of_relatives_are_answered(key: str, tmp_path: Path) -> None:
    section, _, name = key.rpartition(".")
    path = tmp_path / "train.toml"
    path.write_text(f"[{section}]\n{name} = 1\n" if section else f"[{name}]\nx = 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not a valid TrainConfig") as caught:
        load_config(TrainConfig, path)
    assert FOREIGN_KEYS[key] in str(caught.value)
