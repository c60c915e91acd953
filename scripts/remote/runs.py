"""Start, follow and list training runs on the remote machine."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from host import PROJECT_ROOT, CommandError, Host
from transfer import send
from tree import describe_tree, is_tracked


@dataclass(frozen=True)
class Launch:
    """A started training run: its name, its directory and its exit code, if it has one."""

    name: str
    directory: str
    code: int | None = None


def start(host: Host, command: str, config: str, extra: list[str]) -> Launch:
    """Check the config on the remote machine and start the training in tmux.

    Raises:
        CommandError: the config is missing or invalid, or a session exists already.
    """
    path = send_config(host, config)
    name, directory, *_ = host.run("start", describe_tree(), command, "--config", path, *extra, capture=True).split(
        "\n"
    )
    print(f"{command} runs in tmux session {host.session} on {host.name}; its run directory is {directory}")
    print("just follow-train or just attach-train shows it, just kill-train ends it", flush=True)
    return Launch(name, directory)


def send_config(host: Host, config: str) -> str:
    """Send a local config, if it exists, and return its path on the remote machine."""
    local = (PROJECT_ROOT / config).resolve()
    if local.is_dir():
        raise CommandError(f"config = {config} is a folder: name a file in it")
    if not local.is_file():
        if host.run("find_path", config, capture=True) != "file\0":
            raise CommandError(f"config = {config} is neither here nor in {host.name}:{host.root}: name a file")
        print(f"config {config} is not here: that of {host.name} is taken")
        return config
    inside = local.is_relative_to(PROJECT_ROOT)
    path = local.relative_to(PROJECT_ROOT).as_posix() if inside else f".remote/configs/{local.name}"
    if not (inside and is_tracked(local)):
        print(f"config {config} is not tracked by git: it is sent along, as {path}", flush=True)
    send(host, local, path)
    return path


def follow(host: Host, name: str) -> int:
    """Print the output of a launch until it ends. Returns its exit code.

    A lost connection is re-established and the output continues where it stopped; the run is not affected.

    Raises:
        CommandError: it ended without an exit code.
        KeyboardInterrupt: Ctrl-C; the run continues.
    """
    num_bytes = 0

    def print_output() -> Launch:
        nonlocal num_bytes
        command = [*host.ssh("-T"), host.command("follow", name, num_bytes)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert process.stdout is not None
        while data := os.read(process.stdout.fileno(), 1 << 16):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            num_bytes += len(data)
        host.check(process.wait())
        return read_launch(host, name)

    try:
        launch = host.retry(print_output, "the run goes on there (just follow-train shows it again)")
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt("the run goes on: just follow-train shows it, just kill-train ends it") from error
    if launch.code is None:
        raise CommandError(
            f"the run on {host.name} ended without an exit code: it was killed, or the machine fell; "
            f"just fetch any_file={shlex.quote(launch.directory)} brings what it left",
            1,
        )
    return launch.code


def read_launch(host: Host, name: str = "") -> Launch:
    """Read the state of a launch; without a name, of the last one."""
    name, code, directory, *_ = host.run("ended", name, capture=True).split("\n")
    return Launch(name, directory, int(code) if code else None)


def format_runs_table(host: Host) -> str:
    """Format a table of the runs on the remote machine."""
    fields = host.run("runs", capture=True).split("\0")[:-1]
    rows = [("run", "step", "loss", "bound", "newest checkpoint", "written")]
    for folder, written, newest, metrics, summary in zip(*[iter(fields)] * 5, strict=True):
        records = [parse_record(line) for line in metrics.splitlines()]
        steps = [step for record in records if (step := find_number(record, "step")) is not None]
        losses = [loss for record in records if (loss := find_number(record, "metrics", "loss")) is not None]
        bound = find_number(parse_record(summary), "evaluation", "nats_per_token")
        numbers = ["-" if value is None else f"{value:.4f}" for value in (losses[-1] if losses else None, bound)]
        written_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(int(written)))
        rows.append((folder, str(max(steps, default=0)), numbers[0], numbers[1], newest or "-", written_at))
    if len(rows) == 1:
        return f"{host.name}:{host.root} has no runs yet: just train config=FILE"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def parse_record(line: str) -> Any:
    """Parse JSON; None if it is invalid, because the last line may be truncated."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def find_number(record: Any, *names: str) -> float | None:
    """Return a nested number of a record, or None."""
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record if isinstance(record, float | int) else None
