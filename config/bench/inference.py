"""The config of the decoding benchmark."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from config.base import ConfigPath, NonEmptyStr, NonNegativeInt, PositiveInt, Section, TupleOf, check_distinct
from config.bench.training import BenchFileSection
from config.generation import GenerationConfig
from config.infer import InferModelConfig
from config.model import Architecture, ModelConfig

Cache = Literal["none", "prefix", "dual", "block"]

BENCHMARK_KEYS = {"max_new_tokens": "bench.new_tokens", "total_length": "bench.new_tokens", "cache": "grid.caches"}
"""Generation keys that the benchmark sets -> the keys that set them."""


class RandomModelShape(Architecture):
    """``[model.shape]``: a model with random weights. Speed does not depend on the weights, but the number of tokens
    that pass a confidence threshold does."""

    vocab_size: Annotated[int, Field(ge=2)]
    """Size of the vocabulary; the last token is the mask token."""
    block_length: PositiveInt | None = None
    """Block length of the model; with one, attention is block-causal unless a strategy sets another."""

    def to_model_config(self) -> ModelConfig:
        return ModelConfig(**self.model_dump(), mask_token_id=self.vocab_size - 1)


class BenchModel(InferModelConfig):
    """``[model]``: the model and its device; a directory (path), or random weights of a shape."""

    shape: RandomModelShape | None = None
    """Ignored if path is set."""
    seed: NonNegativeInt = 0
    """Seed of random weights."""


class BenchInferSection(Section):
    """``[bench]``: the requests, and how they are measured."""

    prompt_length: PositiveInt = 64
    """Tokens of a prompt, which are random."""
    prompts_file: ConfigPath | None = None
    """JSON lines, {"prompt": TEXT}, in place of random prompts, for a trained model: request i has prompt i, and the
    file is repeated if it is shorter."""
    new_tokens: PositiveInt = 128
    """Tokens that are decoded for each request; fewer only if a strategy sets stop_token_ids."""
    peers: TupleOf[Literal["transformers"]] = ()
    """Autoregressive decoding to compare with: the same random weights as a Qwen3 of transformers, from the dependency
    group `bench`; greedy, with its KV cache, one token per forward."""
    rounds: Annotated[int, Field(ge=2)] = 5
    """Measured calls of each cell; the cells take turns."""
    warmup: NonNegativeInt = 1
    """Rounds before them that are not measured."""
    memory: bool = True
    """Measure peak memory as well, each cell in a fresh process."""
    seed: NonNegativeInt = 0
    """Seed of random prompts; request i decodes with seed + i."""


class BenchStrategySection(Section):
    """``[[strategies]]``: generation settings and their name."""

    name: NonEmptyStr
    """The name of the strategy in the results."""
    generation: GenerationConfig = GenerationConfig()
    """All settings except length and cache, which the benchmark sets; block_length only without a list of them."""
    block_lengths: TupleOf[PositiveInt] | None = None
    """Block lengths instead of grid.block_lengths; []: the one of generation or of the model."""
    caches: Annotated[TupleOf[Cache], Field(min_length=1)] | None = None
    """Caches instead of grid.caches."""


class BenchGridSection(Section):
    """``[grid]``: each strategy is measured with every batch size, block length and cache."""

    batch_sizes: Annotated[TupleOf[PositiveInt], Field(min_length=1)] = (1,)
    """Requests that are decoded together."""
    block_lengths: TupleOf[PositiveInt] = ()
    """Tokens of a block. []: the block length of the strategy's generation or of the model."""
    caches: Annotated[TupleOf[Cache], Field(min_length=1)] = ("none",)
    """prefix and dual are for bidirectional attention, block is for block-causal attention."""


class BenchCell(Section):
    """One combination of the grid."""

    strategy: str
    batch_size: int
    generation: GenerationConfig

    @property
    def label(self) -> str:
        length = "" if self.generation.block_length is None else f", block {self.generation.block_length}"
        return f"{self.strategy}{length}, cache {self.generation.cache}, batch {self.batch_size}"


class BenchInferConfig(Section):
    """A decoding benchmark: every strategy in every cell of the grid."""

    model: BenchModel = BenchModel()
    bench: BenchInferSection = BenchInferSection()
    grid: BenchGridSection = BenchGridSection()
    strategies: Annotated[TupleOf[BenchStrategySection], Field(min_length=1)]
    output: BenchFileSection = BenchFileSection()

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if self.model.path is not None:
            if self.bench.peers:
                raise ValueError("bench.peers decode random weights: remove them, or set [model.shape] without a path")
            return self
        if self.bench.prompts_file is not None:
            raise ValueError("bench.prompts_file needs the tokenizer of a trained model: add --model DIR, or remove it")
        shape, length = self.model.shape, self.bench.prompt_length + self.bench.new_tokens
        if shape is None:
            raise ValueError("no model given: add --model DIR, or a table [model.shape] for random weights")
        if length > shape.max_position_embeddings:
            raise ValueError(
                f"bench.prompt_length = {self.bench.prompt_length} and bench.new_tokens = {self.bench.new_tokens} are "
                f"{length} tokens, more than model.shape.max_position_embeddings = {shape.max_position_embeddings}"
            )
        return self

    @model_validator(mode="after")
    def _check_cells(self) -> Self:
        lists: dict[str, list[Any]] = {"strategies.name": [strategy.name for strategy in self.strategies]}
        for key in ("batch_sizes", "block_lengths", "caches"):
            lists[f"grid.{key}"] = list(getattr(self.grid, key))
        for index, strategy in enumerate(self.strategies):
            lists[f"strategies.{index}.caches"] = list(strategy.caches or ())
            lists[f"strategies.{index}.block_lengths"] = list(strategy.block_lengths or ())
        check_distinct(lists)
        for strategy in self.strategies:
            self._check_generation_keys(strategy)
        self.cells()
        return self

    def _check_generation_keys(self, strategy: BenchStrategySection) -> None:
        """Reject generation keys that the benchmark sets itself."""
        lengths = {"block_length": "grid.block_lengths"} if self._block_lengths(strategy) else {}
        for key, benchmark_key in (BENCHMARK_KEYS | lengths).items():
            value = getattr(strategy.generation, key)
            if value is not None:
                raise ValueError(
                    f"strategy {strategy.name!r}: generation.{key} = {value!r} is set by {benchmark_key} here: remove "
                    "one of them"
                )

    def _block_lengths(self, strategy: BenchStrategySection) -> tuple[int, ...]:
        return self.grid.block_lengths if strategy.block_lengths is None else strategy.block_lengths

    def cells(self) -> tuple[BenchCell, ...]:
        """All combinations, by batch size, strategy, block length and cache.

        Raises:
            ValueError: the settings of a strategy contradict a block length or a cache; names both.
        """
        return tuple(
            BenchCell(
                strategy=strategy.name, batch_size=batch_size, generation=self._generation(strategy, length, cache)
            )
            for batch_size in self.grid.batch_sizes
            for strategy in self.strategies
            for length in self._block_lengths(strategy) or (None,)
            for cache in strategy.caches or self.grid.caches
        )

    def _generation(self, strategy: BenchStrategySection, block_length: int | None, cache: Cache) -> GenerationConfig:
        values = strategy.generation.model_dump() | {
            "cache": cache,
            "max_new_tokens": self.bench.new_tokens,
            "stop_token_ids": strategy.generation.stop_token_ids or (),
            "block_length": block_length or strategy.generation.block_length,
        }
        try:
            return GenerationConfig(**values)
        except ValidationError as error:
            length = "" if block_length is None else f", block {block_length}"
            reasons = "; ".join(str(problem["msg"]).removeprefix("Value error, ") for problem in error.errors())
            raise ValueError(f'cell "{strategy.name}{length}, cache {cache}": {reasons}') from None
