"""The inputs of a run: prompts, chats and infills from the config and from files, and their requests.

All that is checked before the model is loaded is here, and nothing loads torch at import.
"""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic_core import from_json

from config.infer import InferConfig, InferConstraintConfig, InferInputConfig, InferModelConfig
from diffusionlm.checkpoints.adapter_config import read_adapter_config
from diffusionlm.checkpoints.model_files import ModelDescription, check_weight_files, read_model_description
from diffusionlm.data.chat.templates import find_chat_template
from diffusionlm.inference.constraints.compiler import ConstraintCompiler, TokenConstraint
from diffusionlm.inference.request_builder import RequestBuilder
from files.json_files import read_json_object
from files.paths import check_can_write
from files.usage_error import prefix_errors
from tokenizer import ChatTemplate, Tokenizer

if TYPE_CHECKING:
    from diffusionlm.inference.healing import HealedText
    from diffusionlm.inference.requests import PreparedRequest
    from diffusionlm.vision.processor import ImageProcessor

InputKind = Literal["prompt", "chat", "infill"]

NO_TEMPLATE = (
    "the model has no chat template: set one with --set input.chat_template=chatml (qwen3, llama3, llada), or write "
    "the whole text as --prompt"
)
_KEYS: dict[str, InputKind] = {"prompt": "prompt", "messages": "chat", "infill": "infill"}


@dataclass(frozen=True)
class Input:
    """One prompt, chat or infill."""

    kind: InputKind
    text: str = ""
    """Empty for a chat."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Messages of a chat; of an infill those that its text answers, if there are any."""
    location: str = ""
    """File and line, for errors; empty if the input is from the config."""
    folder: Path | None = None
    """Where paths of images in the messages begin."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of its JSON line."""


@dataclass(frozen=True)
class EncodedInput:
    """An input and its request."""

    source: Input
    number: int
    """Number among the inputs of its kind, from 1 on."""
    text: str
    """The text of a prompt or an infill, the rendered template of a chat."""
    num_hidden: int
    """Tokens at the beginning that are not displayed: the prefix of every text of the model, and all of a chat before
    its answer."""
    prepared: PreparedRequest

    @property
    def name(self) -> str:
        """Kind and number for messages, such as ``prompt 1``."""
        return f"{self.source.kind} {self.number}"

    @property
    def token_ids(self) -> list[int]:
        """The prompt, or the canvas of an infill."""
        return self.prepared.token_ids

    @property
    def seed(self) -> int:
        return self.prepared.seed

    @property
    def num_repeated_bytes(self) -> int:
        """Bytes of the end of a prompt, which the first new token repeats."""
        repeated_bytes = self.prepared.options.repeated_bytes
        return 0 if self.source.kind == "infill" else sum(map(len, repeated_bytes))

    def is_new(self, length: int) -> list[bool]:
        """True at the positions that are generated, for a canvas of ``length`` tokens."""
        if self.source.kind == "infill":
            masked_positions = {*self.prepared.masked_positions.tolist()}
            return [position in masked_positions for position in range(length)]
        return [position >= len(self.token_ids) for position in range(length)]


def read_inputs(config: InferInputConfig) -> list[Input]:
    """Read all inputs of a config, in the order of its keys; an interactive chat has none.

    Raises:
        ValueError: there is no input, or a line of the file is invalid (the message names file and line).
        OSError: the file cannot be read.
    """
    if config.interactive:
        if not sys.stdin.isatty():
            raise ValueError(
                "a chat without a text (--chat alone, input.interactive) needs a terminal: use --chat TEXT, or chats "
                "in a file with --prompts FILE.jsonl"
            )
        return []
    inputs = [Input("prompt", text) for text in config.prompts]
    if config.prompts_file is not None:
        inputs += _read_file(config.prompts_file, config.prompts_format)
    system = [] if config.system is None else [{"role": "system", "content": config.system}]
    inputs += [Input("chat", messages=(*system, build_question(text, config.images))) for text in config.chats]
    images = (build_question("", config.images),) if config.images else ()
    inputs += [Input("infill", text, images) for text in config.infills]
    if not inputs:
        raise ValueError(
            'no input: add --prompt "TEXT", --chat "TEXT", --infill "TEXT with [MASK:4]" or --prompts FILE'
        )
    return inputs


def build_question(text: str, images: Sequence[Path]) -> dict[str, Any]:
    """A user message with images before its text."""
    parts = [*({"type": "image", "image": path} for path in images), {"type": "text", "text": text}]
    return {"role": "user", "content": parts if images else text}


def encode_inputs(
    inputs: Sequence[Input], builder: RequestBuilder, seed: int, constraint: TokenConstraint | None = None
) -> list[EncodedInput]:
    """Make the requests of inputs.

    Args:
        seed: of the first input; each further one has the next.
        constraint: on each new text, and on each masked span.

    Raises:
        ValueError: a masked span is invalid, a chat has no template, the template rejects it, an input does not fit the
            model, or no text fits the constraint.
    """
    counts = dict.fromkeys(_KEYS.values(), 0)
    encoded_inputs = []
    for index, source in enumerate(inputs):
        counts[source.kind] += 1
        with prefix_errors(source.location):
            text, encoded, num_hidden = _encode(source, builder)
        label = source.location or f"{source.kind} {counts[source.kind]} of {len(inputs)}"
        constraints = [constraint] * max(1, len(encoded.options.span_lengths)) if constraint is not None else []
        prepared = builder.prepare(encoded, seed + index, label, constraints=constraints)
        encoded_inputs.append(EncodedInput(source, counts[source.kind], text, num_hidden, prepared))
    return encoded_inputs


def _encode(source: Input, builder: RequestBuilder) -> tuple[str, HealedText, int]:
    """The text of an input, its encoding, and how many of its tokens are not displayed."""
    from diffusionlm.inference.healing import split_infill
    from diffusionlm.vision.messages import split_images
    from tokenizer import render_chat

    num_prefix_ids = len(builder.prefix_ids)
    if source.kind == "prompt":
        return source.text, builder.encode_text(source.text), num_prefix_ids
    if not source.messages:
        return source.text, builder.encode_spans(split_infill(source.text)), num_prefix_ids
    if builder.template is None:
        raise ValueError(NO_TEMPLATE)
    chat = builder.encode_chat(source.messages, folder=source.folder)
    if source.kind == "infill":
        return source.text, builder.encode_spans(split_infill(source.text), chat), len(chat.token_ids)
    messages, _ = split_images(source.messages, source.folder)
    return render_chat(builder.template, messages, add_generation_prompt=True), chat, len(chat.token_ids)


def _read_file(path: Path, file_format: str | None) -> list[Input]:
    is_standard = str(path) == "-"
    name = "standard input" if is_standard else str(path)
    is_json = path.suffix == ".jsonl" if file_format is None else file_format == "jsonl"
    inputs: list[Input] = []
    content = (sys.stdin.buffer.read() if is_standard else path.read_bytes()).removeprefix(codecs.BOM_UTF8)
    for number, line_bytes in enumerate(content.replace(b"\r\n", b"\n").split(b"\n"), 1):
        location = f"{name}:{number}"
        with prefix_errors(location):
            try:
                line = line_bytes.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"is not UTF-8 (byte {error.start + 1} of the line); convert the file") from None
            if line.strip():
                source = _parse_json(line) if is_json else Input("prompt", line)
                inputs.append(replace(source, location=location, folder=None if is_standard else path.parent))
    if not inputs:
        raise ValueError(f"{name}: has no prompts: write one per line")
    return inputs


def _parse_json(line: str) -> Input:
    """The input of a line of a .jsonl file."""
    try:
        value = from_json(line, allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from None
    values: Any = {"prompt": value} if isinstance(value, str) else value
    names = [key for key in _KEYS if isinstance(values, dict) and key in values]
    if len(names) != 1 and names != ["messages", "infill"]:
        raise ValueError(
            f'is {line[:60]}: expected a string, or an object with one of "prompt", "messages" and "infill", or with '
            "the last two"
        )
    messages, text = values.pop("messages", ()), values.pop(names[-1], "")
    if "messages" in names and not _are_messages(messages):
        raise ValueError(
            f'"messages" is {json.dumps(messages)[:60]}: expected a list of objects such as '
            '{"role": "user", "content": "..."}'
        )
    if not isinstance(text, str):
        raise ValueError(f'"{names[-1]}" is {json.dumps(text)[:60]}: expected a string')
    return Input(_KEYS[names[-1]], text, tuple(messages), extra=values)


def _are_messages(value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in value)


def prepare_run(config: InferConfig) -> tuple[RequestBuilder, list[EncodedInput]]:
    """Check the output paths, the inputs, the files of the model, and that inputs and settings fit it.

    Returns:
        What makes requests, and the requests of the inputs; none for an interactive chat.

    Raises:
        ValueError: one of them is wrong; names the key, the argument, or the file and line.
        OSError: the file of inputs cannot be read.
    """
    output = config.output
    for key, path in (("file", output.file), ("html", output.html)):
        if path is not None and path.is_dir():
            raise ValueError(f"output.{key} = {path} is a directory: set the path of a file")
        if path is not None:
            check_can_write(path.parent, f"output.{key} = {path}")
    if output.file is not None and output.file.exists() and output.file.stat().st_size > 0:
        raise ValueError(f"output.file = {output.file} contains answers already: set a new path or remove the file")
    if output.file is not None and output.file == output.html:
        raise ValueError(f"output.file and output.html are both {output.file}: set two paths")
    inputs = read_inputs(config.input)
    model, template, processor = describe_model(config.model, config.input.chat_template)
    if config.input.interactive and template is None:
        raise ValueError(NO_TEMPLATE)
    healing = config.input.token_healing
    builder = RequestBuilder.from_config(
        model.tokenizer, model.config, config.generation, template, token_healing=healing, processor=processor
    )
    if config.input.interactive and config.input.images:
        builder.encode_chat([build_question("", config.input.images)])  # refuses what cannot be read
    constraint = compile_constraint(config.constraint, model.tokenizer)
    encoded_inputs = encode_inputs(inputs, builder, config.input.seed, constraint)
    return builder, encoded_inputs


def describe_model(
    config: InferModelConfig, chat_template: str | None, adapters: Sequence[Path] = ()
) -> tuple[ModelDescription, ChatTemplate | None, ImageProcessor | None]:
    """Read the files of a model and its adapters, except the weights; its chat template, or the one of a name or a
    file; and its image processor, if it reads images.

    Raises:
        ValueError: a file is missing or wrong.
    """
    from diffusionlm.vision.processor import load_processor

    assert config.path is not None
    model = read_model_description(config.path)
    check_weight_files(config.path)
    for path in (*adapters, *([] if config.adapter is None else [config.adapter])):
        read_adapter_config(path)
    processor = None if model.config.vision is None else load_processor(model.directory)
    if chat_template is None:
        return model, model.tokenizer.chat_template, processor
    with prefix_errors(f'chat_template = "{chat_template}"'):
        return model, find_chat_template(chat_template, model.tokenizer), processor


def compile_constraint(config: InferConstraintConfig, tokenizer: Tokenizer) -> TokenConstraint | None:
    """The constraint on all new texts; None: there is none.

    Raises:
        ValueError: it is wrong; names the key.
    """
    if not config.is_set:
        return None
    compiler = ConstraintCompiler(tokenizer)
    if config.json_schema is not None:
        schema = read_json_object(config.json_schema)
        with prefix_errors(str(config.json_schema)):
            return compiler.compile_json_schema(schema)
    with prefix_errors(f"constraint.{'choices' if config.regex is None else 'regex'}"):
        return (
            compiler.compile_choices(config.choices) if config.regex is None else compiler.compile_regex(config.regex)
        )
