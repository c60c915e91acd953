"""The whole config of a training run."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from config.base import Section
from config.checkpoint import CheckpointConfig
from config.data import DataConfig
from config.logging import KEY_HINTS as LOGGING_KEY_HINTS
from config.logging import LoggingConfig
from config.model_section import ModelSection
from config.objective import BlockDiffusionConfig, MaskedDiffusionConfig, NextTokenConfig, Objective
from config.optimizer import KEY_HINTS as OPTIMIZER_KEY_HINTS
from config.optimizer import LRScheduleConfig, MuonConfig, OptimizerConfig
from config.parallel import DDP, FSDP, MultiProcessOptions, Parallel, SingleProcess
from config.runtime import ProfilerConfig, RuntimeConfig
from config.tokenizer import TokenizerConfig
from config.training import RunConfig, TrainingConfig
from config.validation import SamplesConfig, ValidationConfig


class TrainConfig(Section):
    """A training run. The resolved config lies in its run directory as config.toml."""

    run: RunConfig
    model: ModelSection
    data: DataConfig
    training: TrainingConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    objective: Objective = MaskedDiffusionConfig()
    optimizer: OptimizerConfig = MuonConfig()
    schedule: LRScheduleConfig = LRScheduleConfig()
    validation: ValidationConfig = ValidationConfig()
    samples: SamplesConfig = SamplesConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    parallel: Parallel = SingleProcess()
    profiler: ProfilerConfig = ProfilerConfig()

    @property
    def row_length(self) -> int:
        """Tokens of a row."""
        return self.data.row_length or self.model.max_position_embeddings

    def rows_per_rank(self, ranks: int) -> int:
        """Rows of a step that each of so many ranks computes.

        Raises:
            ValueError: they cannot be shared out evenly.
        """
        batch_size, micro = self.training.batch_size, self.training.micro_batch_size
        if batch_size % (ranks * (micro or 1)):
            shared = "" if micro is None else f" in parts of training.micro_batch_size = {micro}"
            raise ValueError(
                f"training.batch_size = {batch_size} rows cannot be shared by {ranks} ranks{shared}: choose a "
                f"multiple of {ranks * (micro or 1)}"
            )
        return batch_size // ranks

    @model_validator(mode="after")
    def _check_sections_agree(self) -> Self:
        if self.row_length > self.model.max_position_embeddings:
            raise ValueError(
                f"data.row_length = {self.row_length} is longer than the model's context, "
                f"model.max_position_embeddings = {self.model.max_position_embeddings}"
            )
        warmup = self.schedule.warmup_steps
        if warmup is not None and self.training.max_steps is not None and warmup >= self.training.max_steps:
            raise ValueError(
                f"schedule.warmup_steps = {warmup} must be less than training.max_steps = {self.training.max_steps}"
            )
        if self.schedule.kind == "warmup_stable_decay" and self.training.max_steps is not None:
            self.schedule.num_decay_steps(self.training.max_steps)
        if self.runtime.weights == "bfloat16_with_master" and self.training.precision == "float32":
            raise ValueError(
                'runtime.weights = "bfloat16_with_master" makes bfloat16 products, and training.precision = "float32" '
                'asks for others: set training.precision = "bfloat16", or runtime.weights = "float32"'
            )
        return self

    @model_validator(mode="after")
    def _check_objective(self) -> Self:
        objective, max_steps = self.objective, self.training.max_steps
        stages = objective.stages if isinstance(objective, BlockDiffusionConfig) else ()
        for block_length in objective.block_lengths:
            if block_length is not None and block_length > self.row_length:
                key = "objective.stages: block_length" if stages else "objective.block_length"
                raise ValueError(
                    f"{key} = {block_length} is longer than a row of {self.row_length} tokens "
                    "(data.row_length or model.max_position_embeddings): lower it, or choose objective.kind = "
                    '"masked_diffusion", which is one block for the whole row'
                )
        if stages and max_steps is not None and stages[-1].from_step >= max_steps:
            raise ValueError(
                f"objective.stages: from_step = {stages[-1].from_step} is never reached, since training.max_steps = "
                f"{max_steps}"
            )
        if isinstance(objective, NextTokenConfig) and self.model.logit_alignment != "shifted":
            raise ValueError(
                'objective.kind = "next_token" predicts token i by output i - 1: set model.logit_alignment = "shifted"'
            )
        return self

    @model_validator(mode="after")
    def _check_parallel(self) -> Self:
        parallel = self.parallel
        if not isinstance(parallel, MultiProcessOptions):
            return self
        if parallel.backend == "nccl" and self.run.device == "cpu":
            raise ValueError(
                'parallel.backend = "nccl" joins GPUs, and run.device = "cpu": set parallel.backend = "auto" or "gloo"'
            )
        if self.runtime.weights != "float32":
            raise ValueError(
                f'runtime.weights = "{self.runtime.weights}" is for one rank, and parallel.strategy = '
                f'"{parallel.strategy}": set runtime.weights = "float32"; with parallel.strategy = "fsdp" blocks are '
                "gathered in the precision of their products"
            )
        if isinstance(parallel, FSDP) and self.optimizer.is_quantized:
            raise ValueError(
                f'optimizer.kind = "{self.optimizer.kind}" has one scale for a block of elements, which '
                'parallel.strategy = "fsdp" may cut: choose optimizer.kind = "adamw", "lion" or "muon", or '
                'parallel.strategy = "ddp", which keeps matrices whole'
            )
        return self


class DistributedTrainConfig(TrainConfig):
    """What `diffusionlm-train-ddp` takes: a training run of several ranks, ``ddp`` where nothing is said of it."""

    parallel: Annotated[DDP | FSDP, Field(discriminator="strategy")] = DDP()

    @model_validator(mode="before")
    @classmethod
    def _check_strategy(cls, values: Any) -> Any:
        parallel = values.get("parallel") if isinstance(values, dict) else None
        if isinstance(parallel, dict) and parallel.get("strategy") == "single":
            raise ValueError(
                'parallel.strategy = "single" is one process: start it with diffusionlm-train, or set '
                'parallel.strategy = "ddp" or "fsdp"'
            )
        return values

    def to_train_config(self) -> TrainConfig:
        """The same as the loop takes it, and as a run directory keeps it."""
        return TrainConfig(**dict(self))


KEY_HINTS = {
    "training.max_train_iteration": "is called training.max_steps here (optimizer steps, not micro-steps)",
    "training.max_val_iteration": "is called validation.rows here (rows, not batches)",
    "training.val_freq_iteration": "is called validation.every_steps here",
    "training.grad_accum_steps": "follows from training.batch_size / training.micro_batch_size here",
    "training.seed": "is called run.seed here",
    "training.objective": "is the section [objective] here",
    "training.amp_enabled": "is training.precision here: float32, bfloat16 or auto",
    "training.amp_dtype": "is training.precision here: float32, bfloat16 or auto",
    "model.device": "is called run.device here",
    "model.dtype": "is training.precision here",
    "model.d_model": "is called model.hidden_size here",
    "model.d_ff": "is called model.intermediate_size here",
    "model.num_layers": "is called model.num_hidden_layers here",
    "model.num_heads": "is called model.num_attention_heads here",
    "model.context_length": "is called model.max_position_embeddings here",
    "model.vocab_size": "comes from the tokenizer: set tokenizer.vocab_size",
    "model.mask_token_id": "comes from the tokenizer",
    "model.eot_token_id": "comes from the tokenizer",
    "model.noise_epsilon": 'is objective.estimator.epsilon here, with objective.estimator.kind = "bernoulli"',
    **OPTIMIZER_KEY_HINTS,
    "optimizer.optimizer_name": "is called optimizer.kind here",
    "optimizer.lr_schedule": "is called schedule.kind here",
    "optimizer.warmup_iters": "is called schedule.warmup_steps here",
    "optimizer.grad_clip_max_l2_norm": "is called training.max_grad_norm here",
    "model.random_trunc_prob": "is called data.random_length_probability here",
    "data.runs_path": "is called run.directory here",
    "data.tokenizer": "is the section [tokenizer] here",
    "data.dataset_name": 'is data.source.dataset here, with data.source.kind = "hub"',
    "data.pipeline_mode": "is called data.rows here: packed, best_fit or padded",
    "data.shuffle_buffer_size": "is called data.document_shuffle_window here",
    "compile": "is runtime.compile here: auto, none or blocks",
    "checkpointing": "is the section [checkpoint] here",
    "ddp.backend": "is called parallel.backend here: auto, gloo or nccl",
    "ddp.bucket_size_mb": "is called parallel.bucket_mib here (of memory, not a count of tensors)",
    "ddp.num_gpus_per_node": "is called parallel.local_ranks here",
    "ddp.num_nodes": "is the argument --nodes of diffusionlm-train-ddp, or torchrun's --nnodes",
    "ddp.node_rank": "is found out at the rendezvous: diffusionlm-train-ddp --nodes N --rendezvous HOST:PORT",
    "ddp.master_addr": "is the argument --rendezvous HOST:PORT of diffusionlm-train-ddp, or torchrun's --rdzv-endpoint",
    "ddp.master_port": "is the argument --rendezvous HOST:PORT of diffusionlm-train-ddp, or torchrun's --rdzv-endpoint",
    "ddp.world_size": "is nodes times parallel.local_ranks here",
    "ddp.shard_optimizer": "is called parallel.shard_optimizer here",
    "ddp.zero_stage": 'is parallel.shard_optimizer here (stage 1), or parallel.strategy = "fsdp" (stage 3)',
    "ddp": 'is the section [parallel] here: strategy = "ddp" or "fsdp"',
    "fsdp": 'is the section [parallel] here, with strategy = "fsdp"',
    "deepspeed": 'is not used here: [parallel] with strategy = "ddp" (ZeRO stage 1) or "fsdp" (stage 3) has its place',
    "accelerate": "is not used here: the section [parallel], started by diffusionlm-train-ddp or torchrun",
    "wandb": "is the section [logging.wandb] here: project, entity, name, mode, tags, artifacts",
    **LOGGING_KEY_HINTS,
}
"""Keys of related projects, and where the same thing is said here."""
