"""A tiny random Qwen3-VL of transformers, and the same model in our modules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from config.model import ModelConfig, VisionConfig
from diffusionlm.models.layers import RotaryEmbedding
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.vision.inputs import Grid, ImageInputs

IMAGE, START, END = 290, 292, 293
VISION = VisionConfig(
    depth=4,
    hidden_size=32,
    num_heads=2,
    intermediate_size=48,
    num_position_embeddings=16,
    deepstack_visual_indexes=(0, 2),
    mrope_section=(6, 5, 5),
    patch_size=4,
)
CONFIG = ModelConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    rope_theta=5e6,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    vision=VISION,
    mask_token_id=294,
    image_token_id=IMAGE,
    vision_start_token_id=START,
    vision_end_token_id=END,
)


@dataclass
class Example:
    """Tokens with images, for both models."""

    tokens_1L: Tensor
    grids: tuple[Grid, ...]
    patches_PC: Tensor
    positions_3BL: Tensor
    oracle_inputs: dict[str, Tensor]

    @property
    def images(self) -> ImageInputs:
        indices_M = (self.tokens_1L.flatten() == IMAGE).nonzero()[:, 0]
        rows_M = torch.arange(len(indices_M))
        return ImageInputs(self.positions_3BL, indices_M, rows_M, self.grids, patches_PC=self.patches_PC)


def build_oracle(dtype: torch.dtype = torch.float32, shape: ModelConfig = CONFIG) -> Any:
    """Qwen3-VL of transformers with random weights, norms and biases as well."""
    import transformers

    kind = "Qwen3VLMoe" if shape.num_experts else "Qwen3VL"
    text_keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "head_dim", "max_position_embeddings", "moe_intermediate_size",
                 "num_experts_per_tok", "num_experts")[: 11 if shape.num_experts else 8]  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta, "mrope_section": list(VISION.mrope_section)}
    text = {key: getattr(shape, key) for key in text_keys} | {"rope_parameters": rope | {"mrope_interleaved": True}}
    vision = VISION.model_dump(exclude={"mrope_section"}) | {"out_hidden_size": shape.hidden_size}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=IMAGE + 1,
        vision_start_token_id=START, vision_end_token_id=END, tie_word_embeddings=shape.tie_word_embeddings,
    )  # fmt: skip
    model_class = getattr(transformers, f"{kind}ForConditionalGeneration")
    oracle = model_class._from_config(config, attn_implementation="sdpa").eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in oracle.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data = (1.0 + 0.1 * values if "norm" in name else 0.2 * values).to(dtype)
    return oracle


def reload_in_transformers(folder: Path) -> Any:
    """What transformers makes of a directory; nothing of it is left over, and nothing made up."""
    from transformers import AutoModelForImageTextToText

    auto_model: Any = AutoModelForImageTextToText  # its stub omits the loading report
    model, report = auto_model.from_pretrained(folder, output_loading_info=True)
    assert not [value for value in report.values() if value]
    return model.eval()


def build_ours(oracle: nn.Module, config: ModelConfig = CONFIG) -> Transformer:
    """The same model in our modules."""
    weights = {name.replace("model.language_model.", "model."): value for name, value in oracle.state_dict().items()}
    model = Transformer(config).to(next(oracle.parameters()).dtype)
    model.load_state_dict(weights)
    return model.eval()


def compute_in_double(monkeypatch: pytest.MonkeyPatch, oracle: Any) -> None:
    """Let the oracle compute norms and rotations in float64, which it rounds to float32, with our frequencies."""
    from transformers.models.qwen3_vl import modeling_qwen3_vl as modeling

    def normalize(norm: Any, x: Tensor) -> Tensor:
        normed: Tensor = norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        return normed

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        cos, sin = cos[..., None, :].double(), sin[..., None, :].double()
        return tuple(x * cos + modeling.rotate_half(x) * sin for x in (q, k))

    monkeypatch.setattr(modeling, "apply_rotary_pos_emb_vision", rotate)
    for module in oracle.modules():
        if isinstance(module, modeling.Qwen3VLTextRMSNorm):
            monkeypatch.setattr(module, "forward", partial(normalize, module))
    angles, _ = RotaryEmbedding(CONFIG.head_dim, CONFIG.rope_theta)._angles(torch.tensor([1]))
    oracle.model.language_model.rotary_emb.inv_freq = angles[0]


def build_example(oracle: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Example:
    """A text that begins and ends with an image, and has two images of other grids between its tokens."""
    grids = ((2, 3), (3, 1), (1, 1), (2, 2))
    generator = torch.Generator().manual_seed(seed)
    num_patches = sum(4 * rows * columns for rows, columns in grids)
    patches_PC = torch.randn(num_patches, 3 * VISION.patch_size**2, generator=generator).to(dtype)
    runs = [[IMAGE] * (rows * columns) for rows, columns in grids]
    tokens = [*runs[0], END, 7, 8, START, *runs[1], END, START, *runs[2], END, 9, 10, 11, START, *runs[3]]
    tokens_1L = torch.tensor([tokens])
    grid_thw = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids])
    types_1L = (tokens_1L == IMAGE).int()
    positions, _ = oracle.model.get_rope_index(tokens_1L, types_1L, grid_thw)
    both_frames = patches_PC.unflatten(-1, (3, 1, -1)).expand(-1, 3, 2, -1).flatten(1)
    inputs = {
        "input_ids": tokens_1L, "pixel_values": both_frames, "image_grid_thw": grid_thw, "mm_token_type_ids": types_1L
    }  # fmt: skip
    return Example(tokens_1L, grids, patches_PC, positions, inputs)
