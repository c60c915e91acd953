"""Qwen3-VL's vision tower: patches of images become features at positions of the text.

Patches of an image attend to each other and to no other image. Parameter names are Hugging Face's.

Shapes: P patches of all images, C values of a patch, T width of the tower, N heads, H width of a head, F positions of
all images in the text, E features of each, D hidden size of the text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.model import VisionConfig, VisionPart
from diffusionlm.kernels.precision import compute_dtype
from diffusionlm.models.layers import Embedding, Linear, rotate
from diffusionlm.models.tensors import copy_to_device
from diffusionlm.models.vision.inputs import Grid

NORM_EPS = 1e-6
ROPE_THETA = 10_000.0
NUM_CHANNELS = 3
MODULES_OF_PARTS: dict[VisionPart, tuple[str, ...]] = {
    "vision": ("patch_embed", "pos_embed", "blocks"),
    "merger": ("merger", "deepstack_merger_list"),
}
"""Modules of the parts of a tower that `training.freeze` names."""


class LayerNorm(nn.LayerNorm):
    """Layer norm, computed in at least fp32, in the dtype of x or of autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        return super().forward(x.to(dtype)).to(compute_dtype(x))


class PatchProjection(nn.Module):
    """Projection of patches, stored as the convolution over frames, rows and columns that it is."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        shape = (NUM_CHANNELS, config.temporal_patch_size, config.patch_size, config.patch_size)
        self.weight = nn.Parameter(torch.empty(config.hidden_size, *shape))
        self.bias = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, patches_PC: Tensor) -> Tensor:
        """[P, C] to [P, T]. All frames of a patch are the same image, so their weights are summed."""
        weight_TC = self.weight.sum(2).flatten(1)
        return F.linear(patches_PC.to(compute_dtype(weight_TC)), weight_TC, self.bias)


class PatchEmbedding(nn.Module):
    """Embeds the pixels of patches; Hugging Face stores the projection under the name ``proj``."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_values = NUM_CHANNELS * config.patch_size**2
        """C, of a patch."""
        self.proj = PatchProjection(config)

    def forward(self, patches_PC: Tensor) -> Tensor:
        """[P, C] to [P, T]."""
        return self.proj(patches_PC)  # type: ignore[no-any-return]


class VisionAttention(nn.Module):
    """Full attention inside each image."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=True)
        self.proj = Linear(config.hidden_size, config.hidden_size, bias=True)

    def forward(self, x_PT: Tensor, rope: tuple[Tensor, Tensor], group_sizes: Sequence[tuple[int, int]]) -> Tensor:
        """[P, T]. ``group_sizes``: number of equal images that follow each other, and patches of each."""
        q_PNH, k_PNH, v_PNH = self.qkv(x_PT).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        heads = (rotate(q_PNH, rope), rotate(k_PNH, rope), v_PNH)
        attended, start = [], 0
        for num_images, num_patches in group_sizes:
            end = start + num_images * num_patches
            q, k, v = (t[start:end].unflatten(0, (num_images, num_patches)).transpose(1, 2) for t in heads)
            attended.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1))
            start = end
        out_PNH = attended[0] if len(attended) == 1 else torch.cat(attended)
        return self.proj(out_PNH.flatten(1))  # type: ignore[no-any-return]


class VisionFeedForward(nn.Module):
    """Feed-forward with the tanh form of GELU."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = Linear(config.hidden_size, config.intermediate_size, bias=True)
        self.linear_fc2 = Linear(config.intermediate_size, config.hidden_size, bias=True)

    def forward(self, x_PT: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x_PT), approximate="tanh"))  # type: ignore[no-any-return]


class VisionBlock(nn.Module):
    """Pre-norm residual block of the tower: attention inside each image, then a feed-forward."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = LayerNorm(config.hidden_size, NORM_EPS)
        self.norm2 = LayerNorm(config.hidden_size, NORM_EPS)
        self.attn = VisionAttention(config)
        self.mlp = VisionFeedForward(config)

    def forward(self, x_PT: Tensor, rope: tuple[Tensor, Tensor], group_sizes: Sequence[tuple[int, int]]) -> Tensor:
        """[P, T] to [P, T]."""
        x: Tensor = x_PT + self.attn(self.norm1(x_PT), rope, group_sizes)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class PatchMerger(nn.Module):
    """Joins the patches of a square and projects them to the width of the text.

    Args:
        out_size: width of the text.
        normalizes_joined: normalize after the joining (DeepStack), not each patch before it.
    """

    def __init__(self, config: VisionConfig, out_size: int, *, normalizes_joined: bool) -> None:
        super().__init__()
        self.joined_size = config.hidden_size * config.spatial_merge_size**2
        self.normalizes_joined = normalizes_joined
        self.norm = LayerNorm(self.joined_size if normalizes_joined else config.hidden_size, NORM_EPS)
        self.linear_fc1 = Linear(self.joined_size, self.joined_size, bias=True)
        self.linear_fc2 = Linear(self.joined_size, out_size, bias=True)

    def forward(self, x_PT: Tensor) -> Tensor:
        """[P, T] to [F, D]; the patches of a square follow each other."""
        joined = (-1, self.joined_size)
        x = self.norm(x_PT.view(joined)) if self.normalizes_joined else self.norm(x_PT).view(joined)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))  # type: ignore[no-any-return]


class VisionTower(nn.Module):
    """The tower with its mergers; Hugging Face names it ``model.visual``."""

    def __init__(self, config: VisionConfig, out_size: int) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config)
        self.pos_embed = Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = PatchMerger(config, out_size, normalizes_joined=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, out_size, normalizes_joined=True) for _ in config.deepstack_visual_indexes
        )

    def forward(self, patches_PC: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Features of the images, [E, F, D].

        Args:
            patches_PC: normalized pixels of the patches, square of merged patches by square.
            grids: rows and columns of each image in squares.

        Raises:
            ValueError: the patches are not those of the grids.
        """
        merged = self.config.spatial_merge_size**2
        num_patches = merged * sum(rows * columns for rows, columns in grids)
        if num_patches != len(patches_PC):
            raise ValueError(
                f"{len(patches_PC)} patches for image grids {list(grids)}, which have {num_patches}: process images "
                "with the model's own processor"
            )
        places_P2, points_P2 = self._find_places(grids, patches_PC.device)
        x = self.patch_embed(patches_PC)
        x = x + self._interpolate_positions(points_P2).to(x.dtype)
        rope = self._build_rotary_tables(places_P2, x.dtype)
        sizes = [(len(list(group)), merged * rows * columns) for (rows, columns), group in groupby(grids)]
        deep_features = []
        for index, block in enumerate(self.blocks):
            x = block(x, rope, sizes)
            if index in self.config.deepstack_visual_indexes:
                deep_features.append(self.deepstack_merger_list[self.config.deepstack_visual_indexes.index(index)](x))
        return torch.stack([self.merger(x), *deep_features])

    def build_blank_image(self, device: torch.device) -> tuple[Tensor, tuple[Grid]]:
        """Patches and grid of the smallest image."""
        return torch.zeros(self.config.spatial_merge_size**2, self.patch_embed.num_values, device=device), ((1, 1),)

    def freeze(self, parts: Sequence[VisionPart]) -> None:
        """Freeze parts of the tower."""
        for name in (name for part in parts for name in MODULES_OF_PARTS[part]):
            self.get_submodule(name).requires_grad_(requires_grad=False)

    def _find_places(self, grids: Sequence[Grid], device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and column of each patch in its image, and as a point in the position table, whose corners are those of
        the image, each [P, 2]; square by square."""
        side, size = math.isqrt(self.config.num_position_embeddings), self.config.spatial_merge_size
        places = []
        for rows, columns in grids:
            lines, steps = torch.arange(rows * size), torch.arange(columns * size)
            place_P2 = torch.stack(torch.meshgrid(lines, steps, indexing="ij"), dim=-1).float()
            place_P2 = place_P2.view(rows, size, columns, size, 2).transpose(1, 2).reshape(-1, 2)
            last = torch.tensor([rows * size - 1, columns * size - 1]).clamp(min=1)
            places.append(torch.cat([place_P2, place_P2 * (side - 1) / last], dim=1))
        places_P4 = copy_to_device(torch.cat(places), device)
        return places_P4[:, :2], places_P4[:, 2:]

    def _interpolate_positions(self, points_P2: Tensor) -> Tensor:
        """Bilinear interpolation in the position table, [P, T]."""
        side = math.isqrt(self.config.num_position_embeddings)
        low_P2 = points_P2.floor()
        share_P2 = points_P2 - low_P2
        taps_22P = torch.stack([low_P2, low_P2 + 1]).long().clamp(max=side - 1).transpose(1, 2)
        weights_22P = torch.stack([1 - share_P2, share_P2]).transpose(1, 2)
        corners = [(row, column) for row in (0, 1) for column in (0, 1)]
        indices_P4 = torch.stack([taps_22P[row, 0] * side + taps_22P[column, 1] for row, column in corners], dim=1)
        weights_P4 = torch.stack([weights_22P[row, 0] * weights_22P[column, 1] for row, column in corners], dim=1)
        return (self.pos_embed(indices_P4) * weights_P4[..., None]).sum(1)  # type: ignore[no-any-return]

    def _build_rotary_tables(self, places_P2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables of axial rotary embeddings for `rotate`: half of the pairs for rows, half for columns."""
        width = self.config.hidden_size // self.config.num_heads // 2
        exponents = torch.arange(0, width, 2, device=places_P2.device, dtype=torch.float32) / width
        angles_PH = (places_P2[..., None] * (1.0 / ROPE_THETA**exponents)).flatten(1)
        cosines, sines = angles_PH.cos().to(dtype)[:, None], angles_PH.sin().to(dtype)[:, None]
        return torch.cat([cosines, cosines], dim=-1), torch.cat([-sines, sines], dim=-1)
