"""The vision tower and a step of fine-tuning with images, beside transformers' Qwen3-VL.

Shapes: B sequences of one image each, L tokens, P patches, C values of a patch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarking.harness import compare, make_table
from benchmarking.implementations.training import LEARNING_RATE, OURS
from config.bench.training import BenchTrainSection, TowerName
from config.model import ModelConfig, VisionConfig
from diffusionlm.kernels.loss_types import LossInputs
from diffusionlm.models.init import init_weights
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.vision.inputs import Grid, ImageInputs
from diffusionlm.vision.images import EncodedImage, PlacedImage, compute_mrope_positions
from logger.pages import Table

VOCAB_SIZE = 4096
MASK, IMAGE, START, END = range(VOCAB_SIZE - 4, VOCAB_SIZE)
NUM_TEXT_TOKENS, NUM_MASKED = 48, 16
PEER = "transformers"
FORWARD, FROZEN, TRAINED = "tower, forward", "step, tower frozen", "step, tower trained"
CACHED = f"{FROZEN}, features stored"

METHOD_OF_TOWERS = """\
Images with normal pixels, one in each sequence, before 48 tokens of which 16 are masked; bidirectional attention, \
float32, in turn, in one process. Step: forward, cross-entropy of the masked tokens, backward, torch.optim.AdamW \
(fused). transformers: Qwen3VLForConditionalGeneration (sdpa), with a 4-D mask of zeros and positions computed before; \
it reads each frame twice, as its processor makes them. Ratio: seconds of transformers over ours in the same round, \
median and quartiles; for stored features, our step without them over that with them."""


@dataclass(frozen=True)
class TowerCase:
    """A tower, a small text model behind it, and the images of a step."""

    vision: VisionConfig
    hidden_size: int
    num_layers: int
    num_sequences: int
    grid: Grid

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=VOCAB_SIZE, hidden_size=self.hidden_size, intermediate_size=3 * self.hidden_size,
            num_hidden_layers=self.num_layers, num_attention_heads=self.hidden_size // 64,
            num_key_value_heads=self.hidden_size // 64, head_dim=64, max_position_embeddings=4096,
            vision=self.vision, mask_token_id=MASK, image_token_id=IMAGE, vision_start_token_id=START,
            vision_end_token_id=END,
        )  # fmt: skip


_SHARED: dict[str, Any] = {"num_position_embeddings": 2304, "mrope_section": (12, 10, 10)}
TOWERS: Mapping[TowerName, TowerCase] = {
    "tiny": TowerCase(
        VisionConfig(
            depth=4, hidden_size=128, num_heads=4, intermediate_size=512, deepstack_visual_indexes=(0, 1, 2), **_SHARED
        ),
        hidden_size=256, num_layers=4, num_sequences=8, grid=(4, 4),
    ),
    "300m": TowerCase(
        VisionConfig(
            depth=24, hidden_size=1024, num_heads=16, intermediate_size=4096, deepstack_visual_indexes=(5, 11, 17),
            **_SHARED,
        ),
        hidden_size=512, num_layers=4, num_sequences=1, grid=(8, 8),
    ),
}  # fmt: skip
"""The second tower is that of Qwen3-VL-4B."""


def measure_tower(name: TowerName, bench: BenchTrainSection) -> Table:
    """Measure a tower and its steps; with the peer transformers beside it."""
    case, has_peer = TOWERS[name], PEER in bench.peers
    generator = torch.Generator().manual_seed(bench.seed)
    inputs = _build_inputs(case, generator)
    ours = Transformer(case.config)
    init_weights(ours, bench.seed)
    peer = _build_peer(case, ours) if has_peer else None
    rows = []
    for part in (FORWARD, FROZEN, TRAINED):
        calls = {OURS: _build_our_call(ours, inputs, part)}
        if part == FROZEN:
            calls[CACHED] = _build_our_call(ours, _store_features(ours, inputs), part)
        if peer is not None:
            calls[PEER] = _build_peer_call(peer, case, inputs, part)
        times = compare(calls, rounds=bench.rounds, warmup=bench.warmup, label=f"{name}: {part}")
        rows.append(
            [
                name,
                part,
                times.format_ms(OURS),
                *((times.format_ms(PEER), times.format_speedup(OURS, PEER)) if has_peer else ("-", "-")),
            ]
        )
        if part == FROZEN:
            rows.append([name, CACHED, times.format_ms(CACHED), "-", times.format_speedup(CACHED, OURS)])
    return make_table(["tower", "part", f"{OURS} ms", f"{PEER} ms", "ratio"], rows)


@dataclass(frozen=True)
class _Inputs:
    tokens_BL: Tensor
    images: ImageInputs
    positions_N: Tensor
    """Masked positions."""
    targets_N: Tensor


def _build_inputs(case: TowerCase, generator: torch.Generator) -> _Inputs:
    (rows, columns), B = case.grid, case.num_sequences
    num_tokens = rows * columns
    text_BT = torch.randint(MASK, (B, NUM_TEXT_TOKENS), generator=generator)
    targets_BM = text_BT[:, -NUM_MASKED:].clone()
    text_BT[:, -NUM_MASKED:] = MASK
    image_B1 = [torch.full((B, count), token) for token, count in ((START, 1), (IMAGE, num_tokens), (END, 1))]
    tokens_BL = torch.cat([*image_B1, text_BT], dim=1)
    L = tokens_BL.shape[1]
    positions_3L = compute_mrope_positions(L, [PlacedImage(1, EncodedImage(b"", case.grid, b""))])
    patch_shape = (B * num_tokens * case.vision.spatial_merge_size**2, 3 * case.vision.patch_size**2)
    images = ImageInputs(
        torch.from_numpy(positions_3L)[:, None].repeat(1, B, 1),
        (tokens_BL.flatten() == IMAGE).nonzero()[:, 0],
        torch.arange(B * num_tokens),
        (case.grid,) * B,
        patches_PC=torch.randn(patch_shape, generator=generator),
    )
    return _Inputs(tokens_BL, images, (tokens_BL.flatten() == MASK).nonzero()[:, 0], targets_BM.flatten())


def _store_features(model: Transformer, inputs: _Inputs) -> _Inputs:
    assert model.model.visual is not None and inputs.images.patches_PC is not None
    with torch.no_grad():
        features_EFD = model.model.visual(inputs.images.patches_PC, inputs.images.grids)
    return replace(inputs, images=replace(inputs.images, patches_PC=None, features_EFD=features_EFD))


def _build_our_call(model: Transformer, inputs: _Inputs, part: str) -> Callable[[], object]:
    visual, images = model.model.visual, inputs.images
    assert visual is not None
    if part == FORWARD:
        assert images.patches_PC is not None
        return torch.no_grad()(lambda: visual(images.patches_PC, images.grids))
    weights_N = torch.full(inputs.targets_N.shape, 1.0 / len(inputs.targets_N))

    def compute_loss() -> Tensor:
        return model(
            inputs.tokens_BL,
            pattern=Bidirectional(),
            images=images,
            output_positions=inputs.positions_N,
            loss_inputs=LossInputs(inputs.targets_N, weights_N),
        ).loss_sum

    return _build_step(model, visual, compute_loss, part)


def _build_peer(case: TowerCase, ours: Transformer) -> Any:
    """Qwen3-VL of transformers with our weights."""
    transformers: Any = importlib.import_module("transformers")
    config = ours.config
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip
    rope = {
        "rope_type": "default", "rope_theta": config.rope_theta, "mrope_interleaved": True,
        "mrope_section": list(case.vision.mrope_section),
    }  # fmt: skip
    peer = transformers.Qwen3VLForConditionalGeneration._from_config(
        transformers.Qwen3VLConfig(
            text_config={key: getattr(config, key) for key in keys} | {"rope_parameters": rope},
            vision_config=case.vision.model_dump(exclude={"mrope_section"}) | {"out_hidden_size": config.hidden_size},
            image_token_id=IMAGE,
            tie_word_embeddings=True,
        ),
        attn_implementation="sdpa",
    )
    names = {name.replace("model.language_model.", "model."): value for name, value in peer.named_parameters()}
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            names[name].copy_(parameter)
    return peer


def _build_peer_call(peer: Any, case: TowerCase, inputs: _Inputs, part: str) -> Callable[[], object]:
    (rows, columns), size = case.grid, case.vision.spatial_merge_size
    assert inputs.images.patches_PC is not None
    pixels = inputs.images.patches_PC.view(-1, 3, 1, case.vision.patch_size**2)
    pixel_values = pixels.repeat(1, 1, case.vision.temporal_patch_size, 1).flatten(1)
    grid_thw = torch.tensor([[1, size * rows, size * columns]] * case.num_sequences)
    if part == FORWARD:
        return torch.no_grad()(lambda: peer.model.visual(pixel_values, grid_thw=grid_thw))
    B, L = inputs.tokens_BL.shape
    arguments = {
        "input_ids": inputs.tokens_BL, "pixel_values": pixel_values, "image_grid_thw": grid_thw,
        "attention_mask": torch.zeros(B, 1, L, L), "position_ids": inputs.images.positions_3BS, "use_cache": False,
    }  # fmt: skip

    def compute_loss() -> Tensor:
        logits = peer(**arguments).logits.flatten(0, 1)
        return F.cross_entropy(logits[inputs.positions_N], inputs.targets_N)

    return _build_step(peer, peer.model.visual, compute_loss, part)


def _build_step(
    model: nn.Module, visual: nn.Module, compute_loss: Callable[[], Tensor], part: str
) -> Callable[[], object]:
    optimizers: list[torch.optim.Optimizer] = []

    def step() -> float:
        visual.requires_grad_(part == TRAINED)
        if not optimizers:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizers.append(torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True))
        loss = compute_loss()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers[0].step()
        optimizers[0].zero_grad()
        return loss.item()

    return step
