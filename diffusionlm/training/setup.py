"""What a run is made of, built from its config: device, tokenizer, model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from config.data import TokenizerConfig
from config.objective import NextToken
from config.train import TrainConfig
from config.training import RunConfig, TrainingConfig
from diffusionlm.checkpoints.huggingface import (
    WEIGHTS,
    config_json,
    load_tokenizer,
    load_weights,
    resolve_model_directory,
)
from diffusionlm.checkpoints.manifest import verify, write_directory
from diffusionlm.data.sources import DocumentSource
from diffusionlm.models.init import init_weights
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer, save_tokenizer, train_bpe

Say = Callable[[str], None]


def set_up_device(config: RunConfig) -> torch.device:
    """The device of the run, with the number of threads set.

    Raises:
        ValueError: CUDA is asked for and not there.
    """
    torch.set_num_threads(config.threads or _usable_cores())
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError('run.device = "cuda", but torch sees no CUDA device; set run.device to "cpu" or "auto"')
    name = config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _usable_cores() -> int:
    """Cores that this process may use; not every system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_precision(config: TrainingConfig, device: torch.device) -> torch.dtype:
    """Dtype of matrix products."""
    if config.precision != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.precision]
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def prepare_tokenizer(
    config: TokenizerConfig, init_from: Path | None, source: DocumentSource, directory: Path, say: Say
) -> Tokenizer:
    """The tokenizer of the run directory; if there is none yet, the given one, or one trained on the documents.

    Raises:
        ValueError: a given tokenizer that cannot be read or has no end-of-text token; no documents.
    """
    if directory.is_dir():
        verify(directory)
        tokenizer = load_tokenizer(directory)
    else:
        given = config.path or init_from
        tokenizer = load_tokenizer(given) if given else _train_tokenizer(config, source, say)
        write_directory(directory, lambda folder: save_tokenizer(tokenizer, folder))
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {directory} has no end-of-text token, which rows end in")
    return tokenizer


def _train_tokenizer(config: TokenizerConfig, source: DocumentSource, say: Say) -> Tokenizer:
    say(f"training a byte-level BPE tokenizer of {config.vocab_size:,} tokens ...")
    texts = _first_documents(source, config.max_training_bytes)
    tokenizer = train_bpe(texts, vocab_size=config.vocab_size, pattern=config.pattern)
    if tokenizer.vocab_size < config.vocab_size:
        say(f"the text has no more pairs to merge: the tokenizer has {tokenizer.vocab_size:,} tokens")
    return tokenizer


def _first_documents(source: DocumentSource, max_bytes: int) -> Iterator[str]:
    position = None
    while max_bytes > 0:
        documents, position = source.read(0, position, 64)
        for text in documents:
            max_bytes -= len(text.encode("utf-8", "surrogatepass"))
            yield text
        if position is None:
            return


def training_tokens(
    source: DocumentSource, tokenizer: Tokenizer, limit: int, end_with_eos: bool = True
) -> NDArray[np.int64]:
    """The first tokens of the training documents, each ended by end-of-text or not, up to ``limit`` and a document."""
    end = [tokenizer.eos_token_id] if end_with_eos else []
    parts: list[NDArray[np.int64]] = []
    total, position = 0, None
    while total < limit:
        documents, position = source.read(0, position, 64)
        for text in documents:
            parts.append(np.array([*tokenizer.encode(text), *end], dtype=np.int64))
            total += len(parts[-1])
        if position is None:
            break
    return np.concatenate(parts)


def build_model(config: TrainConfig, tokenizer: Tokenizer, device: torch.device) -> Transformer:
    """The model for the tokenizer's vocabulary and the objective's blocks, initialised or loaded from ``init_from``.

    Raises:
        ValueError: there is no mask token, no checkpoint format holds such a model, or the weights do not fit.
    """
    if tokenizer.mask_token_id is None and not isinstance(config.objective, NextToken):
        raise ValueError(
            f'the tokenizer has no mask token, which objective.kind = "{config.objective.kind}" needs: name one in its '
            "special_tokens.json or tokenizer_config.json, or train a tokenizer by leaving tokenizer.path out"
        )
    section = config.model
    full = section.with_vocabulary(
        vocab_size=tokenizer.vocab_size,
        mask_token_id=tokenizer.mask_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        block_length=config.objective.final_block_length,
        begin_with_eos=config.data.begin_with_eos,
    )
    config_json(full, torch.float32)  # what cannot be saved is refused now, not at the first checkpoint
    model = Transformer(full)
    if section.init_from is None:
        init_weights(model, config.run.seed)
    else:
        directory = resolve_model_directory(section.init_from)
        verify(directory)
        load_weights(model, directory / WEIGHTS)
    return model.to(device)
