"""``python -m cli COMMAND``: the commands, where their scripts are not installed."""

from __future__ import annotations

from cli.commands import main

if __name__ == "__main__":
    raise SystemExit(main())
