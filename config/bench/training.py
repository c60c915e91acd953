"""The whole configs of ``diffusionlm-bench-train`` and ``-bench-tokenizer``, and parts that benchmarks share."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from config.base import ConfigPath, NonEmptyStr, NonNegativeInt, PositiveInt, Section, TupleOf, check_distinct
from config.data import PythonStdlib, TextSourceOrName
from config.model import Architecture, ModelConfig
from config.tokenizer import NUM_BYTES, SplitPattern
from config.training.objective import BlockDiffusionConfig, MaskedDiffusionConfig, NextTokenConfig, ObjectiveConfig

Precision = Literal["float32", "bfloat16"]
Peer = Literal["transformers", "liger"]
ObjectiveName = Literal["masked_diffusion", "block_diffusion", "next_token"]
Preset = Literal["tiny", "124m", "qwen3-0.6b", "qwen3-1.7b"]
TowerName = Literal["tiny", "300m"]
TokenizerPeer = Literal["tokenizers", "tiktoken"]

_PRESET_KEYS = (
    "vocab_size",
    "batch_size",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "rope_theta",
)
_PRESET_VALUES: dict[str, tuple[float, ...]] = {
    "tiny": (4_096, 16, 4, 256, 4, 4, 64, 704, 256, 1e4),
    "124m": (50_304, 64, 12, 768, 12, 12, 64, 2_048, 1_024, 1e4),
    "qwen3-0.6b": (151_936, 8, 28, 1_024, 16, 8, 128, 3_072, 2_048, 1e6),
    "qwen3-1.7b": (151_936, 4, 28, 2_048, 16, 8, 128, 6_144, 4_096, 1e6),
}
PRESETS = {name: dict(zip(_PRESET_KEYS, values, strict=True)) for name, values in _PRESET_VALUES.items()}
"""Shapes by name: the first for a CPU, the others for a GPU. The last two are shapes of Qwen3 checkpoints with a
shorter context. All have a tied head."""


class BenchOutputSection(Section):
    """``[output]``: files of the results, beside the report on the terminal."""

    directory: ConfigPath | None = None
    """Directory of the report (.md) and the measurements (.jsonl); existing files are replaced. None: no files."""


class BenchFileSection(Section):
    """``[output]``: a file of the results, beside the report on the terminal."""

    path: ConfigPath | None = None
    """A JSON file with the config, the environment and all measurements; an existing file is replaced. None: no
    file."""


class BenchShape(Architecture):
    """``[[shapes]]``: a model and its batch, as a preset (shape) or in full. Sequences have max_position_embeddings
    tokens."""

    shape: Preset | None = None
    """A preset that supplies all options that the table leaves out."""
    name: NonEmptyStr
    """The name of the shape in the results; by default the name of the preset."""
    vocab_size: Annotated[int, Field(ge=2)]
    """Size of the vocabulary; the last token is the mask token."""
    batch_size: PositiveInt
    """Sequences of one optimizer step, in one forward."""
    lora_rank: PositiveInt | None = None
    """Train adapters of this rank on all projections, in place of the model. No peer trains them."""
    chats_per_row: PositiveInt | None = None
    """Pack so many conversations into a sequence, each half question and half answer, of which the answers are learned.
    No peer packs them."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        preset = values.get("shape") if isinstance(values, dict) else None
        if preset is None:
            return values
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(
                f"shape = {preset!r} is not one of the presets {', '.join(PRESETS)}: choose one of them, or remove "
                "shape and set all options of a model"
            )
        return {"name": preset} | PRESETS[preset] | values

    @model_validator(mode="after")
    def _check_is_qwen3(self) -> Self:
        if not self.qk_norm or self.attention_bias:
            raise ValueError("the peers train a Qwen3, so shapes need qk_norm = true and attention_bias = false")
        return self

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch_size * self.max_position_embeddings

    @property
    def has_peers(self) -> bool:
        """False: a case of this project alone."""
        return self.lora_rank is None and self.chats_per_row is None

    @property
    def mask_token(self) -> int:
        return self.vocab_size - 1

    def to_model_config(self) -> ModelConfig:
        return ModelConfig(
            **self.model_dump(exclude={"shape", "name", "batch_size", "lora_rank", "chats_per_row"}),
            mask_token_id=self.mask_token,
        )


class BenchTrainSection(Section):
    """``[bench]``: the cases, the peers, and how they are measured."""

    precisions: Annotated[TupleOf[Precision], Field(min_length=1)] = ("float32", "bfloat16")
    """Dtypes of matrix products (autocast); weights are float32."""
    objectives: Annotated[TupleOf[ObjectiveName], Field(min_length=1)] = ("masked_diffusion",)
    """Training objectives; each is measured as a separate case."""
    block_length: PositiveInt = 16
    """Block length of the objective block_diffusion."""
    peers: TupleOf[Peer] = ()
    """Implementations to compare with. transformers is in the dependency group `bench`; liger is transformers with the
    kernels of liger-kernel and is left out (the report says so) if that is not installed or there is no CUDA."""
    rollouts: ConfigPath | None = None
    """Config of a run with [rl], whose parts of an update are measured as well. None: none are."""
    towers: TupleOf[TowerName] = ()
    """Vision towers that are measured as well: forward, and steps of fine-tuning with images. 300m is that of
    Qwen3-VL-4B."""
    keep_freed_memory: bool = False
    """On a CPU, `runtime.keep_freed_memory` for all implementations, which share a process and its allocator. false:
    the defaults of glibc, which a script that trains with transformers has."""
    memory: bool = True
    """Measure the memory as well. false: speed and MFU alone."""
    rounds: Annotated[int, Field(ge=2)] = 12
    """Measured steps of each implementation in each case."""
    warmup: NonNegativeInt = 2
    """Rounds before them that are not measured."""
    threads: PositiveInt | None = None
    """CPU threads of torch. None: one for each usable core."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if there is a GPU."""
    seed: NonNegativeInt = 0
    """Seed of weights, tokens and noise."""

    def objective(self, name: ObjectiveName) -> ObjectiveConfig:
        """Build an objective with its default options."""
        match name:
            case "masked_diffusion":
                return MaskedDiffusionConfig()
            case "block_diffusion":
                return BlockDiffusionConfig(block_length=self.block_length)
            case "next_token":
                return NextTokenConfig()


class BenchTrainConfig(Section):
    """A training benchmark: every shape with every objective in every precision."""

    shapes: TupleOf[BenchShape] = ()
    bench: BenchTrainSection = BenchTrainSection()
    output: BenchOutputSection = BenchOutputSection()

    @model_validator(mode="after")
    def _check_cases(self) -> Self:
        if not self.shapes and not self.bench.towers and self.bench.rollouts is None:
            raise ValueError(
                "there is nothing to measure: add a table [[shapes]], or set bench.rollouts or bench.towers"
            )
        for shape in self.shapes if "liger" in self.bench.peers else ():
            if shape.num_experts:
                raise ValueError(
                    f'bench.peers has "liger", which has no experts, but the shape {shape.name!r} has num_experts = '
                    f"{shape.num_experts}: remove the peer or the shape"
                )
        lists: dict[str, list[str]] = {"shapes.name": [shape.name for shape in self.shapes]}
        for name in ("precisions", "objectives", "peers", "towers"):
            lists[f"bench.{name}"] = list(getattr(self.bench, name))
        check_distinct(lists)
        return self


class BenchTokenizerSection(Section):
    """``[bench]``: the vocabularies, the peers, and how they are measured."""

    vocab_sizes: Annotated[TupleOf[int], Field(min_length=1)] = (4_096, 16_384)
    """Size of each vocabulary, including the 256 bytes; there are no special tokens."""
    pattern: SplitPattern = "qwen"
    """The pre-tokenization pattern, which splits text into words."""
    peers: TupleOf[TokenizerPeer] = ()
    """Libraries to compare with, from the dependency group `bench`. tiktoken cannot train."""
    max_bytes: PositiveInt = 12_000_000
    """The text: the first training documents that together have at least so many bytes."""
    rounds: Annotated[int, Field(ge=2)] = 5
    """Measured rounds of each task; in a round, each implementation processes all documents once."""
    warmup: Annotated[int, Field(ge=1)] = 1
    """Rounds before them that are not measured; they fill the word caches of the warm measurements."""

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        check_distinct({"vocab_sizes": self.vocab_sizes, "peers": self.peers})
        small = next((size for size in self.vocab_sizes if size <= NUM_BYTES), None)
        if small is not None:
            raise ValueError(f"vocab_sizes: {small} has no room for a merge beside {NUM_BYTES} bytes; set at least 257")
        return self


class BenchTokenizerConfig(Section):
    """A benchmark of training a tokenizer, encoding and decoding."""

    source: TextSourceOrName = PythonStdlib()
    """The text: a `kind` alone, or a table `[source]` with its `kind`, as `data.source` of a training run."""
    bench: BenchTokenizerSection = BenchTokenizerSection()
    output: BenchOutputSection = BenchOutputSection()
