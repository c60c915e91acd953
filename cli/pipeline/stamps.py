"""The stamp of a stage, beside its results: what decided them. A stage whose stamp is that of its config is done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cli.pipeline.stages import Stage, with_value
from config.base import Section
from config.data import PythonStdlib
from config.dump import list_differences, to_toml_values
from config.load import ConfigError, validate_config
from config.spellings import read_key
from diffusionlm.families.model_directory import resolve_model_directory
from files.atomic import write_text_atomic
from files.json_files import read_json_object
from files.paths import hash_file
from files.usage_error import prefix_errors

STARTED, DONE, CONFIG = "stage.json", "done.json", "config.toml"
"""Files of a stage: its fingerprint from its start on; the same when it is done; the command's config."""
FORMAT = 1
"""Version of the fingerprint. A change makes all stages stale."""
TRAINING_KEYS_WITHOUT_EFFECT = (
        "run.threads", "data.workers", "data.prefetch_steps", "logging", "samples", "profiler", "parallel",
        "checkpoint.background", "checkpoint.keep_last", "checkpoint.keep_every_steps", "checkpoint.resume",
        "checkpoint.config_change", "runtime.compile", "runtime.activation_checkpointing",
        "runtime.attention_backend", "runtime.prefetch", "runtime.keep_freed_memory", "runtime.garbage_collection",
)  # fmt: skip
KEYS_WITHOUT_EFFECT = {
    "train": TRAINING_KEYS_WITHOUT_EFFECT,
    "rl": TRAINING_KEYS_WITHOUT_EFFECT,
    "convert": (),
    "eval": ("output",),
    "infer": ("output",),
}  # fmt: skip
"""Keys that change no result, or only its rounding. `checkpoint.every_steps` and `keep_best` decide what `best` is."""
TEXT_KEYS = ("paths", "validation_paths", "path", "dataset", "template")
"""Keys whose texts may name files, besides those that are declared as paths."""

Fingerprint = dict[str, Any]
"""``kind``; ``config``: the values that have an effect; ``files``: hashes of their contents by key; ``source``: the
fingerprint of the stage in ``from`` and its checkpoint, or the hash of the model; ``format``."""
Action = Literal["skip", "resume", "run", "stale"]
"""skip: done. resume: training was interrupted and goes on. run: not begun or interrupted. stale: of other inputs."""


@dataclass(frozen=True)
class StageState:
    """A stage and what its directory has."""

    stage: Stage
    fingerprint: Fingerprint
    action: Action
    reason: str


class FileHashes(dict[Path, str]):
    """Hashes of the contents of files. A file is read once."""

    def __missing__(self, path: Path) -> str:
        self[path] = hash_file(path)
        return self[path]

    def hash_files(self, paths: Sequence[Path]) -> str:
        """Hash names and contents of files."""
        text = "\n".join(f"{path.name} {self[path]}" for path in paths)
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()

    def hash_model(self, name: str) -> str:
        """Hash a model directory by its manifest, which has the checksums of all files, else by all files."""
        directory = resolve_model_directory(name, needs_weights=False)
        if not Path(name).exists():
            return f"{name} {directory.name}"  # of the Hub: the directory in its cache has the name of the commit
        manifest = directory / "MANIFEST.json"
        return self.hash_files([manifest] if manifest.is_file() else _files_in(directory))

    def hash_inputs(self, stage: Stage) -> dict[str, str]:
        """Hash the files that the config of a stage names, by key."""
        return {key: self.hash_files(paths) for key, paths in list_files(stage.config, _keys_without_effect(stage))}


def read_states(stages: Sequence[Stage]) -> list[StageState]:
    """Read the state of all stages, in the order of their execution.

    Raises:
        ValueError: a file of the config cannot be read, or a directory has other files.
    """
    hashes, digests = FileHashes(), dict[str, str]()
    states = []
    for stage in stages:
        with prefix_errors(f'stage "{stage.name}"'):
            states.append(_read_state(stage, hashes, digests))
        digests[stage.name] = hashlib.sha256(json.dumps(states[-1].fingerprint, sort_keys=True).encode()).hexdigest()
    return states


def _read_state(stage: Stage, hashes: FileHashes, digests: Mapping[str, str]) -> StageState:
    """Compare the fingerprint of a stage with the recorded one; ``digests`` are those of the stages before."""
    directory, source = stage.directory, ""
    if stage.parent is not None:
        source = f"{digests[stage.parent.name]} {stage.settings.checkpoint}"
    elif stage.settings.input is not None:
        source = hashes.hash_model(stage.settings.input)
    fingerprint: Fingerprint = {
        "kind": stage.settings.kind,
        "config": _effective_values(stage, stage.config),
        "files": hashes.hash_inputs(stage),
        "source": source,
        "format": FORMAT,
    }
    is_done = (directory / DONE).is_file()
    recorded = read_record(directory / (DONE if is_done else STARTED)).get("fingerprint")
    if recorded is None:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ValueError(
                f"{directory} exists and is no stage of a pipeline: rename the stage, or name another directory"
            )
        return StageState(stage, fingerprint, "run", "not begun")
    if _with_present_keys(stage, recorded) != fingerprint:
        return StageState(stage, fingerprint, "stale", f"changed: {_list_changes(recorded, fingerprint)}")
    fingerprint = recorded  # later stages have recorded its digest
    if not is_done:
        is_resumable = (stage.output_paths[0] / CONFIG).is_file()
        return StageState(stage, fingerprint, "resume" if is_resumable else "run", "interrupted")
    if not stage.result.exists():
        return StageState(stage, fingerprint, "stale", f"its output {stage.result.relative_to(directory)} is missing")
    return StageState(stage, fingerprint, "skip", "done")


def _keys_without_effect(stage: Stage) -> tuple[str, ...]:
    return *stage.kind.managed_keys, *KEYS_WITHOUT_EFFECT[stage.kind.command]


def _effective_values(stage: Stage, config: Section) -> dict[str, Any]:
    values: dict[str, Any] = to_toml_values(config)
    for key in _keys_without_effect(stage):
        values = with_value(values, key, None)
    return values


def _with_present_keys(stage: Stage, recorded: Fingerprint) -> Fingerprint:
    """The fingerprint that an older version recorded, with today's spellings of keys."""
    values, tree = to_toml_values(stage.config), recorded.get("config", {})
    for key in _keys_without_effect(stage):
        tree = with_value(tree, key, read_key(values, key))
    try:
        config = validate_config(type(stage.config), tree, "the recorded config")
    except ConfigError:
        return recorded
    return {**recorded, "config": _effective_values(stage, config)}


def _list_changes(old: Fingerprint, new: Fingerprint) -> str:
    changes = list_differences(old.get("config", {}), new["config"])
    old_files = old.get("files", {})
    changes += [f"the content of {key}" for key in new["files"] if old_files.get(key) not in (None, new["files"][key])]
    changes += ["the model in from"] if old.get("source") != new["source"] else []
    return "; ".join(changes or ["its kind, or the version of its stamp"])


def read_record(path: Path) -> dict[str, Any]:
    """Read a record; an empty one: there is none, or it is damaged."""
    try:
        return read_json_object(path)
    except ValueError:
        return {}


def write_stamp(state: StageState, seconds: float | None = None) -> None:
    """Record that a stage begins, or that it is done after ``seconds``.

    Raises:
        ValueError: it is done, and its output is missing.
    """
    stage = state.stage
    record: dict[str, Any] = {"fingerprint": state.fingerprint}
    if seconds is not None:
        if not stage.result.exists():
            raise ValueError(f'stage "{stage.name}": its output {stage.result} is missing')
        record["seconds"] = round(seconds, 1)
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    write_text_atomic(stage.directory / (STARTED if seconds is None else DONE), text)


def read_seconds(stage: Stage) -> float | None:
    """Duration of a stage that is done, of its last process; None: it is not done."""
    return read_record(stage.directory / DONE).get("seconds")


def check_files_unchanged(state: StageState) -> None:
    """Check that the files of a stage are those of its fingerprint.

    Raises:
        ValueError: one has changed; names its key.
    """
    hashes = FileHashes().hash_inputs(state.stage)
    changed = [key for key, value in hashes.items() if value != state.fingerprint["files"].get(key)]
    if changed:
        raise ValueError(
            f'stage "{state.stage.name}": the content of {", ".join(changed)} has changed since the pipeline began; '
            "run the same command again"
        )


def list_files(
    config: Section, ignored_keys: Collection[str] = (), prefix: str = ""
) -> Iterator[tuple[str, list[Path]]]:
    """Iterate over the keys of a config that name local files, with these files in a fixed order.

    Raises:
        ValueError: a pattern matches no file; names the key.
    """
    for name in type(config).model_fields:
        value, key = getattr(config, name), f"{prefix}{name}"
        if key in ignored_keys:
            continue
        if isinstance(value, Path) or (value and name in TEXT_KEYS):
            yield key, _find_paths(value, key)
        for index, item in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(item, Section):
                start = f"{key}.{index}." if isinstance(value, tuple) else f"{key}."
                yield from list_files(item, ignored_keys, start)
    if isinstance(config, PythonStdlib):
        # Imported here, so that --help and config errors do not wait for numpy.
        from diffusionlm.data.sources.local_files import StdlibSource

        training, validation = StdlibSource(config, "train", prefix), StdlibSource(config, "validation", prefix)
        yield prefix.rstrip("."), [*training.paths, *validation.paths]


def _find_paths(value: Any, key: str) -> list[Path]:
    """The files of patterns, of a directory or of a path. A name on the Hub has none."""
    from diffusionlm.data.sources.local_files import find_files

    if isinstance(value, tuple):
        return [Path(path) for path in find_files(value, key)]
    path = Path(value).expanduser()
    return _files_in(path) if path.is_dir() else [path] if path.is_file() else []


def _files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())
