"""Contents of a model directory, without its values: weight files, tokenizer, manifest. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from config.model import ModelConfig
from diffusionlm.checkpoints.manifest import verify_directory
from diffusionlm.families.hub import PROCESSOR_FILES
from diffusionlm.families.model_directory import GENERATION_CONFIG_FILE, read_model_config, resolve_model_directory
from diffusionlm.families.registry import FAMILIES
from files.json_files import read_json_object
from tokenizer import Tokenizer
from tokenizer import load_tokenizer as load_tokenizer_files

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MAX_LISTED_PROBLEMS = 20
"""Problems that an error lists; it counts the others."""


@dataclass(frozen=True)
class ModelDescription:
    """A model directory without its weights."""

    directory: Path
    config: ModelConfig
    tokenizer: Tokenizer


def read_model_description(path: str | Path) -> ModelDescription:
    """Read config and tokenizer of a model directory, a checkpoint, a run directory or a model of the Hub.

    Raises:
        ValueError: there is no model, config.json is not supported, there is no tokenizer, or it does not fit.
    """
    directory = resolve_model_directory(path, needs_weights=False)
    return ModelDescription(directory, read_model_config(directory), load_tokenizer(path))


def read_processor_files(directory: Path, config: ModelConfig) -> dict[str, bytes]:
    """Read the files for the processor of images by name. Empty: the model reads no images."""
    names = PROCESSOR_FILES if config.vision is not None else ()
    return {name: (directory / name).read_bytes() for name in names if (directory / name).is_file()}


def list_weight_files(directory: Path) -> list[Path]:
    """List the files with a directory's weights: the index first, if there is one.

    Raises:
        ValueError: there are no weights, the index is damaged, or a shard is missing; names the files.
    """
    for single, index in ((WEIGHTS, INDEX), (PICKLE, PICKLE_INDEX)):
        if (directory / single).is_file():
            return [directory / single]
        if (directory / index).is_file():
            shards = sorted(set(read_weight_index(directory / index).values()))
            missing = [name for name in shards if not (directory / name).is_file()]
            if missing:
                raise ValueError(f"{directory / index}: missing shards: {join_problems(missing)}; download them again")
            return [directory / index, *(directory / name for name in shards)]
    if is_adapter_checkpoint(directory):
        raise ValueError(
            f"{directory} is an adapter without the weights of its base: merge them with diffusionlm-convert --source "
            f'{directory}, or train it further with model.init_from = its base and lora.init_from = "{directory}"'
        )
    raise ValueError(f"{directory} has no weights: none of {', '.join((WEIGHTS, INDEX, PICKLE, PICKLE_INDEX))}")


def list_safetensors_files(directory: Path) -> list[Path]:
    """List a directory's safetensors files: those of a model, else all.

    Raises:
        ValueError: there are none.
    """
    files = sorted(directory.glob("*.safetensors"))
    files = [path for path in files if path.name.startswith("model")] or files
    if not files:
        raise ValueError(f"{directory} has no *.safetensors files: convert it with diffusionlm-convert first")
    return files


def read_weight_index(path: Path) -> dict[str, str]:
    try:
        weight_map = read_json_object(path)["weight_map"]
        file_of = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: damaged index, it has no readable weight_map: {error!r}") from error
    outside = sorted({file for file in file_of.values() if Path(file).name != file})
    if outside or not file_of:
        raise ValueError(f"{path}: weight_map must name files beside it, not {join_problems(outside) or 'none'}")
    return file_of


def check_weight_files(path: str | Path) -> None:
    """Check that all files with a model's weights exist, of a checkpoint of an adapter those of its base. Those of a
    model on the Hub are downloaded.

    Raises:
        ValueError: there is no model, or a file is missing; names it.
    """
    list_weight_files(find_weights_directory(resolve_model_directory(path)))


def is_adapter_checkpoint(directory: Path) -> bool:
    """Whether a model directory has an adapter in place of weights, as a checkpoint of a run with ``[lora]``."""
    return (directory / ADAPTER_CONFIG).is_file()


def find_weights_directory(directory: Path) -> Path:
    """Find the directory with the weights of a model directory: itself, or of a checkpoint of a run with ``[lora]`` the
    base of its adapter.

    The path of a base is looked up where the program runs, then where the checkpoint is and above it.

    Raises:
        ValueError: the base is missing; names it.
    """
    if not is_adapter_checkpoint(directory):
        return directory
    values = read_json_object(directory / ADAPTER_CONFIG)
    base, revision = values.get("base_model_name_or_path"), values.get("revision")
    if not isinstance(base, str) or not base.strip():
        raise ValueError(f"{directory / ADAPTER_CONFIG} names no base: name it with --model BASE --adapter {directory}")
    candidates = [Path(base), *(parent / base for parent in directory.resolve().parents)]
    on_hub = Path(f"{base}@{revision}" if revision else base)
    path = next((path for path in candidates if path.is_dir()), on_hub)
    try:
        return resolve_model_directory(path)
    except ValueError as error:
        raise ValueError(
            f"the base of the adapter {directory}: {error}; name it with --model BASE --adapter {directory}"
        ) from error


def verify_model_files(directory: Path) -> None:
    """Compare config.json, generation_config.json and the weights with the manifest, if there is one. Of a checkpoint
    of an adapter also those of its base.

    Raises:
        ValueError: there are no weights, or a file is missing, truncated or changed; names it.
    """
    weights_directory = find_weights_directory(directory)
    weight_files = {file.name for file in list_weight_files(weights_directory)}
    if weights_directory != directory:
        verify_directory(weights_directory, file_names=weight_files)
        weight_files = {ADAPTER_CONFIG, ADAPTER_WEIGHTS}
    verify_directory(directory, file_names={"config.json", GENERATION_CONFIG_FILE, *weight_files})


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a model directory, a checkpoint, a run directory or a model of the Hub (``org/name``).

    Raises:
        ValueError: there is none, it cannot be read, or it does not fit the model in its directory.
    """
    directory = Path(path)
    if not any((directory / name).is_file() for name in ("vocab.json", "tokenizer.json")):
        directory = resolve_model_directory(path, needs_weights=False)
    tokenizer = load_tokenizer_files(directory)
    config_file = directory / "config.json"
    if config_file.is_file() and str(read_json_object(config_file).get("model_type")) in FAMILIES:
        check_vocabulary(tokenizer, read_model_config(directory), directory)
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig, directory: Path) -> None:
    """Reject a directory's tokenizer if it cannot be the one that its model was trained with.

    Raises:
        ValueError: it has more ids than the embedding has rows (fewer are usual), or the mask token is not special.
    """
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} ids, but the model has vocab_size = "
            f"{config.vocab_size}: use the tokenizer that the model was trained with, or, if only the mask token has "
            "no row in the embedding, add one with diffusionlm-convert and [diffusion]"
        )
    mask_id = config.mask_token_id
    if mask_id is not None and mask_id in tokenizer.vocab.values():
        raise ValueError(
            f"{directory}: mask_token_id = {mask_id} is the ordinary token {tokenizer.decode([mask_id])!r} of the "
            "tokenizer: correct mask_token_id in config.json, or make the token special in the tokenizer's files"
        )


def join_problems(problems: Sequence[str], limit: int = MAX_LISTED_PROBLEMS) -> str:
    """Join the first ``limit`` problems for an error, and count the others."""
    more = [f"and {len(problems) - limit:,} more"] if len(problems) > limit else []
    return "; ".join([*problems[:limit], *more])
