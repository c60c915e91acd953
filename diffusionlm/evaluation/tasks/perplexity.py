"""The likelihood of a text: nats per token, perplexity and bits per byte."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from config.base import ConfigPath, NonEmptyStr, Section
from config.data import LocalFiles
from config.evaluation.likelihood import EvalDataConfig, LikelihoodConfig, NelboConfig, check_prompt_gap
from diffusionlm.evaluation.tasks.item_task import ScoredTask


class PerplexityTask(Section, ScoredTask):
    """The likelihood of a text: nats per token, perplexity, bits per byte; the same numbers as without a task."""

    kind: Literal["perplexity"] = "perplexity"
    name: NonEmptyStr | None = None
    """Name in tables and files. None: the kind."""
    data: ConfigPath | None = None
    """File, directory or glob of the text, all of which is read. None: text.source says what is read."""
    text: EvalDataConfig = EvalDataConfig()
    """How the text is cut into rows."""
    likelihood: LikelihoodConfig = NelboConfig()
    """How the rows are scored."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.data is None) == (self.text.source is None):
            problem = "names no text" if self.data is None else "names the text in data and in text.source"
            raise ValueError(f"{problem}: set one of data and text.source")
        check_prompt_gap(self.likelihood, self.text_config)
        return self

    @property
    def text_config(self) -> EvalDataConfig:
        """The section ``text``, with the file of ``data`` as its source."""
        if self.data is None:
            return self.text
        return self.text.model_copy(update={"source": LocalFiles(paths=(str(self.data),)), "split": "all"})
