"""Build the parts of a run from its config: device, tokenizer, model and its distribution over ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from config.finetune.preference import PreferenceConfig
from config.model import ModelConfig, VisionPart
from config.model_section import ModelSection
from config.tokenizer import TokenizerConfig
from config.train import TrainConfig
from config.training.objective import NextTokenConfig
from config.training.runtime import AttentionBackend, RuntimeConfig
from config.training.training import RunConfig, TrainingConfig
from ddp.buckets import ParameterUnit
from ddp.parallelism import Parallelism
from ddp.process_group import World
from ddp.strategies import apply_parallelism
from diffusionlm.checkpoints.base_fingerprint import BaseFingerprint
from diffusionlm.checkpoints.huggingface import build_config_json, load_model_with_config
from diffusionlm.checkpoints.manifest import verify_directory, write_directory_atomically
from diffusionlm.checkpoints.model_files import load_tokenizer
from diffusionlm.data.chat.templates import find_stop_token, resolve_chat_template
from diffusionlm.data.pipeline import MixtureComponent, check_shard_tokenizer
from diffusionlm.data.reader import read_first_documents
from diffusionlm.data.shards import ShardDocuments
from diffusionlm.data.tokenization import train_tokenizer
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.families.model_directory import read_model_config, resolve_model_directory
from diffusionlm.models.init import init_weights, initial_value
from diffusionlm.models.lora import find_dropout
from diffusionlm.models.tensors import copy_to_device
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import requires_whole_matrix
from diffusionlm.training.adapters import AdapterSpec
from diffusionlm.training.step import Perturbation
from diffusionlm.vision.messages import IMAGE_TOKENS, find_image_tokens
from diffusionlm.vision.processor import ImageProcessor, ProcessorConfig, load_processor
from profiling import memory, triton_setup
from profiling.cores import usable_cores
from profiling.torch_setup import has_native_bfloat16, select_device
from tokenizer import Tokenizer, save_tokenizer

Log = Callable[[str], None]
MASK_NOISE_STD = 0.02
"""Standard deviation of the noise on the mask token's embedding, as large as a usual row."""


def set_up_device(config: RunConfig, keep_freed_memory: bool) -> torch.device:
    """Select the device, and set the number of threads and the CPU allocator's behavior for the whole process.

    Raises:
        ValueError: ``run.device = "cuda"`` without a CUDA device.
    """
    ranks_on_machine = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # set by torchrun
    default = _read_omp_threads(ranks_on_machine) or max(1, usable_cores() // ranks_on_machine)
    torch.set_num_threads(config.threads or default)
    device = select_device(config.device, "run.device")
    if device == "cpu" and keep_freed_memory:
        memory.keep_freed_memory()
    return torch.device(device)


def check_triton(config: RuntimeConfig, device: torch.device) -> str | None:
    """Return a warning if Triton, which compiles what a GPU runs, cannot, so that ``auto`` does without it.

    Raises:
        ValueError: a key of ``[runtime]`` asks for compiled kernels, and Triton cannot compile them.
    """
    problem = triton_setup.find_triton_problem() if device.type == "cuda" else None
    if problem is None:
        return None
    for key, value in (("compile", "blocks"), ("attention_backend", "flex")):
        if getattr(config, key) == value:
            raise ValueError(f'runtime.{key} = "{value}" {problem}, or set runtime.{key} = "auto"')
    return (
        f"Triton {problem}. Until then blocks are not compiled, and attention and the loss are computed by torch's "
        "operators, which is slower and takes more memory"
    )


def _read_omp_threads(ranks_on_machine: int) -> int:
    """OMP_NUM_THREADS, or 0 if it is not set. With several ranks it is torchrun's 1, whatever the number of cores."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdecimal() and ranks_on_machine == 1 else 0


def choose_precision(config: TrainingConfig, device: torch.device) -> torch.dtype:
    """Dtype of matrix products: ``auto`` is bfloat16 where the hardware computes it natively, else float32."""
    if config.precision != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.precision]
    return torch.bfloat16 if has_native_bfloat16(device.type) else torch.float32


def prepare_tokenizer(
    config: TokenizerConfig, model: ModelSection, components: list[MixtureComponent], directory: Path, log: Log
) -> Tokenizer:
    """Load the tokenizer of the run directory, or create it there: a copy of ``tokenizer.path``, of ``init_from``'s or
    of the shards', else one that is trained on the first documents, with the tokens of images if the model has a vision
    tower. Its chat template is that of the conversations.

    Raises:
        ValueError: the tokenizer cannot be read or has no end-of-text token, there are no documents, or the chat
            template does not allow to learn answers.
    """
    if directory.is_dir():
        verify_directory(directory)
        tokenizer = load_tokenizer(directory)
    else:
        tokenizer = find_tokenizer(config, model, components, log)
        write_directory_atomically(directory, lambda folder: save_tokenizer(tokenizer, folder))
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {directory} has no end-of-text token, which every sequence ends with")
    check_shard_tokenizer(components, tokenizer)
    return tokenizer


def find_tokenizer(
    config: TokenizerConfig, model: ModelSection, components: Sequence[MixtureComponent], log: Log
) -> Tokenizer:
    """Load or train the tokenizer of a new run (`prepare_tokenizer`), without writing it."""
    shard_directories = (
        component.source.tokenizer_directory for component in components if isinstance(component.source, ShardDocuments)
    )
    source = config.path or model.init_from or next(shard_directories, None)
    if model.vision is not None:
        missing = [token for token in IMAGE_TOKENS if token not in config.special_tokens]
        config = config.model_copy(update={"special_tokens": (*config.special_tokens, *missing)})
    tokenizer = load_tokenizer(source) if source else _train_tokenizer(config, components, log)
    chat = next((component.chat for component in components if component.chat is not None), None)
    if chat is None:
        return tokenizer
    return tokenizer.with_chat_template(resolve_chat_template(chat.config, tokenizer, chat.key))


def _train_tokenizer(config: TokenizerConfig, components: Sequence[MixtureComponent], log: Log) -> Tokenizer:
    """Train on the first documents of each component, by its weight."""
    total_weight = sum(component.weight for component in components)
    texts = (
        text
        for component in components
        if not isinstance(component.source, ShardDocuments)
        for text in read_first_documents(
            component.source,
            int(config.max_training_bytes * component.weight / total_weight),
        )
    )
    first_text = next(texts, None)
    if first_text is None:
        raise ValueError("[data]: the sources have no text to train on; add text, or check their paths and text_field")
    return train_tokenizer(chain([first_text], texts), config, log)


@dataclass(frozen=True)
class ModelBuilder:
    """Builds a model with random weights, or with those of a model directory and an adapter on them."""

    config: ModelConfig
    directory: Path | None
    """Verified model directory to load from; None: initialize randomly."""
    seed: int
    attention_backend: AttentionBackend = "auto"
    adapter: AdapterSpec | None = None
    """The adapter that is trained in place of the model. None: the model is."""
    freeze: tuple[VisionPart, ...] = ()
    """Parts of the vision tower that are not trained."""

    def build(self, device: torch.device) -> Transformer:
        """Build the whole model with its weights.

        Raises:
            ValueError: the weights do not fit.
        """
        if self.directory is None:
            model = Transformer(self.config, attention_backend=self.attention_backend)
            init_weights(model, self.seed)
        elif self.adapter is None:
            model = load_model_with_config(
                self.config, self.directory, attention_backend=self.attention_backend, mmap=False
            ).train()
        else:
            model = self._load_with_adapter(self.directory, self.adapter, device)
        return self._freeze(model).to(device)

    def _freeze(self, model: Transformer) -> Transformer:
        if model.model.visual is not None:
            model.model.visual.freeze(self.freeze)
        return model

    def _load_with_adapter(
        self, directory: Path, adapter: AdapterSpec, device: torch.device | None = None
    ) -> Transformer:
        """Load the base on the CPU, memory-mapped where it keeps its dtype, and add the adapter."""
        model = load_model_with_config(self.config, directory, dtype="keep", attention_backend=self.attention_backend)
        adapter.add_to(model, self.seed, device)
        return model.train()

    def fingerprint_directory(self) -> BaseFingerprint | None:
        """Describe the weights of the model directory, in whatever form ranks have them. None: there is none."""
        if self.directory is None:
            return None
        return BaseFingerprint.from_model(load_model_with_config(self.config, self.directory, dtype="keep"))

    def build_on_meta(self) -> Transformer:
        """Build the model without memory, on the ``meta`` device."""
        with torch.device("meta"):
            model = Transformer(self.config, attention_backend=self.attention_backend)
        if self.adapter is not None:
            self.adapter.add_to(model, self.seed)
        return self._freeze(model)

    def values(self) -> Callable[[str], Tensor]:
        """A function from the name of a parameter or buffer to its initial value, whole, on the CPU: for ranks that
        store shards.

        Values of a directory are memory-mapped, so ranks of one machine share them.
        """
        if self.directory is not None:
            if self.adapter is None:
                model = load_model_with_config(self.config, self.directory, dtype="keep")
            else:
                model = self._load_with_adapter(self.directory, self.adapter)
            values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            return lambda name: values[name].detach()
        shapes = {name: parameter.shape for name, parameter in self.build_on_meta().named_parameters()}
        return lambda name: initial_value(name, shapes[name], self.config, self.seed)


def create_model_builder(
    config: TrainConfig, tokenizer: Tokenizer, precision: torch.dtype = torch.float32
) -> ModelBuilder:
    """Resolve the model's config from the tokenizer's vocabulary, the objective's block length and ``init_from``.

    ``precision`` is the dtype of matrix products, in which `lora.base` may keep weights.

    Raises:
        ValueError: there is no mask token, or there are none for images, no checkpoint format holds such a model, or
            ``init_from`` is damaged or of another architecture.
    """
    if tokenizer.mask_token_id is None and not isinstance(config.objective, NextTokenConfig):
        raise ValueError(
            f'the tokenizer has no mask token, which objective.kind = "{config.objective.kind}" needs: name one in its '
            "tokenizer_config.json, or train a tokenizer by leaving tokenizer.path out"
        )
    section = config.model
    image_tokens = {} if section.vision is None else find_image_tokens(tokenizer.special_tokens)
    directory = None if section.init_from is None else resolve_model_directory(section.init_from)
    source_config = None if directory is None else read_model_config(directory)
    vocab_size = tokenizer.vocab_size
    if source_config is not None:
        section.check_same_architecture(source_config)
        section.check_vocab_size(source_config, vocab_size)
        vocab_size = source_config.vocab_size
    build_config = section.to_model_config if config.lora is None else section.to_adapted_config
    model_config = build_config(
        vocab_size=vocab_size,
        mask_token_id=tokenizer.mask_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=_collect_stop_tokens(source_config, tokenizer, has_chats=bool(config.data.chats)),
        block_length=config.objective.final_block_length,
        block_origin=config.block_origin,
        begin_with_eos=config.data.begin_with_eos,
        video_token_id=None if source_config is None else source_config.video_token_id,
        **image_tokens,
    )
    build_config_json(model_config, torch.float32)  # raises now for what could not be saved at the first checkpoint
    if directory is not None:
        verify_directory(directory)
    return ModelBuilder(
        model_config,
        directory,
        config.run.seed,
        config.runtime.attention_backend,
        AdapterSpec.from_config(config, precision),
        config.training.freeze,
    )


def open_processor(config: TrainConfig) -> ImageProcessor | None:
    """The processor of a run's images: that of ``init_from``, else Qwen3-VL's for the vision tower, with the limits of
    ``[data.images]``. None: the model has no vision tower.

    Raises:
        ValueError: ``init_from`` has none, or the limits contradict each other.
    """
    vision, limits = config.model.vision, config.data.images.limits
    if vision is None:
        return None
    if config.model.init_from is None:
        pixels = vision.pixels_per_token**2
        processor = ImageProcessor.for_model(vision, pixels, 256 * pixels)
    else:
        processor = load_processor(config.model.init_from)
    try:
        return ImageProcessor(ProcessorConfig.model_validate(processor.config.model_dump() | limits))
    except ValidationError as error:
        raise ValueError(f"[data.images]: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def _collect_stop_tokens(
    source_config: ModelConfig | None, tokenizer: Tokenizer, *, has_chats: bool
) -> tuple[int, ...]:
    """Stop tokens of a model, the tokenizer's end-of-text token first: those of ``init_from``, if that token is among
    them, and that of the chat template, at which the model learns to end its answers. Empty: that token alone."""
    end = tokenizer.eos_token_id
    stop_token_ids: list[int] = []
    if source_config is not None and end is not None and end in source_config.stop_token_ids:
        stop_token_ids = [end, *source_config.stop_token_ids]
    if has_chats:
        assert tokenizer.chat_template is not None and end is not None, "prepare_tokenizer has set them"
        stop = find_stop_token(tokenizer.chat_template, tokenizer)
        if stop not in (end, *stop_token_ids):
            stop_token_ids = [end, *stop_token_ids, stop]
    return tuple(dict.fromkeys(stop_token_ids))


def parallelize(
    model: Transformer, config: TrainConfig, world: World, device: torch.device, precision: torch.dtype
) -> Parallelism:
    """Distribute the model over the ranks as ``[parallel]`` says; FSDP gathers weights in ``precision``."""
    parameters = dict(model.named_parameters())

    def is_whole(name: str) -> bool:
        return requires_whole_matrix(config.optimizer, name, parameters[name])

    units = parameter_units(model)
    return apply_parallelism(
        model, config.parallel, world, device, units, requires_whole_matrix=is_whole, dtype=precision
    )


def parameter_units(model: Transformer) -> list[ParameterUnit]:
    """Modules in the order of execution, each with the names of the parameters that it reads first.

    The units are the embeddings (with the head if tied), the blocks and mergers of a vision tower, the blocks, and the
    last norm with an untied head.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    embeddings: list[nn.Module] = [model.model.embed_tokens]
    blocks, visual = [*model.model.layers], model.model.visual
    if visual is not None:
        embeddings += [visual.patch_embed, visual.pos_embed]
        blocks = [*visual.blocks, *visual.deepstack_merger_list, visual.merger, *blocks]
    stages: list[tuple[nn.Module, list[nn.Parameter]]] = [
        (model, [parameter for module in embeddings for parameter in module.parameters()]),
        *((block, list(block.parameters())) for block in blocks),
        (model.model.norm, [*model.model.norm.parameters(), *model.lm_head.parameters()]),
    ]
    units: list[ParameterUnit] = []
    assigned: set[nn.Parameter] = set()
    for module, parameters in stages:
        units.append((module, [names[parameter] for parameter in parameters if parameter not in assigned]))
        assigned.update(parameters)
    return units


def only_on_first_rank(world: World, log: Log) -> Log:
    """``log`` on the first rank; elsewhere a function that does nothing."""
    return log if world.is_first else lambda text: None


@contextmanager
def add_embedding_noise(
    model: Transformer, scales_BS: Tensor, seeds_B: Sequence[int], num_tokens: int, sample: Callable[..., Tensor]
) -> Iterator[None]:
    """Context in which input embeddings have noise, the same in the noisy and the clean half of a row.

    Args:
        scales_BS: factor of the noise of each position.
        seeds_B: a seed for each sequence of the forward, which its noise is a function of.
        sample: draws noise of a shape, device and generator, as ``torch.randn`` does.
    """

    def add_noise(_module: Any, _inputs: Any, embeddings_BSD: Tensor) -> Tensor:
        device, shape, noise = embeddings_BSD.device, (num_tokens, embeddings_BSD.shape[2]), []
        generator = torch.Generator(device)
        for seed in seeds_B:
            generator.manual_seed(seed)
            noise.append(sample(shape, device=device, generator=generator))
        noise_BSD = torch.stack(noise).repeat(1, embeddings_BSD.shape[1] // num_tokens, 1)
        return embeddings_BSD + (scales_BS[..., None] * noise_BSD).to(embeddings_BSD.dtype)

    handle = model.model.embed_tokens.register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()


def neftune_scales(noised_batch: NoisedBatch, alpha: float, hidden_size: int) -> Tensor:
    """Largest noise of NEFTune for each token, alpha / sqrt(L D), [B, L], on the CPU; 0 for padding.

    L is the number of tokens of its document, so that packed conversations have the noise of separate rows.
    """
    noised_batch = noised_batch.on_host or noised_batch
    (B, S), pattern = noised_batch.inputs_BS.shape, noised_batch.pattern
    ids_BL = torch.ones(B, S // pattern.positions_per_token, dtype=torch.int64)
    if pattern.documents_BL is not None:
        ids_BL = pattern.documents_BL.long() + 1  # padding is 0
    counts = torch.zeros(B, int(ids_BL.max()) + 1).scatter_add_(1, ids_BL, torch.ones(ids_BL.shape))
    return torch.where(ids_BL > 0, alpha / (counts.gather(1, ids_BL) * hidden_size).sqrt(), 0.0)


def build_perturbations(config: TrainConfig, model: Transformer) -> tuple[Perturbation, ...]:
    """Noise of training forwards that the config asks for, keyed by seed and step: dropout of adapters, Gaussian noise
    on the mask token's embedding (LLaDA2), and uniform noise on all embeddings (NEFTune, Jain et al. 2023)."""
    seed, dropout, objective = config.run.seed, find_dropout(model), config.objective
    perturbations: list[Perturbation] = []

    def add_noise(
        stream: RngStream, step: int, noised_batch: NoisedBatch, scales_BS: Tensor, sample: Callable[..., Tensor]
    ) -> AbstractContextManager[None]:
        rows_B = noised_batch.number_rows("cpu").tolist()  # from a GPU this would wait
        seeds_B = [int(keyed_rng(seed, stream, step, row).integers(2**62)) for row in rows_B]
        num_tokens = scales_BS.shape[1] // noised_batch.pattern.positions_per_token
        return add_embedding_noise(model, scales_BS, seeds_B, num_tokens, sample)

    if dropout is not None:

        def drop_adapters(step: int, noised_batch: NoisedBatch) -> AbstractContextManager[None]:
            key = int(keyed_rng(seed, RngStream.ADAPTER_DROPOUT, step).integers(2**32))
            length = noised_batch.inputs_BS.shape[1]
            return dropout.dropout_context(key, noised_batch.number_rows(), length, noised_batch.positions_N)

        perturbations.append(drop_adapters)
    if not isinstance(objective, NextTokenConfig | PreferenceConfig) and objective.mask_noise_steps:
        num_steps, mask_token = objective.mask_noise_steps, model.config.required_mask_token_id

        def add_mask_noise(step: int, noised_batch: NoisedBatch) -> AbstractContextManager[None]:
            """A mask row that no data trained is the same vector at every masked position, near zero in many models,
            and gradients explode."""
            if step >= num_steps or noised_batch.is_auxiliary:
                return nullcontext()
            scales_BS = MASK_NOISE_STD * (noised_batch.inputs_BS == mask_token)
            scales_BS[:, scales_BS.shape[1] // noised_batch.pattern.positions_per_token :] = 0.0  # clean tokens
            return add_noise(RngStream.MASK_NOISE, step, noised_batch, scales_BS, torch.randn)

        perturbations.append(add_mask_noise)
    alpha = config.training.neftune_alpha
    if alpha is not None:

        def add_neftune_noise(step: int, noised_batch: NoisedBatch) -> AbstractContextManager[None]:
            scales_BL = neftune_scales(noised_batch, alpha, model.config.hidden_size)
            scales_BS = scales_BL.repeat(1, noised_batch.pattern.positions_per_token)
            scales_BS = copy_to_device(scales_BS, noised_batch.inputs_BS.device)
            return add_noise(RngStream.EMBEDDING_NOISE, step, noised_batch, scales_BS, _sample_uniform)

        perturbations.append(add_neftune_noise)
    return tuple(perturbations)


def _sample_uniform(shape: tuple[int, ...], **options: Any) -> Tensor:
    return 2.0 * torch.rand(shape, **options) - 1.0
