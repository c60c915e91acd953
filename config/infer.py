"""The config of ``diffusionlm-infer``."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from config.base import ConfigPath, NonNegativeInt, PositiveInt, Section, TupleOf
from config.generation import GenerationConfig
from config.training.runtime import AttentionBackend


class InferModelConfig(Section):
    """``[model]``: the model, its device and its dtype."""

    path: ConfigPath | None = None
    """A model directory, a checkpoint, a run directory, or a model of the Hugging Face Hub (org/name or
    org/name@revision); required, here or as --model."""
    adapter: ConfigPath | None = None
    """Directory of a PEFT adapter (LoRA) for the model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if it is available."""
    dtype: Literal["auto", "float32", "float64", "bfloat16"] = "auto"
    """Dtype of weights and activations. auto: bfloat16 on a GPU that multiplies it in hardware, else float32.
    Probabilities are float64 in decoding, and at least float32 elsewhere."""
    attention_backend: AttentionBackend = "auto"
    """Implementation of attention. auto: the fastest for device, dtype, length and pattern. eager and sdpa use a dense
    mask. tiled (on a CPU) and flex (on CUDA) skip hidden keys and need generation.cache = "none"."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """auto: on a GPU launch the kernels of a decoding forward at once where its kind and size allow it."""
    threads: PositiveInt | None = None
    """CPU threads of torch. None: the default of torch."""

    @model_validator(mode="after")
    def _check_adapter(self) -> Self:
        if self.adapter is not None and self.path is None:
            raise ValueError("adapter is of no use without path: name its model")
        return self


class InferInputConfig(Section):
    """``[input]``: the inputs, decoded in this order: prompts, prompts_file, chats, infills. Special tokens written in
    them are ordinary text."""

    prompts: TupleOf[str] = ()
    """Texts to continue; an empty text is valid."""
    prompts_file: ConfigPath | None = None
    """A file of inputs; "-": standard input. Text: one prompt per line. JSON lines: a string, or an object with
    "prompt", "messages" (a chat) or "infill", or with both of these: an answer to the chat, with masked spans. Its
    other keys are copied to the answer of the model. Blank lines are skipped."""
    prompts_format: Literal["text", "jsonl"] | None = None
    """Format of prompts_file. None: "jsonl" if its name ends in .jsonl, else "text"."""
    chats: TupleOf[str] = ()
    """User messages, each in a chat of its own, which the model answers."""
    images: TupleOf[ConfigPath] = ()
    """Image files that precede the text of each of `chats` or, in the interactive one, of the first message. With
    `infills` each text is the answer to these images. In prompts_file, content parts of a message name images: {"type":
    "image", "image": "PATH"}, a file below its folder."""
    interactive: bool = False
    """Chat in the terminal, instead of all other inputs."""
    system: str | None = None
    """System message of each of `chats`, or of the interactive one. None: the template's default, if it has one."""
    chat_template: Literal["chatml", "qwen3", "llama3", "llada"] | None = None
    """Chat template. None: the checkpoint's own."""
    infills: TupleOf[str] = ()
    """Texts with masked spans: [MASK:n] stands for n tokens to fill in."""
    token_healing: bool = True
    """Take back the last token of a prompt, or the space before a masked span, and let the first new token begin with
    its text: "def " can go on with the token " main". The text stays as it is. Not for chats."""
    seed: NonNegativeInt = 0
    """Seed of the first input; each further one has the next. It has an effect with temperature > 0 or a random
    strategy."""
    batch_size: PositiveInt = 16
    """Inputs that are decoded together; the answers do not depend on it."""

    @model_validator(mode="after")
    def _check_keys_agree(self) -> Self:
        if self.prompts_format is not None and self.prompts_file is None:
            raise ValueError(f'prompts_format = "{self.prompts_format}" needs prompts_file: add it, or remove this')
        if self.interactive and (self.prompts or self.prompts_file is not None or self.chats or self.infills):
            raise ValueError("interactive takes no prompts, prompts_file, chats or infills: remove them, or this")
        if self.images and not (self.chats or self.infills or self.interactive):
            raise ValueError(
                "images (--image) belong to a chat or an infill: add --chat TEXT, or --chat alone for a chat in the "
                "terminal"
            )
        if self.system is not None and not self.chats and not self.interactive:
            raise ValueError(
                "system has no effect without chats: add --chat TEXT; in a prompts_file write a message "
                '{"role": "system", ...}'
            )
        return self


class InferConstraintConfig(Section):
    """``[constraint]``: what the new text of each prompt and chat, and the text of each masked span, has to be. At most
    one key; none: any text."""

    choices: TupleOf[str] = ()
    """One of these texts."""
    regex: str | None = None
    """A text that this regular expression matches from beginning to end."""
    json_schema: ConfigPath | None = None
    """A file with a JSON schema, of which the text is a value."""

    @property
    def is_set(self) -> bool:
        return self != InferConstraintConfig()

    @model_validator(mode="after")
    def _check_keys_agree(self) -> Self:
        keys = [key for key in ("choices", "regex", "json_schema") if getattr(self, key) not in ((), None)]
        if len(keys) > 1:
            raise ValueError(f"{' and '.join(keys)} exclude each other: keep one of them")
        return self


class InferOutputConfig(Section):
    """``[output]``: the format and the files of the answers."""

    format: Literal["text", "json"] = "text"
    """text: the texts. json: one JSON object per input, one per line."""
    show: bool = False
    """Show the text with its masks after each forward: redrawn in a terminal, else one line per forward. With json or a
    file it is printed to standard error."""
    file: ConfigPath | None = None
    """Write JSON lines to this new file instead of standard output, after each batch."""
    html: ConfigPath | None = None
    """Write a self-contained page that replays the decoding in a browser, forward by forward."""


class InferConfig(Section):
    """The config of one call of ``diffusionlm-infer``."""

    model: InferModelConfig = InferModelConfig()
    input: InferInputConfig = InferInputConfig()
    generation: GenerationConfig = GenerationConfig()
    constraint: InferConstraintConfig = InferConstraintConfig()
    output: InferOutputConfig = InferOutputConfig()

    @model_validator(mode="after")
    def _check_sections_agree(self) -> Self:
        if self.input.interactive and self.output != InferOutputConfig():
            raise ValueError("[output] has no effect on an interactive chat: remove its keys, or input.interactive")
        if self.input.interactive and self.constraint.is_set:
            raise ValueError("[constraint] has no effect on an interactive chat: remove its key, or input.interactive")
        return self
