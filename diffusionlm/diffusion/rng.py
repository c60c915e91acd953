"""Keyed random numbers: they depend on (seed, stream, key) only, never on what was drawn before."""

from __future__ import annotations

from enum import IntEnum, unique

import numpy as np


@unique
class RngStream(IntEnum):
    """Purpose of random numbers: the first part of every key, so that purposes never share numbers.

    The docstring of each member names the rest of its key.
    """

    NOISE_LEVELS = 0
    """(step): offsets of the noise levels of all sequences."""
    MASKS = 1
    """(step, sequence in the step): masks of one sequence."""
    REPLACEMENT_TOKENS = 3
    """(step, sequence in the step): random tokens in place of masked ones."""
    BLOCK_LENGTH = 2
    """(step): block length of the step, if there are several."""
    ATTENTION_ANNEALING = 4
    """(step): which later tokens are visible while attention is annealed."""
    DOCUMENT_ORDER = 10
    """(epoch, window), for shards (epoch); in a mixture preceded by the component."""
    SEQUENCE_ORDER = 11
    """(epoch, window); in a mixture preceded by the component."""
    RANDOM_LENGTH = 12
    """(step): whether the step's sequences are cut; (step, sequence in the step): where."""
    SYNTHETIC = 13
    """(split, epoch, block of documents): text of a synthetic source."""
    ADAPTER_DROPOUT = 14
    """(step): key of the dropout masks of adapters."""
    MASK_NOISE = 15
    """(step, row in the step): noise on the embedding of the mask token."""
    CHAT_TASKS = 16
    """(split, epoch, block of conversations): synthetic conversations."""
    ANSWER = 17
    """(epoch, window, conversation in it): the answer that is learned; in a mixture preceded by the component."""
    EMBEDDING_NOISE = 18
    """(step, row in the step): noise on the embeddings of all tokens."""
    LIKELIHOOD_LEVELS = 20
    """(): offsets of the sequences of an evaluation; (sequence): order of its blocks."""
    LIKELIHOOD_MASKS = 21
    """(Monte Carlo sample, sequence): masks of an evaluation."""
    FILL_MASKS = 22
    """(masked share in thousandths, sequence): masks of the fill test."""
    ANSWER_LEVELS = 23
    """(key of the request, block): shares of the answer that are masked."""
    ANSWER_MASKS = 24
    """(key of the request, block, draw): order of the answer's tokens."""
    TOKEN_SAMPLING = 30
    """(forward): tokens that a request samples."""
    POSITION_ORDER = 31
    """(forward): positions that a request selects."""
    DRAFT_MASKS = 32
    """(): drafted tokens that a request masks again."""
    DRAFT_ACCEPTANCE = 33
    """(index of the new token): whether a draft of speculation is accepted."""
    DRAFT_RESIDUAL = 34
    """(index of the new token): the token in place of a rejected draft."""


def keyed_rng(seed: int, stream: RngStream, *key: int) -> np.random.Generator:
    """Counter-based generator (Philox) for a key of non-negative integers."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy=seed, spawn_key=(stream, *key))))
