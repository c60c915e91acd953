"""Slow transcriptions of the samplers of full-attention models: LLaDA, Dream, Fast-dLLM (`choosing.py` says how chance
enters).

LLaDA: generate.py (Nie et al. 2025). Dream: generation_utils.py (Ye et al. 2025). Fast-dLLM: llada/generate.py (Wu et
al. 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tests.reference.decoding.choosing import Array, Choice, LogitsOf, Text, best, even_counts


def llada_generate(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    choice: Choice,
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    remasking: str = "low_confidence",
    canvas: str = "fixed",
) -> Text:
    """``steps`` are those of a block. ``fixed``: with padding, all masks are there from the start. ``growing``: the
    text ends with the current block (no code was published); what guidance masks is the first prompt.

    Intended, where the published code does otherwise: a last block may be shorter; only the block's own masks are
    settled, not mask tokens of the prompt; forwards of steps that settle nothing are left out. ``random_topk`` is not
    LLaDA's own; it is `low_confidence` with jitter.
    """
    text = Text(list(prompt), choice.mask)
    for done in range(0, gen_length, block_length):
        start, end = len(prompt) + done, len(prompt) + min(done + block_length, gen_length)
        text.append_masks((end if canvas == "growing" else len(prompt) + gen_length) - len(text.x))
        for count in even_counts(len(text.masked(start, end)), steps):
            logits_LV = logits_of(text.x)
            if choice.cfg_scale > 0.0:
                without_LV = logits_of([text.mask] * len(prompt) + text.x[len(prompt) :])
                logits_LV = without_LV + (choice.cfg_scale + 1.0) * (logits_LV - without_LV)
            masked = text.masked(start, end)
            x0 = {position: choice.token(logits_LV[position], position, text.step) for position in masked}
            uniforms = {position: choice.order(position, text.step) for position in masked}
            confidence = {position: choice.confidence(logits_LV[position], x0[position]) for position in masked}
            if remasking == "random_topk":
                chosen = _jittered(confidence, uniforms, count)
            else:
                chosen = best(uniforms if remasking == "random" else confidence, count)
            for position in chosen:
                text.commit(position, x0[position])
            text.step += 1
            text.record_step()
    return text


def _jittered(confidence: dict[int, float], uniforms: dict[int, float], count: int) -> list[int]:
    """Noise of 1e-6 only says which of equal confidences comes first: here the least uniform."""
    return sorted(confidence, key=lambda position: (-round(confidence[position], 6), uniforms[position]))[:count]


def dream_generate(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    choice: Choice,
    *,
    gen_length: int,
    steps: int,
    alg: str,
    alg_temp: float = 0.0,
) -> Text:
    """``logits_of`` are the model's outputs, of which the one before a position predicts it.

    Intended, where the published code does otherwise: forwards of steps that settle nothing are left out, and those of
    counts that are 0 are no steps of chance. (Dream cuts by top-p before top-k, ours as Hugging Face does after it: the
    same with one of them alone.) Places are drawn without replacement by Gumbel noise (as in Open-dLLM),
    which is the same distribution as `torch.multinomial`'s.
    """
    text = Text(list(prompt), choice.mask)
    text.append_masks(gen_length)
    times = torch.linspace(1.0, 1e-3, steps + 1)
    for i in range(steps):
        masked = text.masked(0, len(text.x))
        share = 1.0 - times[i + 1] / times[i]
        if alg == "origin":
            chosen = [
                position for position in masked if i == steps - 1 or choice.order(position, text.step) < float(share)
            ]
            text.step += 1
            if chosen:
                logits_LV = _shifted(logits_of(text.x))
                for position in chosen:
                    text.commit(position, choice.token(logits_LV[position], position, text.step - 1))
                text.record_step()
            continue
        count = int(len(masked) * share) if i < steps - 1 else len(masked)
        if count == 0:
            continue
        logits_LV = _shifted(logits_of(text.x))
        x0 = {position: choice.token(logits_LV[position], position, text.step) for position in masked}
        confidence = {position: dream_confidence(choice, logits_LV[position], x0[position], alg) for position in masked}
        if alg_temp > 0.0:
            noise = {position: -np.log(-np.log(choice.order(position, text.step))) for position in masked}
            confidence = {position: confidence[position] / alg_temp + noise[position] for position in masked}
        for position in best(confidence, count):
            text.commit(position, x0[position])
        text.step += 1
        text.record_step()
    return text


def dream_confidence(choice: Choice, logits_V: Array, token: int, alg: str) -> float:
    probs_V = choice.basis(logits_V)
    if alg == "maskgit_plus":
        return choice.confidence(logits_V, token)
    if alg == "topk_margin":
        first, second = np.sort(probs_V)[::-1][:2]
        return float(first - second)
    assert alg == "entropy"
    return float((probs_V * np.log(probs_V + 1e-10)).sum())


def _shifted(logits_LV: Array) -> Array:
    """Row i is what predicts token i."""
    return np.concatenate([logits_LV[:1], logits_LV[:-1]])


Past = Any
"""Keys and values of each layer, [1, heads, positions, width]."""
Forward = Callable[[Sequence[int], Sequence[int], Past | None], tuple[Array, Past]]
"""From tokens, their positions and what they see beside themselves to logits [Q, V], and keys and values of both, the
tokens' last."""
Transfer = Callable[[dict[int, float], int], list[int]]
"""From confidences of places and the step within the block to the places that are settled."""


def fast_dllm_generate(
    forward: Forward,
    prompt: Sequence[int],
    choice: Choice,
    *,
    gen_length: int,
    block_length: int,
    transfer: Transfer,
    cache: str = "none",
    shift: int = 0,
) -> Text:
    """With a cache the first forward of a block is one of the whole text, all later masks included, and settles tokens,
    too. The others compute a part of it, beside the keys and values of the rest as they were when these were computed
    last. ``prefix``: all from the block on; ``dual``: the block alone. (Intended: no forward of a block that is done.)

    ``shift`` 1: the output before a position predicts it, so that the place before the block is computed with it while
    the block's first is masked. (The published code settles that one in the full forward, however unsure it is.)
    """
    text = Text(list(prompt), choice.mask)
    text.append_masks(gen_length)
    everything = range(len(text.x))
    for start in range(len(prompt), len(text.x), block_length):
        end, cached, step_of_block = min(start + block_length, len(text.x)), None, 0
        while masked := text.masked(start, end):
            if cached is None or cache == "none":
                part = everything
                logits, cached = forward(text.x, everything, None)
            else:
                part = everything[start - int(text.is_masked[start]) * shift : end if cache == "dual" else None]
                logits, cached = _beside(forward, text.x, part, cached)
            rows = {position: logits[position - shift - part[0]] for position in masked}
            x0 = {position: choice.token(rows[position], position, text.step) for position in masked}
            confidence = {position: choice.confidence(rows[position], x0[position]) for position in masked}
            for position in transfer(confidence, step_of_block):
                text.commit(position, x0[position])
            text.step += 1
            step_of_block += 1
            text.record_step()
    return text


def _beside(forward: Forward, x: list[int], part: range, past_of_all: Past) -> tuple[Array, Past]:
    """A part of the text, which sees what is held of the rest."""
    rest = [position for position in range(len(x)) if position not in part]
    past = [(k[:, :, rest], v[:, :, rest]) for k, v in past_of_all]
    logits, cache_of_all = forward([x[position] for position in part], part, past)
    order = [[*rest, *part].index(position) for position in range(len(x))]
    return logits, [(k[:, :, order], v[:, :, order]) for k, v in cache_of_all]


def by_threshold(threshold: float) -> Transfer:
    """All of at least this confidence, and the best one in any case."""

    def transfer(confidence: dict[int, float], step: int) -> list[int]:
        ranked = best(confidence, len(confidence))
        return [position for rank, position in enumerate(ranked) if rank == 0 or confidence[position] >= threshold]

    return transfer


def by_factor(factor: float) -> Transfer:
    """The n-th best one while its confidence is at least 1 - factor / (n + 1), the best one in any case. (The published
    loop also takes the last one if it alone fails.)"""

    def transfer(confidence: dict[int, float], step: int) -> list[int]:
        accepted: list[int] = []
        for n, position in enumerate(best(confidence, len(confidence)), start=1):
            if n > 1 and confidence[position] < 1.0 - factor / (n + 1):
                break
            accepted.append(position)
        return accepted

    return transfer


def by_count(num_masked: int, steps: int) -> Transfer:
    """LLaDA's counts."""
    counts = even_counts(num_masked, steps)
    return lambda confidence, step: best(confidence, counts[step])
