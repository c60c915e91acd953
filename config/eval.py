"""Config of ``diffusionlm-eval``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from config.base import ConfigPath, NonEmptyStr, Section, TupleOf, check_distinct
from config.evaluation.likelihood import EvalDataConfig, LikelihoodConfig, NelboConfig, check_prompt_gap
from config.evaluation.tasks import TaskConfig
from config.infer import InferModelConfig


class EvalOutputConfig(Section):
    """``[output]``: format of the printed result."""

    format: Literal["text", "json"] = "text"
    """text: a table. json: one object on one line."""
    file: ConfigPath | None = None
    """Also write the JSON object to this file; an existing one is replaced."""
    directory: ConfigPath | None = None
    """Folder of the results of tasks, one line for each answer; an interrupted evaluation is continued from them. None:
    beside `file`, as NAME_tasks."""


class VariantConfig(Section):
    """A model, and settings that replace those of the tasks."""

    name: NonEmptyStr | None = None
    """Name in tables and files. None: what distinguishes it from the others."""
    model: ConfigPath | None = None
    """Model, as model.path. None: that of [model]."""
    adapter: ConfigPath | None = None
    """PEFT adapter, as model.adapter. None: that of [model], if the model is, too."""
    prompt: dict[str, Any] = Field(default_factory=dict)
    """Keys of `prompt` of the tasks."""
    generation: dict[str, Any] = Field(default_factory=dict)
    """Keys of `generation` of the tasks that decode; others keep their settings."""
    likelihood: dict[str, Any] = Field(default_factory=dict)
    """Keys of `likelihood` of the tasks that have it."""


class EvalConfig(Section):
    """All sections of ``diffusionlm-eval``: tasks, or the likelihood of a text."""

    model: InferModelConfig = InferModelConfig()
    data: EvalDataConfig = EvalDataConfig()
    likelihood: LikelihoodConfig = NelboConfig()
    tasks: TupleOf[TaskConfig] = ()
    """`[[tasks]]`: what the model is evaluated on, each with a `kind`."""
    variants: TupleOf[VariantConfig] = ()
    """`[[variants]]`: models and settings that are compared on the same items. Empty: [model] alone."""
    vary: Mapping[str, Annotated[TupleOf[Any], Field(min_length=1)]] = Field(default_factory=dict)
    """Keys of tasks with the values that are compared, such as {"generation.confidence_threshold" = [0.8, 0.9]}; each
    variant is evaluated with each combination."""
    output: EvalOutputConfig = EvalOutputConfig()

    @property
    def results_directory(self) -> Path | None:
        """Folder of the results of tasks, if there is one."""
        file = self.output.file
        return self.output.directory or (None if file is None else file.with_name(f"{file.stem}_tasks"))

    @model_validator(mode="after")
    def _check_tasks(self) -> Self:
        if not self.tasks:
            for key in ("variants", "vary"):
                if getattr(self, key):
                    raise ValueError(f"{key} has no effect without tasks: add [[tasks]], or remove it")
            if self.output.directory is not None:
                raise ValueError("output.directory has no effect without tasks: use output.file, or add [[tasks]]")
        elif self.data.source is not None:
            raise ValueError('[data] is evaluated without tasks: make it a task of kind = "perplexity", or remove it')
        check_prompt_gap(self.likelihood, self.data)
        check_distinct({f"vary.{key}": values for key, values in self.vary.items()})
        check_distinct({"the names of tasks": [task.name or task.kind for task in self.tasks]})
        return self
