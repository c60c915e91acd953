"""Train on another machine over SSH. What the recipes of remote.just call: ``python scripts/remote COMMAND ...``.

host.py says how the machine is named. Arguments are ``name=value``, and the first may do without its name; a word that
begins with a dash and all after it go on as they are.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass

from host import HERE, Host, LostError, StopError, connected
from runs import ended, fetch_run, follow, start, table
from transfer import fetch, send
from tree import send_tree


@dataclass(frozen=True)
class Arguments:
    """Of a recipe: the named ones, and the rest."""

    named: dict[str, str]
    rest: list[str]

    def get(self, name: str, default: str = "") -> str:
        """One of the named."""
        return self.named.get(name) or default

    def need(self, name: str, example: str) -> str:
        """One that must be there."""
        value = self.get(name)
        if not value:
            raise StopError(f"{name}= is missing: {example}")
        return value

    def split(self, name: str) -> list[str]:
        """The words of one of the named, quoted as in a shell, and the rest."""
        try:
            return [*shlex.split(self.get(name)), *self.rest]
        except ValueError as error:
            raise StopError(f"{name} = {self.get(name)!r}: {error}") from error


def bootstrap(host: Host, _: Arguments) -> int:
    """The folders, the tools and the tree."""
    host.run("bootstrap")
    send_tree(host)
    return 0


def data(host: Host, arguments: Arguments) -> int:
    """Send a file or folder of this tree, or make data there as a config says."""
    if config := arguments.get("config"):
        return host.in_terminal("execute", "diffusionlm-make-data", "--config", config, *arguments.split("extra"))
    source = (HERE / arguments.get("path", "data")).resolve()
    if not source.exists():
        raise StopError(
            f"path = {source} is not here: name a file or folder of this tree, or config=FILE makes data there"
        )
    if not source.is_relative_to(HERE) or source == HERE:
        raise StopError(f"path = {source} is not in {HERE}: put it, or a copy, into data/")
    send(host, source, source.relative_to(HERE).as_posix())
    return 0


def build(host: Host, arguments: Arguments) -> int:
    """Install the project."""
    extra = arguments.split("extra")
    if (HERE / "env" / "wandb.env").exists():
        extra += ["--extra", "wandb"]  # there is a key, so runs will want to log there
    host.run("build", *extra)
    return 0


def send_env(host: Host, _: Arguments) -> int:
    """Send env/*.env, readable by their owner only."""
    files = sorted((HERE / "env").glob("*.env"))
    if not files:
        print("env/ has no settings to send: cp env/wandb.env.example env/wandb.env and fill it in")
    for file in files:
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            print(f"others may read {file.relative_to(HERE)}: chmod 600 {shlex.quote(str(file))}", file=sys.stderr)
        send(host, file, f"env/{file.name}", 0o600)
    return 0


def train(host: Host, arguments: Arguments) -> int:
    """Start a training in tmux."""
    config = arguments.need("config", "just train config=config/resources/train.toml")
    start(host, arguments.get("command", "diffusionlm-train"), config, arguments.split("extra"))
    return 0


def auto_train(host: Host, arguments: Arguments) -> int:
    """All in one. Returns the exit code of the run."""
    arguments.need("config", "just auto-train config=config/resources/train.toml")
    bootstrap(host, arguments)
    build(host, Arguments({"extra": arguments.get("build")}, []))
    if "data" in arguments.named or (HERE / "data").is_dir():
        data(host, Arguments({"path": arguments.get("data", "data")}, []))
    send_env(host, arguments)
    train(host, arguments)
    code = follow(host)
    print(f"the run ended with exit code {code}", flush=True)
    try:
        fetch_run(host, ended(host)[1])
    except LostError:
        raise
    except StopError as error:  # a run that failed early may have left nothing
        print(f"auto-train: error: {error}", file=sys.stderr)
        return code or error.code
    return code


def infer(host: Host, arguments: Arguments) -> int:
    """A command of the project, there."""
    return host.in_terminal("execute", arguments.get("command", "diffusionlm-infer"), *arguments.split("args"))


def fetch_any(host: Host, arguments: Arguments) -> int:
    """A file or folder of the root, to the same place here."""
    fetch(host, arguments.need("any_file", "just fetch any_file=runs/mine/metrics.jsonl"))
    return 0


def kill(host: Host, arguments: Arguments) -> int:
    """End the training that runs."""
    seconds = arguments.get("wait", "120")
    if not seconds.isdecimal():
        raise StopError(f"wait = {seconds!r} is no number of seconds")
    host.run("kill", seconds)
    return 0


def status(host: Host, _: Arguments) -> int:
    """What is there."""
    host.run("status")
    return 0


def list_runs(host: Host, _: Arguments) -> int:
    """The runs there."""
    print(table(host))
    return 0


def nvitop(host: Host, arguments: Arguments) -> int:
    """The GPUs."""
    return host.in_terminal("nvitop", *arguments.rest)


def attach(host: Host, _: Arguments) -> int:
    """The session, in this terminal."""
    return host.in_terminal("attach")


def follow_last(host: Host, _: Arguments) -> int:
    """The output of the last launch."""
    return follow(host)


COMMANDS: dict[str, tuple[Callable[[Host, Arguments], int], tuple[str, ...]]] = {
    "bootstrap-remote": (bootstrap, ()),
    "data-remote": (data, ("path", "config", "extra")),
    "build-remote": (build, ("extra",)),
    "sync-env": (send_env, ()),
    "train": (train, ("config", "extra", "command")),
    "auto-train": (auto_train, ("config", "extra", "command", "data", "build")),
    "infer": (infer, ("command", "args")),
    "fetch": (fetch_any, ("any_file",)),
    "kill-train": (kill, ("wait",)),
    "status": (status, ()),
    "list-runs": (list_runs, ()),
    "nvitop": (nvitop, ()),
    "attach-train": (attach, ()),
    "follow-train": (follow_last, ()),
}
"""What each recipe does, and its arguments by name; the first may be given without its name."""


def parse(words: list[str], names: tuple[str, ...]) -> Arguments:
    """Sort the words of a command.

    Raises:
        StopError: one is neither an argument nor follows a dash.
    """
    named: dict[str, str] = {}
    for index, word in enumerate(words):
        if word.startswith("-"):
            return Arguments(named, words[index + (word == "--") :])
        name, equals, value = word.partition("=")
        if equals and name in names:
            named[name] = value
        elif index == 0 and names and not re.match(r"\w+=", word):
            named[names[0]] = word
        else:
            known = ", ".join(f"{each}=" for each in names) or "none"
            raise StopError(f"{word!r} is not an argument here (there are: {known}); options begin with a dash")
    return Arguments(named, [])


def main(words: list[str]) -> int:
    """Execute a command and return its exit code: 2 for a mistake, 255 for a lost connection, that of the run."""
    if not words or words[0] not in COMMANDS:
        print(
            f"usage: python scripts/remote COMMAND [name=value ...]\ncommands: {', '.join(COMMANDS)}", file=sys.stderr
        )
        return 2
    command, names = COMMANDS[words[0]]
    try:
        arguments = parse(words[1:], names)
        with connected(os.environ) as host:
            return command(host, arguments)
    except StopError as error:
        if str(error):
            print(f"{words[0]}: error: {error}", file=sys.stderr)
        return 255 if isinstance(error, LostError) else error.code
    except OSError as error:
        print(f"{words[0]}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nleft; a run in tmux goes on: just follow-train shows it, just kill-train ends it", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
