"""Read the settings and secrets of ``env/*.env``, and execute a command with them.

``python environment.py COMMAND ...`` replaces itself by the command, with the settings of the current folder in its
environment. A line is NAME=VALUE, as in ``WANDB_API_KEY='a b'``. Values are not expanded, and an error names the line
but never the value.
"""

from __future__ import annotations

import codecs
import os
import re
import sys
from pathlib import Path

LINE = re.compile(r"""\s*(?:export\s+)?([A-Za-z_]\w*)=(?:'([^']*)'|"([^"]*)"|([^\s'"]*))\s*""", re.ASCII)
BLANK_OR_COMMENT = re.compile(r"\s*(#.*)?")


def read(file: Path) -> dict[str, str]:
    """Read the settings of a file by name.

    Raises:
        ValueError: a line is not a setting.
    """
    settings = {}
    text = os.fsdecode(file.read_bytes().removeprefix(codecs.BOM_UTF8))
    for number, line in enumerate(text.split("\n"), 1):
        if BLANK_OR_COMMENT.fullmatch(line):
            continue
        match = LINE.fullmatch(line)
        if not match or "\0" in line:
            raise ValueError(
                f"env/{file.name}:{number} is not NAME=VALUE: put a value with spaces into quotes, and a comment on a "
                "line of its own"
            )
        settings[match[1]] = match[2] or match[3] or match[4] or ""
    return settings


if __name__ == "__main__":
    try:
        settings = {name: value for file in sorted(Path("env").glob("*.env")) for name, value in read(file).items()}
        os.execve(sys.argv[1], sys.argv[1:], {**os.environ, **settings})
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
