"""Whether greedy decoding yields a continuation."""

from __future__ import annotations

from collections.abc import Sequence

from config.evaluation.likelihood import AnswerLikelihoodConfig
from config.generation import GenerationConfig
from diffusionlm.evaluation.likelihood.scoring import AnswerBuilder, OptionsRequest
from diffusionlm.evaluation.sampler_likelihood import mask_text
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.transformer import Transformer


def greedy_matches(
    model: Transformer, requests: Sequence[OptionsRequest], config: AnswerLikelihoodConfig | None = None
) -> list[bool]:
    """Decode the only option of each document greedily, and compare.

    In each step the most probable token of the most confident masked position is committed, as LLaDA's published
    evaluation does (Nie et al. 2025): `generate` with ``low_confidence`` and one token per step. In block-causal
    attention blocks are decoded one after the other. Autoregressive models predict the tokens in order. Decoding stops
    at the first wrong token.

    Raises:
        ValueError: as `score_documents`.
    """
    config = AnswerLikelihoodConfig() if config is None else config
    builder = AnswerBuilder.from_model(model.config, config)
    block_length, attention = builder.layout.block_length, "bidirectional"
    if block_length is not None:
        attention = "block_causal"
    active, max_length = {}, 1
    for index, item in enumerate(requests):
        answer = builder.build(item.context, item.options[0], f"continuation {index}")
        values = {"attention": attention, "block_length": block_length or answer.num_tokens}
        generation = GenerationConfig.model_validate(
            {**values, "remasking_strategy": "low_confidence", "temperature": 0.0, "cfg_scale": config.cfg_scale}
        )
        request = mask_text(answer.tokens_T, answer.positions, resolve_settings(generation, model.config))
        active[id(request)] = request, answer.tokens_T, index
        max_length = max(max_length, len(answer.tokens_T))
    decoder = Decoder.for_requests(
        model, [request for request, _, _ in active.values()], max(1, config.batch_tokens // max_length)
    )
    results = [True] * len(requests)
    while decoder.has_work:
        for request in decoder.step().decoded:
            if request.error is not None:
                raise request.error
            _, tokens_L, index = active[id(request)]
            if (request.tokens_L != tokens_L)[~request.is_masked_L].any():
                results[index] = False
                decoder.remove(request)
    decoder.keep_graphs()
    return results
