"""The whole config of ``diffusionlm-infer``."""

from __future__ import annotations

from typing import Literal

from config.base import ConfigPath, NonNegativeInt, PositiveInt, Section, StrTuple
from config.generation import GenerationConfig


class InferModelConfig(Section):
    """``[model]``: what is loaded, and where it runs."""

    path: ConfigPath | None = None
    """A model directory, a checkpoint or a run directory; required, here or as --model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of weights and activations; probabilities are float64 in decoding, and at least float32 anywhere."""
    threads: PositiveInt | None = None
    """CPU threads of torch. None: its own choice."""


class InputConfig(Section):
    """``[input]``: the requests. Texts are taken as they are; special tokens written in them are ordinary text."""

    prompts: StrTuple = ()
    """Texts to go on from, decoded together; an empty one samples from nothing."""
    infills: StrTuple = ()
    """Texts with holes, decoded together: [MASK:n] stands for n tokens."""
    seed: NonNegativeInt = 0
    """Of the first request; each further one has the next. Chance enters with temperature > 0 or "random"."""


class OutputConfig(Section):
    """``[output]``: what is printed."""

    format: Literal["text", "json"] = "text"
    """text: the texts. json: one JSON object a line for each request."""
    show: bool = False
    """Show the text with its holes after each forward: redrawn in a terminal, one line a forward elsewhere. With
    json it goes to standard error."""


class InferConfig(Section):
    """One call of ``diffusionlm-infer``."""

    model: InferModelConfig = InferModelConfig()
    input: InputConfig = InputConfig()
    generation: GenerationConfig = GenerationConfig()
    output: OutputConfig = OutputConfig()
