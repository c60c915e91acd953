"""[objective]: schedules by name, estimators, block lengths; what does not go together is said with the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.base import Section
from config.dump import to_toml
from config.load import ConfigError, load_config
from config.train import TrainConfig
from config.training.objective import (
    BlockDiffusionConfig,
    BlockLengthStage,
    IndependentMasking,
    MaskedDiffusionConfig,
    ObjectiveConfig,
)
from diffusionlm.diffusion.schedules import CleanCosineSchedule, PowerSchedule
from tests.tiny_run import REQUIRED_SECTIONS

LONG_ROWS = REQUIRED_SECTIONS.replace("max_position_embeddings = 16", "max_position_embeddings = 128")


class Config(Section):
    objective: ObjectiveConfig = MaskedDiffusionConfig()


def load(tmp_path: Path, text: str, *overrides: str) -> ObjectiveConfig:
    path = tmp_path / "c.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(Config, path, overrides).objective


BLOCKS = '[objective]\nkind = "block_diffusion"\n'
BERNOULLI = '[objective.estimator]\nkind = "bernoulli"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", MaskedDiffusionConfig()),
        (
            BLOCKS + "stages = [{from_step = 0, block_length = 32}, {from_step = 10, block_length = 4}]\n",
            BlockDiffusionConfig(
                stages=(BlockLengthStage(from_step=0, block_length=32), BlockLengthStage(from_step=10, block_length=4))
            ),
        ),
        (
            BERNOULLI + 'schedule = {kind = "power", exponent = 3.0}\nrange = [0, 0.5]\n',
            MaskedDiffusionConfig(estimator=IndependentMasking(schedule=PowerSchedule(exponent=3.0), range=(0.0, 0.5))),
        ),
    ],
)
def test_toml_round_trip(text: str, expected: ObjectiveConfig, tmp_path: Path) -> None:
    objective = load(tmp_path, text)
    assert objective == expected
    assert load(tmp_path, to_toml(Config(objective=expected))) == expected


def test_on_the_command_line(tmp_path: Path) -> None:
    kind = "objective.estimator.kind=bernoulli"
    for override in ("objective.estimator.schedule=clean_cosine", "objective.estimator.schedule.kind=clean_cosine"):
        assert load(tmp_path, "", "objective.kind=masked_diffusion", kind, override) == MaskedDiffusionConfig(
            estimator=IndependentMasking(schedule=CleanCosineSchedule())
        )
    objective = load(tmp_path, "", "objective.kind=block_diffusion", "objective.block_length=[2, 8]")
    assert objective == BlockDiffusionConfig(block_length=(2, 8))


SHIFTED = "model.logit_alignment=shifted"


@pytest.mark.parametrize(
    ("overrides", "lengths", "final"),
    [
        ([], (None,), None),
        (["objective.kind=next_token", SHIFTED], (1,), 1),
        (["objective.kind=block_diffusion", "objective.block_length=[8, 32, 1]", SHIFTED], (8, 32, 1), 32),
        (
            [
                "objective.kind=block_diffusion",
                "objective.stages=[{from_step=0, block_length=8},{from_step=2, block_length=1}]",
            ],
            (8, 1),
            1,
        ),
    ],
)
def test_block_lengths_of_an_objective(
    overrides: list[str], lengths: tuple[int | None, ...], final: int | None, tmp_path: Path
) -> None:
    (tmp_path / "train.toml").write_text(LONG_ROWS, encoding="utf-8")
    config = load_config(TrainConfig, tmp_path / "train.toml", overrides)
    assert (config.objective.block_lengths, config.objective.final_block_length) == (lengths, final)
    (tmp_path / "again.toml").write_text(to_toml(config), encoding="utf-8")
    assert load_config(TrainConfig, tmp_path / "again.toml") == config


TOKEN_CAUSAL = ["objective.kind=block_diffusion", "objective.block_length=4", "objective.clean_attention=token"]
CLEAN_OUTPUTS = "model.clean_alignment=shifted"


def test_token_causal_text_is_named_by_model_and_objective(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(LONG_ROWS, encoding="utf-8")
    config = load_config(TrainConfig, tmp_path / "train.toml", [*TOKEN_CAUSAL, CLEAN_OUTPUTS])
    assert (config.model.clean_alignment, config.model.noisy_attention) == ("shifted", "block")
    for overrides, message in (
        (TOKEN_CAUSAL, r"needs clean outputs.*set model\.clean_alignment"),
        ([CLEAN_OUTPUTS], r'promises token-causal text.*clean_attention = "token"'),
        ([*TOKEN_CAUSAL[:2], CLEAN_OUTPUTS], "promises token-causal text"),
        (["objective.kind=next_token", SHIFTED, CLEAN_OUTPUTS], "promises token-causal text"),
        ([*TOKEN_CAUSAL, "model.noisy_attention=token"], 'noisy_attention = "token" needs token-causal text'),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(TrainConfig, tmp_path / "train.toml", overrides)
