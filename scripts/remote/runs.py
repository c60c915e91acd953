"""Training there: started in tmux, followed from here, listed."""

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
"""Seconds before each attempt to reach the machine again while a run is followed."""


@dataclass(frozen=True)
class Launch:
    """A training that was started: its name, the run directory, and the exit code, if it ended with one."""

    name: str
    directory: str
    code: int | None = None


def start(host: Host, command: str, config: str, extra: list[str]) -> Launch:
    """Check the config there and start its training in tmux.

    Raises:
        CommandError: the config is nowhere or invalid, or a session runs already.
    """
    path = send_config(host, config)
    said = host.run("start", tree(), command, "--config", path, *extra, capture=True).decode()
    name, directory, *_ = said.split("\n")
    print(f"{command} runs in tmux session {host.session} on {host.name}; its run directory is {directory}")
    print("just follow-train or just attach-train shows it, just kill-train ends it", flush=True)
    return Launch(name, directory)


def send_config(host: Host, config: str) -> str:
    """Send a config that lies here along with the run; its path there."""
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
    """Show the output of a launch until it ends. Returns its exit code.

    Raises:
        CommandError: it ended without an exit code.
        KeyboardInterrupt: Ctrl-C, which leaves the run alone.
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
    """Show the output of a launch until it ends, and say how it ended.

    A lost connection is made again, and the output goes on where it stopped; the run does not notice.
    """
    seen = 0
    while True:
        try:
            command = host.command("follow", name, seen)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            assert process.stdout is not None
            while data := os.read(process.stdout.fileno(), 1 << 16):
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
                seen += len(data)
            host.check(process.wait())
            return read_launch(host, name)
        except ConnectionLostError:
            reconnect(host, "the run goes on there (just follow-train shows it again)")


def reconnect(host: Host, meanwhile: str) -> None:
    """Make a lost connection again.

    Raises:
        ConnectionLostError: the machine does not answer for two minutes.
    """
    for pause in RETRY_DELAYS:
        print(f"the connection to {host.name} was lost, {meanwhile}; again in {pause} s", file=sys.stderr, flush=True)
        time.sleep(pause)
        try:
            connect(host)
            return
        except ConnectionLostError:
            continue
    raise ConnectionLostError(f"{host.name} does not answer: {meanwhile}")


def read_launch(host: Host, name: str = "") -> Launch:
    """What became of a launch; of the last one, if none is named."""
    name, code, directory, *_ = host.run("ended", name, capture=True).decode().split("\n")
    return Launch(name, directory, int(code) if code else None)


def fetch_run(host: Host, directory: str) -> list[Path]:
    """Bring what a run left, of its checkpoints the newest and the best; a lost connection is made again."""
    while True:
        try:
            return fetch(host, directory, "newest")
        except ConnectionLostError:
            reconnect(
                host, f"the rest of {directory} is there (just fetch any_file={shlex.quote(directory)} brings it)"
            )


def format_runs_table(host: Host) -> str:
    """The runs there, a line each."""
    fields = host.run("runs", capture=True).decode(errors="replace").split("\0")[:-1]
    rows = [("run", "step", "loss", "bound", "newest checkpoint", "written")]
    for start_of in range(0, len(fields), 5):
        folder, written, newest, metrics, summary = fields[start_of : start_of + 5]
        records = [record for record in map(parse_record, metrics.splitlines()) if record]
        step = max((find_number(record, "step") or 0 for record in records), default=0)
        losses = [loss for record in records if (loss := find_number(record, "metrics", "loss")) is not None]
        bound = find_number(parse_record(summary), "evaluation", "nats_per_token")
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(int(written)))
        rows.append(
            (
                folder,
                str(step),
                format_number(losses[-1] if losses else None),
                format_number(bound),
                newest or "-",
                when,
            )
        )
    if len(rows) == 1:
        return f"{host.name}:{host.root} has no runs yet: just train config=FILE"
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def parse_record(line: str) -> dict[str, Any]:
    """A JSON object, or nothing: the last line may be cut."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def find_number(record: object, *names: str) -> float | None:
    """A number in a record, if there is one in that place."""
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record if isinstance(record, float | int) else None


def format_number(value: float | None) -> str:
    """A number in a table."""
    return "-" if value is None else f"{value:.4f}"
