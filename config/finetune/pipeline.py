"""The whole config of ``diffusionlm-pipeline``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from config.base import ConfigPath, NonEmptyStr, Section, TupleOf, check_distinct

Settings = dict[str, Any]
"""Tables and keys of a command's config."""

StageKind = Literal["train", "sft", "rl", "merge", "export", "evaluate", "sample"]

CheckpointChoice = Literal["last", "best", "ema"]

MARKDOWN, PAGE = REPORTS = "report.md", "report.html"
"""The report, beside the directories of the stages."""


def _check_stage_name(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name) is None:
        raise ValueError("names a directory: use letters, digits, -, _ and .")
    if name in REPORTS or ".tmp-" in name:
        raise ValueError("is a name of files that the pipeline writes: use another name")
    return name


class CommonSettings(Section):
    """``[common]``: settings that stages share. Those of a stage win."""

    train: Settings = Field(default_factory=dict)
    """Sections of diffusionlm-train, for the stages of kinds train, sft and rl."""
    evaluate: Settings = Field(default_factory=dict)
    """Sections of diffusionlm-eval, for the stages of kind evaluate."""
    sample: Settings = Field(default_factory=dict)
    """Sections of diffusionlm-infer, for the stages of kind sample."""
    serve: Settings = Field(default_factory=dict)
    """Sections of diffusionlm-serve, for the server of --serve."""


class StageConfig(Section):
    """``[[stages]]``: one step of the pipeline, which runs a command in a directory of its own."""

    name: Annotated[NonEmptyStr, AfterValidator(_check_stage_name)]
    """Name, and name of its directory."""
    kind: StageKind
    """train: diffusionlm-train. sft: the same, with a source of chats. rl: diffusionlm-rl. merge, export:
    diffusionlm-convert, with the adapter of the model merged, or without one. evaluate: diffusionlm-eval. sample:
    diffusionlm-infer."""
    model_config = ConfigDict(serialize_by_alias=True)

    input: NonEmptyStr | None = Field(default=None, alias="from")
    """Stage whose model this one starts from, converts, evaluates or samples; or a model: a directory or org/name on
    the Hub. None: random weights, in a training stage."""
    checkpoint: CheckpointChoice = "last"
    """Checkpoint of the training stage in `from`. last: that of the last step (with training.ema_decay, its averaged
    weights). best: that with the lowest validation bound during the run. ema: as last, and an error without
    training.ema_decay."""
    config: ConfigPath | None = None
    """Config file of the command, as its --config."""
    settings: Settings = Field(default_factory=dict)
    """Tables and keys of the command's config, which win over those of `config` and of [common]."""


class PipelineConfig(Section):
    """The whole config of ``diffusionlm-pipeline``. Paths are relative to the working directory."""

    directory: ConfigPath
    """Directory of the pipeline: a directory for each stage, and the report."""
    common: CommonSettings = CommonSettings()
    stages: Annotated[TupleOf[StageConfig], Field(min_length=1)]
    """The stages. They run in this order, but each after the stage in its `from`."""

    @model_validator(mode="after")
    def _check_graph(self) -> Self:
        check_distinct({"stages.name": [stage.name for stage in self.stages]})
        _ = self.ordered_stages
        return self

    @property
    def ordered_stages(self) -> list[StageConfig]:
        """The stages in the order of their execution.

        Raises:
            ValueError: stages start from each other in a circle; names them.
        """
        by_name = {stage.name: stage for stage in self.stages}
        order: dict[str, StageConfig] = {}
        for stage in self.stages:
            chain: list[StageConfig] = []
            needed: StageConfig | None = stage
            while needed is not None and needed.name not in order:
                if needed in chain:
                    circle = [link.name for link in chain[chain.index(needed) :]]
                    raise ValueError(
                        f"stages start from each other in a circle: {' from '.join([*circle, needed.name])}"
                    )
                chain.append(needed)
                needed = by_name.get(needed.input or "")
            order |= {link.name: link for link in reversed(chain)}
        return list(order.values())
