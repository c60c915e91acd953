"""Slow transcriptions of samplers of absorbing diffusion: MDLM (Sahoo et al. 2024), first-hitting (Zheng et al. 2025),
P2 (Peng et al. 2025, as in Open-dLLM), ReMDM (Wang et al. 2025). `choosing.py` says how chance enters.

A step from t to s first says by the places' uniforms which of them change, then draws tokens for these alone: the same
distribution as one draw over vocabulary and mask together.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from tests.reference.decoding.choosing import Choice, LogitsOf, Text, best, even_counts


def _start(prompt: Sequence[int], choice: Choice, gen_length: int) -> Text:
    text = Text(list(prompt), choice.mask)
    text.append_masks(gen_length)
    return text


def mdlm_ddpm_cache(
    logits_of: LogitsOf, prompt: Sequence[int], choice: Choice, *, gen_length: int, block_length: int, steps: int
) -> Text:
    """Ancestral sampling with the linear schedule, block by block; the logits of a text that did not change are kept.

    Intended: time ends at 0, where nothing is masked any more, in place of a last argmax behind t = 1e-5; a block is
    over when nothing in it is masked.
    """
    text, cached_logits_LV = _start(prompt, choice, gen_length), None
    for start in range(len(prompt), len(text.x), block_length):
        for i in range(steps):
            masked = text.masked(start, start + block_length)
            if not masked:
                break
            t, s = Fraction(steps - i, steps), Fraction(steps - i - 1, steps)
            if cached_logits_LV is None:
                cached_logits_LV = logits_of(text.x)
                text.forwards += 1
            chosen = [position for position in masked if choice.order(position, text.step) < float((t - s) / t)]
            for position in chosen:
                text.commit(position, choice.token(cached_logits_LV[position], position, text.step))
            if chosen:
                text.history.append(list(text.x))
                cached_logits_LV = None
            text.step += 1
    return text


def first_hitting(logits_of: LogitsOf, prompt: Sequence[int], choice: Choice, *, gen_length: int) -> Text:
    """With n masks left the next one is hit at t u^(1/n), and is any of them: the model is not told the time, so that
    only the place matters, which is that of the greatest uniform."""
    return equal_counts(logits_of, prompt, choice, gen_length=gen_length, steps=gen_length)


def equal_counts(logits_of: LogitsOf, prompt: Sequence[int], choice: Choice, *, gen_length: int, steps: int) -> Text:
    """As many places in every step, any of them: those of the greatest uniforms."""
    text = _start(prompt, choice, gen_length)
    for count in even_counts(gen_length, steps):
        logits_LV = logits_of(text.x)
        uniforms = {position: choice.order(position, text.step) for position in text.masked(0, len(text.x))}
        for position in best(uniforms, count):
            text.commit(position, choice.token(logits_LV[position], position, text.step))
        text.step += 1
        text.record_step()
    return text


def p2(
    logits_of: LogitsOf, prompt: Sequence[int], choice: Choice, *, gen_length: int, block_length: int, steps: int
) -> Text:
    """After step i of a block the floor((1 - (i + 1) / S) N) least confident of its N places are masks, whatever they
    were. The confidence of a settled place is the present probability of its token."""
    text = _start(prompt, choice, gen_length)
    for start in range(len(prompt), len(text.x), block_length):
        positions = range(start, min(start + block_length, len(text.x)))
        for i in range(steps):
            num_to_mask = len(positions) * (steps - 1 - i) // steps
            logits_LV = logits_of(text.x)
            masked = text.masked(positions.start, positions.stop)
            x0 = {position: choice.token(logits_LV[position], position, text.step) for position in masked}
            confidence = {
                position: choice.confidence(logits_LV[position], x0.get(position, text.x[position]))
                for position in positions
            }
            confident_positions = best(confidence, len(positions) - num_to_mask)
            for position in positions:
                if position not in confident_positions:
                    text.forget(position)
                elif position in x0:
                    text.commit(position, x0[position])
            text.step += 1
            text.record_step()
    return text


def remdm(
    logits_of: LogitsOf, prompt: Sequence[int], choice: Choice, *, gen_length: int, rates: Sequence[tuple[float, float]]
) -> Text:
    """``rates``: how probably a masked place is settled and a settled one masked, in each step; the last step settles
    all. Forwards of steps that settle nothing are left out: their logits would not be read."""
    text = _start(prompt, choice, gen_length)
    positions = range(len(prompt), len(text.x))
    for i, (settle, remask) in enumerate(rates):
        uniforms = {position: choice.order(position, text.step) for position in positions}
        is_last = i == len(rates) - 1
        masked = text.masked(positions.start, positions.stop)
        chosen = [position for position in masked if is_last or uniforms[position] < settle]
        logits_LV = logits_of(text.x) if chosen else None
        for position in positions:
            if position not in masked and not is_last and uniforms[position] < remask:
                text.forget(position)
        for position in chosen:
            text.commit(position, choice.token(logits_LV[position], position, text.step))  # type: ignore[index]
        if chosen:
            text.record_step()
        text.step += 1
    return text


def remdm_rates(alpha_t: float, alpha_s: float, sigma: float) -> tuple[float, float]:
    """Of a step from t to s: settling and masking again."""
    if alpha_t == 1.0:
        return 1.0, sigma
    return (alpha_s - (1.0 - sigma) * alpha_t) / (1.0 - alpha_t), sigma


def largest_sigma(alpha_t: float, alpha_s: float) -> float:
    return 1.0 if alpha_t == 0.0 else min(1.0, (1.0 - alpha_s) / alpha_t)


def remdm_cap_rates(steps: int, eta: float) -> list[tuple[float, float]]:
    """Linear schedule, sigma = min(eta, the largest one)."""
    rates = []
    for i in range(steps):
        alpha_t, alpha_s = i / steps, (i + 1) / steps
        rates.append(remdm_rates(alpha_t, alpha_s, min(eta, largest_sigma(alpha_t, alpha_s))))
    return rates


def loop_alpha(t: float, t_on: float, t_off: float, alpha_on: float) -> float:
    """MDLM until alpha_on at t_on, constant until t_off, then MDLM to 1."""
    if t > t_on:
        return alpha_on * (1.0 - t) / (1.0 - t_on)
    if t > t_off:
        return alpha_on
    return 1.0 - t * (1.0 - alpha_on) / t_off


def remdm_loop_rates(
    steps: int, eta: float, t_on: float = 0.55, t_off: float = 0.05, alpha_on: float = 0.9
) -> list[tuple[float, float]]:
    """Masks come back only while alpha is constant: in steps that lie between t_on and t_off. (The published code goes
    by where they begin, and lets alpha overshoot in the step that crosses t_on.)"""
    rates = []
    for i in range(steps):
        t, s = (steps - i) / steps, (steps - i - 1) / steps
        alpha_t, alpha_s = (loop_alpha(time, t_on, t_off, alpha_on) for time in (t, s))
        sigma = min(eta, largest_sigma(alpha_t, alpha_s)) if s >= t_off and t <= t_on else 0.0
        rates.append(remdm_rates(alpha_t, alpha_s, sigma))
    return rates
