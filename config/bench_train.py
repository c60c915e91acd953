"""The config of the training benchmark."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from config.base import ConfigPath, NonEmptyStr, NonNegativeInt, PositiveInt, Section, TupleOf
from config.model import Architecture, ModelConfig
from config.objective import BlockDiffusionConfig, MaskedDiffusionConfig, NextTokenConfig, ObjectiveConfig

Precision = Literal["float32", "bfloat16"]
Peer = Literal["transformers", "liger"]
ObjectiveName = Literal["masked_diffusion", "block_diffusion", "next_token"]
Preset = Literal["tiny", "124m", "qwen3-0.6b", "qwen3-1.7b"]

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 4_096,
        "batch_size": 16,
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 704,
        "max_position_embeddings": 256,
    },
    "124m": {
        "vocab_size": 50_304,
        "batch_size": 64,
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "intermediate_size": 2_048,
        "max_position_embeddings": 1_024,
    },
    "qwen3-0.6b": {
        "vocab_size": 151_936,
        "batch_size": 8,
        "num_hidden_layers": 28,
        "hidden_size": 1_024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3_072,
        "max_position_embeddings": 2_048,
        "rope_theta": 1e6,
    },
    "qwen3-1.7b": {
        "vocab_size": 151_936,
        "batch_size": 4,
        "num_hidden_layers": 28,
        "hidden_size": 2_048,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 6_144,
        "max_position_embeddings": 4_096,
        "rope_theta": 1e6,
    },
}
"""Shapes by name: the first for a CPU, the others for a GPU. The last two are those of Qwen's checkpoints, but for the
length of rows. All have a tied head."""


class BenchShape(Architecture):
    """``[[shapes]]``: a model and its batch, by name (shape) or in full. Rows are as long as the context,
    max_position_embeddings."""

    shape: Preset | None = None
    """Options that are not given are those of the preset of this name."""
    name: NonEmptyStr
    """What the shape is called in the results. Of a preset, its own name where none is given."""
    vocab_size: Annotated[int, Field(ge=2)]
    """Rows of the embedding; the last one is the mask token."""
    batch_size: PositiveInt
    """Rows of one optimizer step, in one forward."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        preset = values.get("shape") if isinstance(values, dict) else None
        if preset is None:
            return values
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(
                f"shape = {preset!r} is none of the presets {', '.join(PRESETS)}: choose one of them, or leave shape "
                "out and give all options of a model"
            )
        return {"name": preset} | PRESETS[preset] | values

    @model_validator(mode="after")
    def _check_is_qwen3(self) -> Self:
        if not self.qk_norm or self.attention_bias:
            raise ValueError("the peer is a Qwen3, so shapes need qk_norm = true and attention_bias = false")
        return self

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch_size * self.max_position_embeddings

    @property
    def mask_token(self) -> int:
        """The last token of the vocabulary."""
        return self.vocab_size - 1

    def to_model_config(self) -> ModelConfig:
        """What the model is built from."""
        return ModelConfig(**self.model_dump(exclude={"shape", "name", "batch_size"}), mask_token_id=self.mask_token)


class BenchTrainSection(Section):
    """``[bench]``: what is measured, and how."""

    precisions: Annotated[TupleOf[Precision], Field(min_length=1)] = ("float32", "bfloat16")
    """Of matrix products (autocast); weights are float32."""
    objectives: Annotated[TupleOf[ObjectiveName], Field(min_length=1)] = ("masked_diffusion",)
    """What is trained; each is a case of its own."""
    block_length: PositiveInt = 16
    """Tokens of a block of block_diffusion."""
    peers: TupleOf[Peer] = ()
    """Others that train the same shapes, step by step in turn with ours. transformers is in the group `bench`. liger:
    that with the kernels of liger-kernel; where they are not installed or there is no CUDA, the report says so."""
    keep_freed_memory: bool = False
    """On a CPU, as `runtime.keep_freed_memory`, for all contestants alike: they share a process and its allocator.
    false: glibc's defaults, as of a script that trains with transformers."""
    rounds: Annotated[int, Field(ge=2)] = 12
    """Measured steps of each contestant in each case."""
    warmup: NonNegativeInt = 2
    """Rounds before that which do not count."""
    threads: PositiveInt | None = None
    """CPU threads of torch. None: one for each core that the process may use."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    seed: NonNegativeInt = 0
    """Of weights, tokens and noise."""

    def objective(self, name: ObjectiveName) -> ObjectiveConfig:
        """The objective of a name, at its defaults."""
        match name:
            case "masked_diffusion":
                return MaskedDiffusionConfig()
            case "block_diffusion":
                return BlockDiffusionConfig(block_length=self.block_length)
            case "next_token":
                return NextTokenConfig()


class BenchTrainOutput(Section):
    """``[output]``: where results are kept beside the terminal."""

    directory: ConfigPath | None = None
    """Gets training_speed.md and training_speed.jsonl, replaced where they are; None: nothing is written."""


class BenchTrainConfig(Section):
    """A training benchmark: every shape with every objective in every precision."""

    shapes: Annotated[TupleOf[BenchShape], Field(min_length=1)]
    bench: BenchTrainSection = BenchTrainSection()
    output: BenchTrainOutput = BenchTrainOutput()

    @model_validator(mode="after")
    def _check_block_length(self) -> Self:
        for shape in self.shapes if "block_diffusion" in self.bench.objectives else ():
            if self.bench.block_length > shape.max_position_embeddings:
                raise ValueError(
                    f"bench.block_length = {self.bench.block_length} is longer than the rows of the shape "
                    f"{shape.name!r}, max_position_embeddings = {shape.max_position_embeddings}: lower it, or leave "
                    '"block_diffusion" out of bench.objectives'
                )
        return self

    @model_validator(mode="after")
    def _check_distinct(self) -> Self:
        lists: dict[str, list[str]] = {"shapes.name": [shape.name for shape in self.shapes]}
        for name in ("precisions", "objectives", "peers"):
            lists[f"bench.{name}"] = list(getattr(self.bench, name))
        for key, values in lists.items():
            twice = next((value for value in values if values.count(value) > 1), None)
            if twice is not None:
                raise ValueError(f"{key}: {twice!r} is given twice")
        return self
