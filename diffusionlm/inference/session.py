"""One call of ``diffusionlm-infer``: its requests, decoded together, and what is printed of them."""

from __future__ import annotations

import time
from collections.abc import Iterator

from config.infer import InferConfig
from diffusionlm.inference.generate import generate, infill
from diffusionlm.inference.terminal import LiveView, Requests, print_answer
from diffusionlm.inference.text import ids_without_text, parse_infill
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer


def answer(model: Transformer, tokenizer: Tokenizer, config: InferConfig) -> None:
    """Decode every request of the config and print it.

    Raises:
        ValueError: a text that is too long for the model, or a hole that cannot be read.
    """
    unknown = ids_without_text(tokenizer, model.config.vocab_size)
    suppressed = (*config.generation.suppress_token_ids, *unknown)
    generation = config.generation.model_copy(update={"suppress_token_ids": suppressed})
    many = len(config.input.prompts) + len(config.input.infills) > 1
    for requests in _requests_of(config, tokenizer, model):
        view = LiveView(tokenizer, requests, config.output.format) if config.output.show else None
        start = time.perf_counter()
        decode = generate if requests.kind == "prompt" else infill
        done = decode(model, requests.inputs, generation, requests.seeds, view)
        seconds = time.perf_counter() - start
        if view is not None:
            view.close()
        for index, result in enumerate(done):
            print_answer(tokenizer, requests, index, result, seconds if config.output.format == "json" else None, many)


def _requests_of(config: InferConfig, tokenizer: Tokenizer, model: Transformer) -> Iterator[Requests]:
    mask, new = model.config.mask_token_id, config.generation.max_new_tokens
    begin = model.config.beginning
    prompts = [[*begin, *tokenizer.encode(text)] for text in config.input.prompts]
    # Read before anything is decoded, so that a mistake in them does not come late.
    canvases = [[*begin, *parse_infill(text, tokenizer, mask)] for text in config.input.infills]
    seed = config.input.seed
    if prompts:
        is_new = [[False] * len(ids) + [True] * new for ids in prompts]
        seeds = list(range(seed, seed + len(prompts)))
        yield Requests("prompt", config.input.prompts, prompts, is_new, seeds, len(begin))
    seed += len(prompts)
    if canvases:
        is_new = [[token == mask for token in ids] for ids in canvases]
        seeds = list(range(seed, seed + len(canvases)))
        yield Requests("infill", config.input.infills, canvases, is_new, seeds, len(begin))
