"""The graph of a pipeline and the configs of its stages are validated before anything runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.pipeline import main
from cli.pipeline.stages import Stage, build_stages, merge_tables
from config.finetune.pipeline import PipelineConfig
from config.load import load_config
from config.train import TrainConfig
from tests.unit.cli.conftest import Fails
from tests.unit.cli.pipeline.conftest import stage_of, train_settings, write_pipeline

Change = Callable[[dict[str, Any]], object]


def plan(values: dict[str, Any]) -> dict[str, Stage]:
    """Stages by name, in the order of execution."""
    config = load_config(PipelineConfig, Path(write_pipeline(values)))
    return {stage.name: stage for stage in build_stages(config)}


def test_settings_are_merged_by_key_and_tables_of_another_kind_replaced() -> None:
    low = {"a": {"x": 1, "y": {"z": 1}}, "o": {"kind": "adamw", "eps": 1}, "l": [1, 2]}
    high = {"a": {"y": {"w": 2}}, "o": {"kind": "lion"}, "l": [3]}
    assert merge_tables(low, high) == {"a": {"x": 1, "y": {"z": 1, "w": 2}}, "o": {"kind": "lion"}, "l": [3]}
    assert merge_tables(low, {"o": {"lr": 2}})["o"] == {"kind": "adamw", "eps": 1, "lr": 2}


def test_stages_run_after_their_input_and_start_from_its_checkpoint(pipeline: dict[str, Any]) -> None:
    """And a config file lies between the common part and the settings."""
    file = {"run": {"directory": "elsewhere", "seed": 5, "device": "cuda"}, "training": {"batch_size": 8}}
    write_pipeline(file, Path("base.toml"))
    stage_of(pipeline, "base")["config"] = "base.toml"
    plans = plan(pipeline)
    assert list(plans) == ["base", "tune", "after", "before"]
    base, tune = plans["base"].config, plans["tune"].config
    assert isinstance(base, TrainConfig) and isinstance(tune, TrainConfig)
    assert (base.run.directory, base.run.seed, base.run.device) == (Path("out/base/run"), 5, "cuda")
    assert base.training.batch_size == 4
    assert tune.run.directory == Path("out/tune/run") and tune.run.device == "cpu"
    assert tune.model.init_from == Path("out/base/run/checkpoints/latest")
    assert tune.model.hidden_size == 16 and tune.training.max_steps == 10
    assert plans["after"].config.model_dump()["model"]["path"] == Path("out/tune/run/checkpoints/latest")
    assert not Path("out").exists()


def test_an_adapter_is_evaluated_as_it_is_and_merged_before_more_training(pipeline: dict[str, Any]) -> None:
    stage_of(pipeline, "tune")["settings"]["lora"] = {"rank": 2}
    pipeline["stages"].append({"name": "merged", "kind": "merge", "from": "tune"})
    pipeline["stages"].append(
        {"name": "more", "kind": "train", "from": "merged", "settings": train_settings(["a.txt"])}
    )
    plans = plan(pipeline)
    checkpoint = Path("out/tune/run/checkpoints/latest")
    assert plans["after"].config.model_dump()["model"]["path"] == checkpoint
    assert plans["merged"].config.model_dump()["source"] == checkpoint
    more = plans["more"].config
    assert isinstance(more, TrainConfig) and more.model.init_from == Path("out/merged/model")


def rename(values: dict[str, Any], stage: str, /, **changes: Any) -> None:
    stage_of(values, stage).update(changes)


def settings(values: dict[str, Any], name: str, section: str, **changes: Any) -> None:
    stage_of(values, name).setdefault("settings", {}).setdefault(section, {}).update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: rename(v, "base", **{"from": "tune"}), "in a circle: tune from base from tune"),
        (lambda v: rename(v, "tune", name="base"), "stages.name: 'base' is given twice"),
        (lambda v: rename(v, "tune", name="a.tmp-b"), "is a name of files that the pipeline writes"),
        (
            lambda v: rename(v, "tune", **{"from": "bass"}),
            'stage "tune": from = "bass" is neither a stage (after, base, tune, before)',
        ),
        (lambda v: rename(v, "tune", **{"from": "before"}), 'a stage of kind "evaluate" has no model'),
        (lambda v: stage_of(v, "before").pop("from"), 'stage "before": from is missing'),
        (
            lambda v: settings(v, "tune", "training", max_stepz=3),
            'stage "tune": training.max_stepz = 3: unknown key (did',
        ),
        (
            lambda v: settings(v, "tune", "model", init_from="x"),
            'init_from is set by the pipeline: name the model in "f',
        ),
        (lambda v: settings(v, "tune", "data", source={"kind": "files", "paths": ["c.txt"]}), "c.txt"),
        (lambda v: rename(v, "tune", checkpoint="ema"), 'stage "base" has no average: set its training.ema_decay'),
        (lambda v: rename(v, "tune", checkpoint="best"), "validation.every_steps to less"),
        (lambda v: rename(v, "tune", kind="rl"), 'kind = "rl" answers prompts, and there are none: add [rl.prompts]'),
    ],
)
def test_mistakes_are_refused_before_the_first_stage(
    change: Change, message: str, pipeline: dict[str, Any], fails: Fails
) -> None:
    values = copy.deepcopy(pipeline)
    change(values)
    assert message in fails(main, "--config", write_pipeline(values))
    assert not list(Path("out").glob("*/stage.json"))
