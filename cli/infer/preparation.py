"""Everything of a call that is checked before the model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cli.infer.answers import check_output_paths
from cli.infer.inputs import EncodedInput, Input, encode_inputs, read_inputs, require_template
from config.infer import InferConfig, InferConstraintConfig
from config.model import ModelConfig
from diffusionlm.checkpoints.adapter_config import read_adapter_config
from diffusionlm.checkpoints.model_files import ModelDescription, check_weight_files, read_model_description
from diffusionlm.inference.constraints.compiler import ConstraintCompiler, TokenConstraint
from diffusionlm.inference.request_builder import RequestBuilder
from files.json_files import read_json_object
from tokenizer import CHAT_TEMPLATES, ChatTemplate, Tokenizer, load_chat_template


@dataclass(frozen=True)
class PreparedRun:
    """A call whose inputs fit the model and the settings."""

    builder: RequestBuilder
    inputs: tuple[EncodedInput, ...] = ()
    """Empty for an interactive chat."""


def prepare_run(config: InferConfig) -> PreparedRun:
    """Check the output paths, the inputs, the files of the model, and that inputs and settings fit it.

    Raises:
        ValueError: one of them is wrong; names the key, the argument, or the file and line.
        OSError: the file of inputs cannot be read.
    """
    assert config.model.path is not None
    check_output_paths(config.output)
    inputs = read_inputs(config.input)
    model = read_model_description(config.model.path)
    has_chats = config.input.interactive or any(item.kind == "chat" for item in inputs)
    template = require_template(_find_template(config, model)) if has_chats else None
    run = prepare_inputs(inputs, model.tokenizer, model.config, config, template)
    check_weight_files(config.model.path)
    if config.model.adapter is not None:
        read_adapter_config(config.model.adapter)
    return run


def _find_template(config: InferConfig, model: ModelDescription) -> ChatTemplate | None:
    """The chat template of the config, else of the given directory, else of its checkpoint."""
    if config.input.chat_template is not None:
        return CHAT_TEMPLATES[config.input.chat_template]
    assert config.model.path is not None
    return load_chat_template(config.model.path) or load_chat_template(model.directory)


def prepare_inputs(
    inputs: Sequence[Input],
    tokenizer: Tokenizer,
    model: ModelConfig,
    config: InferConfig,
    template: ChatTemplate | None = None,
) -> PreparedRun:
    """Encode the inputs and check them against the model and the settings.

    Raises:
        ValueError: an input does not fit the model, a masked span cannot be parsed, the template rejects a chat, the
            settings do not fit the model, or the constraint is wrong or does not fit an input.
    """
    builder = RequestBuilder.from_config(
        tokenizer, model, config.generation, template, token_healing=config.input.token_healing
    )
    constraint = compile_constraint(config.constraint, tokenizer)
    return PreparedRun(builder, tuple(encode_inputs(inputs, builder, config.input.seed, constraint)))


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
        try:
            return compiler.compile_json_schema(schema)
        except ValueError as error:
            raise ValueError(f"{config.json_schema}: {error}") from None
    try:
        if config.regex is not None:
            return compiler.compile_regex(config.regex)
        return compiler.compile_choices(config.choices)
    except ValueError as error:
        raise ValueError(f"constraint.{'choices' if config.regex is None else 'regex'}: {error}") from None
