"""Keyed random numbers: equal keys give equal numbers, and no two purposes share them."""

from __future__ import annotations

import itertools

import numpy as np

from diffusionlm.diffusion.rng import RngStream, keyed_rng


def test_equal_keys_give_equal_numbers_and_others_do_not() -> None:
    assert keyed_rng(1, RngStream.MASKS, 3).random() == keyed_rng(1, RngStream.MASKS, 3).random()
    keys = [(), (2,), (2, 3), (3, 2), (0,), (0, 0), (2, 3, 0)]
    values = [keyed_rng(seed, RngStream.MASKS, *key).random() for seed in (0, 1) for key in keys]
    assert len(set(values)) == len(values)


def test_rng_streams_never_collide() -> None:
    """Names of one value would be one stream, and keys of another stream must not be those of this one."""
    assert len(RngStream.__members__) == len(list(RngStream)) == len({int(stream) for stream in RngStream})
    keys = [key for size in range(3) for key in itertools.product(range(3), repeat=size)]
    values = {keyed_rng(0, stream, *key).random() for stream in RngStream for key in keys}
    assert len(values) == len(RngStream) * len(keys)


def test_keyed_rng_leaves_the_global_state_alone() -> None:
    state = np.random.get_state()[1].copy()  # type: ignore[index]
    keyed_rng(0, RngStream.FILL_MASKS).random(10)
    assert np.array_equal(state, np.random.get_state()[1])  # type: ignore[index]
