"""The settings and secrets of ``env/*.env``, and a command with them.

``python environment.py COMMAND ...`` becomes the command, with the settings of the current folder in its environment.
A line is NAME=VALUE, as in ``WANDB_API_KEY='a b'``. Nothing is evaluated, so a value is what stands there, and an error
names the line and not the value.
"""

from __future__ import annotations

import codecs
import os
import re
import sys
from pathlib import Path

LINE = re.compile(r"""\s*(?:export\s+)?([A-Za-z_]\w*)=(?:'([^']*)'|"([^"]*)"|([^\s'"]*))\s*""", re.ASCII)
NOTHING = re.compile(r"\s*(#.*)?")


def files(folder: Path) -> list[Path]:
    """The files of ``env/`` with settings."""
    return sorted(file for file in (folder / "env").glob("*.env") if file.is_file())


def read(file: Path) -> dict[str, str]:
    """The settings of a file by name.

    Raises:
        ValueError: a line is no setting.
    """
    found = {}
    text = os.fsdecode(file.read_bytes().removeprefix(codecs.BOM_UTF8))
    for number, line in enumerate(text.split("\n"), 1):
        if NOTHING.fullmatch(line):
            continue
        match = LINE.fullmatch(line)
        if not match or "\0" in line:
            raise ValueError(
                f"env/{file.name}:{number} is not NAME=VALUE: put a value with spaces into quotes, and a comment on a "
                "line of its own"
            )
        found[match[1]] = match[2] or match[3] or match[4] or ""
    return found


def main(words: list[str]) -> int:
    """Become the command. Returns 2 where that cannot be."""
    settings: dict[str, str] = {}
    try:
        for file in files(Path.cwd()):
            settings |= read(file)
        os.execve(words[0], words, {**os.environ, **settings})
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
