"""The model ``diffusionlm`` of lm-evaluation-harness 0.4. It needs the extra ``lm-eval``.

import lm_eval
from diffusionlm.evaluation.lm_eval.adapter import DiffusionLM

model = DiffusionLM(path="DIR", **{"generation.steps": 64, "likelihood.num_mc_samples": 32})
results = lm_eval.simple_evaluate(model=model, tasks=["arc_easy"], bootstrap_iters=0)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.metadata import version
from operator import itemgetter
from typing import Any, TypeVar

import lm_eval.models  # noqa: F401  # registers the harness's own models, which would stay unknown without it
import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, CacheHook
from lm_eval.api.registry import register_model
from torch import Tensor
from tqdm import tqdm

from config.evaluation.lm_eval import LmEvalConfig, nest_arguments
from ddp.process_group import SINGLE_PROCESS, World, read_torchrun_environment
from diffusionlm.checkpoints.base_fingerprint import TensorDigest
from diffusionlm.checkpoints.huggingface import load_configured_model
from diffusionlm.checkpoints.model_files import load_tokenizer
from diffusionlm.evaluation.lm_eval.runner import HarnessRequest, RequestRunner
from diffusionlm.models.transformer import Transformer
from tokenizer import CHAT_TEMPLATES, ChatTemplate, Tokenizer, render_chat

CACHE_KEY = "diffusionlm"
"""Key of a request cache under which there are the fingerprints and settings of the model that filled it."""
T = TypeVar("T")


@register_model("diffusionlm")
class DiffusionLM(LM):  # type: ignore[misc]
    """A model with its settings. Batch sizes, order, neighbors and ranks change no result, up to rounding."""

    def __init__(
        self,
        model: Transformer | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **arguments: Any,
    ) -> None:
        """Load the model, unless it is given.

        Args:
            model: a loaded model, with its tokenizer; None: ``path`` or ``pretrained`` among the arguments names it.
            batch_size: answers that are decoded at a time; "auto" and None: the default.
            max_batch_size: without effect, since no batch size is searched.
            arguments: keys of `LmEvalConfig`, such as ``path``, ``device``, ``seed`` or ``generation.steps``; nested
                values may be dictionaries.

        Raises:
            ValueError: an argument is unknown or wrong, or the model cannot be loaded.
        """
        super().__init__()
        if batch_size is not None and not str(batch_size).startswith("auto"):
            arguments["batch_size"] = int(batch_size)
        if "device" in arguments:
            arguments["device"] = _read_device(str(arguments["device"]))
        self.config = LmEvalConfig.model_validate(nest_arguments(arguments))
        self.world = _join_world()
        self._rank, self._world_size = self.world.rank, self.world.size
        if (model is None) == (self.config.model.path is None) or (model is None) != (tokenizer is None):
            raise ValueError("name the model as path=DIR, or pass both a loaded model and its tokenizer")
        if model is None or tokenizer is None:
            assert self.config.model.path is not None
            tokenizer = load_tokenizer(self.config.model.path)
            model = load_configured_model(self.config.model)
        self.runner = RequestRunner(model.eval(), tokenizer, self.config)
        self.runner.resolve_generation(self.config.generation)  # so that wrong settings are found before any task
        self._device = model.lm_head.weight.device

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> DiffusionLM:
        """Create the model of a command line, whose ``--model_args`` win over its other options."""
        return cls(**{key: value for key, value in (additional_config or {}).items() if value is not None} | arg_dict)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        return self._collect("loglikelihood", requests, self.runner.score(requests))

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        return self._collect("loglikelihood_rolling", requests, self.runner.roll(requests))

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return self._collect("generate_until", requests, self.runner.generate(requests))

    def _collect(self, method: str, requests: Sequence[HarnessRequest], results: Iterator[tuple[int, T]]) -> list[T]:
        """Sort results, with a progress bar; they go into the request cache as soon as they are there."""
        for request in requests if self.cache_hook.dbdict is not None else ():
            is_uncached = method == "generate_until" and request.args[1].get("do_sample")
            if (request.repeats or 1) > 1 and not is_uncached:
                raise ValueError(
                    f"task {request.task_name}: repeats = {request.repeats} would all get the same value from the "
                    "request cache: leave out --use_cache, or add do_sample=true to --gen_kwargs, with which answers "
                    "are not cached"
                )
        collected: dict[int, T] = {}
        for index, result in tqdm(results, total=len(requests), desc=f"diffusionlm: {method}", disable=self.rank > 0):
            collected[index] = result
            self.cache_hook.add_partial(method, requests[index].args, result)
        return [collected[index] for index in range(len(requests))]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a chat. Without a generation prompt its last message, the beginning of an answer, stays open.

        Raises:
            ValueError: there is no chat template, or it rejects the chat or does not write the last message as it is.
        """
        text = render_chat(self._template, chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        ending = chat_history[-1]["content"].strip()
        start = text.rfind(ending)
        if start < 0:
            raise ValueError(f"the chat template changes the last message {ending!r}, so it cannot be continued")
        return text[: start + len(ending)]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The text of the chat template, for the results.

        Raises:
            ValueError: another template is named than the one in use.
        """
        if not chat_template:
            return None
        if isinstance(chat_template, str) and CHAT_TEMPLATES.get(chat_template) != self._template:
            raise ValueError(
                f"--apply_chat_template {chat_template}: templates are chosen with --model_args "
                f"chat_template=NAME, one of {', '.join(CHAT_TEMPLATES)}"
            )
        return self._template.source

    @property
    def _template(self) -> ChatTemplate:
        name = self.config.chat_template
        template = CHAT_TEMPLATES[name] if name is not None else self.runner.tokenizer.chat_template
        if template is None:
            raise ValueError(
                f"the model has no chat template: add chat_template=NAME to --model_args, one of "
                f"{', '.join(CHAT_TEMPLATES)}, or leave out --apply_chat_template"
            )
        return template

    @property
    def tokenizer_name(self) -> str:
        """Key of the harness's cache of prompts: hashes of the tokenizer and of the chat template."""
        template = hashlib.sha256(self._template.source.encode()).hexdigest()
        return f"diffusionlm-{self.runner.tokenizer.fingerprint[:16]}-{template[:16]}"

    def get_model_info(self) -> dict[str, Any]:
        """What the results say about the model and its settings."""
        model = self.runner.model
        settings = self.config.model_dump(mode="json", exclude={"model", "batch_size"})
        own_ids = {"suppress_token_ids": self.config.generation.suppress_token_ids}  # without the ids that have no text
        resolved = self.runner.resolve_generation(self.config.generation).config.model_copy(update=own_ids)
        return {
            "model_path": str(self.config.model.path or "loaded"),
            "model_num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "model_dtype": str(model.lm_head.weight.dtype),
            "model_fingerprint": self.model_fingerprint,
            "model_config": model.config.model_dump(mode="json", exclude_defaults=True),
            "diffusionlm_version": version("diffusionlm"),
            "diffusionlm_settings": settings,
            "resolved_generation": resolved.model_dump(mode="json", exclude_none=True),
            "preset_deviations": self.config.deviations,
            "num_truncated_contexts": self.runner.num_truncated,
        }

    @cached_property
    def model_fingerprint(self) -> str:
        """SHA-256 of the config and of all parameters, adapters included, whatever file they were loaded from. Reads
        all weights once: 0.5 to 1 GB each second."""
        model = self.runner.model
        digest = hashlib.sha256(model.config.model_dump_json().encode())
        for name, parameter in sorted(model.named_parameters(), key=itemgetter(0)):
            digest.update(f"{name} {list(parameter.shape)} {TensorDigest.from_tensor(parameter).exact}".encode())
        return digest.hexdigest()

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Use a request cache.

        Raises:
            ValueError: another model, or the same with other settings, has filled it.
        """
        database = cache_hook.dbdict
        if database is not None:
            settings = self.config.model_dump_json(exclude={"model", "batch_size"})
            parts = [self.model_fingerprint, self.runner.tokenizer.fingerprint, settings]
            fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
            stored = database.get(CACHE_KEY)
            if stored != fingerprint and (stored is not None or len(database)):
                raise ValueError(
                    f"{database.filename} has results of another model, or of other settings: name another file"
                )
            database[CACHE_KEY] = fingerprint
        super().set_cache_hook(cache_hook)

    @property
    def max_length(self) -> int:
        """Tokens of the model's context."""
        return self.runner.max_length

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the ranks' tensors, of which scalars become elements."""
        parts = self.world.all_gather_objects(tensor.detach().cpu())
        return torch.cat([part if part.dim() else part[None] for part in parts])

    def gather_object(self, obj: T, dst: int = 0) -> list[T] | None:
        """The objects of all ranks, in rank order; None except on rank ``dst``."""
        objects = self.world.all_gather_objects(obj)
        return objects if self.rank == dst else None

    def barrier(self) -> None:
        self.world.barrier()


def _read_device(name: str) -> str:
    """The device of `InferModelConfig`. The harness's default is cuda:0, also where there is no CUDA."""
    if name.startswith("cuda:") and name != "cuda:0":
        raise ValueError(f"device = {name}: choose a GPU with CUDA_VISIBLE_DEVICES, and set device = cuda")
    return "auto" if name == "cuda:0" else name


def _join_world() -> World:
    """The process group that exists, or a new one for host values if torchrun has started several processes."""
    rank, world_size, local_rank = read_torchrun_environment() or (0, 1, 0)
    if not dist.is_initialized():
        if world_size == 1:
            return SINGLE_PROCESS
        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank)
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return World(dist.get_rank(), dist.get_world_size(), local_rank)
