"""The Optuna study of a sweep: its trials are the runs, which several processes share.

A trial has the user attributes ``run`` (name, values, digest of the config), ``process`` (who makes it) and ``end``. A
trial of a run that failed or was interrupted is a failed trial; when the run is continued, it gets another one.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import socket
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from cli.sweep.grid import (
    GridError,
    GridPoint,
    Setting,
    format_number,
    format_values,
    is_logarithmic,
    name_run,
    parse_numbers,
)
from cli.sweep.plan import STUDY_FILE, Status, SweepPlan, SweepRun, objective
from config.base import Section
from config.dump import list_differences
from config.load import ConfigError, load_config
from files.lock import DirectoryInUseError, is_locked, lock_directory

LOCK_SECONDS = 60.0
"""Longest wait for another process that adds or takes a run."""
REDUCTION_FACTOR = 3
"""Of successive halving: a third of the runs passes each rung."""
MAX_DRAWS = 50
"""Draws of values until a run is new and valid."""
MAX_RANDOM_RUNS = 10
"""Most runs of ``tpe`` with random values, before it prefers values like those of good runs."""
MIN_RUNS_FOR_IMPORTANCES = 6
_CANDIDATE = "candidate "
"""Prefix of user attributes that name the processes that tried to take a trial."""
_STATUSES: dict[TrialState, Status] = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "done",
    TrialState.PRUNED: "pruned",
}


@dataclass(frozen=True)
class ClaimedRun:
    """A run that this process makes."""

    run: SweepRun
    config: Section
    """With the paths of its files."""
    trial: Trial
    study: optuna.Study

    def report(self, step: int, bound: float) -> bool:
        """Record a validation. Returns whether the run is so much worse than the others that it should stop."""
        self.trial.report(bound, step)
        return self.trial.should_prune()

    def finish(self, status: Status, seconds: float, error: Sequence[str], value: float | None) -> None:
        """Record the end of a process.

        Args:
            status: of the run.
            seconds: of all processes of the run.
            error: last lines of its log, if it failed.
            value: the objective of a run that is done; None: it has none, or it is not finite.
        """
        self.trial.set_user_attr("end", {"status": status, "seconds": seconds, "error": list(error)})
        state = next((state for state, name in _STATUSES.items() if name == status), TrialState.FAIL)
        values = (math.inf if value is None else value) if status == "done" else None
        self.study.tell(self.trial, values, state, skip_if_finished=True)


@dataclass(frozen=True)
class SweepStudy:
    """A study, opened by one process (`open_study`)."""

    plan: SweepPlan
    storage: optuna.storages.BaseStorage
    study: optuna.Study
    owner: str
    """Name of this process among those of the sweep."""
    lock: int
    """File descriptor of the lock of this process, which its runs inherit: it is dead when they have ended as well."""
    digests: dict[str, str] = field(default_factory=dict)
    """Recorded digest -> present one, of runs whose config is the same although its digest is not."""

    def runs(self) -> list[SweepRun]:
        """Return the runs in the order of their first trials."""
        runs = map(_read_run, self._trials().values())
        return [replace(run, digest=self.digests.get(run.digest, run.digest)) for run in runs]

    def add(self, points: Sequence[GridPoint]) -> set[str]:
        """Queue the points that are new, and the runs that failed, were interrupted or left by a dead process.

        Returns:
            Digests of the runs that this command makes.

        Raises:
            GridError: a run has another config than the command line, or a process of a dead sweep still uses it.
        """
        with _lock(self.plan.directory):
            trials = self._trials()
            for trial in trials.values():
                self._check_config(_read_run(trial))
            points = points if self.plan.sampler == "grid" else []
            drawn = {
                str(self._digest(trial)) for trial in trials.values() if trial.params and self.plan.sampler != "grid"
            }
            wanted = {point.digest for point in points} | drawn
            ended = [trial for trial in trials.values() if trial.state == TrialState.FAIL or self._is_dead(trial)]
            queue = [_copy_trial(trial) for trial in ended if self._digest(trial) in wanted]
            for point in points:
                if point.digest not in map(self._digest, trials.values()):
                    name = name_run(point.values, [*trials, *(trial.user_attrs["run"]["name"] for trial in queue)])
                    run = {"name": name, "values": dict(point.values), "digest": point.digest}
                    queue.append(optuna.create_trial(state=TrialState.WAITING, user_attrs={"run": run}))
            for trial in queue:
                path = self.plan.run_path(trial.user_attrs["run"]["name"])
                if is_locked(path):
                    raise GridError(f"{path} is in use by a process of an earlier sweep; wait for it or stop it")
            for trial in ended:
                if trial.state == TrialState.RUNNING:
                    self.storage.set_trial_user_attr(trial._trial_id, "end", {"status": "interrupted"})
                    self.study.tell(trial.number, state=TrialState.FAIL)
            self.study.add_trials(queue)
        return wanted

    def claim(self, wanted: Collection[str], log: Callable[[str], None]) -> ClaimedRun | None:
        """Take the next waiting run of these digests, which no other process takes, or draw the values of a new one.

        Returns:
            None: nothing is left to do.
        """
        with _lock(self.plan.directory):
            seen: set[str | None] = {None}
            for trial in self.study.get_trials(deepcopy=False):
                digest = self._digest(trial)
                if trial.state == TrialState.FAIL or digest in seen:
                    continue  # of two machines that queued a run at the same time, the first trial counts
                seen.add(digest)
                if trial.state == TrialState.WAITING and digest in wanted and self._take(trial):
                    taken = Trial(self.study, trial._trial_id)
                    taken.set_user_attr("process", self._process)
                    return self._prepare(taken)
            return None if self.plan.num_trials is None else self._draw(self.plan.num_trials, log)

    def _trials(self) -> dict[str, FrozenTrial]:
        """Return the trial of each run by name: its first that did not fail, or else its last."""
        trials: dict[str, FrozenTrial] = {}
        for trial in self.study.get_trials(deepcopy=False):
            name = trial.user_attrs.get("run", {}).get("name")
            if name is not None and (name not in trials or trials[name].state == TrialState.FAIL):
                trials[name] = trial
        return trials

    def _is_dead(self, trial: FrozenTrial) -> bool:
        """Return whether no process of a running trial is left; one whose files are on another machine is not dead."""
        locks = [self.plan.processes_path / owner for owner in _owners(trial)]
        is_left = any(not lock.is_dir() or is_locked(lock) for lock in locks)
        return trial.state == TrialState.RUNNING and bool(locks) and not is_left

    def _digest(self, trial: FrozenTrial) -> str | None:
        recorded: str | None = trial.user_attrs.get("run", {}).get("digest")
        return recorded if recorded is None else self.digests.get(recorded, recorded)

    def _check_config(self, run: SweepRun) -> None:
        path = self.plan.config_path(run.name)
        try:
            point = self.plan.load_point(run.values, self.plan.run_path(run.name))
            if point.digest == run.digest and not path.is_file():
                return
            command = self.plan.sweep_command
            recorded = load_config(command.config, path)
            differences = list_differences(recorded, point.config)
            lines = [line for line in differences if not line.startswith(command.managed_keys)]
        except ConfigError as error:
            lines = str(error).splitlines()[-1:]
        if not lines:  # the digest may be one that another version computed
            self.digests[run.digest] = point.digest
            return
        listed = "\n  ".join(lines)
        raise GridError(
            f"{self.plan.directory} contains a sweep of another config; its run {format_values(run.values)} would "
            f"change:\n  {listed}\nchoose another --directory; a sweep can only be extended by values of --set"
        )

    @property
    def _process(self) -> dict[str, Any]:
        return {"owner": self.owner, "jobs": self.plan.jobs}

    def _take(self, trial: FrozenTrial) -> bool:
        # Recorded while the trial waits, so that a running trial always names a process. Each has an attribute of its
        # own: of two machines that take the trial at the same time, the one that fails must not overwrite the other.
        try:
            self.storage.set_trial_user_attr(trial._trial_id, f"{_CANDIDATE}{self.owner}", self.plan.jobs)
            return self.storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
        except optuna.exceptions.UpdateFinishedTrialError:
            return False

    def _prepare(self, trial: Trial) -> ClaimedRun:
        run = _read_run(self.storage.get_trial(trial._trial_id))
        return ClaimedRun(run, self.plan.load_point(run.values, self.plan.run_path(run.name)).config, trial, self.study)

    def _draw(self, num_trials: int, log: Callable[[str], None]) -> ClaimedRun | None:
        """Draw the values of a new run; None: there are ``num_trials`` runs, or no other values."""
        study_id = self.storage.get_study_id_from_name(self.study.study_name)
        trials = self._trials()
        for _ in range(MAX_DRAWS if len(trials) < num_trials else 0):
            trial = Trial(self.study, self.storage.create_new_trial(study_id))
            # Seeded by the trial, so that a sweep is reproducible and concurrent processes draw different values.
            self.study.sampler = optuna.samplers.RandomSampler(seed=trial.number)
            if self.plan.sampler == "tpe":
                num_random = min(MAX_RANDOM_RUNS, max(4, num_trials // 4))
                self.study.sampler = optuna.samplers.TPESampler(seed=trial.number, n_startup_trials=num_random)
            try:
                values = {axis.key: _suggest(trial, axis) for axis in self.plan.axes}
                point = self.plan.load_point(values)
            except ConfigError as error:
                log(f"{format_values(values)} is invalid, and not run: {str(error).splitlines()[-1].strip()}")
                self.study.tell(trial, state=TrialState.FAIL)
                continue
            except ValueError as error:  # other choices than in the study
                self.study.tell(trial, state=TrialState.FAIL)
                raise GridError(f"--sampler {self.plan.sampler}: {error}; choose another --directory") from None
            equal = next((other for other in trials.values() if self._digest(other) == point.digest), None)
            if equal is None:
                run = {"name": name_run(values, trials), "values": values, "digest": point.digest}
                trial.set_user_attr("process", self._process)
                trial.set_user_attr("run", run)
                return self._prepare(trial)
            is_done = equal.state == TrialState.COMPLETE
            self.study.tell(trial, equal.value if is_done else None, None if is_done else TrialState.FAIL)
        return None


@contextlib.contextmanager
def open_study(plan: SweepPlan, min_resource: int = 1) -> Iterator[SweepStudy]:
    """Open the study, or create it, and hold the lock of this process in the directory.

    Args:
        plan: of the sweep.
        min_resource: first step at which runs are compared, if they are pruned.

    Raises:
        GridError: the study cannot be read or written; names its URL.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if plan.prune:
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource, REDUCTION_FACTOR)
    owner = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    with _storage_errors(plan), lock_directory(plan.processes_path / owner) as lock:
        try:
            storage, study = _load_or_create(plan, pruner)
        except BaseException:
            shutil.rmtree(plan.processes_path / owner)  # this process has claimed no run
            raise
        yield SweepStudy(plan, storage, study, owner, lock)
    shutil.rmtree(plan.processes_path / owner)


def read_runs(plan: SweepPlan) -> list[SweepRun]:
    """Read the runs of a sweep without writing files or locks.

    Raises:
        GridError: the study cannot be read; names its URL.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if not plan.storage and not (plan.directory / STUDY_FILE).exists():
        return []
    with _storage_errors(plan):
        storage = optuna.storages.RDBStorage(_storage_template(plan), skip_table_creation=True)
        names = [study.study_name for study in storage.get_all_studies()]
        if plan.study_name not in names:
            return []
        study = optuna.load_study(study_name=plan.study_name, storage=storage)
        return SweepStudy(plan, storage, study, owner="", lock=-1).runs()


@contextlib.contextmanager
def _storage_errors(plan: SweepPlan) -> Iterator[None]:
    """Raise a GridError with the URL of the database if it is no URL, has no driver, or cannot be used."""
    try:
        url = str(make_url(_storage_url(plan)))  # without the password
    except ArgumentError:
        raise GridError(f"--storage {plan.storage}: expected a URL, such as postgresql://user@host/name") from None
    try:
        yield
    except ImportError as error:
        problem = str(error).splitlines()[0]
        raise GridError(f"--storage {url}: {problem}; install the driver of the database") from None
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        raise GridError(f"--storage {url}: {str(error).splitlines()[0]}") from None


def _load_or_create(
    plan: SweepPlan, pruner: optuna.pruners.BasePruner
) -> tuple[optuna.storages.BaseStorage, optuna.Study]:
    """Open the storage and the study in it.

    Raises:
        GridError: the study is one of another command or measurement.
    """
    with _lock(plan.directory):
        storage = optuna.storages.get_storage(_storage_template(plan))
        study = optuna.create_study(storage=storage, study_name=plan.study_name, pruner=pruner, load_if_exists=True)
        name = plan.sweep_command.name
        command = study.user_attrs.get("command", name)
        study.set_user_attr("command", command)
        measurement = objective([axis.key for axis in plan.axes])
        recorded = study.user_attrs.get("objective", measurement)
        study.set_user_attr("objective", recorded)
    if measurement != recorded:
        raise GridError(
            f"{plan.directory} contains a sweep that is ranked by {recorded}; the keys of --set require "
            f"{measurement}: choose another --directory"
        )
    if command != name:
        raise GridError(f"{plan.directory} contains a sweep of --command {command}, not {name}")
    return storage, study


def _storage_url(plan: SweepPlan) -> str:
    """Return the URL of the database; every character of the directory may be one that URLs quote."""
    path = str(plan.directory / STUDY_FILE)
    return plan.storage or URL.create("sqlite", database=path).render_as_string()


def _storage_template(plan: SweepPlan) -> str:
    """Return the URL as Optuna expects it, which replaces names in braces."""
    return _storage_url(plan).replace("{", "{{").replace("}", "}}")


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Lock the directory of a sweep, for a moment."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_directory(directory, LOCK_SECONDS))
        except DirectoryInUseError as error:
            raise GridError(f"{directory} is in use by another process; wait for it or stop it") from error
        yield


def importances(runs: Sequence[SweepRun]) -> dict[str, float]:
    """Estimate how much each key decides whether a run is among the best (PED-ANOVA; Watanabe et al. 2023).

    Returns:
        Shares by key, which sum to 1; empty: too few runs are done.
    """
    done = [run for run in runs if run.status == "done" and run.value is not None]
    keys = [key for key in (done[0].values if done else {}) if all(key in run.values for run in done)]
    if len(done) < MIN_RUNS_FOR_IMPORTANCES:
        return {}
    study = optuna.create_study()
    columns: dict[str, Sequence[Any]] = {}
    space: dict[str, optuna.distributions.BaseDistribution] = {}
    for key in keys:
        texts = [run.values[key] for run in done]
        numbers = parse_numbers(texts)
        if numbers is None:
            space[key], columns[key] = optuna.distributions.CategoricalDistribution(sorted({*texts})), texts
        else:
            low, high = min(numbers), max(numbers)
            space[key] = optuna.distributions.FloatDistribution(low, high, log=is_logarithmic(numbers))
            columns[key] = numbers
    for index, run in enumerate(done):
        params = {key: columns[key][index] for key in keys}
        study.add_trial(optuna.create_trial(params=params, distributions=space, value=run.value))
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    return optuna.importance.get_param_importances(study, evaluator=evaluator)


def _read_run(trial: FrozenTrial) -> SweepRun:
    run, end = trial.user_attrs["run"], trial.user_attrs.get("end", {})
    return SweepRun(
        name=run["name"],
        values=run["values"],
        status=_STATUSES.get(trial.state) or end.get("status", "failed"),
        digest=run["digest"],
        seconds=end.get("seconds", 0.0),
        error=end.get("error", ()),
        jobs=trial.user_attrs.get("process", {}).get("jobs", 1),
        value=trial.value if trial.value is not None and math.isfinite(trial.value) else None,
        number=trial.number,
    )


def _owners(trial: FrozenTrial) -> list[str]:
    """Return the process of a running trial, or while it does not say so, all that tried to take it."""
    if "process" in trial.user_attrs:
        return [trial.user_attrs["process"]["owner"]]
    return [key.removeprefix(_CANDIDATE) for key in trial.user_attrs if key.startswith(_CANDIDATE)]


def _copy_trial(trial: FrozenTrial) -> FrozenTrial:
    """Build a waiting trial that continues the run of another one."""
    seconds = trial.user_attrs.get("end", {}).get("seconds", 0.0)
    attributes = {"run": trial.user_attrs["run"], "end": {"seconds": seconds}}
    return optuna.create_trial(
        state=TrialState.WAITING, params=trial.params, distributions=trial.distributions, user_attrs=attributes
    )


def _suggest(trial: Trial, axis: Setting) -> str:
    """Draw a value of an axis, as text."""
    numbers = axis.range
    if numbers is None:
        return trial.suggest_categorical(axis.key, axis.values)
    if numbers.is_integer:
        low, high, step = int(numbers.low), int(numbers.high), int(numbers.step or 1)
        return str(trial.suggest_int(axis.key, low, high, step=step, log=numbers.is_log))
    number = trial.suggest_float(axis.key, numbers.low, numbers.high, step=numbers.step, log=numbers.is_log)
    return format_number(numbers, number)
