"""Store features of images on disk while a run trains."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch

from config.model import VISION_PREFIX
from config.train import TrainConfig
from ddp.process_group import World
from diffusionlm.checkpoints.base_fingerprint import TensorDigest
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.setup import ModelBuilder
from diffusionlm.vision.features import FeatureStore


def open_feature_store(
    config: TrainConfig, builder: ModelBuilder, model: Transformer, world: World, precision: torch.dtype
) -> FeatureStore | None:
    """Open `data.images.cache_features`, and let the model store the features that it computes. None: it is not set.

    ``precision`` is the dtype of matrix products.
    """
    directory = config.data.images.cache_features
    if directory is None:
        return None
    store = FeatureStore.open(directory, world.run_on_first(lambda: hash_tower(builder)), precision)
    model.store_features = store.write
    return store


def hash_tower(builder: ModelBuilder) -> str:
    """SHA-256 of the config and the initial weights of a vision tower, in hex."""
    vision, value = builder.config.vision, replace(builder, adapter=None).values()
    assert vision is not None, "the config refuses to store features without a tower"
    digest = hashlib.sha256(vision.model_dump_json().encode())
    for name, _ in builder.build_on_meta().named_parameters():
        if name.startswith(VISION_PREFIX):
            digest.update(f"{name} {TensorDigest.from_tensor(value(name)).exact}".encode())
    return digest.hexdigest()
