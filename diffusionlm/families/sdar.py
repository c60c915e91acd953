"""SDAR (Cheng et al. 2025): Qwen3 and Qwen3-MoE in blocks. I-DLM (arXiv 2604.11035) calls itself by its name."""

from __future__ import annotations

import json
import re
from pathlib import Path

from config.model import ModelConfig
from diffusionlm.families.family import JsonObject, ModelFamily, Options, model_name

_IDLM_NAME = re.compile(r"(?<![a-z])i-?dlm", re.IGNORECASE)
_SHORTEST_BLOCK = 4
"""Of the published models; I-DLM has blocks of 1 to 3 tokens."""
_IDLM_OPTIONS: Options = {"logit_alignment": "shifted", "clean_alignment": "shifted", "noisy_attention": "token"}


class SDARFamily(ModelFamily):
    """Refuses a config.json that may be I-DLM's, which does not say that its outputs and its text are others."""

    def read_options(
        self, values: JsonObject, directory: Path, generation: JsonObject | None = None
    ) -> tuple[Options, list[str]]:
        options, problems = super().read_options(values, directory, generation)
        block_length = options.get("block_length")
        is_short = isinstance(block_length, int) and block_length < _SHORTEST_BLOCK
        if "logit_alignment" not in values and (is_short or _IDLM_NAME.search(model_name(directory))):
            problems.append(
                f"model_type = {self.model_type!r} may mean I-DLM, whose config.json does not tell it from SDAR: for "
                f'I-DLM add {json.dumps(_IDLM_OPTIONS)}, for SDAR {{"logit_alignment": "same_position"}}'
            )
        return options, problems

    def check_diffusion(self, config: ModelConfig) -> None:
        """Check that SDAR's or I-DLM's code would find the model's diffusion options."""
        if all(getattr(config, key) == value for key, value in _IDLM_OPTIONS.items()):
            config = config.model_copy(update={key: ModelConfig.model_fields[key].default for key in _IDLM_OPTIONS})
        super().check_diffusion(config)
