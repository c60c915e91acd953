"""What stands beside the weights for other programs: generation_config.json. For people see `model_card`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from config.families.key_readers import list_eos_token_ids
from config.families.model_directory import GENERATION_CONFIG_FILE, read_generation_config
from config.model import ModelConfig


def default_generation_config(config: ModelConfig) -> dict[str, Any]:
    """What generation_config.json says: the tokens that end and pad a text."""
    values = {"eos_token_id": list(config.stop_token_ids) or config.eos_token_id, "pad_token_id": config.pad_token_id}
    return {key: value for key, value in values.items() if value is not None}


def format_generation_config(config: ModelConfig, source: Path | None) -> str:
    """generation_config.json: that of the source, if there is one, with all the tokens that end a text.

    It stays as it is if nothing is missing in it: what it says of temperatures is for other programs.

    Raises:
        ValueError: the source's is no JSON object; names the file.
    """
    theirs = None if source is None else read_generation_config(source)
    if source is None or theirs is None:
        return json.dumps(default_generation_config(config), indent=2) + "\n"
    ours = (
        list_eos_token_ids({"eos_token_id": config.eos_token_id})
        if not config.stop_token_ids
        else list(config.stop_token_ids)
    )
    # As they are read: config.json, which has the first one, comes before.
    read = dict.fromkeys([*ours[:1], *list_eos_token_ids(theirs)])
    if [each for each in read if each in ours] == ours:
        return (source / GENERATION_CONFIG_FILE).read_text(encoding="utf-8")
    kept = {key: value for key, value in theirs.items() if key != "_from_model_config"}
    return json.dumps(kept | {"eos_token_id": list(dict.fromkeys([*ours, *read]))}, indent=2) + "\n"
