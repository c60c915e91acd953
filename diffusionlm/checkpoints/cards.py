"""What stands beside the weights for people and for other programs: README.md and generation_config.json."""

from __future__ import annotations

from typing import Any

from config.model import ModelConfig
from diffusionlm.checkpoints.families import natural_family
from diffusionlm.models.transformer import Transformer


def generation_defaults(config: ModelConfig) -> dict[str, Any]:
    """What generation_config.json says: the tokens that end and pad a text."""
    values = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    return {key: value for key, value in values.items() if value is not None}


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
