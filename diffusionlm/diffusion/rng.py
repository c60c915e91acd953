"""Keyed chance: a number is a function of (seed, stream, key), never of what was drawn before it."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class RngStream(IntEnum):
    """What a draw is for. The first part of every key, so that no two purposes share their chance."""

    NOISE_LEVELS = 0
    """(step): offsets of the rows' noise levels."""
    MASKS = 1
    """(step, row of the step): noise of one row."""
    REPLACEMENT_TOKENS = 3
    """(step, row of the step): random tokens in place of noised ones."""
    BLOCK_LENGTH = 2
    """(step): block length of the step, where there are several."""
    DOCUMENT_ORDER = 10
    """(epoch, window), of shards (epoch); in a mixture with the part before it."""
    SEQUENCE_ORDER = 11
    """(epoch, window); in a mixture with the part before it."""
    RANDOM_LENGTH = 12
    """(step) whether the rows are cut, (step, row of the step) where."""
    SYNTHETIC = 13
    """(split, epoch, block of documents): text of a synthetic source."""
    LIKELIHOOD_LEVELS = 20
    """(): offsets of the rows of an evaluation, (row): order of its blocks."""
    LIKELIHOOD_MASKS = 21
    """(draw, row): masks of an evaluation."""
    FILL_MASKS = 22
    """(share in thousandths, row): masks of the fill test."""
    TOKEN_SAMPLING = 30
    """(forward): a request's choice of tokens."""
    POSITION_ORDER = 31
    """(forward): a request's choice of positions."""


def keyed_rng(seed: int, stream: RngStream, *key: int) -> np.random.Generator:
    """Counter-based chance for a key of non-negative integers: equal keys give equal numbers, anywhere."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy=seed, spawn_key=(stream, *key))))
