"""The config of the decoding benchmark."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from config.base import ConfigPath, NonEmptyStr, NonNegativeInt, PositiveInt, Section, StrTuple, TupleOf
from config.eval import EvalDataConfig
from config.generation import GenerationConfig
from config.infer import InferModelConfig
from config.model import Architecture, ModelConfig

Cache = Literal["none", "prefix", "dual", "block"]

BENCHMARK_KEYS = {"max_new_tokens": "bench.new_tokens", "total_length": "bench.new_tokens", "cache": "grid.caches"}
"""Keys of a policy's generation that the benchmark sets, and where."""


class RandomModelShape(Architecture):
    """``[model.shape]``: a model of random weights. Speed does not depend on them, but how many tokens a confidence
    threshold settles does."""

    vocab_size: Annotated[int, Field(ge=2)]
    """Rows of the embedding; the last one is the mask token."""
    block_length: PositiveInt | None = None
    """Blocks that the model is for; with them attention is block-causal unless a policy says otherwise."""

    def to_model_config(self) -> ModelConfig:
        """What the model is built from."""
        return ModelConfig(**self.model_dump(), mask_token_id=self.vocab_size - 1)


class BenchModel(InferModelConfig):
    """``[model]``: what decodes, and where; a directory (path), or else random weights of a shape."""

    shape: RandomModelShape | None = None
    """Plays no part where there is a path."""
    seed: NonNegativeInt = 0
    """Of random weights."""


class BenchInferSection(Section):
    """``[bench]``: the requests, and how they are measured."""

    prompts: StrTuple = ()
    """Texts to go on from, in turn until the batch is full; they need model.path and its tokenizer. Empty: random
    tokens, prompt_length of them."""
    prompt_length: PositiveInt = 64
    """Tokens of each random prompt."""
    new_tokens: PositiveInt = 128
    """Decoded for each request, exactly so many unless a policy names stop_token_ids."""
    rounds: Annotated[int, Field(ge=2)] = 5
    """Measured calls of each cell; all cells take turns."""
    warmup: NonNegativeInt = 1
    """Rounds before that which do not count."""
    memory: bool = True
    """Measure peak memory as well, each cell in a process of its own."""
    seed: NonNegativeInt = 0
    """Of random prompts; request i decodes with seed + i."""


class BenchStrategySection(Section):
    """``[[policies]]``: settings of decoding under a name."""

    name: NonEmptyStr
    """What the policy is called in the results."""
    generation: GenerationConfig = GenerationConfig()
    """All but length and cache, which the benchmark sets; block_length only where no list of block lengths holds."""
    block_lengths: TupleOf[PositiveInt] | None = None
    """In place of grid.block_lengths; []: that of generation, or of the model."""
    caches: Annotated[TupleOf[Cache], Field(min_length=1)] | None = None
    """In place of grid.caches."""


class BenchGridSection(Section):
    """``[grid]``: each policy is measured with every batch size, block length and cache."""

    batch_sizes: Annotated[TupleOf[PositiveInt], Field(min_length=1)] = (1,)
    """Requests that are decoded together."""
    block_lengths: TupleOf[PositiveInt] = ()
    """Tokens of a block. []: that of the policy's generation, or of the model."""
    caches: Annotated[TupleOf[Cache], Field(min_length=1)] = ("none",)
    """prefix and dual are for bidirectional attention, block is for block-causal attention."""


class BenchValidationSection(EvalDataConfig):
    """``[validation]``: a text whose likelihood is bounded, once for each block length of the grid; it needs
    model.path and its tokenizer."""

    max_rows: NonNegativeInt = 64
    """Rows that are evaluated; 0: all."""
    num_mc_samples: PositiveInt = 4
    """Masked versions of each row."""
    batch_size: PositiveInt = 32
    """Rows of one forward."""


class BenchInferOutput(Section):
    """``[output]``: where results are kept beside the terminal."""

    path: ConfigPath | None = None
    """A JSON file of the config, the environment and the numbers of every call, replaced where it is there."""


class BenchCell(Section):
    """One combination of the grid."""

    policy: str
    batch_size: int
    generation: GenerationConfig

    @property
    def label(self) -> str:
        """The cell in words."""
        length = "" if self.generation.block_length is None else f", block {self.generation.block_length}"
        return f"{self.policy}{length}, cache {self.generation.cache}, batch {self.batch_size}"


class BenchInferConfig(Section):
    """A decoding benchmark: every policy in every cell of the grid."""

    model: BenchModel = BenchModel()
    bench: BenchInferSection = BenchInferSection()
    grid: BenchGridSection = BenchGridSection()
    policies: Annotated[TupleOf[BenchStrategySection], Field(min_length=1)]
    validation: BenchValidationSection | None = None
    output: BenchInferOutput = BenchInferOutput()

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if self.model.path is not None:
            return self
        if self.model.shape is None:
            raise ValueError("no model given: add --model DIR, or a table [model.shape] for random weights")
        if self.validation is not None:
            raise ValueError("[validation] needs a trained model and its tokenizer: set model.path, or remove it")
        if self.bench.prompts:
            raise ValueError(
                "bench.prompts need a tokenizer, and random weights have none: set model.path, or remove the prompts"
            )
        return self

    @model_validator(mode="after")
    def _check_cells(self) -> Self:
        lists: dict[str, list[Any]] = {"policies.name": [policy.name for policy in self.policies]}
        for key in ("batch_sizes", "block_lengths", "caches"):
            lists[f"grid.{key}"] = list(getattr(self.grid, key))
        for index, policy in enumerate(self.policies):
            lists[f"policies.{index}.caches"] = list(policy.caches or ())
            lists[f"policies.{index}.block_lengths"] = list(policy.block_lengths or ())
        for key, values in lists.items():
            twice = next((value for value in values if values.count(value) > 1), None)
            if twice is not None:
                raise ValueError(f"{key}: {twice!r} is given twice")
        for policy in self.policies:
            self._check_keys(policy)
        for cell in self.cells():
            self.model.check_cache(cell.generation.cache, "grid.caches")
            self._check_cell(cell)
        return self

    def _check_keys(self, policy: BenchStrategySection) -> None:
        """A policy leaves to the benchmark what is the benchmark's."""
        lengths = {"block_length": "grid.block_lengths"} if self._block_lengths(policy) else {}
        for key, instead in (BENCHMARK_KEYS | lengths).items():
            value = getattr(policy.generation, key)
            if value is not None:
                raise ValueError(
                    f"policy {policy.name!r}: generation.{key} = {value!r} is set by {instead} here: remove one of them"
                )

    def _check_cell(self, cell: BenchCell) -> None:
        """What can be said before the model is there."""
        attention = cell.generation.attention
        shape = self.model.shape if self.model.path is None else None
        if attention is None and shape is not None:
            attention = "bidirectional" if shape.block_length is None else "block_causal"
        cache = cell.generation.cache
        if attention == "block_causal" and cache in ("prefix", "dual"):
            raise ValueError(
                f'cell "{cell.label}": cache = "{cache}" is for bidirectional attention and this policy is '
                'block-causal, whose exact cache is "block": give the policy its own caches, as in '
                'caches = ["none", "block"]'
            )
        if attention == "bidirectional" and cache == "block":
            raise ValueError(
                f'cell "{cell.label}": cache = "block" is for block-causal attention and this policy is '
                'bidirectional: give the policy its own caches, as in caches = ["none", "prefix", "dual"]'
            )
        length = self.bench.prompt_length + self.bench.new_tokens
        if shape is not None and length > shape.max_position_embeddings:
            raise ValueError(
                f"bench.prompt_length = {self.bench.prompt_length} and bench.new_tokens = {self.bench.new_tokens} are "
                f"{length} tokens, more than model.shape.max_position_embeddings = {shape.max_position_embeddings}"
            )

    def _block_lengths(self, policy: BenchStrategySection) -> tuple[int, ...]:
        return self.grid.block_lengths if policy.block_lengths is None else policy.block_lengths

    def cells(self) -> tuple[BenchCell, ...]:
        """All combinations, by batch size, policy, block length and cache.

        Raises:
            ValueError: a policy's settings do not go with a block length or a cache; names both.
        """
        return tuple(
            BenchCell(policy=policy.name, batch_size=batch_size, generation=self._generation(policy, length, cache))
            for batch_size in self.grid.batch_sizes
            for policy in self.policies
            for length in self._block_lengths(policy) or (None,)
            for cache in policy.caches or self.grid.caches
        )

    def _generation(self, policy: BenchStrategySection, block_length: int | None, cache: Cache) -> GenerationConfig:
        values = policy.generation.model_dump()
        values |= {"cache": cache, "max_new_tokens": self.bench.new_tokens}
        values["stop_token_ids"] = policy.generation.stop_token_ids or ()
        if block_length is not None:
            values["block_length"] = block_length
        try:
            return GenerationConfig(**values)
        except ValidationError as error:
            reasons = "; ".join(str(each["msg"]).removeprefix("Value error, ") for each in error.errors())
            length = "" if block_length is None else f", block {block_length}"
            raise ValueError(f'cell "{policy.name}{length}, cache {cache}": {reasons}') from None
