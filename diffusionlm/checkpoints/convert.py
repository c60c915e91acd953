"""From one model directory to another: dtype, shards, family, and an autoregressive model made ready for diffusion.

Shapes: V rows of the embedding, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from config.convert import ConvertConfig, DiffusionSection
from config.families.model_directory import read_model_config, resolve_model_directory
from config.families.registry import FAMILIES, get_family, infer_model_type
from config.model import ModelConfig
from diffusionlm.checkpoints.huggingface import (
    load_model_with_config,
    load_tokenizer,
    save_model_directory,
    verify_model_files,
)
from diffusionlm.checkpoints.manifest import write_directory_atomically
from diffusionlm.checkpoints.vocabulary import Vocabulary, check_vocabulary
from diffusionlm.models.transformer import Transformer
from tokenizer import SentencePieceTokenizer, Tokenizer, load_chat_template, save_chat_template

EMBEDDING_WEIGHT, HEAD_WEIGHT = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class ConversionPlan:
    """What a conversion will do."""

    source: Path
    source_config: ModelConfig
    target_config: ModelConfig
    tokenizer: Tokenizer
    """As it will be written."""
    descriptions: tuple[str, ...]
    """For people, in order."""
    new_mask_row: int | None
    """Row of the embedding (and of the head) that gets the mean of the others: what no token has used says nothing."""


def plan_conversion(config: ConvertConfig) -> ConversionPlan:
    """What will be done; nothing is written, and no weights are read.

    Raises:
        ValueError: no source or target, a target that exists, a mask token that cannot be had, a family that cannot
            express the model, or a tokenizer that does not fit it; names the key.
    """
    if config.source is None or config.target is None:
        raise ValueError("source and target are both needed: name a model directory, and one that will be written")
    if config.target.exists():
        raise ValueError(f"target = {config.target} exists already: name another directory, or remove it")
    source = resolve_model_directory(config.source)
    source_config, tokenizer = read_model_config(source), load_tokenizer(source)
    descriptions = [
        f"read {source}: {source_config.num_hidden_layers} layers, {source_config.vocab_size:,} rows of the embedding"
    ]
    target_config, fresh = source_config, None
    if config.diffusion is not None:
        target_config, tokenizer, fresh, added = _add_mask_token(config.diffusion, source_config, tokenizer)
        descriptions += added
    if config.model_type is not None:
        target_config = _change_family(config.model_type, target_config)
    values = get_family(target_config).to_config_json(target_config)
    descriptions.append(f"write it as model_type = {values['model_type']!r} ({values['architectures'][0]})")
    ordinary_tokens = {token_id: token.decode(errors="replace") for token, token_id in tokenizer.vocab.items()}
    check_vocabulary(Vocabulary(ordinary_tokens, tokenizer.vocab_size), target_config, source)
    dtype = "their dtype" if config.dtype == "keep" else config.dtype
    descriptions.append(f"write {config.target}: weights in {dtype}, files of up to {config.max_shard_gigabytes:g} GB")
    return ConversionPlan(source, source_config, target_config, tokenizer, tuple(descriptions), fresh)


def _add_mask_token(
    section: DiffusionSection, source_config: ModelConfig, tokenizer: Tokenizer
) -> tuple[ModelConfig, Tokenizer, int | None, list[str]]:
    """The config and the tokenizer with a mask token, the row that is new, and what was done."""
    token_id, fresh, descriptions = _choose_mask_row(section, source_config, tokenizer)
    if section.mask_token not in tokenizer.special_tokens and isinstance(tokenizer, SentencePieceTokenizer):
        raise ValueError(
            f"diffusion.mask_token = {section.mask_token!r} cannot be added to a SentencePiece tokenizer: name one of "
            f"its special tokens, such as an unused one, of {sorted(tokenizer.special_tokens)[:20]}"
        )
    made = tokenizer.with_mask_token(section.mask_token, token_id)
    alignment = source_config.logit_alignment if section.logit_alignment == "keep" else section.logit_alignment
    target_config = source_config.model_copy(
        update={
            "vocab_size": max(source_config.vocab_size, token_id + 1),
            "mask_token_id": token_id,
            "block_length": section.block_length,
            "logit_alignment": alignment,
            "tie_word_embeddings": source_config.tie_word_embeddings and not section.untie_head,
        }
    )
    blocks = "the whole sequence at once" if section.block_length is None else f"blocks of {section.block_length}"
    descriptions.append(f"{blocks}; outputs {alignment.replace('_', ' ')}")
    if section.untie_head and source_config.tie_word_embeddings:
        descriptions.append("the head gets a copy of the embedding")
    return ModelConfig.model_validate(target_config.model_dump()), made, fresh, descriptions


def _change_family(model_type: str, config: ModelConfig) -> ModelConfig:
    """The same model in the words of another family.

    Raises:
        ValueError: an option that the family's own code would not look for; names it, and what the family has.
    """
    FAMILIES[model_type].check_diffusion(config)
    said = None if infer_model_type(config) == model_type else model_type
    return config.model_copy(update={"model_type": said})


def _choose_mask_row(
    section: DiffusionSection, source_config: ModelConfig, tokenizer: Tokenizer
) -> tuple[int, int | None, list[str]]:
    """The mask token's id, whether its row is to be filled, and why."""
    name, known = section.mask_token, tokenizer.special_tokens.get(section.mask_token)
    if known is not None:
        if section.mask_token_id not in (None, known):
            raise ValueError(
                f"diffusion.mask_token_id = {section.mask_token_id}, but {name!r} has the id {known} in the tokenizer: "
                "leave it out, or choose another mask_token"
            )
        fresh = known if known >= source_config.vocab_size else None
        return known, fresh, [f"the mask token is {name!r}, id {known}, of the tokenizer"]
    used = {*tokenizer.vocab.values(), *tokenizer.special_tokens.values()}
    if section.mask_token_id is not None:
        if section.mask_token_id in used:
            taken = tokenizer.decode([section.mask_token_id])
            raise ValueError(
                f"diffusion.mask_token_id = {section.mask_token_id} is the token {taken!r}: name an id that no token has"
            )
        if section.mask_token_id > source_config.vocab_size:
            raise ValueError(
                f"diffusion.mask_token_id = {section.mask_token_id} would leave rows without tokens: the embedding has "
                f"{source_config.vocab_size} rows, the next one is {source_config.vocab_size}"
            )
        token_id = section.mask_token_id
    else:
        token_id = next((row for row in range(source_config.vocab_size) if row not in used), source_config.vocab_size)
    where = "a new row" if token_id >= source_config.vocab_size else "a row that no token used"
    return token_id, token_id, [f"add {name!r} with the id {token_id}, {where}; it gets the mean of the others"]


def convert(plan: ConversionPlan, config: ConvertConfig, log: Callable[[str], None]) -> None:
    """Carry out a plan. The target appears when it is complete, or not at all.

    Raises:
        ValueError: weights that do not fit, or no room to write.
    """
    assert config.target is not None, "the plan has one"
    for step in plan.descriptions:
        log(step)
    verify_model_files(plan.source)
    model = load_model_with_config(plan.source_config, plan.source, dtype=config.dtype)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if not plan.target_config.tie_word_embeddings and HEAD_WEIGHT not in weights:
        weights[HEAD_WEIGHT] = weights[EMBEDDING_WEIGHT].clone()
    if plan.new_mask_row is not None:
        for name in (EMBEDDING_WEIGHT, HEAD_WEIGHT):
            if name in weights:
                weights[name] = _fill_row_with_mean(weights[name], plan.new_mask_row)
    with torch.device("meta"):
        shape = Transformer(plan.target_config)
    template, shard_bytes = load_chat_template(plan.source), int(config.max_shard_gigabytes * 10**9)

    def write(folder: Path) -> None:
        save_model_directory(shape, plan.tokenizer, folder, weights, max_shard_size=shard_bytes, source=plan.source)
        if template is not None:
            save_chat_template(template, folder)

    write_directory_atomically(config.target, write)


def _fill_row_with_mean(table_VD: Tensor, row: int) -> Tensor:
    """The table with the mean of its other rows in one row, which may be the first one behind its end."""
    others = torch.cat([table_VD[:row], table_VD[row + 1 :]])
    mean_D = others.double().mean(0, keepdim=True).to(table_VD.dtype)
    return torch.cat([table_VD[:row], mean_D, table_VD[row + 1 :]])
