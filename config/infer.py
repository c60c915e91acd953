"""The whole config of ``diffusionlm-infer``."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from config.base import ConfigPath, NonNegativeInt, PositiveInt, Section, StrTuple
from config.generation import GenerationConfig
from config.runtime import AttentionBackend


class InferModelConfig(Section):
    """``[model]``: what is loaded, and where it runs."""

    path: ConfigPath | None = None
    """A model directory, a checkpoint or a run directory; required, here or as --model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of weights and activations; probabilities are float64 in decoding, and at least float32 anywhere."""
    attention_backend: AttentionBackend = "auto"
    """Implementation of attention. auto: the fastest for device, dtype, length and pattern. eager and sdpa use a dense
    mask. tiled (on a CPU) and flex (on CUDA) skip hidden keys and need generation.cache = "none"."""
    threads: PositiveInt | None = None
    """CPU threads of torch. None: its own choice."""

    def check_cache(self, cache: str | None, key: str) -> None:
        """Raise if the attention backend cannot use the cache that ``key`` of the config requests.

        Raises:
            ValueError: tiled or flex with a cache.
        """
        if self.attention_backend in ("tiled", "flex") and cache not in (None, "none"):
            raise ValueError(
                f'model.attention_backend = "{self.attention_backend}" has no cached form, and {key} = "{cache}": use '
                f'"auto", "eager" or "sdpa", or {key} = "none"'
            )


class InferInputConfig(Section):
    """``[input]``: the requests, answered in this order: prompts, prompts_file, chats, infills. Texts are taken as they
    are; special tokens written in them are ordinary text."""

    prompts: StrTuple = ()
    """Texts to go on from; an empty one samples from nothing."""
    prompts_file: ConfigPath | None = None
    """A file of requests; "-": standard input. Text: one prompt a line. JSON lines: a string, or an object with
    "prompt", "messages" (a chat) or "infill"; its other keys come back with the answer. Blank lines are left out."""
    prompts_format: Literal["text", "jsonl"] | None = None
    """Of prompts_file. None: "jsonl" if its name ends so, else "text"."""
    chats: StrTuple = ()
    """What a user says, each in a chat of its own; the model answers."""
    interactive: bool = False
    """A chat in the terminal, in place of all of these."""
    system: str | None = None
    """What the system says at the beginning of each of `chats`, or of the interactive one. None: the template's own,
    if it has one."""
    chat_template: Literal["chatml", "qwen3", "llama3", "llada"] | None = None
    """How chats are written. None: as the checkpoint's own template has it."""
    infills: StrTuple = ()
    """Texts with holes: [MASK:n] stands for n tokens."""
    seed: NonNegativeInt = 0
    """Of the first request; each further one has the next. Chance enters with temperature > 0 or a random strategy."""
    batch_size: PositiveInt = 16
    """Requests that are decoded together; the answers do not depend on it."""

    @model_validator(mode="after")
    def _check_keys_agree(self) -> Self:
        if self.prompts_format is not None and self.prompts_file is None:
            raise ValueError(f'prompts_format = "{self.prompts_format}" needs prompts_file: add it, or remove this')
        if self.interactive and (self.prompts or self.prompts_file is not None or self.chats or self.infills):
            raise ValueError("interactive takes no prompts, prompts_file, chats or infills: remove them, or this")
        if self.system is not None and not self.chats and not self.interactive:
            raise ValueError(
                "system is for chats, and there are none: add --chat TEXT; "
                'in a prompts_file the system has a message of its own, {"role": "system", ...}'
            )
        return self


class InferOutputConfig(Section):
    """``[output]``: what is printed and written."""

    format: Literal["text", "json"] = "text"
    """text: the texts. json: one JSON object a line for each request."""
    show: bool = False
    """Show the text with its holes after each forward: redrawn in a terminal, one line a forward elsewhere. With
    json or a file it goes to standard error."""
    file: ConfigPath | None = None
    """A new file for the JSON lines, whatever the format, in place of standard output; each is there as soon as its
    batch is done."""
    html: ConfigPath | None = None
    """A page that replays the decoding in a browser, forward by forward; it needs nothing but itself."""


class InferConfig(Section):
    """One call of ``diffusionlm-infer``."""

    model: InferModelConfig = InferModelConfig()
    input: InferInputConfig = InferInputConfig()
    generation: GenerationConfig = GenerationConfig()
    output: InferOutputConfig = InferOutputConfig()

    @model_validator(mode="after")
    def _check_sections_agree(self) -> Self:
        self.model.check_cache(self.generation.cache, "generation.cache")
        if self.input.interactive and self.output != InferOutputConfig():
            raise ValueError("[output] has no effect on an interactive chat: remove its keys, or input.interactive")
        return self
