"""What a run is made of, built from its config: device, tokenizer, model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from config.families.model_directory import read_model_config, resolve_model_directory
from config.model import ModelConfig
from config.objective import NextTokenConfig
from config.runtime import AttentionBackend
from config.tokenizer import TokenizerConfig
from config.train import TrainConfig
from config.training import RunConfig, TrainingConfig
from diffusionlm.checkpoints.huggingface import build_config_json, load_model_with_config, load_tokenizer
from diffusionlm.checkpoints.manifest import verify_directory, write_directory_atomically
from diffusionlm.checkpoints.weights import load_weights
from diffusionlm.data.pipeline import MixtureComponent, check_shard_tokenizer
from diffusionlm.data.reader import first_documents
from diffusionlm.data.shards import ShardDocuments
from diffusionlm.models.init import init_weights, initial_value
from diffusionlm.models.transformer import Transformer
from profiling import memory
from profiling.cores import usable_cores
from profiling.torch_setup import has_native_bfloat16
from tokenizer import Tokenizer, save_tokenizer, train_bpe

Log = Callable[[str], None]


def set_up_device(config: RunConfig, keep_freed_memory: bool) -> torch.device:
    """The device of the run, with the number of threads and the way of the allocator set.

    Raises:
        ValueError: CUDA is asked for and not there.
    """
    shared_by = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # ranks on this machine, as their launcher says
    torch.set_num_threads(config.threads or max(1, usable_cores() // shared_by))
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError('run.device = "cuda", but torch sees no CUDA device; set run.device to "cpu" or "auto"')
    name = config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu" and keep_freed_memory:
        memory.keep_freed_memory()
    return torch.device(name)


def choose_precision(config: TrainingConfig, device: torch.device) -> torch.dtype:
    """Dtype of matrix products."""
    if config.precision != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.precision]
    return torch.bfloat16 if has_native_bfloat16(device.type) else torch.float32


def prepare_tokenizer(
    config: TokenizerConfig, init_from: Path | None, parts: list[MixtureComponent], directory: Path, log: Log
) -> Tokenizer:
    """The tokenizer of the run directory; if there is none yet, the given one, the shards', or one trained on the text.

    Raises:
        ValueError: a given tokenizer that cannot be read or has no end-of-text token; no documents.
    """
    if directory.is_dir():
        verify_directory(directory)
        tokenizer = load_tokenizer(directory)
    else:
        of_shards = (part.source.tokenizer_directory for part in parts if isinstance(part.source, ShardDocuments))
        given = config.path or init_from or next(of_shards, None)
        tokenizer = load_tokenizer(given) if given else _train_tokenizer(config, parts, log)
        write_directory_atomically(directory, lambda folder: save_tokenizer(tokenizer, folder))
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {directory} has no end-of-text token, which rows end in")
    check_shard_tokenizer(parts, tokenizer)
    return tokenizer


def _train_tokenizer(config: TokenizerConfig, parts: list[MixtureComponent], log: Log) -> Tokenizer:
    """On the first documents of each part, by its weight."""
    log(f"training a byte-level BPE tokenizer of {config.vocab_size:,} tokens ...")
    total = sum(part.weight for part in parts)
    texts = (
        text
        for part in parts
        if not isinstance(part.source, ShardDocuments)
        for text in first_documents(part.source, int(config.max_training_bytes * part.weight / total))
    )
    tokenizer = train_bpe(texts, vocab_size=config.vocab_size, pattern=config.pattern)
    if tokenizer.vocab_size < config.vocab_size:
        log(f"the text has no more pairs to merge: the tokenizer has {tokenizer.vocab_size:,} tokens")
    return tokenizer


@dataclass(frozen=True)
class ModelBuilder:
    """A model that is still to be built, and where its first weights come from."""

    config: ModelConfig
    directory: Path | None
    """A verified model directory. None: weights are drawn."""
    seed: int
    attention_backend: AttentionBackend = "auto"

    def build(self, device: torch.device) -> Transformer:
        """The whole model, filled.

        Raises:
            ValueError: the weights do not fit.
        """
        model = Transformer(self.config, attention_backend=self.attention_backend)
        if self.directory is None:
            init_weights(model, self.seed)
        else:
            load_weights(model, self.directory)
        return model.to(device)

    def build_on_meta(self) -> Transformer:
        """The model without memory, on ``meta``."""
        with torch.device("meta"):
            return Transformer(self.config, attention_backend=self.attention_backend)

    def values(self) -> Callable[[str], Tensor]:
        """What gives the first value of a parameter by its name, whole, on the CPU: for ranks that keep parts of it.
        Those of a directory are mapped from its files, so that ranks of one machine share them.

        Raises:
            ValueError: the weights do not fit.
        """
        if self.directory is not None:
            given = dict(load_model_with_config(self.config, self.directory, dtype="keep").named_parameters())
            return lambda name: given[name].detach()
        shapes = {name: parameter.shape for name, parameter in self.build_on_meta().named_parameters()}
        return lambda name: initial_value(name, shapes[name], self.config, self.seed)


def create_model_builder(config: TrainConfig, tokenizer: Tokenizer) -> ModelBuilder:
    """The model for the tokenizer's vocabulary and the objective's blocks, initialised or loaded from ``init_from``.

    Raises:
        ValueError: there is no mask token, no checkpoint format holds such a model, or ``init_from`` is damaged.
    """
    if tokenizer.mask_token_id is None and not isinstance(config.objective, NextTokenConfig):
        raise ValueError(
            f'the tokenizer has no mask token, which objective.kind = "{config.objective.kind}" needs: name one in its '
            "special_tokens.json or tokenizer_config.json, or train a tokenizer by leaving tokenizer.path out"
        )
    section = config.model
    directory = None if section.init_from is None else resolve_model_directory(section.init_from)
    found = None if directory is None else read_model_config(directory)
    if found is not None:
        section.check_same_architecture(found)
    full = section.to_model_config(
        vocab_size=tokenizer.vocab_size if found is None else _check_vocab_size(found, section.init_from, tokenizer),
        mask_token_id=tokenizer.mask_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=() if found is None else _merge_stop_tokens(found, tokenizer),
        block_length=config.objective.final_block_length,
        begin_with_eos=config.data.begin_with_eos,
    )
    build_config_json(full, torch.float32)  # what cannot be saved is refused now, not at the first checkpoint
    if directory is not None:
        verify_directory(directory)
    return ModelBuilder(full, directory, config.run.seed, config.runtime.attention_backend)


def _check_vocab_size(found: ModelConfig, init_from: Path | None, tokenizer: Tokenizer) -> int:
    """Rows of the embedding of a model that training starts from; some may have no token.

    Raises:
        ValueError: it has fewer rows than the tokenizer has tokens.
    """
    if found.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"model.init_from = {init_from} has {found.vocab_size} rows in its embedding, the tokenizer "
            f"{tokenizer.vocab_size} tokens: add the missing ones with diffusionlm-convert, or take its own tokenizer"
        )
    return found.vocab_size


def _merge_stop_tokens(found: ModelConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ends of text of a model that training starts from, the tokenizer's first; none if its end is another."""
    end = tokenizer.eos_token_id
    if end is None or end not in found.stop_token_ids:
        return ()
    return tuple(dict.fromkeys([end, *found.stop_token_ids]))
