"""The state of stages on disk: what was started and what is done, and whether that is still what the config says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cli.pipeline.fingerprint import Fingerprint, FingerprintBuilder
from cli.pipeline.plan import ANSWERS, MODEL, RESULT, RUN, StagePlan
from files.atomic import write_text_atomic
from files.hashing import hash_file
from files.json_files import read_json_object, read_text
from files.lock import LOCK_FILE

STARTED, DONE, CONFIG = "stage.json", "done.json", "config.toml"
"""Files of a stage: its fingerprint from its start on; the same and the hashes of its outputs; the command's config."""

StageStatus = Literal["skip", "resume", "run", "stale"]
"""skip: done. resume: training was interrupted and goes on. run: not begun or interrupted. stale: of other inputs."""

_OTHER_CHECKPOINT_FILES = ("state.json", "README.md", "MANIFEST.json", CONFIG)
"""Files of a checkpoint with times or paths; two equal runs differ in them."""
_TIMES = ("seconds", "tokens_per_second")


@dataclass(frozen=True)
class StageState:
    """A stage and what its directory has."""

    plan: StagePlan
    fingerprint: Fingerprint
    status: StageStatus
    reason: str


def read_states(plans: Sequence[StagePlan]) -> list[StageState]:
    """Read the state of all stages, in the order of their execution.

    Raises:
        ValueError: a file of the config cannot be read, or a directory has other files.
    """
    builder = FingerprintBuilder()
    states = []
    for plan in plans:
        try:
            fingerprint = builder.add(plan)
            states.append(StageState(plan, fingerprint, *_find_status(plan, fingerprint)))
        except ValueError as error:
            raise ValueError(f'stage "{plan.name}": {error}') from error
    return states


def _find_status(plan: StagePlan, fingerprint: Fingerprint) -> tuple[StageStatus, str]:
    directory = plan.directory
    done = _read_record(directory / DONE)
    record = done or _read_record(directory / STARTED)
    if record is None:
        foreign = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
        if directory.exists() and (foreign or not directory.is_dir()):
            raise ValueError(
                f"{directory} exists and is no stage of a pipeline: rename the stage, or name another directory"
            )
        return "run", "not begun"
    try:
        old = Fingerprint.from_json(record["fingerprint"])
    except (ValueError, KeyError, TypeError):
        return "stale", "its record is of another version"
    if old.digest != fingerprint.digest:
        return "stale", f"changed: {'; '.join(old.list_changes(fingerprint))}"
    if done is not None:
        damage = _find_damage(plan, done.get("outputs"))
        return ("stale", damage) if damage else ("skip", "done")
    if plan.is_training and (directory / RUN / CONFIG).is_file():
        return "resume", "interrupted"
    return "run", "interrupted"


def _read_record(path: Path) -> dict[str, Any] | None:
    """Read a record; None: there is none, or it is damaged."""
    try:
        return read_json_object(path) if path.is_file() else None
    except ValueError:
        return None


def _find_damage(plan: StagePlan, outputs: Any) -> str:
    """What is wrong with the outputs of a stage that is done; "": nothing."""
    try:
        current = hash_outputs(plan)
    except ValueError as error:
        return str(error)
    names = [name for name in outputs or {} if current.get(name) != outputs[name]]
    return f"its output {names[0]} is missing or was changed" if names else ""


def write_started(state: StageState) -> None:
    """Record that a stage begins."""
    _write_record(state.plan.directory / STARTED, {"fingerprint": state.fingerprint.to_json()})


def write_done(state: StageState, seconds: float) -> None:
    """Record that a stage is done, with the hashes of its outputs.

    Raises:
        ValueError: an output is missing.
    """
    outputs = hash_outputs(state.plan)
    record = {"fingerprint": state.fingerprint.to_json(), "outputs": outputs, "seconds": round(seconds, 1)}
    _write_record(state.plan.directory / DONE, record)


def _write_record(path: Path, values: Mapping[str, Any]) -> None:
    write_text_atomic(path, json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def read_seconds(plan: StagePlan) -> float | None:
    """Duration of a stage that is done, of its last process; None: it is not done."""
    record = _read_record(plan.directory / DONE)
    return None if record is None else record.get("seconds")


def hash_outputs(plan: StagePlan) -> dict[str, str]:
    """Hash the files of a stage that equal inputs make equal, by their path in its directory.

    Raises:
        ValueError: an output is missing.
    """
    directory = plan.directory
    if plan.is_training:
        checkpoints = directory / RUN / "checkpoints"
        folders = [checkpoints / name for name in ("latest", "best") if (checkpoints / name).is_dir()]
        return _hash_folders(folders or [checkpoints / "latest"], directory)
    match plan.stage.kind:
        case "merge" | "export":
            return _hash_folders([directory / MODEL], directory)
        case "sample":
            return {ANSWERS: _hash_json([json.loads(line) for line in read_text(directory / ANSWERS).splitlines()])}
        case _:
            return {RESULT: _hash_json(read_json_object(directory / RESULT))}


def _hash_folders(folders: Collection[Path], directory: Path) -> dict[str, str]:
    hashes = {}
    for folder in folders:
        files = [path for path in sorted(folder.iterdir()) if path.is_file()] if folder.is_dir() else []
        if not files:
            raise ValueError(f"its output {folder.relative_to(directory)} is missing")
        for path in files:
            if path.name not in _OTHER_CHECKPOINT_FILES and path.name != LOCK_FILE:
                hashes[path.relative_to(directory).as_posix()] = hash_file(path)
    return hashes


def _hash_json(value: Any) -> str:
    """Hash a JSON value without the times in it."""
    return hashlib.sha256(json.dumps(_without_times(value), sort_keys=True).encode()).hexdigest()


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if key not in _TIMES}
    return [_without_times(item) for item in value] if isinstance(value, list) else value
