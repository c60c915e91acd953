"""The Optuna study of a sweep: its trials are the runs, which several processes and machines share.

A process claims a waiting trial, records its heartbeat and tells how it ended; Optuna fails the trials whose heartbeat
has stopped. A run that failed or was interrupted is continued as another trial with the same user attributes: ``run``
(name and values) and ``end``. The study is a database, also in a single file: heartbeats need one.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from cli.sweep.definition import STUDY_FILE, Sweep, format_values, name_run
from cli.sweep.results import STATUSES, Status, SweepRun
from config.dump import list_differences, to_toml
from config.load import ConfigError, validate_config
from config.train import TrainConfig
from files.lock import lock_directory
from files.toml_text import parse_toml
from files.usage_error import UsageError

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


class SweepStudy:
    """A study, opened by one process.

    Args:
        points: all points of the sweep by name (`Sweep.load_points`); of a grid they are the runs.

    Raises:
        UsageError: the study cannot be read or written, or is one of another config.
    """

    def __init__(self, sweep: Sweep, points: Mapping[str, Mapping[str, str]]) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", "Heartbeat of storage")  # this class records it
        self.sweep, self._points = sweep, points
        pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
        if sweep.prune:
            first_validation = min(sweep.load_config(values).validation.every_steps for values in points.values())
            pruner = optuna.pruners.SuccessiveHalvingPruner(first_validation, REDUCTION_FACTOR)
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
        first = {axis.key: axis.values[0] for axis in sweep.axes}
        if "values" not in study.user_attrs:
            study.set_user_attr("config", to_toml(sweep.load_config(first)))
            study.set_user_attr("values", first)
        values, text = study.user_attrs["values"], study.user_attrs["config"]
        differences = [f"keys: {', '.join(values)} -> {', '.join(first)}"] if [*values] != [*first] else []
        try:
            recorded = validate_config(TrainConfig, parse_toml(text), "the recorded config")
            differences += list_differences(recorded, sweep.load_config(values))
        except ConfigError as error:
            differences += str(error).splitlines()[-1:]
        if differences:
            listed = "\n  ".join(differences)
            raise UsageError(
                f"{sweep.directory} contains a sweep of another config; its run {format_values(values)} would change:"
                f"\n  {listed}\nchoose another --directory; a sweep can only be extended by values of its keys"
            )

    def _lock(self) -> contextlib.AbstractContextManager[int]:
        """Lock the directory: in a database that is a file, two processes could claim one trial."""
        return lock_directory(self.sweep.directory, LOCK_SECONDS)

    def runs(self, *, only_own: bool = False) -> list[SweepRun]:
        """Return the runs in the order of their first trials; ``only_own``: those that this command makes."""
        trials = self._trials().values()
        return [SweepRun.from_trial(trial) for trial in trials if not only_own or self._is_own(trial)]

    def is_running(self) -> bool:
        """Return whether another process makes runs of this command now."""
        return any(trial.state == TrialState.RUNNING and self._is_own(trial) for trial in self._trials().values())

    def _trials(self) -> dict[str, FrozenTrial]:
        """Return the trial of each run by name: its first that did not fail, or else its last."""
        trials: dict[str, FrozenTrial] = {}
        for trial in self.study.get_trials(deepcopy=False):
            name = trial.user_attrs.get("run", {}).get("name")
            if name is not None and (name not in trials or trials[name].state == TrialState.FAIL):
                trials[name] = trial
        return trials

    def _is_own(self, trial: FrozenTrial) -> bool:
        """Return whether this command makes the run of a trial: of a grid its points, otherwise all."""
        return self.sweep.sampler != "grid" or trial.user_attrs["run"]["name"] in self._points

    def add(self) -> None:
        """Queue the points of a grid that are new, and the runs that failed or were interrupted."""
        with self._lock():
            optuna.storages.fail_stale_trials(self.study)
            trials = self._trials()
            for trial in trials.values():
                if trial.state == TrialState.FAIL and self._is_own(trial):
                    self._retry(trial)
            for name, values in self._points.items() if self.sweep.sampler == "grid" else ():
                if name not in trials:
                    self.study.enqueue_trial({}, user_attrs={"run": {"name": name, "values": values}})

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

    def claim(self, log: Callable[[str], None]) -> Trial | None:
        """Take the next waiting run, which no other process takes, or draw a new one. None: no run is missing."""
        with self._lock():
            optuna.storages.fail_stale_trials(self.study)
            for trial in self._trials().values():
                if trial.state == TrialState.FAIL and "status" not in trial.user_attrs.get("end", {}):
                    self._retry(trial)  # its process is dead
            for trial in self._trials().values():  # of two machines that queued a run at once, the first trial counts
                if trial.state == TrialState.WAITING and self._is_own(trial) and self._take(trial):
                    return Trial(self.study, trial._trial_id)
            return None if self.sweep.num_trials is None else self._draw(self.sweep.num_trials, log)

    def _take(self, trial: FrozenTrial) -> bool:
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            self.beat(trial)  # before the state changes: a trial that is running and has no heartbeat never fails
            return self._storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
        return False

    def _draw(self, num_trials: int, log: Callable[[str], None]) -> Trial | None:
        """Draw the values of a new run; None: there are ``num_trials`` runs, or no other values."""
        axes, drawn = self.sweep.axes, [trial.user_attrs["run"]["values"] for trial in self._trials().values()]
        num_random = min(MAX_RANDOM_RUNS, max(4, num_trials // 4)) if self.sweep.sampler == "tpe" else num_trials
        for _ in range(MAX_DRAWS if len(drawn) < num_trials else 0):
            # Seeded by the trial, so that a sweep is reproducible and concurrent processes draw different values.
            seed = len(self.study.get_trials(deepcopy=False))
            self.study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=num_random)
            try:
                trial = self.study.ask({axis.key: axis.distribution for axis in axes})
            except ValueError as error:  # other choices than in the study
                raise UsageError(f"--sampler {self.sweep.sampler}: {error}; choose another --directory") from None
            self.beat(trial)
            values = {axis.key: axis.format(trial.params[axis.key]) for axis in axes}
            try:
                self.sweep.load_config(values)
            except ConfigError as error:
                log(f"{format_values(values)} is invalid, and not run: {str(error).splitlines()[-1].strip()}")
            else:
                if values not in drawn:
                    trial.set_user_attr("run", {"name": name_run(values), "values": values})
                    return trial
            self.study.tell(trial, state=TrialState.FAIL)
        return None

    def beat(self, trial: Trial | FrozenTrial) -> None:
        """Record the heartbeat of a run.

        Raises:
            UpdateFinishedTrialError: it is another process that makes it now.
        """
        self._storage.record_heartbeat(trial._trial_id)
        self._storage.check_trial_is_updatable(trial._trial_id, self._storage.get_trial(trial._trial_id).state)

    def finish(self, trial: Trial, status: Status, seconds: float, error: Sequence[str], value: float | None) -> None:
        """Record the end of a run.

        Args:
            seconds: of all processes of the run.
            error: last lines of its log, if it failed.
            value: the objective of a run that is done; None: it has none, or it is not finite.
        """
        trial.set_user_attr("end", {"status": status, "seconds": seconds, "error": list(error)})
        state = next((state for state, name in STATUSES.items() if name == status), TrialState.FAIL)
        values = (math.inf if value is None else value) if status == "done" else None
        self.study.tell(trial, values, state, skip_if_finished=True)


@contextlib.contextmanager
def open_study(sweep: Sweep, points: Mapping[str, Mapping[str, str]]) -> Iterator[SweepStudy]:
    """Open the study, or create it.

    Raises:
        UsageError: it cannot be read or written; names the URL of its database without the password.
    """
    try:
        url = str(make_url(_format_url(sweep)))
    except ArgumentError:
        raise UsageError(f"--storage {sweep.storage}: expected a URL, such as postgresql://user@host/name") from None
    try:
        yield SweepStudy(sweep, points)
    except ImportError as error:
        problem = str(error).splitlines()[0]
        raise UsageError(f"--storage {url}: {problem}; install the driver of the database") from None
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        raise UsageError(f"--storage {url}: {str(error).splitlines()[0]}") from None


def _format_url(sweep: Sweep) -> str:
    """Return the URL of the database; every character of the directory may be one that URLs quote."""
    path = str(sweep.directory / STUDY_FILE)
    return sweep.storage or URL.create("sqlite", database=path).render_as_string()
