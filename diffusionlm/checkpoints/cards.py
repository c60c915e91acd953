"""What stands beside the weights for people and for other programs: README.md and generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from config.families import natural_family
from config.model import ModelConfig
from config.model_directory import GENERATION, read_generation
from config.spelling import ids_of
from diffusionlm.models.transformer import Transformer


def generation_defaults(config: ModelConfig) -> dict[str, Any]:
    """What generation_config.json says: the tokens that end and pad a text."""
    values = {"eos_token_id": list(config.stop_token_ids) or config.eos_token_id, "pad_token_id": config.pad_token_id}
    return {key: value for key, value in values.items() if value is not None}


def generation_text(config: ModelConfig, source: Path | None) -> str:
    """generation_config.json: that of the source, if there is one, with all the tokens that end a text.

    It stays as it is if nothing is missing in it: what it says of temperatures is for other programs.

    Raises:
        ValueError: the source's is no JSON object; names the file.
    """
    theirs = None if source is None else read_generation(source)
    if source is None or theirs is None:
        return json.dumps(generation_defaults(config), indent=2) + "\n"
    ours = ids_of({"eos_token_id": config.eos_token_id}) if not config.stop_token_ids else list(config.stop_token_ids)
    # As they are read: config.json, which has the first one, comes before.
    read = dict.fromkeys([*ours[:1], *ids_of(theirs)])
    if [each for each in read if each in ours] == ours:
        return (source / GENERATION).read_text(encoding="utf-8")
    kept = {key: value for key, value in theirs.items() if key != "_from_model_config"}
    return json.dumps(kept | {"eos_token_id": list(dict.fromkeys([*ours, *read]))}, indent=2) + "\n"


def model_card(model: Transformer) -> str:
    """README.md: what the model is, and how it is run."""
    config = model.config
    family = config.model_type or natural_family(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if config.is_autoregressive:
        kind = "An autoregressive language model"
    elif config.block_length is None:
        kind = "A masked diffusion language model, which fills the whole sequence at once"
    else:
        kind = (
            f"A block diffusion language model, which fills blocks of {config.block_length} tokens one after the other"
        )
    rows = {
        "family (`model_type`)": family,
        "parameters": f"{parameters:,}",
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "context": f"{config.max_position_embeddings:,} tokens",
        "vocabulary": f"{config.vocab_size:,}",
        "mask token": "none" if config.mask_token_id is None else config.mask_token_id,
        "output that predicts token i": "i - 1" if config.logit_alignment == "shifted" else "i",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    tags = ["text-generation"] if config.is_autoregressive else ["text-generation", "diffusion"]
    return (
        f"---\nlibrary_name: diffusionlm\ntags: [{', '.join(tags)}]\n---\n\n"
        f"# {family}, {parameters:,} parameters\n\n{kind}.\n\n| | |\n|---|---|\n{table}\n\n"
        '```bash\ndiffusionlm-infer --model . --prompt "..."\n```\n\n'
        '```python\nimport diffusionlm\n\nmodel = diffusionlm.load_model(".")\n'
        'tokenizer = diffusionlm.load_tokenizer(".")\n```\n'
    )
