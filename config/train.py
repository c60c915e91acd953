"""The whole config of a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from config.base import Section
from config.data import DataConfig, ImagesConfig
from config.evaluation.tasks import TrainingEvaluationConfig
from config.finetune.lora import DEFAULT_LORA_OPTIMIZER, LoraTrainingConfig
from config.finetune.preference import PreferenceConfig, PreferenceLossConfig
from config.finetune.rl import RLConfig
from config.model import BlockOrigin
from config.model_section import ModelSection
from config.tokenizer import TokenizerConfig
from config.training.logging import LoggingConfig
from config.training.objective import BlockDiffusionConfig, MaskedDiffusionConfig, NextTokenConfig, ObjectiveConfig
from config.training.optimizer import LRScheduleConfig, MuonConfig, OptimizerConfig
from config.training.parallel import DDP, FSDP, MultiProcessOptions, Parallel, SingleProcess
from config.training.runtime import ProfilerConfig, RuntimeConfig
from config.training.training import CheckpointConfig, RunConfig, TrainingConfig
from config.training.validation import SamplesConfig, ValidationConfig


class TrainConfig(Section):
    """The whole config of ``diffusionlm-train``. A run directory holds it, with all defaults, as config.toml."""

    run: RunConfig
    model: ModelSection
    data: DataConfig
    training: TrainingConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    lora: LoraTrainingConfig | None = None
    rl: RLConfig | None = None
    objective: ObjectiveConfig = MaskedDiffusionConfig()
    optimizer: OptimizerConfig = MuonConfig()
    schedule: LRScheduleConfig = LRScheduleConfig()
    validation: ValidationConfig = ValidationConfig()
    samples: SamplesConfig = SamplesConfig()
    evaluation: TrainingEvaluationConfig = TrainingEvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    parallel: Parallel = SingleProcess()
    profiler: ProfilerConfig = ProfilerConfig()

    @property
    def row_length(self) -> int:
        """Tokens of a training sequence."""
        return self.data.row_length or self.model.max_position_embeddings

    @property
    def has_reference(self) -> bool:
        """The loss compares with the model before training."""
        if self.rl is not None:
            return self.rl.kl is not None and self.rl.kl.reference == "start"
        return isinstance(self.objective, PreferenceConfig) and self.objective.loss.has_reference

    @property
    def reference_model(self) -> Path | None:
        """Directory of the reference. None: it is the model before training, if there is one."""
        return None if self.rl is None or self.rl.kl is None else self.rl.kl.model

    @property
    def block_origin(self) -> BlockOrigin:
        """Origin of the blocks of the finished model: the turns, if several answers share a row."""
        objective = self.objective
        if not isinstance(objective, BlockDiffusionConfig) or objective.attention == "prompt_and_own_block":
            return "text"
        chats = [section.resolve(objective.longest_block_length) for section in self.data.chats]
        return "turn" if any(section.turns == "all" for section in chats) else "text"

    def sequences_per_rank(self, world_size: int) -> int:
        """Return the number of sequences of a step that each rank computes.

        Raises:
            ValueError: the batch cannot be divided evenly among the ranks and their micro-batches.
        """
        batch_size, micro = self.training.batch_size, self.training.micro_batch_size
        if batch_size % (world_size * (micro or 1)):
            in_parts = "" if micro is None else f" with training.micro_batch_size = {micro}"
            raise ValueError(
                f"training.batch_size = {batch_size} cannot be divided among {world_size} ranks{in_parts}: set a "
                f"multiple of {world_size * (micro or 1)}"
            )
        return batch_size // world_size

    @model_validator(mode="before")
    @classmethod
    def _choose_optimizer(cls, values: Any) -> Any:
        """Muon orthogonalizes whole matrices, so AdamW is the default for the factors of an adapter."""
        if isinstance(values, dict) and values.get("lora") is not None and "optimizer" not in values:
            return {**values, "optimizer": DEFAULT_LORA_OPTIMIZER}
        return values

    @model_validator(mode="after")
    def _check_sections_agree(self) -> Self:
        if self.row_length > self.model.max_position_embeddings:
            raise ValueError(
                f"data.row_length = {self.row_length} must be at most the model's context, "
                f"model.max_position_embeddings = {self.model.max_position_embeddings}"
            )
        if self.model.vision is None and self.data.images != ImagesConfig():
            raise ValueError(
                "[data.images] is for a model with a vision tower: set [model.vision], name a model with one in "
                "model.init_from, or remove [data.images]"
            )
        freeze, lora = set(self.training.freeze), self.lora
        is_tower_frozen = freeze == {"vision", "merger"} or (lora is not None and not lora.trains_base)
        if self.data.images.cache_features is not None and not is_tower_frozen:
            raise ValueError(
                f"data.images.cache_features = {self.data.images.cache_features} needs a vision tower that stays as it "
                'is: set training.freeze = ["vision", "merger"], or remove it'
            )
        if self.training.freeze and self.model.vision is None:
            raise ValueError(
                f"training.freeze = {list(self.training.freeze)} freezes parts of a vision tower, and the model has "
                "none: remove it, or train a model with [model.vision]"
            )
        warmup = self.schedule.warmup_steps
        if warmup is not None and self.training.max_steps is not None and warmup >= self.training.max_steps:
            raise ValueError(
                f"schedule.warmup_steps = {warmup} must be less than training.max_steps = {self.training.max_steps}"
            )
        if self.schedule.kind == "warmup_stable_decay" and self.training.max_steps is not None:
            self.schedule.num_decay_steps(self.training.max_steps)
        every_steps = self.validation.every_steps
        if self.validation.early_stopping and not 0 < every_steps < (self.training.max_steps or 2**63):
            raise ValueError(
                f"validation.early_stopping needs validations before the last step, and validation.every_steps = "
                f"{every_steps}: set it to less than training.max_steps, or remove early_stopping"
            )
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        conflicts = {
            'training.precision = "float32"': self.training.precision == "float32",
            "[lora], which has few trained weights and lora.base for the others": self.lora is not None,
            'objective.kind = "preference"': isinstance(self.objective, PreferenceConfig),
            f'parallel.strategy = "{self.parallel.strategy}"': not isinstance(self.parallel, SingleProcess),
        }
        conflict = next((key for key, is_set in conflicts.items() if is_set), None)
        if self.runtime.weights != "float32" and conflict is not None:
            raise ValueError(
                f'runtime.weights = "{self.runtime.weights}" does not combine with {conflict}: set '
                'runtime.weights = "float32"'
            )
        if isinstance(self.parallel, FSDP) and self.optimizer.is_quantized:
            raise ValueError(
                f'optimizer.kind = "{self.optimizer.kind}" has one scale per block of elements, which '
                'parallel.strategy = "fsdp" may split: set another optimizer.kind, or parallel.strategy = "ddp"'
            )
        return self

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora is None:
            return self
        if self.model.init_from is None:
            raise ValueError(
                "[lora] trains an adapter on a model, and model.init_from is not set: name the model, or remove [lora]"
            )
        if isinstance(self.optimizer, MuonConfig):
            raise ValueError(
                'optimizer.kind = "muon" orthogonalizes whole matrices, and [lora] trains their factors: set '
                'optimizer.kind = "adamw" or "lion", or remove [optimizer]'
            )
        if self.lora.positions == "masks":
            self._check_masked_positions()
        if self.lora.base == "nf4" and isinstance(self.parallel, FSDP):
            raise ValueError(
                'lora.base = "nf4" keeps blocks of weights that parallel.strategy = "fsdp" would cut: set '
                'parallel.strategy = "ddp", or lora.base = "bfloat16"'
            )
        return self

    def _check_masked_positions(self) -> None:
        objective = self.objective
        if not isinstance(objective, BlockDiffusionConfig) or objective.clean_attention == "block" or self.rl:
            raise ValueError(
                'lora.positions = "masks" trains the drafts of a model whose text is token-causal: set objective.kind '
                '= "block_diffusion" with clean_attention = "token", without [rl], or lora.positions = "all"'
            )
        if objective.next_token_weight:
            raise ValueError(
                f"objective.next_token_weight = {objective.next_token_weight} trains outputs that lora.positions = "
                '"masks" leaves as they are, so it has no gradient: set it to 0'
            )

    @model_validator(mode="after")
    def _check_objective(self) -> Self:
        objective, max_steps = self.objective, self.training.max_steps
        stages = objective.stages if isinstance(objective, BlockDiffusionConfig) else ()
        for block_length in objective.block_lengths:
            if block_length is not None and block_length > self.row_length:
                key = "objective.stages: block_length" if stages else "objective.block_length"
                raise ValueError(
                    f"{key} = {block_length} is more than the {self.row_length} tokens of a sequence "
                    "(data.row_length or model.max_position_embeddings): lower it, or set "
                    'objective.kind = "masked_diffusion", which has one block for the whole sequence'
                )
        if objective.longest_block_length is None and any(
            section.eos_padding == "block" for section in self.data.chats
        ):
            raise ValueError(
                'chat.eos_padding = "block" fills the last block of an answer, and objective.kind = "masked_diffusion" '
                'has no blocks: set "length:N", or objective.kind = "block_diffusion"'
            )
        self._check_eos_padding_length()
        if stages and max_steps is not None and stages[-1].from_step >= max_steps:
            raise ValueError(
                f"objective.stages: from_step = {stages[-1].from_step} must be less than training.max_steps = "
                f"{max_steps}"
            )
        if isinstance(objective, PreferenceConfig):
            self._check_preferences(objective.loss)
        if isinstance(objective, NextTokenConfig) and self.model.logit_alignment != "shifted":
            raise ValueError(
                'objective.kind = "next_token" predicts token i by output i - 1: set model.logit_alignment = "shifted"'
            )
        return self

    @model_validator(mode="after")
    def _check_clean_attention(self) -> Self:
        objective, alignment = self.objective, self.model.clean_alignment
        is_token_causal = isinstance(objective, BlockDiffusionConfig) and objective.clean_attention == "token"
        if is_token_causal and alignment is None:
            raise ValueError(
                'objective.clean_attention = "token" needs clean outputs, of which i - 1 predicts token i: set '
                'model.clean_alignment = "shifted", which the checkpoint then says, or clean_attention = "block"'
            )
        if alignment is not None and not is_token_causal and not isinstance(objective, PreferenceConfig):
            raise ValueError(
                f'model.clean_alignment = "{alignment}" promises token-causal text, and the objective trains another '
                'attention: set objective.kind = "block_diffusion" with clean_attention = "token", or convert the '
                "model without clean_alignment ([diffusion] of diffusionlm-convert)"
            )
        return self

    def _check_eos_padding_length(self) -> None:
        length = self.row_length // 2 if isinstance(self.objective, PreferenceConfig) else self.row_length
        for chat in self.data.chats:
            if chat.eos_padding_length is not None and chat.eos_padding_length >= length:
                raise ValueError(
                    f'chat.eos_padding = "{chat.eos_padding}" leaves no room for a prompt: a conversation has at most '
                    f"{length} tokens (data.row_length or model.max_position_embeddings; half of it for preferences); "
                    "set a smaller N, or longer rows"
                )

    @model_validator(mode="after")
    def _check_rl(self) -> Self:
        rl, training = self.rl, self.training
        if rl is None:
            return self
        if not isinstance(self.objective, MaskedDiffusionConfig | BlockDiffusionConfig):
            raise ValueError(
                f'objective.kind = "{self.objective.kind}": [rl] has a loss of its own, and [objective] says how the '
                'model was trained: set "masked_diffusion", or "block_diffusion" with its block_length'
            )
        if training.max_steps is None:
            raise ValueError("training.epochs: [rl] has no passes over data; set training.max_steps")
        if training.batch_size % rl.prompts.repeats:
            raise ValueError(
                f"training.batch_size = {training.batch_size} answers of a step must be a multiple of "
                f"rl.prompts.repeats = {rl.prompts.repeats}, the answers to a prompt"
            )
        without_effect = {
            "lora.dropout": self.lora is not None and self.lora.dropout > 0.0,
            "training.neftune_alpha": training.neftune_alpha is not None,
            "objective.mask_noise_steps": self.objective.mask_noise_steps > 0,
            "validation.early_stopping": self.validation.early_stopping is not None,
        }
        if key := next((key for key, is_set in without_effect.items() if is_set), None):
            reason = "stops when the model has moved" if "stop" in key else "is noise that answers are decoded without"
            raise ValueError(f"{key} {reason}, and [rl] is set: remove it")
        if rl.prompt_masking and isinstance(self.objective, BlockDiffusionConfig):
            raise ValueError(
                f"rl.logprobs.prompt_masking = {rl.prompt_masking} has no effect on the clean blocks of the prompt, "
                "which block attention sees: set it to 0"
            )
        intervals = {
            "training.max_steps": training.max_steps,
            "checkpoint.every_steps": self.checkpoint.every_steps,
            "validation.every_steps": self.validation.every_steps,
        }
        for key, value in intervals.items():
            if value % rl.inner_steps:
                raise ValueError(
                    f"{key} = {value} must be a multiple of rl.inner_steps = {rl.inner_steps}: a run is saved when the "
                    "next step has new answers"
                )
        return self

    def _check_preferences(self, loss: PreferenceLossConfig) -> None:
        if self.model.init_from is None:
            raise ValueError(
                'objective.kind = "preference" compares answers by a model that has been trained: set model.init_from'
            )
        if len(self.data.chats) < len(self.data.components):
            raise ValueError(
                'objective.kind = "preference" needs rows with a chosen and a rejected answer: set chat = '
                '{ format = "preference" } in every source'
            )
        if loss.is_unpaired and self.training.batch_size < 2:
            raise ValueError(
                f'training.batch_size = {self.training.batch_size}: objective.loss.kind = "kto" takes the answers of '
                "other examples of the step as mismatches; set at least 2"
            )
        if self.data.pads_to_longest:
            raise ValueError(
                'chat.eos_padding = "batch_max" pads rows of one conversation, and objective.kind = "preference" has '
                'two in each: set chat.eos_padding = "length:N" or "none"'
            )
        if self.training.neftune_alpha is not None:
            raise ValueError(
                f"training.neftune_alpha = {self.training.neftune_alpha} is for supervised training, and "
                'objective.kind = "preference" compares answers with a reference: remove neftune_alpha'
            )

    @model_validator(mode="after")
    def _check_attention(self) -> Self:
        objective = self.objective
        if isinstance(objective, MaskedDiffusionConfig) and objective.attention_bias and self.data.rows != "padded":
            raise ValueError(
                f'objective.attention_bias is by position of the text, and data.rows = "{self.data.rows}" packs texts: '
                'set data.rows = "padded"'
            )
        has_independent_blocks = (
            isinstance(objective, BlockDiffusionConfig) and objective.attention == "prompt_and_own_block"
        )
        if has_independent_blocks and self.model.logit_alignment == "shifted":
            raise ValueError(
                'objective.attention = "prompt_and_own_block" needs outputs at the same position: output i - 1 of '
                'another block knows nothing of the block. Set model.logit_alignment = "same_position"'
            )
        turns = [chat.turns for chat in self.data.chats]
        if has_independent_blocks and any(turn in (None, "all") for turn in turns):
            raise ValueError(
                'objective.attention = "prompt_and_own_block" has one answer in a document: set chat.turns = "expand" '
                'or "last" in [data.source]'
            )
        if has_independent_blocks and any(chat.eos_padding in (None, "block", "batch_max") for chat in self.data.chats):
            raise ValueError(
                'objective.attention = "prompt_and_own_block" counts blocks from the start of the answer, and '
                'chat.eos_padding = "block" from that of the prompt: set chat.eos_padding = "length:N" or "none" in '
                "[data.source]"
            )
        return self

    @model_validator(mode="after")
    def _check_parallel(self) -> Self:
        parallel = self.parallel
        if not isinstance(parallel, MultiProcessOptions):
            return self
        if parallel.backend == "nccl" and self.run.device == "cpu":
            raise ValueError(
                'parallel.backend = "nccl" needs GPUs, and run.device = "cpu": set parallel.backend = "auto" or "gloo"'
            )
        if parallel.is_divided:
            self._check_mesh(parallel)
        return self

    def _check_mesh(self, parallel: MultiProcessOptions) -> None:
        """
        Raises:
            ValueError: the mesh does not combine with another key.
        """
        parallel.check_model(self.model)
        if self.model.vision is not None and (parallel.context > 1 or parallel.sequence_norms):
            raise ValueError(
                f"parallel.context = {parallel.context}, sequence_norms = {str(parallel.sequence_norms).lower()}: a "
                "model with a vision tower reads images into whole sequences, which these divide: set context = 1 and "
                "sequence_norms = false; parallel.tensor divides its text layers"
            )
        is_split, is_matrix = parallel.context > 1, parallel.tensor > 1
        objective, is_muon = self.objective, isinstance(self.optimizer, MuonConfig)
        has_mask_noise = not isinstance(objective, NextTokenConfig | PreferenceConfig) and objective.mask_noise_steps
        conflicts = {
            'objective.kind = "preference"': is_split and isinstance(objective, PreferenceConfig),
            "[rl]": is_split and self.rl is not None,
            "objective.balance": is_split and isinstance(objective, BlockDiffusionConfig) and objective.balance,
            "training.neftune_alpha": is_split and self.training.neftune_alpha is not None,
            "objective.mask_noise_steps": is_split and bool(has_mask_noise),
            "lora.dropout": (is_split or is_matrix) and self.lora is not None and self.lora.dropout > 0.0,
            f'optimizer.kind = "{self.optimizer.kind}"': is_matrix and self.optimizer.is_quantized,
            'optimizer.kind = "muon" and parallel.strategy = "fsdp"': is_muon
            and isinstance(parallel, FSDP)
            and (is_matrix or parallel.expert > 1),
            'lora.base = "nf4"': self.lora is not None and self.lora.base == "nf4",
            'lora.positions = "masks"': self.lora is not None and self.lora.positions == "masks",
            'runtime.compile = "blocks"': self.runtime.compile == "blocks",
        }
        conflict = next((key for key, is_set in conflicts.items() if is_set), None)
        if conflict is not None:
            raise ValueError(
                f"parallel.tensor = {parallel.tensor}, context = {parallel.context} and expert = {parallel.expert} do "
                f"not combine with {conflict}: remove it, or set the mesh to 1"
            )
        if parallel.sequence_norms and self.row_length % (parallel.tensor * parallel.context):
            raise ValueError(
                f"data.row_length = {self.row_length} must be a multiple of parallel.tensor * parallel.context = "
                f"{parallel.tensor * parallel.context} with parallel.sequence_norms"
            )
        if self.row_length % (2 * parallel.context):
            raise ValueError(
                f"data.row_length = {self.row_length} must be a multiple of 2 * parallel.context = "
                f"{2 * parallel.context}"
            )


class DistributedTrainConfig(TrainConfig):
    """The whole config of ``diffusionlm-train-ddp``: a run of several ranks, by default with ``ddp``."""

    parallel: Annotated[DDP | FSDP, Field(discriminator="strategy")] = DDP()

    def to_train_config(self) -> TrainConfig:
        """Convert to the config that training takes and a run directory holds."""
        return TrainConfig(**dict(self))
