"""``[[variants]]`` of ``diffusionlm-eval``: models and settings that are compared on the same items."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from config.base import ConfigPath, NonEmptyStr, Section


class VariantConfig(Section):
    """A model, and settings that replace those of the tasks."""

    name: NonEmptyStr | None = None
    """Name in tables and files. None: what distinguishes it from the others."""
    model: ConfigPath | None = None
    """Model, as model.path. None: that of [model]."""
    adapter: ConfigPath | None = None
    """PEFT adapter, as model.adapter. None: that of [model], if the model is, too."""
    prompt: dict[str, Any] = Field(default_factory=dict)
    """Keys of `prompt` of the tasks."""
    generation: dict[str, Any] = Field(default_factory=dict)
    """Keys of `generation` of the tasks that decode; others keep their settings."""
    likelihood: dict[str, Any] = Field(default_factory=dict)
    """Keys of `likelihood` of the tasks that have it."""
