"""Check a conversion of a model directory, without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from config.convert import ConvertConfig, DiffusionSection
from config.model import ModelConfig
from diffusionlm.checkpoints.adapter_config import read_adapter_config
from diffusionlm.checkpoints.model_files import load_tokenizer
from diffusionlm.checkpoints.vocabulary import Vocabulary, check_vocabulary
from diffusionlm.families.model_directory import read_model_config, resolve_model_directory
from diffusionlm.families.registry import FAMILIES, get_family, infer_model_type
from files.output_paths import check_can_write
from tokenizer import SentencePieceTokenizer, Tokenizer

MAX_LISTED_TOKENS = 20
"""Special tokens that an error names."""


@dataclass(frozen=True)
class ConversionPlan:
    """A conversion that was checked, but not carried out."""

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


def plan_conversion(config: ConvertConfig) -> ConversionPlan:
    """Check a conversion, without reading weights or writing anything.

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
    check_vocabulary(Vocabulary.from_tokenizer(tokenizer), target_config, source)
    return ConversionPlan(source, config.target, config, source_config, target_config, tokenizer, new_row)


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
        "tie_word_embeddings": config.tie_word_embeddings and not section.untie_head,
    }
    return ModelConfig.model_validate(config.model_dump() | changes)


def _change_family(config: ModelConfig, model_type: str) -> ModelConfig:
    FAMILIES[model_type].check_diffusion(config)
    is_inferable = infer_model_type(config) == model_type
    return config.model_copy(update={"model_type": None if is_inferable else model_type})
