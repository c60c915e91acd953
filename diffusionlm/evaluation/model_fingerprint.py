"""A hash by which results belong to the model that computed them."""

from __future__ import annotations

import hashlib
from operator import itemgetter

from diffusionlm.checkpoints.base_fingerprint import TensorDigest
from diffusionlm.models.transformer import Transformer


def fingerprint_model(model: Transformer) -> str:
    """SHA-256 of the config and of all parameters, adapters included, whatever file they were loaded from. Reads all
    weights once: 0.5 to 1 GB each second."""
    digest = hashlib.sha256(model.config.model_dump_json().encode())
    for name, parameter in sorted(model.named_parameters(), key=itemgetter(0)):
        digest.update(f"{name} {list(parameter.shape)} {TensorDigest.from_tensor(parameter).exact}".encode())
    return digest.hexdigest()
