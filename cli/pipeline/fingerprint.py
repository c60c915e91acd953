"""Fingerprints of stages, which cover what decides their results: config, contents of files, fingerprints of inputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from cli.pipeline.plan import STAGE_KINDS, StagePlan
from cli.pipeline.settings import without_key
from config.base import Section
from config.convert import ConvertConfig
from config.data import HubDataset, LocalFiles, PythonStdlib, Shards
from config.dump import list_differences, to_toml_values
from config.evaluation.tasks import AnyTask
from config.evaluation.variants import VariantConfig
from config.finetune.chat import ChatRowsConfig
from config.finetune.lora import LoraTrainingConfig
from config.generation import GenerationConfig
from config.infer import InferInputConfig, InferModelConfig
from config.tokenizer import TokenizerConfig
from config.train import TrainConfig
from config.training.objective import MaskedDiffusionConfig
from diffusionlm.evaluation.tasks.item_task import PromptConfig
from diffusionlm.families.model_directory import resolve_model_directory
from files.hashing import hash_file

FORMAT = 1
"""Version of the fingerprint. A change makes all stages stale."""
KEYS_WITHOUT_EFFECT = {
    "train": (
        "run.threads", "data.workers", "data.prefetch_steps", "logging", "samples", "profiler", "parallel",
        "checkpoint.background", "checkpoint.keep_last", "checkpoint.keep_every_steps", "checkpoint.resume",
        "checkpoint.config_change", "runtime.compile", "runtime.activation_checkpointing",
        "runtime.attention_backend", "runtime.prefetch", "runtime.keep_freed_memory", "runtime.garbage_collection",
    ),
    "evaluate": ("output",),
    "sample": ("output",),
}  # fmt: skip
"""Keys that change no result, or only its rounding. `checkpoint.every_steps` and `keep_best` decide what `best` is."""
PATH_KEYS: dict[type[Section], tuple[str, ...]] = {
    MaskedDiffusionConfig: ("attention_bias",),
    GenerationConfig: ("attention_bias",),
    LocalFiles: ("paths", "validation_paths"),
    HubDataset: ("dataset",),
    Shards: ("path",),
    TokenizerConfig: ("path",),
    InferInputConfig: ("prompts_file",),
    InferModelConfig: ("adapter",),
    ConvertConfig: ("adapter",),
    LoraTrainingConfig: ("init_from",),
    ChatRowsConfig: ("template",),
    **dict.fromkeys(get_args(AnyTask), ("data",)),
    PromptConfig: ("shots_data",),
    VariantConfig: ("model", "adapter"),
}
"""Keys of files whose contents decide a result, beside the model of the stage."""
SPLITS: tuple[Literal["train", "validation"], ...] = ("train", "validation")
MAX_REASONS = 3


@dataclass(frozen=True)
class Fingerprint:
    """What decides the results of a stage."""

    kind: str
    config: dict[str, Any]
    """Values of the command's config that have an effect on its results."""
    files: dict[str, str]
    """Key of the config -> hash of the contents of its files."""
    source: str
    """Fingerprint of the stage in ``from`` and its checkpoint, or hash of the model; "": neither."""
    format: int = FORMAT

    @property
    def digest(self) -> str:
        text = json.dumps(self.to_json(), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Fingerprint:
        """The inverse of `to_json`.

        Raises:
            ValueError: a key is missing or unknown.
        """
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(str(error)) from None

    def list_changes(self, new: Fingerprint) -> list[str]:
        """List what differs in a newer fingerprint of the stage."""
        changes = list_differences(self.config, new.config)
        changes += [f"the content of {key}" for key in new.files if self.files.get(key) not in (None, new.files[key])]
        if self.source != new.source:
            changes.append("the model in from")
        if (self.kind, self.format) != (new.kind, new.format):
            changes.append(f"kind or format: {self.kind}, {self.format} -> {new.kind}, {new.format}")
        hidden = [f"{len(changes) - MAX_REASONS} more"] if len(changes) > MAX_REASONS else []
        return [*changes[:MAX_REASONS], *hidden]


@dataclass
class FingerprintBuilder:
    """Computes the fingerprints of stages in the order of their execution. A file is hashed once."""

    digests: dict[str, str] = field(default_factory=dict)
    """By name, of earlier stages."""
    _hashes: dict[Path, str] = field(default_factory=dict)

    def add(self, plan: StagePlan) -> Fingerprint:
        """Compute the fingerprint of the next stage.

        Raises:
            ValueError: a file cannot be read; names it.
        """
        stage, kind = plan.stage, STAGE_KINDS[plan.stage.kind]
        config_name = "train" if isinstance(plan.config, TrainConfig) else stage.kind
        values: dict[str, Any] = to_toml_values(plan.config, stage.name)
        for key in (*kind.managed_keys, *KEYS_WITHOUT_EFFECT.get(config_name, ())):
            values = without_key(values, key)
        source = ""
        if plan.parent is not None:
            source = f"{self.digests[plan.parent.name]} {stage.checkpoint}"
        elif stage.input is not None:
            source = self.hash_model(stage.input)
        files = {key: self.hash_files(paths) for key, paths in list_files(plan.config)}
        fingerprint = Fingerprint(stage.kind, values, files, source)
        self.digests[stage.name] = fingerprint.digest
        return fingerprint

    def hash_files(self, paths: Sequence[Path]) -> str:
        """Hash names and contents of files."""
        lines = []
        for path in paths:
            if path not in self._hashes:
                self._hashes[path] = hash_file(path)
            lines.append(f"{path.name} {self._hashes[path]}")
        return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()

    def hash_model(self, name: str) -> str:
        """Hash a model directory by its manifest, which has the checksums of all files, else by all files."""
        directory = resolve_model_directory(name, needs_weights=False)
        if not Path(name).exists():
            return f"{name} {directory.name}"  # of the Hub: the directory in its cache has the name of the commit
        manifest = directory / "MANIFEST.json"
        return self.hash_files([manifest] if manifest.is_file() else _files_in(directory))


def check_files_unchanged(plan: StagePlan, fingerprint: Fingerprint) -> None:
    """Check that the files of a stage are those of its fingerprint.

    Raises:
        ValueError: one has changed; names its key.
    """
    builder = FingerprintBuilder()
    changed = [key for key, paths in list_files(plan.config) if builder.hash_files(paths) != fingerprint.files.get(key)]
    if changed:
        raise ValueError(
            f'stage "{plan.name}": the content of {", ".join(changed)} has changed since the pipeline began; run the '
            "same command again"
        )


def list_files(config: Section, prefix: str = "") -> Iterator[tuple[str, list[Path]]]:
    """Iterate over the keys of a config that name local files, with these files in a fixed order.

    Raises:
        ValueError: a pattern matches no file; names the key.
    """
    for name in type(config).model_fields:
        value, key = getattr(config, name), f"{prefix}{name}"
        if name in PATH_KEYS.get(type(config), ()) and value:
            yield key, _find_paths(value, key)
        for index, item in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(item, Section):
                yield from list_files(item, f"{key}.{index}." if isinstance(value, tuple) else f"{key}.")
    if isinstance(config, PythonStdlib):
        # Imported here, so that --help and config errors do not wait for numpy.
        from diffusionlm.data.sources.local_files import StdlibSource

        paths = [path for split in SPLITS for path in StdlibSource(config, split, prefix).paths]
        yield prefix.rstrip("."), paths


def _find_paths(value: Any, key: str) -> list[Path]:
    """The files of patterns, of a directory or of a path. A name on the Hub has none."""
    from diffusionlm.data.sources.local_files import find_files

    if isinstance(value, tuple):
        return [Path(path) for path in find_files(value, key)]
    path = Path(value).expanduser()
    return _files_in(path) if path.is_dir() else [path] if path.is_file() else []


def _files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())
