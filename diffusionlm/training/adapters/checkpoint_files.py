"""The model files of a checkpoint: a whole model, or the adapter of a run with ``[lora]``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from config.train import TrainConfig
from ddp.parallelism import local_values
from diffusionlm.checkpoints.adapter_files import read_own_adapter, save_adapter
from diffusionlm.checkpoints.base_fingerprint import BaseFingerprint
from diffusionlm.checkpoints.huggingface import save_model, save_model_config
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.checkpointing.store import LoadedCheckpoint


@dataclass(frozen=True)
class ModelFiles:
    """Writes and reads the model of a run. It uses only what training does not change."""

    model: Transformer
    config: TrainConfig
    base_fingerprint: BaseFingerprint | None
    """Of the base of the adapter; None: the run trains the whole model."""

    def saved_values(self) -> dict[str, Tensor] | None:
        """The parameters that a checkpoint holds, in this rank's form. None: all."""
        if self.config.lora is None:
            return None
        return {name: local_values(value) for name, value in self.model.named_parameters() if value.requires_grad}

    def write(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write config.json, generation_config.json and the weights: the model's, or those of its adapter.

        Args:
            folder: must exist.
            weights: whole, by parameter name.
        """
        if self.config.lora is None:
            save_model(self.model, folder, weights)
            return
        save_model_config(self.model.config, torch.float32, folder)
        base = str(self.config.model.init_from)
        save_adapter(
            self.model, self.config.lora, folder, base=base, weights=weights, fingerprint=self.base_fingerprint
        )

    def read(self, checkpoint: LoadedCheckpoint) -> dict[str, Tensor]:
        """Read the weights that `write` wrote, whole, by parameter name.

        Raises:
            ValueError: they are of another base.
        """
        if self.base_fingerprint is None:
            return checkpoint.weights()
        return read_own_adapter(self.model, checkpoint.path, self.base_fingerprint)
