"""How every command starts and ends: its parser, its errors and its exit code. Standard library only."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from files.resilient_stream import discard_pending_output

TRACEBACK_VARIABLE = "DIFFUSIONLM_TRACEBACK"


def build_parser(name: str, description: str, example: str) -> argparse.ArgumentParser:
    """Build a parser without arguments, whose `--help` ends with an example."""
    return argparse.ArgumentParser(
        prog=name,
        description=description,
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # An abbreviation would change its meaning if another argument is added.
        allow_abbrev=False,
    )


def exit_with_usage_error(name: str, problem: str) -> NoReturn:
    """Print a problem of the command line, and exit with 2."""
    print(f"{name}: error: {problem}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def friendly_errors(name: str) -> Iterator[None]:
    """End the command with a message instead of a traceback, for errors of the user or the system.

    ValueError and OSError (a missing file, no permission, a full disk) exit with 1, Ctrl-C with 130. Other errors are
    bugs and keep their traceback. With DIFFUSIONLM_TRACEBACK=1 in the environment, all errors keep it. Also works as a
    decorator.
    """
    try:
        yield
    except KeyboardInterrupt:
        if _wants_traceback():
            raise
        print(f"{name}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        discard_pending_output(sys.stdout)  # the reader of a pipe closed it, as `head` does
        raise SystemExit(0) from None
    except (ValueError, OSError) as error:
        if _wants_traceback():
            raise
        print(f"{name}: error: {_format_error(error)}", file=sys.stderr)
        raise SystemExit(1) from None


def _wants_traceback() -> bool:
    return os.environ.get(TRACEBACK_VARIABLE) == "1"


def _format_error(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error) or type(error).__name__
