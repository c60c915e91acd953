"""Training there: started in tmux, followed from here, listed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from host import HERE, LOST, Host, LostError, StopError, connect
from transfer import fetch, listing, send
from tree import is_tracked, tree

PAUSES = (1, 2, 4, 8, 16, 32, 60)
"""Seconds before each attempt to reach the machine again while a run is followed."""


def start(host: Host, command: str, config: str, extra: list[str]) -> str:
    """Check the config there and start its training in tmux. Returns the run directory.

    Raises:
        StopError: the config is nowhere or invalid, or a session runs already.
    """
    path = send_config(host, config)
    directory = host.run("start", tree(), command, "--config", path, *extra, capture=True).decode().strip()
    print(f"{command} runs in tmux session {host.session} on {host.name}; its run directory is {directory}")
    print("just follow-train or just attach-train shows it, just kill-train ends it", flush=True)
    return directory


def send_config(host: Host, config: str) -> str:
    """Send a config that lies here along with the run; its path there."""
    local = (HERE / config).resolve()
    if not local.is_file():
        if not listing(host, config):
            raise StopError(f"config = {config} is neither here nor in {host.name}:{host.root}")
        print(f"config {config} is not here: that of {host.name} is taken")
        return config
    inside = local.is_relative_to(HERE)
    path = local.relative_to(HERE).as_posix() if inside else f".remote/configs/{local.name}"
    if not (inside and is_tracked(local)):
        print(f"config {config} is not tracked by git: it is sent along, as {path}", flush=True)
    send(host, local, path)
    return path


def follow(host: Host) -> int:
    """Show the output of the last launch until it ends. Returns its exit code.

    A lost connection is made again, and the output goes on where it stopped; the run does not notice.
    """
    seen = 0
    while True:
        process = subprocess.Popen(host.command("follow", seen), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert process.stdout is not None
        while data := os.read(process.stdout.fileno(), 1 << 16):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            seen += len(data)
        if process.wait() == LOST:
            reconnect(host, "the run goes on there (just follow-train shows it again)")
            continue
        host.check(process.returncode)
        code, _ = ended(host)
        if code is None:
            raise StopError(f"the run on {host.name} ended without an exit code: it was killed, or the machine fell", 1)
        return code


def reconnect(host: Host, meanwhile: str) -> None:
    """Make a lost connection again.

    Raises:
        LostError: the machine does not answer for two minutes.
    """
    for pause in PAUSES:
        print(f"the connection to {host.name} was lost, {meanwhile}; again in {pause} s", file=sys.stderr, flush=True)
        time.sleep(pause)
        try:
            connect(host)
            return
        except LostError:
            continue
    raise LostError(f"{host.name} does not answer: {meanwhile}")


def ended(host: Host) -> tuple[int | None, str]:
    """Exit code of the last launch, if it has one, and its run directory."""
    code, directory, *_ = host.run("ended", capture=True).decode().split("\n")
    return int(code) if code else None, directory


def fetch_run(host: Host, directory: str) -> list[Path]:
    """Bring what a run left, of its checkpoints the newest and the best; a lost connection is made again."""
    while True:
        try:
            return fetch(host, directory, "newest")
        except LostError:
            reconnect(
                host, f"the rest of {directory} is there (just fetch any_file={shlex.quote(directory)} brings it)"
            )


def table(host: Host) -> str:
    """The runs there, a line each."""
    fields = host.run("runs", capture=True).decode(errors="replace").split("\0")[:-1]
    rows = [("run", "step", "loss", "bound", "newest checkpoint", "written")]
    for start_of in range(0, len(fields), 5):
        folder, written, newest, metrics, summary = fields[start_of : start_of + 5]
        records = [record for record in map(parsed, metrics.splitlines()) if record]
        step = max((record.get("step", 0) for record in records), default=0)
        losses = [record["metrics"]["loss"] for record in records if "loss" in record.get("metrics", {})]
        bound = parsed(summary).get("evaluation", {}).get("nats_per_token")
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(int(written)))
        rows.append((folder, str(step), shown(losses[-1] if losses else None), shown(bound), newest or "-", when))
    if len(rows) == 1:
        return f"{host.name}:{host.root} has no runs yet: just train config=FILE"
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def parsed(line: str) -> dict[str, Any]:
    """A JSON object, or nothing: the last line may be cut."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def shown(value: object) -> str:
    """A number in a table."""
    return f"{value:.4f}" if isinstance(value, float | int) else "-"
