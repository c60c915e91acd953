"""Keyed chance: equal keys give equal numbers, and no two purposes share theirs."""

from __future__ import annotations

import itertools

import numpy as np

from diffusionlm.diffusion.rng import Stream, generator


def test_equal_keys_give_equal_numbers_and_others_do_not() -> None:
    assert generator(1, Stream.DRAW_ROW, 3).random() == generator(1, Stream.DRAW_ROW, 3).random()
    keys = [(), (2,), (2, 3), (3, 2), (0,), (0, 0), (2, 3, 0)]
    values = [generator(seed, Stream.DRAW_ROW, *key).random() for seed in (0, 1) for key in keys]
    assert len(set(values)) == len(values)


def test_streams_never_collide() -> None:
    """Names of one value would be one stream, and keys of another stream must not be those of this one."""
    assert len(Stream.__members__) == len(list(Stream)) == len({int(stream) for stream in Stream})
    keys = [key for size in range(3) for key in itertools.product(range(3), repeat=size)]
    values = {generator(0, stream, *key).random() for stream in Stream for key in keys}
    assert len(values) == len(Stream) * len(keys)


def test_chance_leaves_the_global_state_alone() -> None:
    state = np.random.get_state()[1].copy()  # type: ignore[index]
    generator(0, Stream.FILL).random(10)
    assert np.array_equal(state, np.random.get_state()[1])  # type: ignore[index]
