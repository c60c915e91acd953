"""YaRN's rotations are those of transformers, pair by pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from config.model import YarnRope
from diffusionlm.models.layers import RotaryEmbedding

ORIGINAL = 32


@pytest.mark.parametrize(
    ("options", "head_dim", "theta"),
    [
        ({"factor": 4.0}, 128, 1e6),
        ({"factor": 4.0}, 16, 100.0),
        ({"factor": 1.0}, 16, 100.0),
        ({"factor": 40.0, "attention_factor": 1.25}, 32, 1e4),
        ({"factor": 3.0, "beta_fast": 4.0, "beta_slow": 0.5}, 32, 1e3),
        ({"factor": 3.0, "beta_fast": 900.0, "beta_slow": 800.0}, 8, 1e3),  # one place for both ends of the ramp
    ],
)
def test_yarn_is_that_of_transformers(options: dict[str, Any], head_dim: int, theta: float) -> None:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "yarn", "original_max_position_embeddings": ORIGINAL, **options}
    config = Qwen3Config(
        head_dim=head_dim, max_position_embeddings=128, rope_parameters={**scaling, "rope_theta": theta}
    )
    frequencies, length = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    positions = torch.tensor([[0, 1, 2, 5]])
    cos, sin = RotaryEmbedding(head_dim, theta, YarnRope.model_validate(scaling))(positions)
    angles = positions[..., None] * frequencies
    for part, sign in ((slice(head_dim // 2), -1.0), (slice(head_dim // 2, None), 1.0)):
        torch.testing.assert_close(cos[:, :, 0, part], angles.cos() * length, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(sin[:, :, 0, part], sign * angles.sin() * length, rtol=1e-5, atol=1e-6)
    plain, _ = RotaryEmbedding(head_dim, theta)(positions)
    assert torch.allclose(cos, plain) == (options["factor"] == 1.0), "the case can tell them apart"
