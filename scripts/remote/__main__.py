"""Train on a remote machine over SSH; the recipes of remote.just run ``python scripts/remote COMMAND ...``.

host.py describes the environment variables that select the machine. Arguments are ``name=value``; the name of the first
may be left out. A word that begins with a dash and all words after it are passed on to the remote command.

The scripts need only Python 3.11, so that they run without the project and its dependencies.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import environment
from host import PROJECT_ROOT, CommandError, ConnectionLostError, Host, connected
from transfer import describe_tree, fetch, find_path, git, push, resolve_remote_path, send, send_tree


@dataclass(frozen=True)
class Arguments:
    """The arguments of a recipe: named ones, and words that are passed on."""

    named: dict[str, str]
    rest: list[str]

    def get(self, name: str, default: str = "") -> str:
        return self.named.get(name) or default

    def need(self, name: str, example: str) -> str:
        """Return a required argument."""
        if not (value := self.get(name)):
            raise CommandError(f"{name}= is missing: {example}")
        return value

    def split(self, name: str) -> list[str]:
        """Split a named argument like a shell, and append the words that are passed on."""
        try:
            return [*shlex.split(self.get(name)), *self.rest]
        except ValueError as error:
            raise CommandError(f"{name} = {self.get(name)!r}: {error}") from error


def bootstrap(host: Host, _: Arguments) -> None:
    host.run("bootstrap")
    send_tree(host)


def data(host: Host, arguments: Arguments) -> int:
    if config := arguments.get("config"):
        path = send_config(host, config)
        return host.in_terminal("execute", "diffusionlm-make-data", "--config", path, *arguments.split("extra"))
    if arguments.split("extra"):
        raise CommandError("extra= and options are for config=FILE, which makes data there: nothing was sent")
    source = Path(os.path.normpath(PROJECT_ROOT / arguments.get("path", "data")))  # a link may point anywhere
    if not (source.is_dir() or source.is_file()):
        raise CommandError(
            f"path = {source} is not here: name a file or folder of this tree, or config=FILE makes data there"
        )
    if not source.is_relative_to(PROJECT_ROOT) or source == PROJECT_ROOT:
        raise CommandError(f"path = {source} is not in {PROJECT_ROOT}: put it, or a link to it, into data/")
    path = source.relative_to(PROJECT_ROOT).as_posix()
    if path.split("/")[0] == "env":
        raise CommandError(
            f"path = {source} holds secrets: just sync-env sends env/*.env, readable by their owner only"
        )
    send(host, source, path)
    return 0


def build(host: Host, arguments: Arguments) -> None:
    has_key = (PROJECT_ROOT / "env" / "wandb.env").exists()
    host.run("build", *arguments.split("extra"), *(["--extra", "wandb"] if has_key else []))


def send_env(host: Host, _: Arguments) -> None:
    files = environment.files(PROJECT_ROOT)
    for file in files:
        try:
            environment.read(file)
        except ValueError as error:
            raise CommandError(str(error)) from error
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            name = file.relative_to(PROJECT_ROOT)
            print(f"others may read {name}: chmod 600 {shlex.quote(str(file))}", file=sys.stderr)
    if not files:
        print("env/ has no settings to send: cp env/wandb.env.example env/wandb.env and fill it in", flush=True)
        return
    names = [file.name for file in files]
    push(host, PROJECT_ROOT / "env", "env", "--copy-links", "--chmod=F600", names=names)
    print(f"sent {len(files)} files to {host.name}:{host.root}/env", flush=True)


def train(host: Host, arguments: Arguments) -> None:
    launch(host, arguments)


def launch(host: Host, arguments: Arguments) -> Launch:
    config = arguments.need("config", "just train config=config/resources/train.toml")
    return start(host, arguments.get("command", "diffusionlm-train"), config, arguments.split("extra"))


def auto_train(host: Host, arguments: Arguments) -> int:
    config = arguments.need("config", "just auto-train config=config/resources/train.toml")
    check_run_directory(host, config, arguments.split("extra"))
    bootstrap(host, arguments)
    build(host, Arguments({"extra": arguments.get("build")}, []))
    if "data" in arguments.named or (PROJECT_ROOT / "data").is_dir():
        data(host, Arguments({"path": arguments.get("data", "data")}, []))
    send_env(host, arguments)
    launched = launch(host, arguments)
    code = follow(host, launched.name)
    print(f"the run ended with exit code {code}", flush=True)
    path = launched.directory
    rest = f"the rest of {path} is there (just fetch any_file={shlex.quote(path)} brings it)"
    try:
        host.retry(lambda: fetch(host, path, linked_only=True), rest)
    except ConnectionLostError:
        raise
    except CommandError as error:  # a run that failed early may have no files
        print(f"auto-train: error: {error}", file=sys.stderr)
        return code or error.code
    return code


def infer(host: Host, arguments: Arguments) -> int:
    words = arguments.split("args")
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        # Messages go to stderr, because stdout belongs to the remote command.
        with contextlib.redirect_stdout(sys.stderr):
            if name == "--config" and equals:
                words[index] = f"--config={send_config(host, value)}"
            elif index and words[index - 1] == "--config":
                words[index] = send_config(host, word)
    return host.in_terminal("execute", arguments.get("command", "diffusionlm-infer"), *words)


def kill(host: Host, arguments: Arguments) -> None:
    seconds = arguments.get("wait", "120")
    if not seconds.isdecimal():
        raise CommandError(f"wait = {seconds!r} is no number of seconds")
    host.run("stop", int(seconds))


# --- runs


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
        if find_path(host, config) != ["file"]:
            raise CommandError(f"config = {config} is neither here nor in {host.name}:{host.root}: name a file")
        print(f"config {config} is not here: that of {host.name} is taken")
        return config
    inside = local.is_relative_to(PROJECT_ROOT)
    path = local.relative_to(PROJECT_ROOT).as_posix() if inside else f".remote/configs/{local.name}"
    if not (inside and git("ls-files", "--", str(local)).strip()):
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


def check_run_directory(host: Host, config: str, extra: list[str]) -> None:
    """Check that the run that is fetched at the end does not replace another one.

    Raises:
        CommandError: its directory exists here and not there.
    """
    directory = run_directory(config, extra)
    if not directory:
        return
    path, folder = resolve_remote_path(host, directory)
    if folder.is_dir() and any(folder.iterdir()) and find_path(host, path) == ["nothing"]:
        raise CommandError(
            f"run.directory = {directory} is here already, and {host.name} has none of that name: set another "
            f"run.directory, or move {folder} away, or use just train, and then "
            f"just fetch any_file={shlex.quote(directory)}, which keeps what it replaces"
        )


def run_directory(config: str, extra: list[str]) -> str:
    """Read ``run.directory`` from the config and the options; empty if it cannot be determined locally."""
    directory = ""
    # The config may exist only on the remote machine, or be invalid, which the remote command reports.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        directory = tomllib.loads((PROJECT_ROOT / config).read_text(encoding="utf-8"))["run"]["directory"]
    for before, word in zip(["", *extra], extra, strict=False):
        key, equals, value = word.removeprefix("--set=").partition("=")
        if equals and key.strip() == "run.directory" and (before == "--set" or word.startswith("--set=")):
            directory = value.strip().strip("\"'")
    is_plain = isinstance(directory, str) and not directory.startswith("~") and ".." not in directory.split("/")
    return directory if is_plain else ""


# --- the command line


@dataclass(frozen=True)
class Recipe:
    """A recipe: its function, its named arguments, and whether options are passed on."""

    run: Callable[[Host, Arguments], int | None]
    names: tuple[str, ...] = ()
    options: bool = False

    def usage(self, recipe: str) -> str:
        """The help text of the recipe."""
        words = [*(f"[{name}=...]" for name in self.names), *(["[--option ...]"] if self.options else [])]
        return (
            f"usage: {' '.join(['just', recipe, *words])}\n\njust --list says what it does, docs/operate.md shows it."
        )


COMMANDS = {
    "bootstrap-remote": Recipe(bootstrap),
    "data-remote": Recipe(data, ("path", "config", "extra"), options=True),
    "build-remote": Recipe(build, ("extra",), options=True),
    "sync-env": Recipe(send_env),
    "train": Recipe(train, ("config", "extra", "command"), options=True),
    "auto-train": Recipe(auto_train, ("config", "extra", "command", "data", "build"), options=True),
    "infer": Recipe(infer, ("command", "args"), options=True),
    "fetch": Recipe(
        lambda host, arguments: fetch(host, arguments.need("any_file", "just fetch runs/a")), ("any_file",)
    ),
    "kill-train": Recipe(kill, ("wait",)),
    "status": Recipe(lambda host, _: host.in_terminal("status")),
    "list-runs": Recipe(lambda host, _: print(format_runs_table(host))),
    "nvitop": Recipe(lambda host, arguments: host.in_terminal("nvitop", *arguments.rest), options=True),
    "attach-train": Recipe(lambda host, _: host.in_terminal("attach")),
    "follow-train": Recipe(lambda host, _: follow(host, read_launch(host).name)),
}
"""Recipes by name; the name of the first argument may be left out."""


def parse_arguments(words: list[str], command: Recipe) -> Arguments:
    """Parse the words of a command.

    Raises:
        CommandError: a word is neither an argument nor an option that is passed on.
    """
    named: dict[str, str] = {}
    names = command.names
    known_names = ", ".join(f"{name}=" for name in names) or "none"
    for index, word in enumerate(words):
        if word.startswith("-"):
            if not command.options:
                raise CommandError(f"{word} is not an option: there are none here, and these arguments: {known_names}")
            return Arguments(named, words[index + (word == "--") :])
        name, equals, value = word.partition("=")
        if equals and name in names:
            named[name] = value
        elif index == 0 and names and not re.match(r"\w+=", word):
            named[names[0]] = word
        else:
            raise CommandError(
                f"{word!r} is not an argument here (there are: {known_names}); options begin with a dash"
            )
    return Arguments(named, [])


def exit_on_signal(number: int, _: FrameType | None) -> None:
    """Exit on a signal and ignore further ones, so that the connection can be closed."""
    for ignored in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main(words: list[str]) -> int:
    """Run a command. Returns its exit code, 2 for a user error or 255 for a lost connection."""
    recipe, *words = words or [""]
    if recipe not in COMMANDS:
        print(
            f"usage: python scripts/remote COMMAND [name=value ...]; commands: {', '.join(COMMANDS)}", file=sys.stderr
        )
        return 2
    command = COMMANDS[recipe]
    # After other words, --help may be an option that is passed on.
    if {"-h", "--help"} & set(words[:1] if command.options else words):
        print(command.usage(recipe))
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, exit_on_signal)
    try:
        arguments = parse_arguments(words, command)
        with connected(os.environ) as host:
            return command.run(host, arguments) or 0
    except (CommandError, OSError) as error:
        if str(error):
            print(f"{recipe}: error: {error}", file=sys.stderr)
        return error.code if isinstance(error, CommandError) else 2
    except KeyboardInterrupt as error:
        print(f"\n{recipe}: left{f'; {error}' if str(error) else ''}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
