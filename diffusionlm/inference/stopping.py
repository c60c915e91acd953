"""When a request is finished before all its tokens are decoded.

Shapes: N new positions of a request, in order.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from config.generation import GenerationConfig
from config.model import ModelConfig

FinishReason = Literal["stop", "length"]
"""``stop``: a stop token came; ``length``: every position was decoded and none did."""


def resolve_stop_token_ids(config: GenerationConfig, model: ModelConfig) -> frozenset[int]:
    """The ids that end a text: those of the config, else the model's, else its end of text, if it has one."""
    if config.stop_token_ids is not None:
        return frozenset(config.stop_token_ids)
    if model.stop_token_ids:
        return frozenset(model.stop_token_ids)
    return frozenset() if model.eos_token_id is None else frozenset({model.eos_token_id})


def find_stop_token(
    tokens_N: NDArray[np.int64], is_masked_N: NDArray[np.bool_], stop_ids: Collection[int]
) -> int | None:
    """Place of the first stop token, once everything before it is final; None if that is not so.

    Final tokens never change, so the text before that place is already the whole answer.
    """
    open_places = np.flatnonzero(is_masked_N)
    end = open_places[0] if len(open_places) else len(tokens_N)
    stops = np.flatnonzero(np.isin(tokens_N[:end], list(stop_ids)))
    return int(stops[0]) if len(stops) else None
