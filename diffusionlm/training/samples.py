"""Fill texts with masked spans during training, so that a person sees what the model has learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from config.generation import GenerationConfig
from diffusionlm.inference.generate import Generation, decode
from diffusionlm.inference.requests import PreparedRequest, prepare_infill
from diffusionlm.inference.settings import DecodingSettings, resolve_settings
from diffusionlm.inference.text import parse_infill, token_texts
from diffusionlm.models.transformer import Transformer
from logger import RunLogger
from tokenizer import Tokenizer


@dataclass(frozen=True)
class SampleInfills:
    """The texts of ``samples.infills``, encoded."""

    tokenizer: Tokenizer
    texts: Sequence[str]
    prefix_ids: list[int]
    """Tokens before each text, which are not shown."""
    settings: DecodingSettings
    requests: list[PreparedRequest]
    """Empty on ranks that fill nothing."""

    @classmethod
    def open(
        cls, texts: Sequence[str], tokenizer: Tokenizer, model: Transformer, is_participating: bool = True
    ) -> SampleInfills:
        """Encode the texts, and check that the model can fill them.

        Args:
            is_participating: whether this rank fills them: the first one does; under FSDP, whose forwards are
                collective, all do.

        Raises:
            ValueError: ``samples.infills`` cannot be filled by this model.
        """
        prefix_ids = model.config.prefix_ids
        try:
            # The default cache of a block-causal model is "block", and these backends have no cached form.
            cache = "none" if model.attention_backend in ("tiled", "flex") else None
            settings = resolve_settings(GenerationConfig(cache=cache), model.config)
            requests = [
                prepare_infill(settings, [*prefix_ids, *parse_infill(text, tokenizer)], seed, label=repr(text))
                for seed, text in enumerate(texts)
            ]
        except ValueError as error:
            raise ValueError(f"samples.infills = {list(texts)}: {error}") from error
        return cls(tokenizer, texts, prefix_ids, settings, requests if is_participating else [])

    def log_samples(self, model: Transformer, step: int, logger: RunLogger) -> None:
        """Fill the masked spans greedily, one token per forward, and log an event for each text."""
        if not self.requests:
            return
        results = decode(model, self.settings, self.requests)
        for text, request, result in zip(self.texts, self.requests, results, strict=True):
            values = self._describe_sample(text, request, result)
            logger.event(step, "sample", f"step {step}: {text!r} -> {values['filled']!r}", values)

    def _describe_sample(self, text: str, request: PreparedRequest, result: Generation) -> dict[str, Any]:
        """``given``, ``filled`` and its ``tokens`` as text. For each token ``step_map``, the forward (from 1) that
        committed it, and ``logprobs``, in nats; null for tokens that were not masked."""
        start = len(self.prefix_ids)
        masked_positions = (request.masked_positions - start).tolist()
        tokens = token_texts(self.tokenizer, result.token_ids[start:])
        step_map = dict(zip(masked_positions, result.step_map, strict=True))
        finite_logprobs = (logprob if math.isfinite(logprob) else None for logprob in result.logprobs)
        logprobs = dict(zip(masked_positions, finite_logprobs, strict=True))
        positions = range(len(tokens))
        return {
            "given": text,
            "filled": "".join(tokens),
            "tokens": tokens,
            "step_map": [step_map.get(position) for position in positions],
            "logprobs": [logprobs.get(position) for position in positions],
        }
