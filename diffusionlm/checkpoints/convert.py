"""Convert a model directory: dtype, family, adapter merged, mask token added.

Shapes: V rows of the embedding, D hidden size.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from config.convert import ConvertConfig, DiffusionSection
from config.model import ModelConfig
from diffusionlm.checkpoints.adapter_config import read_adapter_config
from diffusionlm.checkpoints.adapter_files import load_adapter
from diffusionlm.checkpoints.huggingface import DTYPES, load_model_with_config, save_model_directory
from diffusionlm.checkpoints.manifest import write_directory_atomically
from diffusionlm.checkpoints.model_files import check_vocabulary, find_weights_directory, verify_model_files
from diffusionlm.checkpoints.weights import EMBEDDING_WEIGHT, HEAD_WEIGHT, read_saved_dtype
from diffusionlm.families.model_directory import read_model_config, resolve_model_directory
from diffusionlm.families.registry import get_family, infer_model_type
from diffusionlm.models.lora import merge_adapter
from diffusionlm.models.transformer import Transformer
from files.paths import check_can_write
from tokenizer import SentencePieceTokenizer, Tokenizer, load_tokenizer

MAX_LISTED_TOKENS = 20
"""Special tokens that an error names."""


@dataclass(frozen=True)
class Conversion:
    """A conversion whose parts fit each other; no weights were read."""

    source: Path
    """Directory with config.json."""
    target: Path
    config: ConvertConfig
    source_config: ModelConfig
    target_config: ModelConfig
    tokenizer: Tokenizer
    """Tokenizer of the target."""
    new_row: int | None
    """Row of the embedding and of the head that gets the values of ``diffusion.mask_row``, by default the mean of the
    other rows, because no token was trained on it. None: no row."""

    @property
    def unties_head(self) -> bool:
        """The target's head is a copy of the embedding that the source's head is tied to."""
        return self.source_config.tie_word_embeddings and not self.target_config.tie_word_embeddings


def prepare_conversion(config: ConvertConfig) -> Conversion:
    """Prepare a conversion, without reading weights or writing anything.

    Raises:
        ValueError: source or target is missing, the target exists, cannot be written, or is, contains or lies in the
            source, the adapter cannot be used, the mask token cannot be added, the family has no such model, or the
            tokenizer does not fit the model; names the key.
    """
    if config.source is None or config.target is None:
        raise ValueError("source and target are both required: a model directory, and a directory to write")
    source = resolve_model_directory(config.source, needs_weights=False)
    # A name on the Hub is no path.
    _check_target(config.target, [config.source, source] if config.source.exists() else [source])
    source_config, tokenizer = read_model_config(source), load_tokenizer(source)
    if config.adapter is not None:
        read_adapter_config(config.adapter)
    target_config, new_row = source_config, None
    if config.diffusion is not None:
        token_id, new_row = _choose_mask_row(config.diffusion, source_config, tokenizer)
        tokenizer = _add_mask_token(tokenizer, config.diffusion.mask_token, token_id)
        target_config = _to_diffusion_config(source_config, config.diffusion, token_id)
    if config.model_type is not None:
        target_config = _change_family(target_config, config.model_type)
    get_family(target_config).to_config_json(target_config)
    check_vocabulary(tokenizer, target_config, source)
    return Conversion(source, config.target, config, source_config, target_config, tokenizer, new_row)


def convert(conversion: Conversion) -> None:
    """Write the target of a conversion. The target exists completely or not at all.

    Raises:
        ValueError: the weights do not fit the config, the adapter not the model, or the target cannot be written.
    """
    assert conversion.config.source is not None
    resolve_model_directory(conversion.config.source)  # downloads the weights of a model of the Hub
    verify_model_files(conversion.source)
    weights = _read_weights(conversion)
    if conversion.unties_head:
        weights[HEAD_WEIGHT] = weights[EMBEDDING_WEIGHT].clone()
    if conversion.new_row is not None:
        assert conversion.config.diffusion is not None
        for name in weights.keys() & {EMBEDDING_WEIGHT, HEAD_WEIGHT}:
            weights[name] = _set_row(weights[name], conversion.new_row, conversion.config.diffusion)
    with torch.device("meta"):
        target_model = Transformer(conversion.target_config)

    def write(folder: Path) -> None:
        save_model_directory(target_model, conversion.tokenizer, folder, weights, source=conversion.source)

    write_directory_atomically(conversion.target, write)


def _read_weights(conversion: Conversion) -> dict[str, Tensor]:
    """The weights of the source by parameter name, with its adapter and the config's merged, in the dtype of the
    target."""
    config, weights_directory = conversion.config, find_weights_directory(conversion.source)
    adapters = [
        *([conversion.source] if weights_directory != conversion.source else []),
        *filter(None, [config.adapter]),
    ]
    if not adapters:
        model = load_model_with_config(conversion.source_config, conversion.source, dtype=config.dtype)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}
    model = load_model_with_config(conversion.source_config, weights_directory, dtype="float32")
    for adapter in adapters:
        load_adapter(model, adapter)
        merge_adapter(model)
    dtype = read_saved_dtype(weights_directory) if config.dtype == "keep" else DTYPES[config.dtype]
    return {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}


def _set_row(table_VD: Tensor, row: int, section: DiffusionSection) -> Tensor:
    """Set a row to the values of ``diffusion.mask_row``. ``row`` = V appends one."""
    other_rows = torch.cat([table_VD[:row], table_VD[row + 1 :]])
    if section.reused_row is not None:
        values_1D = table_VD[section.reused_row][None]
    elif section.mask_row == "random":
        generator = torch.Generator().manual_seed(0)
        scale = float(other_rows.double().std())
        values_1D = scale * torch.randn(1, table_VD.shape[1], dtype=torch.float64, generator=generator)
    else:
        values_1D = other_rows.double().mean(0, keepdim=True)
    return torch.cat([table_VD[:row], values_1D.to(table_VD.dtype), table_VD[row + 1 :]])


def _check_target(target: Path, sources: list[Path]) -> None:
    """Check that the target is new, apart from the source, and can be written.

    Args:
        sources: the path of the source, and the directory of its config.json.
    """
    new = target.resolve()
    for source, old in ((path, path.resolve()) for path in sources):
        if new == old or old in new.parents or new in old.parents:
            relation = "is" if new == old else "lies in" if old in new.parents else "contains"
            raise ValueError(f"target = {target} {relation} the source, {source}: name a directory apart from it")
    if os.path.lexists(target):
        raise ValueError(f"target = {target} exists: name another directory, or remove it")
    check_can_write(target.parent, f"target = {target}")


def _choose_mask_row(section: DiffusionSection, config: ModelConfig, tokenizer: Tokenizer) -> tuple[int, int | None]:
    """Return the mask token's id, and the same id if its row has to be set."""
    if section.reused_row is not None and section.reused_row >= config.vocab_size:
        raise ValueError(
            f'diffusion.mask_row = "{section.mask_row}": the embedding has {config.vocab_size} rows: name a smaller id'
        )
    name, tokenizer_id = section.mask_token, tokenizer.special_tokens.get(section.mask_token)
    num_rows, token_id = config.vocab_size, section.mask_token_id
    if tokenizer_id is not None:
        if token_id not in (None, tokenizer_id):
            raise ValueError(
                f"diffusion.mask_token_id = {token_id}, but {name!r} has the id {tokenizer_id} in the tokenizer: "
                "remove it, or choose another mask_token"
            )
        needs_values = tokenizer_id >= num_rows or section.mask_row is not None
        return tokenizer_id, tokenizer_id if needs_values else None
    used_ids = {*tokenizer.vocab.values(), *tokenizer.special_tokens.values()}
    if token_id is None:
        token_id = next((row for row in range(num_rows) if row not in used_ids), num_rows)
    elif token_id in used_ids:
        raise ValueError(
            f"diffusion.mask_token_id = {token_id} is the id of {tokenizer.decode([token_id])!r}: name an id that no "
            "token has"
        )
    elif token_id > num_rows:
        raise ValueError(
            f"diffusion.mask_token_id = {token_id} would leave rows of the embedding without tokens: it has "
            f"{num_rows} rows, so the next id is {num_rows}"
        )
    return token_id, token_id


def _add_mask_token(tokenizer: Tokenizer, mask_token: str, token_id: int) -> Tokenizer:
    if mask_token not in tokenizer.special_tokens and isinstance(tokenizer, SentencePieceTokenizer):
        names = sorted(tokenizer.special_tokens)[:MAX_LISTED_TOKENS]
        raise ValueError(
            f"diffusion.mask_token = {mask_token!r} cannot be added to a SentencePiece tokenizer: choose one of its "
            f"special tokens, such as an unused one: {names}"
        )
    return tokenizer.with_mask_token(mask_token, token_id)


def _to_diffusion_config(config: ModelConfig, section: DiffusionSection, mask_token_id: int) -> ModelConfig:
    changes = {
        "vocab_size": max(config.vocab_size, mask_token_id + 1),
        "mask_token_id": mask_token_id,
        "block_length": section.block_length,
        "logit_alignment": config.logit_alignment if section.logit_alignment == "keep" else section.logit_alignment,
        "clean_alignment": section.clean_alignment,
        "tie_word_embeddings": config.tie_word_embeddings and not section.untie_head,
    }
    return ModelConfig.model_validate(config.model_dump() | changes)


def _change_family(config: ModelConfig, model_type: str) -> ModelConfig:
    changed = config.model_copy(update={"model_type": model_type})
    get_family(changed).check_diffusion(config)
    return config.model_copy(update={"model_type": None}) if infer_model_type(config) == model_type else changed
