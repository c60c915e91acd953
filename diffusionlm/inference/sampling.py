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
from diffusionlm.diffusion.rng import Stream
from diffusionlm.inference.filters import choose_tokens, filter_logits
from diffusionlm.inference.requests import Proposal, Request
from diffusionlm.inference.strategies import Policy

CHUNK_BYTES = 64 << 20
"""Budget for one [rows, V] array of fp64 probabilities."""


@dataclass(frozen=True)
class Reader:
    """How logits are read."""

    config: GenerationConfig
    """After `with_defaults`."""
    policy: Policy
    forbidden: Tensor
    """Tokens of probability zero: the mask, as in training (SUBS, Sahoo et al. 2024), and the suppressed ones."""

    def propose(self, logits_RV: Tensor, requests: Sequence[Request]) -> list[Proposal]:
        """What the rows say, request by request; the one wait for the device in a forward.

        Raises:
            ValueError: probabilities that are not finite.
        """
        R, V = logits_RV.shape
        device = logits_RV.device
        token_R = None
        if self.config.temperature:
            token_R = torch.from_numpy(
                np.concatenate([request.uniforms(Stream.TOKEN, request.read) for request in requests])
            ).to(device)
        present_R = None
        if self.policy.remasks:
            present = [np.where(each.is_masked_L[each.read], -1, each.tokens_L[each.read]) for each in requests]
            present_R = torch.from_numpy(np.concatenate(present)).to(device)
        size = max(1, CHUNK_BYTES // (8 * V))
        chunks = [slice(start, start + size) for start in range(0, R, size)]
        read = [
            self._read(
                logits_RV[some],
                None if token_R is None else token_R[some],
                None if present_R is None else present_R[some],
            )
            for some in chunks
        ]
        tokens_R, confidence_R, logprobs_R = torch.cat(read, dim=1).cpu().numpy()
        if not np.isfinite(logprobs_R).all():
            raise ValueError(
                "the model's probabilities are not finite: its weights may be damaged, or its numbers overflow in "
                'this dtype; try dtype = "float32"'
            )
        ends = np.cumsum([0, *(len(request.read) for request in requests)]).tolist()
        return [
            Proposal(tokens_R[start:end].astype(np.int64), confidence_R[start:end], logprobs_R[start:end])
            for start, end in pairwise(ends)
        ]

    def _read(self, logits_RV: Tensor, token_R: Tensor | None, present_R: Tensor | None) -> Tensor:
        """Chosen token, confidence and log-probability of each row, [3, R] in fp64 (which holds ids exactly).

        ``token_R`` are uniforms for the tokens (None: greedy), ``present_R`` the tokens of settled rows (-1: masked).
        fp64 throughout: in fp32 all probabilities near 1 are equal, and the order among them would be chance.
        """
        config, policy = self.config, self.policy
        unfiltered = config.top_k is None and config.top_p == 1.0 and config.temperature in (0.0, 1.0)
        if token_R is None and present_R is None and not policy.needs_distribution and unfiltered:
            return _best(logits_RV, self.forbidden)
        own_RV = logits_RV.to(torch.float64, copy=True).index_fill_(1, self.forbidden, float("-inf"))
        logprobs_RV = own_RV.log_softmax(dim=1)
        own_probs_RV = logprobs_RV.exp()
        assert config.temperature is not None
        filtered_RV = filter_logits(own_RV, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p)
        probs_RV = own_probs_RV if filtered_RV is own_RV else filtered_RV.softmax(dim=1)
        tokens_R = choose_tokens(probs_RV, token_R)
        if present_R is not None:
            tokens_R = torch.where(present_R < 0, tokens_R, present_R)
        basis_RV = own_probs_RV if config.confidence_from == "unfiltered" else probs_RV
        confidence_R = policy.confidence(basis_RV, tokens_R)
        logprobs_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0]
        return torch.stack([tokens_R.double(), confidence_R, logprobs_R])


def _best(logits_RV: Tensor, forbidden: Tensor) -> Tensor:
    """Greedy choice with its own probability as confidence, [3, R] in fp64, without an array of fp64 logits.

    The probability is 1 / (1 + rest), the rest being the other tokens' exp(logit - best): however near 1 it is, its
    distance from 1 is as exact as the rest in fp32.
    """
    wide_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32), copy=True)
    wide_RV.index_fill_(1, forbidden, float("-inf"))
    tokens_R1 = wide_RV.argmax(dim=1, keepdim=True)
    others_RV = wide_RV.sub_(wide_RV.gather(1, tokens_R1)).exp_().scatter_(1, tokens_R1, 0.0)
    rest_R = others_RV.sum(dim=1, dtype=torch.float64)
    return torch.stack([tokens_R1[:, 0].double(), 1.0 / (1.0 + rest_R), -torch.log1p(rest_R)])
