"""How every command starts and ends: its parser, its streams, its errors and its exit code.

Standard library only: it works where packages are missing, and Ctrl-C is handled before they are imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn, cast

import diffusionlm
from files.resilient_stream import NamedStream, discard_pending_output, resilient
from files.terminal_text import escape_control_characters, print_message
from files.usage_error import UsageError

TRACEBACK_VARIABLE = "DIFFUSIONLM_TRACEBACK"
TORCH_VARIABLES = {
    ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"): "expandable_segments:True",
    ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"): "1000",
}
"""Variables that commands set for torch: a name, others that also set it, and the value."""
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""
STANDARD_OUTPUT = "standard output"
"""``filename`` of the errors of standard output."""
MEMORY_REMEDY = "use a smaller model or input, or a machine with more memory"
_MEMORY_ERROR = re.compile("out of memory|can't allocate memory|not enough memory|CUBLAS_STATUS_ALLOC_FAILED")
"""Texts of the RuntimeErrors of torch's allocators."""
_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"
"""File name of the code of Python's import system."""


def build_parser(name: str, description: str, example: str) -> argparse.ArgumentParser:
    """Build a parser with `--version`, whose `--help` ends with an example."""
    parser = _Parser(
        prog=name,
        description=description,
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # An abbreviation would change its meaning if another argument is added.
        allow_abbrev=False,
    )
    version = f"{name} {diffusionlm.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version, and exit")
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(escape_control_characters(message))


def path_argument(text: str) -> Path:
    """The path of an argument. An empty text, as of an unset shell variable, is an error: `Path` takes it for "."."""
    if not text.strip():
        raise argparse.ArgumentTypeError('is empty: name a path; "." is the working directory')
    return Path(text)


def print_error(name: str, problem: str) -> None:
    """Print a problem as ``NAME: error: PROBLEM``."""
    print_message(f"{name}: error: {problem}")


def require_extra(extra: str, *packages: str) -> None:
    """Raise a UsageError unless the packages of an extra are installed."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise UsageError(f"{' and '.join(missing)} cannot be imported: run uv sync --extra {extra}")


@contextmanager
def usage_errors() -> Iterator[None]:
    """Raise a ValueError or an OSError as UsageError, with which commands exit with 2: for checks before the work."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UsageError(_format_error(error)) from error


@contextmanager
def memory_errors(remedy: str) -> Iterator[None]:
    """Name a remedy where memory runs out, of the machine or of a GPU; the innermost one counts.

    Raises:
        MemoryError: it ran out; one line.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        has_remedy = isinstance(error, MemoryError) and error.__cause__ is not None
        if has_remedy or (isinstance(error, RuntimeError) and _MEMORY_ERROR.search(str(error)) is None):
            raise
        size = re.search(r"allocate (\d[\d.]* \w+)", str(error))
        amount = "" if size is None else f", {size[1]} more were needed"
        raise MemoryError(f"out of memory{amount}: {remedy}") from error


@contextmanager
def friendly_errors(name: str, memory_remedy: str = MEMORY_REMEDY) -> Iterator[None]:
    """End the command with a message instead of a traceback, for errors of the user or the system.

    UsageError (wrong input that was found before the work began) exits with 2. Any other ValueError and OSError (a
    missing file, no permission, a full disk) and missing memory exit with 1, and so does a standard output that is
    on a full disk, or whose reader has ended (as in ``| head``), which is not reported; Ctrl-C exits with
    130. A standard error that cannot be written is ignored. Other errors are bugs and keep their traceback. With
    DIFFUSIONLM_TRACEBACK=1 in the environment, all errors keep it. Also works as a decorator.
    """
    _replace_closed_streams()
    _set_up_torch()
    output = NamedStream(sys.stdout, STANDARD_OUTPUT)
    with (
        redirect_stdout(cast("IO[str]", output)),
        redirect_stderr(resilient(sys.stderr)),
        _interrupt_handler(name),
    ):
        try:
            try:
                with memory_errors(memory_remedy):
                    yield
            except SystemExit as ended:
                if not ended.code:
                    output.flush()  # the text of --help
                raise
            output.flush()
        except KeyboardInterrupt:
            if _wants_traceback():
                raise
            print(f"{name}: interrupted", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None
        except (ValueError, OSError, MemoryError) as error:
            if _wants_traceback():
                raise
            if isinstance(error, BrokenPipeError) and error.filename == STANDARD_OUTPUT:
                raise SystemExit(1) from None
            print_error(name, _format_error(error))
            raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
        finally:
            try:
                sys.stdout.flush()
            except OSError:  # else Python fails when it flushes it at its exit
                discard_pending_output(sys.stdout)


@contextmanager
def _interrupt_handler(name: str) -> Iterator[None]:
    """Replace Python's handler of SIGINT by one that ends the process during an import; another handler, which a caller
    has installed, stays.

    Imports of compiled packages swallow KeyboardInterrupt, fail later because of it, or abort: nothing is lost by the
    end.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename != _IMPORT_SYSTEM:
            frame = frame.f_back
        if frame is None or _wants_traceback():
            raise KeyboardInterrupt
        with suppress(OSError):
            sys.stdout.flush()
        print(f"{name}: interrupted", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _set_up_torch() -> None:
    """Set the variables that torch reads when it is imported, unless the user has set them.

    Memory of GPUs grows in place: tensors of each step have other sizes, which would leave gaps. OpenMP's threads soon
    sleep while they wait for each other, instead of spinning on a core that another one needs: after microseconds, so
    that short waits stay short.
    """
    for variables, value in TORCH_VARIABLES.items():
        if not any(variable in os.environ for variable in variables):
            os.environ[variables[0]] = value


def _replace_closed_streams() -> None:
    """Open the null device for standard streams that were closed, so that no file gets their descriptors."""
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open until the end)


def _wants_traceback() -> bool:
    return os.environ.get(TRACEBACK_VARIABLE) == "1"


def _format_error(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error) or type(error).__name__
