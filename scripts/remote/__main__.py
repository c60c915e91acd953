"""Train on a remote machine over SSH; the recipes of remote.just run ``python scripts/remote COMMAND ...``.

host.py describes the environment variables that select the machine. Arguments are ``name=value``; the name of the first
may be left out. A word that begins with a dash and all words after it are passed on to the remote command.

The scripts need only Python 3.11, so that they run without the project and its dependencies.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from host import PROJECT_ROOT, CommandError, ConnectionLostError, Host, connected
from transfer import describe_tree, fetch, find_path, push, resolve_remote_path, send, send_tree

Words = Sequence[str]


def bootstrap(host: Host) -> None:
    host.run("bootstrap")
    send_tree(host)


def send_data(host: Host, path: str = "data") -> None:
    source = Path(os.path.normpath(PROJECT_ROOT / path))  # a link may point anywhere
    if not (source.is_dir() or source.is_file()):
        raise CommandError(f"path = {source} is not here: name a file or folder of this tree")
    if not source.is_relative_to(PROJECT_ROOT) or source == PROJECT_ROOT:
        raise CommandError(f"path = {source} is not in {PROJECT_ROOT}: put it, or a link to it, into data/")
    path = source.relative_to(PROJECT_ROOT).as_posix()
    if path.split("/")[0] == "env":
        raise CommandError(
            f"path = {source} holds secrets: just sync-env sends env/*.env, readable by their owner only"
        )
    send(host, source, path)


def build_remote(host: Host, extra: Words = ()) -> None:
    has_key = (PROJECT_ROOT / "env" / "wandb.env").exists()
    host.run("build", *extra, *(["--extra", "wandb"] if has_key else []))


def send_env(host: Host) -> None:
    names = sorted(file.name for file in (PROJECT_ROOT / "env").glob("*.env"))
    if not names:
        print("env/ has no settings to send: cp env/wandb.env.example env/wandb.env and fill it in", flush=True)
        return
    push(host, PROJECT_ROOT / "env", "env", "--copy-links", "--chmod=F600", names=names)
    print(f"sent {len(names)} files to {host.name}:{host.root}/env", flush=True)


def train(host: Host, config: str, extra: Words = (), command: str = "diffusionlm-train") -> None:
    start(host, command, send_config(host, config), extra)


def auto_train(
    host: Host, config: str, extra: Words = (), command: str = "diffusionlm-train", data: str = "", build: Words = ()
) -> int:
    bootstrap(host)
    build_remote(host, build)
    if data or (PROJECT_ROOT / "data").is_dir():
        send_data(host, data or "data")
    send_env(host)
    path = send_config(host, config)
    check_run_directory(host, host.run("run_directory", command, "--config", path, *extra, capture=True))
    name, directory = start(host, command, path, extra)
    code = follow(host, name)
    print(f"the run ended with exit code {code}", flush=True)
    rest = f"the rest of {directory} is there (just fetch any_file={shlex.quote(directory)} brings it)"
    try:
        host.retry(lambda: fetch(host, directory, linked_only=True), rest)
    except ConnectionLostError:
        raise
    except CommandError as error:  # a run that failed early may have no files
        print(f"auto-train: error: {error}", file=sys.stderr)
        return code or error.code
    return code


def infer(host: Host, command: str = "diffusionlm-infer", args: Words = ()) -> int:
    words = list(args)
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        # Messages go to stderr, because stdout belongs to the remote command.
        with contextlib.redirect_stdout(sys.stderr):
            if name == "--config" and equals:
                words[index] = f"--config={send_config(host, value)}"
            elif index and words[index - 1] == "--config":
                words[index] = send_config(host, word)
    return host.in_terminal("execute", command, *words)


def kill(host: Host, wait: str = "120") -> None:
    if not wait.isdecimal():
        raise CommandError(f"wait = {wait!r} is no number of seconds")
    host.run("stop", int(wait))


# --- runs


def start(host: Host, command: str, config: str, extra: Words) -> tuple[str, str]:
    """Check the config, a path on the remote machine, and start the training in tmux.

    Returns:
        The name of the launch and its run directory.

    Raises:
        CommandError: the config is invalid, or a session exists already.
    """
    output = host.run("start", describe_tree(), command, "--config", config, *extra, capture=True)
    name, directory, *_ = output.split("\n")
    print(f"{command} runs in tmux session {host.session} on {host.name}; its run directory is {directory}")
    print("just follow-train or just attach-train shows it, just kill-train ends it", flush=True)
    return name, directory


def send_config(host: Host, config: str) -> str:
    """Send a local config, if it exists, and return its path on the remote machine."""
    local = (PROJECT_ROOT / config).resolve()
    if not local.is_file():
        if find_path(host, config) != ["file"]:
            raise CommandError(f"config = {config} is neither here nor in {host.name}:{host.root}: name a file")
        print(f"config {config} is not here: that of {host.name} is taken")
        return config
    inside = local.is_relative_to(PROJECT_ROOT)
    path = local.relative_to(PROJECT_ROOT).as_posix() if inside else f".remote/configs/{local.name}"
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

    def print_output() -> tuple[str, str, str]:
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
        _, code, directory = host.retry(print_output, "the run goes on there (just follow-train shows it again)")
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt("the run goes on: just follow-train shows it, just kill-train ends it") from error
    if not code:
        raise CommandError(
            f"the run on {host.name} ended without an exit code: it was killed, or the machine fell; "
            f"just fetch any_file={shlex.quote(directory)} brings what it left",
            1,
        )
    return int(code)


def read_launch(host: Host, name: str = "") -> tuple[str, str, str]:
    """Read the name of a launch, its exit code (empty if it has none) and its run directory; without a name, of the
    last launch."""
    name, code, directory, *_ = host.run("ended", name, capture=True).split("\n")
    return name, code, directory


def check_run_directory(host: Host, directory: str) -> None:
    """Check that the run that is fetched at the end does not replace another one.

    Raises:
        CommandError: its directory exists here and not there.
    """
    path, folder = resolve_remote_path(host, directory)
    if folder.is_dir() and any(folder.iterdir()) and find_path(host, path) == ["nothing"]:
        raise CommandError(
            f"run.directory = {directory} is here already, and {host.name} has none of that name: set another "
            f"run.directory, or move {folder} away, or use just train, and then "
            f"just fetch any_file={shlex.quote(directory)}, which keeps what it replaces"
        )


# --- the command line

RECIPES: dict[str, Callable[..., int | None]] = {
    "bootstrap-remote": bootstrap,
    "data-remote": send_data,
    "build-remote": build_remote,
    "sync-env": send_env,
    "train": train,
    "auto-train": auto_train,
    "infer": infer,
    "fetch": lambda host, any_file: fetch(host, any_file),
    "kill-train": kill,
    "status": lambda host: host.in_terminal("status"),
    "list-runs": lambda host: host.in_terminal("runs"),
    "nvitop": lambda host, args=(): host.in_terminal("nvitop", *args),
    "attach-train": lambda host: host.in_terminal("attach"),
    "follow-train": lambda host: follow(host, read_launch(host)[0]),
}
"""Recipes by name. Their parameters are the arguments; those that are tuples are split as by a shell."""


def parse_arguments(recipe: str, words: list[str]) -> dict[str, Any]:
    """Parse the words of a recipe: the name of its first argument may be left out, and words from the first that begins
    with a dash on belong to its first argument that is split.

    Raises:
        CommandError: a word is neither an argument nor an option, or an argument is missing.
    """
    parameters = list(inspect.signature(RECIPES[recipe]).parameters.values())[1:]
    names = [parameter.name for parameter in parameters]
    split = [parameter.name for parameter in parameters if parameter.default == ()]
    known_names = ", ".join(f"{name}=" for name in names) or "none"
    first_option = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    words, options = words[:first_option], words[first_option:]
    if options and not split:
        raise CommandError(f"{options[0]} is not an option: there are none here, and these arguments: {known_names}")
    if words and names and not re.match(r"\w+=", words[0]):
        words[0] = f"{names[0]}={words[0]}"
    for word in words:
        if "=" not in word or word.partition("=")[0] not in names:
            raise CommandError(
                f"{word!r} is not an argument here (there are: {known_names}); options begin with a dash"
            )
    named: dict[str, Any] = {name: value for name, _, value in (word.partition("=") for word in words) if value}
    for name in split:
        try:
            named[name] = shlex.split(named.get(name, ""))
        except ValueError as error:
            raise CommandError(f"{name} = {named[name]!r}: {error}") from error
    for name in split[:1]:
        named[name] += options[options[:1] == ["--"] :]
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in named:
            raise CommandError(f"{parameter.name}= is missing: just {recipe} {parameter.name}=...")
    return named


def format_usage(recipe: str) -> str:
    """The help text of a recipe."""
    parameters = list(inspect.signature(RECIPES[recipe]).parameters.values())[1:]
    words = [f"[{parameter.name}=...]" for parameter in parameters]
    words += ["[--option ...]"] if any(parameter.default == () for parameter in parameters) else []
    return f"usage: {' '.join(['just', recipe, *words])}\n\njust --list says what it does, docs/operate.md shows it."


def exit_on_signal(number: int, _: FrameType | None) -> None:
    """Exit on a signal and ignore further ones, so that the connection can be closed."""
    for ignored in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main(words: list[str]) -> int:
    """Run a command. Returns its exit code, 2 for a user error or 255 for a lost connection."""
    recipe, *words = words or [""]
    if recipe not in RECIPES:
        print(f"usage: python scripts/remote COMMAND [name=value ...]; commands: {', '.join(RECIPES)}", file=sys.stderr)
        return 2
    if {"-h", "--help"} & set(words[:1]):  # after other words it may be an option that is passed on
        print(format_usage(recipe))
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, exit_on_signal)
    try:
        arguments = parse_arguments(recipe, words)
        with connected(os.environ) as host:
            return RECIPES[recipe](host, **arguments) or 0
    except (CommandError, OSError) as error:
        if str(error):
            print(f"{recipe}: error: {error}", file=sys.stderr)  # such as "No such file or directory: 'rsync'"
        return error.code if isinstance(error, CommandError) else 2
    except KeyboardInterrupt as error:
        print(f"\n{recipe}: left{f'; {error}' if str(error) else ''}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
