"""A small program in place of the runs of a sweep, and what tests ask of the sweep."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import optuna

from cli.sweep import main, processes
from cli.sweep.commands import SWEEP_COMMANDS
from cli.sweep.grid import PointLoader, read_settings
from cli.sweep.plan import Sampler, SweepPlan

RUN = """
import json, math, os, pathlib, signal, sys, time, tomllib
config = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())
directory = pathlib.Path(config["run"]["directory"])
directory.mkdir(parents=True, exist_ok=True)
(directory / "pid").write_text(str(os.getpid()))
rate = config["optimizer"]["learning_rate"]
print("rate", rate, *sys.argv[2:], "on", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if rate == 3.0 and not os.environ.get("MENDED"):
    sys.exit("learning_rate is too high\\n\\n")
def log(step, **metrics):
    with open(directory / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "metrics": metrics}) + "\\n")
log(1, loss=9.0, val_nats_per_token=rate, val_standard_error=0.1)
if rate in (5.0, 6.0) and not (directory / "checkpoints").exists():
    def stop(number, frame):
        (directory / "checkpoints").mkdir()
        sys.exit(128 + number)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    print("ready", flush=True)
    while not (directory / "go").exists():
        time.sleep(0.01)
if rate != 7.0:
    bound = rate if rate >= 1.0 else 1.0 + math.log10(rate / 0.01) ** 2
    evaluation = {"nats_per_token": bound, "standard_error": 0.1, "bits_per_byte": rate / 2}
    (directory / "summary.json").write_text(json.dumps({"evaluation": evaluation, "step": 10}))
"""


def run(base: Path, rates: str, *more: str) -> int:
    return main(["--config", str(base), "--set", f"optimizer.learning_rate={rates}", *more])


def build_plan(base: Path, rates: str, sampler: Sampler = "grid", storage: str = "") -> SweepPlan:
    command = SWEEP_COMMANDS["train"]
    settings = read_settings([f"optimizer.learning_rate={rates}"], command)
    trials = None if sampler == "grid" else 3
    return SweepPlan(PointLoader(command, base, settings), Path("runs/sweeps/base"), sampler, trials, storage=storage)


def statuses(path: Path) -> dict[str, str]:
    """Status by name, of the runs in the order of their first trials."""
    rows = [json.loads(line) for line in (path / "sweep.jsonl").read_text().splitlines()]
    names = dict.fromkeys(trial.user_attrs["run"]["name"] for trial in load_study(path).get_trials())
    return {name: row["status"] for name in names for row in rows if row["name"] == name}


def load_study(path: Path) -> optuna.Study:
    return optuna.load_study(study_name="sweep", storage=f"sqlite:///{path / 'study.db'}")


def starts(path: Path, name: str) -> int:
    return f"\n{(path / 'logs' / f'{name}.log').read_text()}".count("\nrate ")


def wait_for(path: Path) -> None:
    """Wait until a directory exists, or a run has printed "ready" to its log."""
    end = time.monotonic() + 60.0
    while not (path.is_dir() or (path.exists() and "ready" in path.read_text())):
        assert time.monotonic() < end, path
        time.sleep(0.01)


def when_ready(log: Path, act: Callable[[], None]) -> threading.Thread:
    """Call ``act`` after the run has printed "ready"."""

    def wait() -> None:
        wait_for(log)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


SWEEP = """
import pathlib, sys
from cli.sweep import main, runner
runner.build_command = lambda module, config, overrides=(): [
    sys.executable, "-I", "-S", "program.py", str(config), *overrides
]
runner.POLL_SECONDS = 0.01
sys.exit(main(sys.argv[1:]))
"""


def start_sweep(base: Path, rates: str, *more: str) -> subprocess.Popen[bytes]:
    """Start a sweep of the program in a process of its own."""
    arguments = ["--config", str(base), "--set", f"optimizer.learning_rate={rates}", *more]
    environment = processes.build_environment()
    return subprocess.Popen(
        [sys.executable, "-c", SWEEP, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
