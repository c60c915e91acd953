"""The adapter that a run trains: how it is put on the model, and the files of a checkpoint, whose model may be one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from config.finetune.lora import LoraTrainingConfig
from config.train import TrainConfig
from ddp.parallelism import local_values
from diffusionlm.checkpoints.adapter_files import (
    load_adapter_values,
    read_own_adapter,
    save_adapter,
    stored_module_names,
)
from diffusionlm.checkpoints.base_fingerprint import BaseFingerprint
from diffusionlm.checkpoints.huggingface import save_model, save_model_config
from diffusionlm.models.lora import LoRALinear, adapter_modules, add_adapter, keep_start
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.checkpointing.store import LoadedCheckpoint
from diffusionlm.vision.processor import ImageProcessor, save_processor


@dataclass(frozen=True)
class AdapterSpec:
    """Section ``[lora]`` with its automatic values resolved."""

    config: LoraTrainingConfig
    base_dtype: torch.dtype
    """Dtype of the frozen weights of adapted projections; all other parameters are float32."""
    keeps_start: bool = False
    """The adapter of `lora.init_from` is a part of the reference that the loss compares with."""

    @classmethod
    def from_config(cls, config: TrainConfig, precision: torch.dtype) -> AdapterSpec | None:
        """None: the run trains the model itself. ``precision`` is the dtype of matrix products."""
        if config.lora is None:
            return None
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        keeps_start = config.lora.init_from is not None and config.has_reference
        return cls(config.lora, dtypes.get(config.lora.base, precision), keeps_start)

    def add_to(self, model: Transformer, seed: int, device: torch.device | None = None) -> None:
        """Freeze a model and put the adapter on it, in place. On ``meta`` it gets no values.

        ``device`` is where projections are quantized, one after the other. None: where they are.

        Raises:
            ValueError: the adapter does not fit the model, or `lora.init_from` does not fit the adapter.
        """
        config = self.config
        add_adapter(model, config, seed=seed, names=stored_module_names(model))
        adapted = [module for _, module in adapter_modules(model) if isinstance(module, LoRALinear)]
        if config.dropout and isinstance(model.lm_head, LoRALinear):
            raise ValueError(
                f"lora.dropout = {config.dropout} is not supported for the head, whose product is part of the loss: "
                'set lora.dropout = 0, or lora.exclude = ["lm_head"]'
            )
        if config.dropout and any(".experts." in name for name, _ in adapter_modules(model)):
            raise ValueError(
                f"lora.dropout = {config.dropout} is not supported for experts: set lora.dropout = 0, or lora.targets "
                'without experts, such as ["q_proj", "k_proj", "v_proj", "o_proj"]'
            )
        if config.init_from is not None and not model.model.norm.weight.is_meta:
            load_adapter_values(model, config, config.init_from)
        if self.keeps_start:
            keep_start(model)
        if config.base == "nf4":
            for module in adapted:
                weight = module.weight.detach().to(device, torch.float32)
                module.weight = nn.Parameter(weight, requires_grad=False)
                module.quantize()
        narrow = {module.weight for module in adapted}
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.base_dtype if parameter in narrow else torch.float32)


@dataclass(frozen=True)
class ModelFiles:
    """Writes and reads the model of a run. It uses only what training does not change."""

    model: Transformer
    whole_model: Transformer
    """The same without values, if ranks have parts of it; else the same object."""
    config: TrainConfig
    base_fingerprint: BaseFingerprint | None
    """Of the base of the adapter; None: the run trains the whole model."""
    processor: ImageProcessor | None
    """Of the images that the model reads. None: it reads none."""

    def saved_values(self, averages: dict[str, Tensor] | None = None) -> dict[str, Tensor] | None:
        """The parameters that a checkpoint holds, in this rank's form. None: all.

        ``averages``: in place of the trained parameters.
        """
        if self.config.lora is None and averages is None:
            return None
        return {
            name: local_values(value)
            for name, value in self.model.named_parameters()
            if self.config.lora is None or value.requires_grad
        } | (averages or {})

    @property
    def frozen_names(self) -> set[str]:
        return {name for name, value in self.whole_model.named_parameters() if not value.requires_grad}

    def write(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write config.json, generation_config.json and the weights: the model's, or those of its adapter; and the
        settings of the image processor.

        Args:
            weights: whole, by parameter name.
        """
        if self.processor is not None:
            save_processor(self.processor, folder)
        if self.config.lora is None:
            save_model(self.whole_model, folder, weights)
            return
        save_model_config(self.model.config, torch.float32, folder)
        base = str(self.config.model.init_from)
        save_adapter(
            self.whole_model, self.config.lora, folder, base=base, weights=weights, fingerprint=self.base_fingerprint
        )

    def read(self, checkpoint: LoadedCheckpoint) -> dict[str, Tensor]:
        """Read the weights that `write` wrote, whole, by parameter name.

        Raises:
            ValueError: they are of another base.
        """
        if self.base_fingerprint is None or self.config.lora is None:
            return checkpoint.weights()
        return read_own_adapter(self.whole_model, self.config.lora, checkpoint.path, self.base_fingerprint)
