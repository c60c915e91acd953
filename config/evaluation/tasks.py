"""``[[tasks]]`` of ``diffusionlm-eval``: one row for each kind, which is a class in a module of its own."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from diffusionlm.evaluation.tasks.cloze import ClozeTask
from diffusionlm.evaluation.tasks.exact_match import ExactMatchTask
from diffusionlm.evaluation.tasks.gsm8k import Gsm8kTask
from diffusionlm.evaluation.tasks.humaneval import HumanEvalTask
from diffusionlm.evaluation.tasks.multiple_choice import MultipleChoiceTask
from diffusionlm.evaluation.tasks.perplexity import PerplexityTask

AnyItemTask = Gsm8kTask | HumanEvalTask | MultipleChoiceTask | ClozeTask | ExactMatchTask
AnyTask = AnyItemTask | PerplexityTask
TaskConfig = Annotated[AnyTask, Field(discriminator="kind")]
TaskInTraining = Annotated[AnyItemTask, Field(discriminator="kind")]
