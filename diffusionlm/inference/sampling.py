"""From logits to proposals: a token, a confidence and a log-probability for each row that was read.

Shapes: R rows of a forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from config.generation import GenerationConfig
from diffusionlm.diffusion.rng import RngStream
from diffusionlm.inference.filters import choose_tokens, filter_logits
from diffusionlm.inference.requests import ActiveRequest, Predictions
from diffusionlm.inference.strategies import Strategy

PROBABILITY_CHUNK_BYTES = 64 << 20
"""Budget for one [rows, V] array of fp64 probabilities."""


@dataclass(frozen=True)
class TokenSampler:
    """How logits are read."""

    config: GenerationConfig
    """After `fill_defaults`."""
    strategy: Strategy
    forbidden_token_ids: Tensor
    """Tokens of probability zero: the mask, as in training (SUBS, Sahoo et al. 2024), and the suppressed ones."""

    def sample_predictions(self, logits_NV: Tensor, requests: Sequence[ActiveRequest]) -> list[Predictions]:
        """What the rows say, request by request; the one wait for the device in a forward.

        Raises:
            ValueError: probabilities that are not finite.
        """
        R, V = logits_NV.shape
        device = logits_NV.device
        token_N = None
        if self.config.temperature:
            token_N = torch.from_numpy(
                np.concatenate([request.draw_uniforms(RngStream.TOKEN_SAMPLING, request.read) for request in requests])
            ).to(device)
        present_N = None
        if self.strategy.can_remask:
            present = [np.where(each.is_masked_L[each.read], -1, each.tokens_L[each.read]) for each in requests]
            present_N = torch.from_numpy(np.concatenate(present)).to(device)
        size = max(1, PROBABILITY_CHUNK_BYTES // (8 * V))
        chunks = [slice(start, start + size) for start in range(0, R, size)]
        read = [
            self._sample_chunk(
                logits_NV[some],
                None if token_N is None else token_N[some],
                None if present_N is None else present_N[some],
            )
            for some in chunks
        ]
        tokens_N, confidence_N, logprobs_N = torch.cat(read, dim=1).cpu().numpy()
        if not np.isfinite(logprobs_N).all():
            raise ValueError(
                "the model's probabilities are not finite: its weights may be damaged, or its numbers overflow in "
                'this dtype; try dtype = "float32"'
            )
        ends = np.cumsum([0, *(len(request.read) for request in requests)]).tolist()
        return [
            Predictions(tokens_N[start:end].astype(np.int64), confidence_N[start:end], logprobs_N[start:end])
            for start, end in pairwise(ends)
        ]

    def _sample_chunk(self, logits_NV: Tensor, token_N: Tensor | None, present_N: Tensor | None) -> Tensor:
        """Chosen token, confidence and log-probability of each row, [3, R] in fp64 (which holds ids exactly).

        ``token_N`` are uniforms for the tokens (None: greedy), ``present_N`` the tokens of settled rows (-1: masked).
        fp64 throughout: in fp32 all probabilities near 1 are equal, and the order among them would be chance.
        """
        config, strategy = self.config, self.strategy
        unfiltered = config.top_k is None and config.top_p == 1.0 and config.temperature in (0.0, 1.0)
        if token_N is None and present_N is None and not strategy.needs_distribution and unfiltered:
            return _greedy_with_probability(logits_NV, self.forbidden_token_ids)
        own_NV = logits_NV.to(torch.float64, copy=True).index_fill_(1, self.forbidden_token_ids, float("-inf"))
        logprobs_NV = own_NV.log_softmax(dim=1)
        own_probs_NV = logprobs_NV.exp()
        assert config.temperature is not None
        filtered_NV = filter_logits(own_NV, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p)
        probs_NV = own_probs_NV if filtered_NV is own_NV else filtered_NV.softmax(dim=1)
        tokens_N = choose_tokens(probs_NV, token_N)
        if present_N is not None:
            tokens_N = torch.where(present_N < 0, tokens_N, present_N)
        basis_NV = own_probs_NV if config.confidence_from == "unfiltered" else probs_NV
        confidence_N = strategy.confidence(basis_NV, tokens_N)
        logprobs_N = logprobs_NV.gather(1, tokens_N[:, None])[:, 0]
        return torch.stack([tokens_N.double(), confidence_N, logprobs_N])


def _greedy_with_probability(logits_NV: Tensor, forbidden_token_ids: Tensor) -> Tensor:
    """Greedy choice with its own probability as confidence, [3, R] in fp64, without an array of fp64 logits.

    The probability is 1 / (1 + rest), the rest being the other tokens' exp(logit - best): however near 1 it is, its
    distance from 1 is as exact as the rest in fp32.
    """
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32), copy=True)
    wide_NV.index_fill_(1, forbidden_token_ids, float("-inf"))
    tokens_N1 = wide_NV.argmax(dim=1, keepdim=True)
    others_NV = wide_NV.sub_(wide_NV.gather(1, tokens_N1)).exp_().scatter_(1, tokens_N1, 0.0)
    rest_N = others_NV.sum(dim=1, dtype=torch.float64)
    return torch.stack([tokens_N1[:, 0].double(), 1.0 / (1.0 + rest_N), -torch.log1p(rest_N)])
