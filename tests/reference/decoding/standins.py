"""What the decoding tests decode with: a model that is a table, and a comparison with a transcription.

Shapes: B texts, L positions, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from config.generation import GenerationConfig
from diffusionlm.inference.generate import DecodingStep, Generation, generate
from diffusionlm.models.patterns import BlockCausal
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import VarlenBatch
from tests.conftest import MakeModel
from tests.reference.decoding.choosing import Array, Choice, Text
from tests.reference.enumeration import PlainModel, table_config

TOKENS, LONGEST = 10, 48
MASK = TOKENS


class Table:
    """Outputs that are a fixed function of all that is visible, and are quite others when any token changes."""

    def __init__(self, num_tokens: int = TOKENS, seed: int = 0, scale: float = 4.0) -> None:
        rng = np.random.default_rng(seed)
        self.key_LV = rng.uniform(0.0, 1.0, (LONGEST, num_tokens + 1))
        self.frequency_LV = rng.uniform(50.0, 100.0, (LONGEST, num_tokens + 1))
        self.phase_LV = rng.uniform(0.0, 6.0, (LONGEST, num_tokens + 1))
        self.scale_L1 = rng.uniform(0.2 * scale, 1.8 * scale, (LONGEST, 1))

    def __call__(self, tokens: Sequence[int]) -> Array:
        """[L, V]; the mask token's own are as high as the others'."""
        L = len(tokens)
        key = sum(self.key_LV[position, token] for position, token in enumerate(tokens))
        logits_LV: Array = self.scale_L1[:L] * np.sin(self.frequency_LV[:L] * key + self.phase_LV[:L])
        return logits_LV


class TableModel(Transformer):
    """Answers from a table: what the pattern lets a position see is what the table is asked about."""

    table: Table

    def forward(self, tokens_BL: Tensor, **options: Any) -> Any:
        batch: VarlenBatch = options["pattern"]
        assert batch.cache is None, "a table keeps nothing"
        logits, first = [], 0
        for part in batch.sequences:
            tokens = tokens_BL[0, first : first + part.num_inputs].tolist()
            first += part.num_inputs
            size = part.pattern.block_length if isinstance(part.pattern, BlockCausal) else len(tokens)
            logits_LV = np.zeros((len(tokens), self.config.vocab_size))
            for start in range(0, len(tokens), size):
                end = min(start + size, len(tokens))
                logits_LV[start:end] = self.table(tokens[:end])[start:end]
            logits.append(logits_LV[part.output_offsets])
        return torch.from_numpy(np.concatenate(logits))


def table_model(num_tokens: int = TOKENS, seed: int = 0, scale: float = 4.0, **config: Any) -> TableModel:
    model = TableModel(table_config(num_tokens, LONGEST, **config))
    model.table = Table(num_tokens, seed, scale)
    return model


def tiny_transformer(tiny_model: MakeModel, seed: int = 0, **config: Any) -> Transformer:
    """Two layers in fp64, of the tokens and the length of the table."""
    shape = {"vocab_size": TOKENS + 1, "mask_token_id": MASK, "max_position_embeddings": LONGEST}
    ids = {"eos_token_id": None, "pad_token_id": None}
    return tiny_model(torch.float64, seed=seed, scale=0.5, **{**shape, **ids, **config}).eval()


class Plain:
    """A Transformer's parameters in the second implementation of the model: whole texts, or parts beside a cache."""

    def __init__(self, model: Transformer) -> None:
        self.model = PlainModel(model)

    def __call__(self, tokens: Sequence[int]) -> Array:
        return self.forward(tokens, range(len(tokens)), None)[0]

    @torch.no_grad()
    def forward(self, tokens: Sequence[int], positions: Sequence[int], past: Any) -> tuple[Array, Any]:
        logits_1QV, cache = self.model(torch.tensor([list(tokens)]), torch.tensor(list(positions)), past=past)
        return logits_1QV[0].numpy(), cache

    @torch.no_grad()
    def in_blocks(self, tokens: Sequence[int], block_length: int) -> Array:
        blocks = torch.arange(len(tokens)) // block_length
        may_see = blocks[:, None] >= blocks
        logits, _ = self.model(torch.tensor([list(tokens)]), torch.arange(len(tokens)), may_see)
        return logits[0].numpy()


def spread(prompts: Sequence[list[int]], options: Sequence[Any], start: int) -> list[tuple[list[int], Any]]:
    """Each prompt with two of the options in turn, others for each start."""
    count = len(options)
    return [
        (prompt, options[(start + i + half) % count]) for i, prompt in enumerate(prompts) for half in (0, count // 2)
    ]


def settings(**values: Any) -> GenerationConfig:
    return GenerationConfig.model_validate({"stop_token_ids": (), "cache": "none", **values})


def choice(config: GenerationConfig, seed: int, confidence_from: str) -> Choice:
    """What a config says of the choice of tokens."""
    return Choice(
        mask=MASK,
        seed=seed,
        temperature=config.temperature or 0.0,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        confidence_from=config.confidence_from or confidence_from,
        forbidden=config.suppress_token_ids,
        deferred=config.defer_token_ids,
        cfg_scale=config.cfg_scale,
    )


def assert_same(
    model: Transformer, prompt: Sequence[int], config: GenerationConfig, seed: int, text: Text, overhead: int = 0
) -> Generation:
    """The same canvas after every forward, and so the same tokens in as many forwards, less the transcription's
    ``overhead``."""
    decoding_steps: list[DecodingStep] = []
    [done] = generate(model, [prompt], config, [seed], on_step=decoding_steps.append)
    length = len(prompt) + (config.max_new_tokens or 64)
    padded = [[*canvas, *[MASK] * length][:length] for canvas in text.history]
    assert [list(step.canvases[0].token_ids) for step in decoding_steps] == padded
    assert [*prompt, *done.token_ids] == text.x[:length]
    assert done.num_forwards == text.forwards - overhead == len(text.history)
    for position, forward in enumerate(done.step_map, start=len(prompt)):
        assert padded[forward - 1][position] == padded[-1][position]
        assert forward == 1 or padded[forward - 2][position] == MASK or has_taken_back(padded)
    return done


def assert_like(
    sampler: Callable[..., Text],
    model: TableModel,
    prompt: Sequence[int],
    config: GenerationConfig,
    seed: int,
    *,
    confidence_from: str = "filtered",
    **options: Any,
) -> tuple[Generation, Text]:
    """The same as a transcription with its options, which is asked for as many tokens. Returns both."""
    chosen = choice(config, seed, confidence_from)
    text = sampler(model.table, prompt, chosen, gen_length=config.max_new_tokens, **options)
    return assert_same(model, prompt, config, seed, text), text


def has_taken_back(history: list[list[int]]) -> bool:
    """Whether a token went; where the next one comes in the same forward, the mask between them is not seen."""
    return any(
        old not in (MASK, new) for before, after in pairwise(history) for old, new in zip(before, after, strict=True)
    )
