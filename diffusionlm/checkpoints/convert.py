"""Carry out the conversion of a model directory.

Shapes: V rows of the embedding, D hidden size.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from config.convert import DiffusionSection
from diffusionlm.checkpoints.adapter_files import load_adapter
from diffusionlm.checkpoints.conversion_plan import ConversionPlan
from diffusionlm.checkpoints.huggingface import DTYPES, load_model_with_config, save_model_directory
from diffusionlm.checkpoints.manifest import write_directory_atomically
from diffusionlm.checkpoints.model_files import find_weights_directory, verify_model_files
from diffusionlm.checkpoints.weights import EMBEDDING_WEIGHT, HEAD_WEIGHT, read_saved_dtype
from diffusionlm.families.model_directory import resolve_model_directory
from diffusionlm.models.lora import merge_adapter
from diffusionlm.models.transformer import Transformer


def convert(plan: ConversionPlan) -> None:
    """Carry out a plan. The target exists completely or not at all.

    Raises:
        ValueError: the weights do not fit the config, the adapter not the model, or the target cannot be written.
    """
    assert plan.config.source is not None
    resolve_model_directory(plan.config.source)  # downloads the weights of a model of the Hub
    verify_model_files(plan.source)
    weights = _read_weights(plan)
    if plan.unties_head:
        weights[HEAD_WEIGHT] = weights[EMBEDDING_WEIGHT].clone()
    if plan.new_row is not None:
        assert plan.config.diffusion is not None
        for name in weights.keys() & {EMBEDDING_WEIGHT, HEAD_WEIGHT}:
            weights[name] = _set_row(weights[name], plan.new_row, plan.config.diffusion)
    with torch.device("meta"):
        target_model = Transformer(plan.target_config)
    shard_bytes = int(plan.config.max_shard_gigabytes * 10**9)

    def write(folder: Path) -> None:
        save_model_directory(
            target_model, plan.tokenizer, folder, weights, max_shard_size=shard_bytes, source=plan.source
        )

    write_directory_atomically(plan.target, write)


def _read_weights(plan: ConversionPlan) -> dict[str, Tensor]:
    """The weights of the source by parameter name, with its adapter and the config's merged, in the dtype of the
    target."""
    config, weights_directory = plan.config, find_weights_directory(plan.source)
    adapters = [*([plan.source] if weights_directory != plan.source else []), *filter(None, [config.adapter])]
    if not adapters:
        model = load_model_with_config(plan.source_config, plan.source, dtype=config.dtype)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}
    model = load_model_with_config(plan.source_config, weights_directory, dtype="float32")
    for adapter in adapters:
        load_adapter(model, adapter)
        merge_adapter(model)
    dtype = read_saved_dtype(weights_directory) if config.dtype == "keep" else DTYPES[config.dtype]
    return {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}


def _set_row(table_VD: Tensor, row: int, section: DiffusionSection) -> Tensor:
    """Set a row to the values of ``diffusion.mask_row``. ``row`` = V appends one."""
    other_rows = torch.cat([table_VD[:row], table_VD[row + 1 :]])
    if section.reused_row is not None:
        values_1D = table_VD[section.reused_row][None]
    elif section.mask_row == "random":
        generator = torch.Generator().manual_seed(0)
        scale = float(other_rows.double().std())
        values_1D = scale * torch.randn(1, table_VD.shape[1], dtype=torch.float64, generator=generator)
    else:
        values_1D = other_rows.double().mean(0, keepdim=True)
    return torch.cat([table_VD[:row], values_1D.to(table_VD.dtype), table_VD[row + 1 :]])
