"""The Optuna study of a sweep: its trials are the runs, which several processes and machines share.

A process claims a waiting trial, records its heartbeat and tells how it ended; Optuna fails the trials whose heartbeat
has stopped. A run that failed or was interrupted is continued as another trial with the same user attributes: ``run``
(name and values), ``jobs`` and ``end``. The study is a database, also in a single file: heartbeats need one.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import optuna
from optuna.distributions import IntDistribution
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from cli.sweep.definition import (
    STUDY_FILE,
    Setting,
    Sweep,
    SweepError,
    format_number,
    format_values,
    is_logarithmic,
    name_run,
    parse_numbers,
)
from config.dump import list_differences
from config.load import ConfigError, validate_config
from files.lock import DirectoryInUseError, lock_directory
from files.toml_text import parse_toml

Status = Literal["waiting", "running", "done", "pruned", "failed", "interrupted"]

HEARTBEAT_SECONDS = 10
GRACE_SECONDS = 60
"""A run without a heartbeat for this long has lost its process, and is continued by another one."""
LOCK_SECONDS = 60.0
"""Longest wait for another process that adds or claims a run."""
REDUCTION_FACTOR = 3
"""Of successive halving: a third of the runs passes each rung."""
MAX_DRAWS = 50
"""Draws of values until a run is new and valid."""
MAX_RANDOM_RUNS = 10
"""Most runs of ``tpe`` with random values, before it prefers values like those of good runs."""
MIN_RUNS_FOR_IMPORTANCES = 6
_STATUSES: dict[TrialState, Status] = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "done",
    TrialState.PRUNED: "pruned",
}


@dataclass(frozen=True)
class SweepRun:
    """A run and its status."""

    name: str
    values: Mapping[str, str]
    """Its value of each axis, as written."""
    status: Status
    seconds: float = 0.0
    """Wall-clock time of all processes of the run."""
    error: Sequence[str] = ()
    """The last lines of the log of a failed run."""
    jobs: int = 1
    """Concurrent runs of its sweep process, itself included."""
    value: float | None = None
    """The objective, of a training run that is done or pruned."""
    number: int = 0
    """Its place in the order of starts."""

    @classmethod
    def from_trial(cls, trial: FrozenTrial) -> SweepRun:
        run, end = trial.user_attrs["run"], trial.user_attrs.get("end", {})
        return cls(
            name=run["name"],
            values=run["values"],
            status=_STATUSES.get(trial.state) or end.get("status") or "interrupted",
            seconds=end.get("seconds", 0.0),
            error=end.get("error", ()),
            jobs=trial.user_attrs.get("jobs", 1),
            value=trial.value if trial.value is not None and math.isfinite(trial.value) else None,
            number=trial.number,
        )


class SweepStudy:
    """A study, opened by one process.

    Args:
        sweep: its definition.
        min_resource: first step at which runs are compared, if they are pruned.

    Raises:
        SweepError: the study cannot be read or written, or is one of another command, config or measurement.
    """

    def __init__(self, sweep: Sweep, min_resource: int = 1) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self.sweep = sweep
        self._format_config = cache(lambda values: sweep.format_config(dict(values)))
        pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
        if sweep.prune:
            pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource, REDUCTION_FACTOR)
        with self._lock():
            self._storage = optuna.storages.RDBStorage(
                _format_url(sweep).replace("{", "{{").replace("}", "}}"),  # Optuna replaces names in braces
                heartbeat_interval=HEARTBEAT_SECONDS,
                grace_period=GRACE_SECONDS,
            )
            # Sweeps that share a database are told apart by the names of their directories.
            name = sweep.directory.resolve().name if sweep.storage else "sweep"
            self.study = optuna.create_study(storage=self._storage, study_name=name, pruner=pruner, load_if_exists=True)
            self._check_definition()

    def _check_definition(self) -> None:
        """Record the definition of a new study, and compare it with that of an existing one."""
        sweep, study = self.sweep, self.study
        expected = {"command": sweep.command_name, "objective": sweep.objective}
        for key, value in expected.items():
            recorded = study.user_attrs.get(key, value)
            if recorded != value:
                raise SweepError(
                    f"{sweep.directory} contains a sweep whose {key} is {recorded}, not {value}: choose another "
                    "--directory"
                )
            study.set_user_attr(key, value)
        values = study.user_attrs.get("values")
        if values is None and study.trials:
            raise SweepError(
                f"{sweep.directory} contains a sweep that an older version made (its page is sweep.html): choose "
                "another --directory"
            )
        if values is None:
            values = {axis.key: axis.values[0] for axis in sweep.axes}
            study.set_user_attr("config", sweep.format_config(values))
            study.set_user_attr("values", values)
        tree = parse_toml(study.user_attrs["config"])
        try:
            recorded = validate_config(sweep.command.config, tree, "the recorded config")
            differences = list_differences(recorded, sweep.load_config(values))
        except ConfigError as error:
            differences = str(error).splitlines()[-1:]
        if differences:
            listed = "\n  ".join(differences)
            raise SweepError(
                f"{sweep.directory} contains a sweep of another config; its run {format_values(values)} would change:"
                f"\n  {listed}\nchoose another --directory; a sweep can only be extended by values of --set"
            )

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Lock the directory: in a database that is a file, two processes could claim one trial."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(lock_directory(self.sweep.directory, LOCK_SECONDS))
            except DirectoryInUseError as error:
                raise SweepError(f"{self.sweep.directory} is in use by another process; wait or stop it") from error
            yield

    def runs(self) -> list[SweepRun]:
        """Return the runs in the order of their first trials."""
        return [SweepRun.from_trial(trial) for trial in self._trials().values()]

    def wanted_runs(self, points: Mapping[str, Mapping[str, str]]) -> list[SweepRun]:
        """Return the runs that this command makes: of a grid its points, otherwise all."""
        is_grid = self.sweep.sampler == "grid"
        trials = [trial for trial in self._trials().values() if not is_grid or self._is_wanted(trial, points)]
        return [SweepRun.from_trial(trial) for trial in trials]

    def _trials(self) -> dict[str, FrozenTrial]:
        """Return the trial of each run by name: its first that did not fail, or else its last."""
        trials: dict[str, FrozenTrial] = {}
        for trial in self.study.get_trials(deepcopy=False):
            name = trial.user_attrs.get("run", {}).get("name")
            if name is not None and (name not in trials or trials[name].state == TrialState.FAIL):
                trials[name] = trial
        return trials

    def add(self, points: Mapping[str, Mapping[str, str]]) -> None:
        """Queue the points of a grid that are new, and the runs that failed or were interrupted.

        Args:
            points: all points of the sweep, by their config (`Sweep.load_points`).
        """
        with self._lock():
            self._fail_stale_trials()
            trials = self._trials().values()
            for trial in trials:
                if trial.state == TrialState.FAIL and self._is_wanted(trial, points):
                    self._retry(trial)
            existing = {self._identify(trial) for trial in trials}
            for text, values in points.items() if self.sweep.sampler == "grid" else ():
                if text not in existing:
                    self.study.enqueue_trial({}, user_attrs={"run": {"name": name_run(values), "values": dict(values)}})

    def claim(self, points: Mapping[str, Mapping[str, str]], log: Callable[[str], None]) -> Trial | None:
        """Take the next waiting run, which no other process takes, or draw the values of a new one.

        Returns:
            None: no run waits, and none is missing.
        """
        with self._lock():
            self._fail_stale_trials()
            claimed = None
            for trial in self._trials().values():  # of two machines that queued a run at once, the first trial counts
                if claimed is None and trial.state == TrialState.WAITING and self._is_wanted(trial, points):
                    claimed = self._take(trial)
            if claimed is None and self.sweep.num_trials is not None:
                claimed = self._draw(self.sweep.num_trials, log)
            if claimed is not None:
                self._storage.record_heartbeat(claimed._trial_id)
                claimed.set_user_attr("jobs", self.sweep.jobs)
            return claimed

    def beat(self, trial: Trial) -> None:
        """Record the heartbeat of a run.

        Raises:
            UpdateFinishedTrialError: it is another process that makes it now.
        """
        self._storage.record_heartbeat(trial._trial_id)
        self._storage.check_trial_is_updatable(trial._trial_id, self._storage.get_trial(trial._trial_id).state)

    def num_running(self) -> int:
        """Return how many runs are made now, by any process."""
        return len(self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]))

    def finish(self, trial: Trial, status: Status, seconds: float, error: Sequence[str], value: float | None) -> None:
        """Record the end of a run.

        Args:
            trial: of the run.
            status: of the run.
            seconds: of all processes of the run.
            error: last lines of its log, if it failed.
            value: the objective of a run that is done; None: it has none, or it is not finite.
        """
        trial.set_user_attr("end", {"status": status, "seconds": seconds, "error": list(error)})
        state = next((state for state, name in _STATUSES.items() if name == status), TrialState.FAIL)
        values = (math.inf if value is None else value) if status == "done" else None
        self.study.tell(trial, values, state, skip_if_finished=True)

    def _fail_stale_trials(self) -> None:
        """Fail the runs whose process is dead, and queue them again."""
        optuna.storages.fail_stale_trials(self.study)
        for trial in self._trials().values():
            if trial.state == TrialState.FAIL and "status" not in trial.user_attrs.get("end", {}):
                self._retry(trial)

    def _retry(self, trial: FrozenTrial) -> None:
        """Queue a run again, with its values and the seconds that it has taken."""
        end = {"seconds": trial.user_attrs.get("end", {}).get("seconds", 0.0)}
        retried = optuna.create_trial(
            state=TrialState.WAITING,
            params=trial.params,
            distributions=trial.distributions,
            user_attrs={"run": trial.user_attrs["run"], "end": end},
        )
        self.study.add_trial(retried)

    def _identify(self, trial: FrozenTrial) -> str | None:
        """Return the config of a run as in `Sweep.load_points`; None: it is not valid with this command line."""
        try:
            return self._format_config(tuple(trial.user_attrs["run"]["values"].items()))
        except ConfigError:
            return None

    def _is_wanted(self, trial: FrozenTrial, points: Mapping[str, Mapping[str, str]]) -> bool:
        """Return whether this command makes the run of a trial: of a grid its points, otherwise all that were drawn."""
        return self._identify(trial) in points if self.sweep.sampler == "grid" else bool(trial.params)

    def _take(self, trial: FrozenTrial) -> Trial | None:
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            if self._storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING):
                return Trial(self.study, trial._trial_id)
        return None

    def _draw(self, num_trials: int, log: Callable[[str], None]) -> Trial | None:
        """Draw the values of a new run; None: there are ``num_trials`` runs, or no other values."""
        runs = self._trials().values()
        for _ in range(MAX_DRAWS if len(runs) < num_trials else 0):
            trial = Trial(self.study, self.study._storage.create_new_trial(self.study._study_id))
            # Seeded by the trial, so that a sweep is reproducible and concurrent processes draw different values.
            self.study.sampler = optuna.samplers.RandomSampler(seed=trial.number)
            if self.sweep.sampler == "tpe":
                num_random = min(MAX_RANDOM_RUNS, max(4, num_trials // 4))
                self.study.sampler = optuna.samplers.TPESampler(seed=trial.number, n_startup_trials=num_random)
            try:
                values = {axis.key: _suggest(trial, axis) for axis in self.sweep.axes}
                self.sweep.load_config(values)
            except ConfigError as error:
                log(f"{format_values(values)} is invalid, and not run: {str(error).splitlines()[-1].strip()}")
                self.study.tell(trial, state=TrialState.FAIL)
                continue
            except ValueError as error:  # other choices than in the study
                self.study.tell(trial, state=TrialState.FAIL)
                raise SweepError(f"--sampler {self.sweep.sampler}: {error}; choose another --directory") from None
            equal = next((other for other in runs if other.user_attrs["run"]["values"] == values), None)
            if equal is None:
                trial.set_user_attr("run", {"name": name_run(values), "values": values})
                return trial
            is_done = equal.state == TrialState.COMPLETE
            self.study.tell(trial, equal.value if is_done else None, None if is_done else TrialState.FAIL)
        return None


@contextlib.contextmanager
def open_study(sweep: Sweep, min_resource: int = 1) -> Iterator[SweepStudy]:
    """Open the study, or create it.

    Raises:
        SweepError: it cannot be read or written; names the URL of its database without the password.
    """
    try:
        url = str(make_url(_format_url(sweep)))
    except ArgumentError:
        raise SweepError(f"--storage {sweep.storage}: expected a URL, such as postgresql://user@host/name") from None
    try:
        yield SweepStudy(sweep, min_resource)
    except ImportError as error:
        problem = str(error).splitlines()[0]
        raise SweepError(f"--storage {url}: {problem}; install the driver of the database") from None
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        raise SweepError(f"--storage {url}: {str(error).splitlines()[0]}") from None


def _format_url(sweep: Sweep) -> str:
    """Return the URL of the database; every character of the directory may be one that URLs quote."""
    path = str(sweep.directory / STUDY_FILE)
    return sweep.storage or URL.create("sqlite", database=path).render_as_string()


def _suggest(trial: Trial, axis: Setting) -> str:
    """Draw a value of an axis, as text."""
    numbers = axis.range
    if numbers is None:
        return trial.suggest_categorical(axis.key, axis.values)
    if isinstance(numbers, IntDistribution):
        value: float = trial.suggest_int(axis.key, numbers.low, numbers.high, step=numbers.step, log=numbers.log)
    else:
        value = trial.suggest_float(axis.key, numbers.low, numbers.high, step=numbers.step, log=numbers.log)
    return format_number(numbers, value)


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
