"""A config that grids are laid over, and a small program in place of the runs of a sweep."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest

from cli import child_process
from cli.sweep import main, runner, study
from cli.sweep.definition import Sampler, Sweep, read_settings
from tests.tiny_run import REQUIRED_SECTIONS

PROGRAM = """
import json, math, os, pathlib, signal, sys, threading, time, tomllib
config = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())
directory = pathlib.Path(config["run"]["directory"])
directory.mkdir(parents=True, exist_ok=True)
threading.Thread(target=lambda: (os.read(0, 1), os._exit(9)), daemon=True).start()
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

SWEEP = """
import sys
from cli import child_process
from cli.sweep import main, runner
runner.build_command = lambda name, config, overrides=(): [
    sys.executable, "-I", "-S", "program.py", str(config), *overrides
]
child_process.POLL_SECONDS = 0.01
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A valid config, ``base.toml``; nothing is trained by it."""
    path = tmp_path / "base.toml"
    path.write_text(REQUIRED_SECTIONS)
    return path


@dataclass(frozen=True)
class SmallSweep:
    """A sweep of learning rates in a fresh working directory; its runs are `PROGRAM`.

    The run of rate 3 fails, that of 7 has no result, and those of 5 and 6 wait until they are stopped or told to go.
    """

    base: Path
    directory: Path = Path("runs/sweeps/base")

    def arguments(self, rates: str, *more: str) -> list[str]:
        return ["--config", str(self.base), "--set", f"optimizer.learning_rate={rates}", *more]

    def run(self, rates: str, *more: str) -> int:
        return main(self.arguments(rates, *more))

    def refuse(self, rates: str, *more: str, code: int = 2) -> None:
        with pytest.raises(SystemExit) as caught:
            self.run(rates, *more)
        assert caught.value.code == code

    def start(self, rates: str, *more: str) -> subprocess.Popen[bytes]:
        """Start the sweep in a process of its own."""
        command = [sys.executable, "-c", SWEEP, *self.arguments(rates, *more)]
        return subprocess.Popen(command, env=child_process.build_environment({}), stderr=subprocess.PIPE)

    def define(self, rates: str, sampler: Sampler = "grid", num_trials: int | None = None, storage: str = "") -> Sweep:
        settings = read_settings([f"optimizer.learning_rate={rates}"])
        return Sweep(self.base, settings, self.directory, sampler, num_trials, storage=storage)

    def load_study(self, directory: str = "runs/sweeps/base") -> optuna.Study:
        return optuna.load_study(study_name="sweep", storage=f"sqlite:///{directory}/study.db")

    def rows(self, directory: str = "runs/sweeps/base") -> list[dict[str, Any]]:
        return [json.loads(line) for line in Path(directory, "sweep.jsonl").read_text().splitlines()]

    def statuses(self) -> dict[str, str]:
        """Status by the values of a run, in the order of their first trials."""
        names = dict.fromkeys(trial.user_attrs["run"]["name"] for trial in self.load_study().trials)
        by_name = {row["name"]: row["status"] for row in self.rows()}
        return {name.removeprefix("learning_rate-"): by_name[name] for name in names}

    def log(self, rate: str) -> Path:
        return self.directory / "logs" / f"learning_rate-{rate}.log"

    def starts(self, *rates: str) -> list[int]:
        """How many processes each run had."""
        return [f"\n{self.log(rate).read_text()}".count("\nrate ") for rate in rates]

    def wait_for(self, rate: str) -> None:
        """Wait until a run waits."""
        deadline = time.monotonic() + 60.0
        while not (self.log(rate).exists() and "ready" in self.log(rate).read_text()):
            assert time.monotonic() < deadline, rate
            time.sleep(0.01)

    def release(self, rate: str) -> None:
        """Let a waiting run go on."""
        (self.directory / "runs" / f"learning_rate-{rate}" / "go").touch()


@pytest.fixture
def small(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallSweep]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def build_command(name: str, config: Path, overrides: Sequence[str] = ()) -> list[str]:
        return [sys.executable, "-I", "-S", str(program), str(config), *overrides]

    monkeypatch.setattr(runner, "build_command", build_command)
    monkeypatch.setattr(child_process, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(runner, "CLAIM_SECONDS", 0.1)
    monkeypatch.setattr(runner, "usable_cores", lambda: 8)
    monkeypatch.setattr(runner, "drivers", list)
    monkeypatch.setattr(study, "GRACE_SECONDS", 1)
    monkeypatch.delenv("MENDED", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGINT)
    yield SmallSweep(base)
    assert signal.getsignal(signal.SIGINT) == handler
