"""What a likelihood evaluation reads and how it scores, checked before the model is loaded. No torch."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from config.data import DataConfig, LocalFiles
from config.eval import EvalConfig
from config.evaluation.text import EvalDataConfig, NelboConfig, SamplerLikelihoodConfig
from config.generation import GenerationConfig
from config.model import ModelConfig
from diffusionlm.checkpoints.adapter_config import read_adapter_config
from diffusionlm.checkpoints.model_files import ModelDescription, check_weight_files, read_model_description
from diffusionlm.data.packing import Row
from diffusionlm.data.pipeline import MixtureComponent, build_row_reader, open_components
from diffusionlm.data.reader import ResumableReader
from diffusionlm.inference.settings import DecodingSettings, resolve_settings
from diffusionlm.inference.strategies import STRATEGIES
from files.json_files import read_text

MAX_DEFAULT_ROW_LENGTH = 1_024


@dataclass(frozen=True)
class EvaluationPlan:
    """An evaluation whose config fits the model, with its text opened but not read."""

    config: EvalConfig
    model: ModelDescription
    components: list[MixtureComponent]
    reader: ResumableReader[Row]
    row_length: int
    block_length: int | None
    """Tokens per block of block-causal attention; None: bidirectional."""
    method: str
    """See `LikelihoodResult`."""


def plan_evaluation(config: EvalConfig) -> EvaluationPlan:
    """Check the config against the model, and open the text.

    Raises:
        ValueError: the model, its tokenizer or the text is missing, the rows do not fit the model, or the model does
            not support this kind of likelihood.
    """
    if config.model.path is None or config.data.source is None:
        raise ValueError("model.path and data.source are required")
    model = read_model_description(config.model.path)
    for directory in (model.directory, config.model.adapter):
        check_trained_attention(directory)
    block_length, method = resolve_method(config.likelihood, model.config)
    data_config = build_data_config(config.data, model.config)
    components = open_components(data_config, "validation" if config.data.split == "validation" else "train")
    row_length = _resolve_row_length(config.data, model.config)
    reader = build_row_reader(
        components,
        data_config,
        model.tokenizer,
        row_length,
        config.data.seed,
        repeat=False,
        block_length=block_length,
    )
    if isinstance(config.likelihood, NelboConfig) and config.likelihood.prompt_gap:
        check_prompt_gap(config.data, components)
    check_weight_files(config.model.path)
    if config.model.adapter is not None:
        read_adapter_config(config.model.adapter)
    return EvaluationPlan(config, model, components, reader, row_length, block_length, method)


def check_trained_attention(directory: Path | None) -> None:
    """Check that a run trained its model with an attention that likelihoods are computed with.

    Args:
        directory: of a model or an adapter. Its config.toml, if there is one, is that of the run.

    Raises:
        ValueError: it was trained with another attention.
    """
    path = None if directory is None else directory / "config.toml"
    if path is None or not path.is_file():
        return
    try:
        objective = tomllib.loads(read_text(path)).get("objective", {})
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: is no TOML ({error})") from error
    if objective.get("attention") == "prompt_and_own_block" or objective.get("attention_bias") is not None:
        name = "attention_bias" if objective.get("attention_bias") is not None else "attention"
        raise ValueError(
            f'{path}: the model was trained with objective.{name} = "{objective[name]}", and [likelihood] has no form '
            'for it: read the validation of the run, or measure answers with a task of kind = "exact_match"'
        )


def check_prompt_gap(config: EvalDataConfig, components: list[MixtureComponent]) -> None:
    """Check that each row is a conversation.

    Raises:
        ValueError: it is not.
    """
    if components[0].chat is None:
        raise ValueError("likelihood.prompt_gap = true needs conversations: set data.source.chat, or remove it")
    if config.rows != "padded":
        raise ValueError(
            f'likelihood.prompt_gap = true needs rows of one conversation, and data.rows = "{config.rows}": set '
            '"padded"'
        )


def resolve_method(config: NelboConfig | SamplerLikelihoodConfig, model: ModelConfig) -> tuple[int | None, str]:
    """Tokens per block of block-causal attention (None: bidirectional), and the name of the method.

    Raises:
        ValueError: the model is autoregressive and the config is not, or the model needs a mask token and has none.
    """
    match config:
        case SamplerLikelihoodConfig():
            key = "likelihood.generation"
            settings = resolve_settings(config.generation, model)
            check_exact_likelihood(settings)
            block_length = settings.block_causal_length
            method = f"exact, {settings.strategy.name} sampler"
        case NelboConfig():
            key = "likelihood"
            block_length = None if config.bidirectional else config.block_length or model.block_length
            method = "bound, bidirectional" if block_length is None else f"bound, blocks of {block_length}"
            if block_length == 1:
                method = f"exact, {'next token' if model.logit_alignment == 'shifted' else 'block length 1'}"
    if model.is_autoregressive and block_length != 1:
        problem = "bidirectional attention" if block_length is None else f"block_length = {block_length}"
        raise ValueError(
            f"{key}: {problem} does not fit an autoregressive model, which predicts the next token: remove "
            f"block_length and attention from [{key}]"
        )
    if block_length != 1 or model.logit_alignment != "shifted":
        _ = model.required_mask_token_id
    return block_length, method


def check_exact_likelihood(settings: DecodingSettings) -> None:
    """Check that a sampler has an exact likelihood.

    Raises:
        ValueError: its order is random, its temperature is not 1 (or 0, read as 1), or it changes the model's
            distributions; names the key.
    """
    config, strategy = settings.config, settings.strategy
    if not strategy.has_exact_likelihood:
        names = [name for name, strategy_class in STRATEGIES.items() if strategy_class().has_exact_likelihood]
        default_options = type(strategy)().model_dump()
        options = [f"{key} = {value}" for key, value in strategy.model_dump().items() if value != default_options[key]]
        cause = " with ".join([f'remasking_strategy = "{strategy.name}"', *options])
        raise ValueError(
            f"{cause} has no exact likelihood: its order depends on randomness or it remasks; choose one of "
            f"{', '.join(names)}, with default options"
        )
    if config.attention == "prompt_and_own_block" or config.attention_bias is not None:
        raise ValueError("generation: attention_bias and prompt_and_own_block have no sampler likelihood: remove them")
    if config.temperature not in (0.0, 1.0):
        raise ValueError(f"temperature = {config.temperature}: the likelihood is defined for temperature 1: remove it")
    defaults = GenerationConfig()
    for name in ("top_k", "top_p", "suppress_token_ids", "defer_token_ids", "cfg_scale", "canvas"):
        value = getattr(config, name)
        if value != getattr(defaults, name):
            raise ValueError(
                f"{name} = {value} changes the sampler's distributions, but the likelihood is that of the model: "
                "remove it"
            )
    if config.cache in ("prefix", "dual"):
        raise ValueError(
            f'cache = "{config.cache}" approximates the distributions, but the likelihood is that of the model: '
            "remove it"
        )


def build_data_config(config: EvalDataConfig, model: ModelConfig) -> DataConfig:
    """The ``[data]`` section of a training run with these rows."""
    source = config.source
    if config.split == "all":
        assert isinstance(source, LocalFiles)
        # With validation files of its own, a source uses all of its `paths` for training.
        source = source.model_copy(update={"validation_paths": source.paths})
    return DataConfig(
        source=source,
        rows=config.rows,
        begin_with_eos=model.begin_with_eos if config.begin_with_eos is None else config.begin_with_eos,
        end_with_eos=config.end_with_eos,
        document_shuffle_window=config.shuffle_window,
        row_shuffle_window=0,
    )


def _resolve_row_length(config: EvalDataConfig, model: ModelConfig) -> int:
    context = model.max_position_embeddings
    if config.row_length is None:
        return min(context, MAX_DEFAULT_ROW_LENGTH)
    if config.row_length > context:
        raise ValueError(
            f"data.row_length = {config.row_length} is longer than the model's context, max_position_embeddings = "
            f"{context}: lower it"
        )
    return config.row_length
