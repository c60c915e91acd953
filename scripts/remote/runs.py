"""Start, follow, list and fetch training runs on the remote machine."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from host import PROJECT_ROOT, CommandError, ConnectionLostError, Host, connect
from transfer import fetch, list_files, send
from tree import is_tracked, tree

RETRY_DELAYS = (1, 2, 4, 8, 16, 32, 60)
"""Seconds before each attempt to reconnect."""


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
    output = host.run("start", tree(), command, "--config", path, *extra, capture=True).decode()
    name, directory, *_ = output.split("\n")
    print(f"{command} runs in tmux session {host.session} on {host.name}; its run directory is {directory}")
    print("just follow-train or just attach-train shows it, just kill-train ends it", flush=True)
    return Launch(name, directory)


def send_config(host: Host, config: str) -> str:
    """Send a local config, if it exists, and return its path on the remote machine."""
    local = (PROJECT_ROOT / config).resolve()
    if local.is_dir():
        raise CommandError(f"config = {config} is a folder: name a file in it")
    if not local.is_file():
        if not list_files(host, config):
            raise CommandError(f"config = {config} is neither here nor in {host.name}:{host.root}")
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

    Raises:
        CommandError: it ended without an exit code.
        KeyboardInterrupt: Ctrl-C; the run continues.
    """
    try:
        launch = stream_output(host, name)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt("the run goes on: just follow-train shows it, just kill-train ends it") from error
    if launch.code is None:
        raise CommandError(
            f"the run on {host.name} ended without an exit code: it was killed, or the machine fell; "
            f"just fetch any_file={shlex.quote(launch.directory)} brings what it left",
            1,
        )
    return launch.code


def stream_output(host: Host, name: str) -> Launch:
    """Print the output of a launch until it ends.

    A lost connection is re-established and the output continues where it stopped; the run is not affected.
    """
    num_bytes = 0
    while True:
        try:
            command = host.command("follow", name, num_bytes)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            assert process.stdout is not None
            while data := os.read(process.stdout.fileno(), 1 << 16):
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
                num_bytes += len(data)
            host.check(process.wait())
            return read_launch(host, name)
        except ConnectionLostError:
            reconnect(host, "the run goes on there (just follow-train shows it again)")


def reconnect(host: Host, meanwhile: str) -> None:
    """Re-establish a lost connection.

    Args:
        host: the machine.
        meanwhile: message about the state of the remote work.

    Raises:
        ConnectionLostError: all attempts of about two minutes failed.
    """
    for delay in RETRY_DELAYS:
        print(f"the connection to {host.name} was lost, {meanwhile}; again in {delay} s", file=sys.stderr, flush=True)
        time.sleep(delay)
        try:
            connect(host)
            return
        except ConnectionLostError:
            continue
    raise ConnectionLostError(f"{host.name} does not answer: {meanwhile}")


def read_launch(host: Host, name: str = "") -> Launch:
    """Read the state of a launch; without a name, of the last one."""
    name, code, directory, *_ = host.run("ended", name, capture=True).decode().split("\n")
    return Launch(name, directory, int(code) if code else None)


def fetch_run(host: Host, directory: str) -> list[Path]:
    """Fetch the files of a run, with its newest and best checkpoints only; reconnects if necessary."""
    while True:
        try:
            return fetch(host, directory, "newest")
        except ConnectionLostError:
            reconnect(
                host, f"the rest of {directory} is there (just fetch any_file={shlex.quote(directory)} brings it)"
            )


def format_runs_table(host: Host) -> str:
    """Format a table of the runs on the remote machine."""
    fields = host.run("runs", capture=True).decode(errors="replace").split("\0")[:-1]
    rows = [("run", "step", "loss", "bound", "newest checkpoint", "written")]
    for start_index in range(0, len(fields), 5):
        folder, written, newest, metrics, summary = fields[start_index : start_index + 5]
        records = [record for record in map(parse_record, metrics.splitlines()) if record]
        step = max((find_number(record, "step") or 0 for record in records), default=0)
        losses = [loss for record in records if (loss := find_number(record, "metrics", "loss")) is not None]
        bound = find_number(parse_record(summary), "evaluation", "nats_per_token")
        written_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(int(written)))
        rows.append(
            (
                folder,
                str(step),
                format_number(losses[-1] if losses else None),
                format_number(bound),
                newest or "-",
                written_at,
            )
        )
    if len(rows) == 1:
        return f"{host.name}:{host.root} has no runs yet: just train config=FILE"
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def parse_record(line: str) -> dict[str, Any]:
    """Parse a JSON object; empty if the line is invalid, because the last one may be truncated."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def find_number(record: object, *names: str) -> float | None:
    """Return a nested number of a record, or None."""
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record if isinstance(record, float | int) else None


def format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
