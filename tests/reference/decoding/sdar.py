"""A slow transcription of SDAR's ``block_diffusion_generate`` (Cheng et al. 2025, generate.py), with what JetEngine and
LMDeploy do otherwise as options. `choosing.py` says how chance enters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.reference.decoding.choosing import Array, Choice, LogitsOf, Text, best, even_counts


@dataclass(frozen=True)
class Rule:
    """Which places are settled."""

    remasking_strategy: str
    confidence_threshold: float = 0.85
    eb_threshold: float = 0.35
    fallback: str = "quota"
    """generate.py: "quota", the most confident ones. JetEngine: "leftmost". LMDeploy: "one", whatever the count is."""

    def chosen(self, masked: list[int], confidence: dict[int, float], probs: dict[int, Array], count: int) -> list[int]:
        if self.remasking_strategy == "sequential":
            return masked[:count]
        if self.remasking_strategy == "low_confidence_static":
            return best(confidence, count)
        if self.remasking_strategy == "entropy_bounded":
            return _entropy_bounded(probs, self.eb_threshold)
        assert self.remasking_strategy == "low_confidence_dynamic"
        passing = [position for position in masked if confidence[position] > self.confidence_threshold]
        if self.fallback == "one":
            return sorted({*passing, *best(confidence, 1)})
        if len(passing) >= count:
            return passing
        return best(confidence, count) if self.fallback == "quota" else masked[:count]


def block_diffusion_generate(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    choice: Choice,
    rule: Rule,
    *,
    gen_length: int,
    block_length: int,
    denoising_steps: int,
) -> Text:
    """Blocks are counted from the start of the text; the last one is decoded whole, so that the text may be longer than
    asked for. ``logits_of`` a text that ends with the current block: keys and values of the blocks before it are as in
    the cache, since no block sees those after it.

    Forwards are counted as there: one that fills the cache with the prompt's whole blocks, and one behind every block.

    Intended, where the published code does otherwise: places that are not masked are never chosen, and
    ``entropy_bounded`` is JetEngine's.
    """
    B, P = block_length, len(prompt)
    length = -(-(P + gen_length) // B) * B
    text = Text(list(prompt), choice.mask)
    text.append_masks(length - P)
    text.forwards += int(P // B > 0)
    for start in range(P // B * B, length, B):
        counts = even_counts(B, denoising_steps) if rule.fallback != "one" else [1] * B
        for count in counts:
            masked = text.masked(start, start + B)
            if not masked:
                break
            logits_LV = logits_of(text.x[: start + B])
            x0 = {position: choice.token(logits_LV[position], position, text.step) for position in masked}
            confidence = {position: choice.confidence(logits_LV[position], x0[position]) for position in masked}
            probs = {position: choice.basis(logits_LV[position]) for position in masked}
            chosen = rule.chosen(masked, confidence, probs, count)
            for position in chosen:
                text.commit(position, x0[position])
            text.step += 1
            text.record_step()
        assert not text.masked(start, start + B)
        text.forwards += 1
    return text


def _entropy_bounded(probs: dict[int, Array], bound: float) -> list[int]:
    """The least uncertain ones, as long as the sum of their entropies is below the bound; at least one."""
    entropy = {}
    for position, probs_V in probs.items():
        some_V = probs_V[probs_V > 0.0]
        entropy[position] = float(-(some_V * np.log(some_V)).sum())
    ranked = sorted(entropy, key=lambda position: (entropy[position], position))
    sums = np.cumsum([entropy[position] for position in ranked])
    return ranked[: max(1, int((sums < bound).sum()))]
