"""Start the ranks of a run on this machine with torch's elastic agent, and return their exit code.

This adds what a training run needs beyond the agent:

* Signals. The agent terminates its ranks, kills them after 30 seconds and exits with 1 and a traceback. Here a signal
  is forwarded to each rank once; the ranks finish their step and save, and their exit code is the command's.
* Restarts. The agent restarts the ranks after any failure; here not after a user error or a signal.
* Errors. An error that several ranks share is printed once.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import resource_tracker
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from types import FrameType
from urllib.parse import quote

from config.training.parallel import MultiProcessOptions
from files.atomic import write_text_atomic
from files.stop_signals import STOP_SIGNALS
from files.terminal_text import print_message
from files.usage_error import UsageError
from profiling.cores import usable_cores

EXIT_CODE_UNKNOWN = -1
"""Value of the shared exit code while the run goes on."""

RankFunction = Callable[[], int]
"""A picklable function that a rank runs; returns its exit code."""


@dataclass(frozen=True)
class Nodes:
    """The machines of a run."""

    count: int = 1
    rendezvous: str = "localhost:0"
    """HOST:PORT of the rendezvous, on one of the machines. Port 0: any free port, for a single machine."""
    job: str = "diffusionlm"
    """Id of this run among those that use the rendezvous."""


@dataclass(frozen=True)
class RankFailure:
    """The error that ended a rank."""

    rank: int
    attempt: int
    """Number of restarts before this one."""
    is_user_error: bool
    """True if the user can fix the error; otherwise it is an error of the program or the machine."""
    text: str
    at: float
    """Seconds since the epoch."""
    is_usage_error: bool = False
    """True for a user error that was found before the work began."""


def count_local_ranks(parallel: MultiProcessOptions, device: str) -> int:
    """Return the number of ranks to start on this machine; ``device`` is `run.device`.

    Raises:
        ValueError: fewer GPUs than `parallel.local_ranks`.
    """
    import torch

    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if parallel.local_ranks == "auto":
        return gpus or 2
    if gpus and parallel.local_ranks > gpus:
        raise ValueError(
            f"parallel.local_ranks = {parallel.local_ranks}, but this machine has {gpus} GPUs, and each rank needs "
            f'one: set it to {gpus} at most or to "auto", or run.device to "cpu"'
        )
    return parallel.local_ranks


def launch(
    function: RankFunction, local_ranks: int, *, name: str, max_restarts: int = 0, nodes: Nodes | None = None
) -> int:
    """Run ``function`` in ``local_ranks`` new processes with torchrun's environment, and wait for them.

    OMP_NUM_THREADS, unless set, becomes a rank's share of the cores. Errors go to stderr, prefixed with ``name``. Call
    this in the main thread.

    Returns:
        The exit code of the ranks: 128 + signal if a signal stopped them; 1 if a rank failed, 2 at a UsageError.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // local_ranks)))
    # Else all restarts share one store, in which new ranks find the addresses of dead ones.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    shared_exit_code: Synchronized[int] = multiprocessing.get_context("spawn").Value("i", EXIT_CODE_UNKNOWN)
    with tempfile.TemporaryDirectory(prefix="diffusionlm-ranks-") as folder, _forward_signals(shared_exit_code):
        outcome = _run_agent((function, shared_exit_code, folder, name), local_ranks, max_restarts, nodes or Nodes())
        failures = read_failures(Path(folder))
    if isinstance(outcome, int) and outcome != 1:
        return outcome
    last = [failure for failure in failures if failure.attempt == failures[-1].attempt]
    is_user_error = any(failure.is_user_error for failure in last)
    exit_code = shared_exit_code.value
    if exit_code > 128 and not is_user_error:
        print_message(f"{name}: ended by {signal.Signals(exit_code - 128).name}, before it could save")
        return exit_code
    messages = [format_failures(name, last)] if last else []
    if isinstance(outcome, str) and not is_user_error:
        messages.append(f"{name}: {outcome}")
    print_message("\n".join(messages))
    return 2 if any(failure.is_usage_error for failure in last) else 1


def run_rank(function: RankFunction, shared_exit_code: Synchronized[int], folder: str, name: str) -> int:
    """Run ``function`` in a process of the agent, and write a `RankFailure` to ``folder`` if it fails.

    If ``shared_exit_code`` is already set, the run is ending and this rank returns the code at once.
    """
    launcher = os.getppid()
    # In a session of its own: Ctrl-C of the terminal reaches the launcher alone, which forwards it.
    with suppress(PermissionError):
        os.setsid()
    pending = [number for number in STOP_SIGNALS if number in signal.sigpending()]
    if pending or shared_exit_code.value != EXIT_CODE_UNKNOWN:
        return shared_exit_code.value if shared_exit_code.value != EXIT_CODE_UNKNOWN else 128 + pending[0]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt and os.environ["LOCAL_RANK"] == "0":
        before = [failure for failure in read_failures(Path(folder)) if failure.attempt == attempt - 1]
        why = format_failures(name, before) or f"{name}: a rank died without an error message"
        max_restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        print_message(f"{why}\n{name}: restarting all ranks, {attempt} of {max_restarts} times")
    try:
        code = function()
        if os.getppid() != launcher:  # the launcher is gone, and torch would wait for it
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code
    except (ValueError, OSError) as error:
        is_usage_error = isinstance(error, UsageError)
        shared_exit_code.value = 2 if is_usage_error else 1
        text = traceback.format_exc() if os.environ.get("DIFFUSIONLM_TRACEBACK") == "1" else str(error)
        failure = RankFailure(rank, attempt, True, text, time.time(), is_usage_error)
    except MemoryError as error:
        failure = RankFailure(rank, attempt, False, str(error), time.time())
    except Exception:
        failure = RankFailure(rank, attempt, False, traceback.format_exc(), time.time())
    write_text_atomic(Path(folder) / f"{attempt}-{rank}.json", json.dumps(asdict(failure)))
    raise SystemExit(1)


def read_failures(folder: Path) -> list[RankFailure]:
    """Read the failures that ranks of this machine have written, in order of time."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("*.json")]
    return sorted((RankFailure(**json.loads(text)) for text in texts), key=lambda failure: failure.at)


def format_failures(name: str, failures: Sequence[RankFailure]) -> str:
    """Format failures for stderr.

    User errors hide the others, which follow from them. Without any, the first traceback and the last lines of the
    others are shown.
    """
    users = [failure for failure in failures if failure.is_user_error]
    if users:
        texts = dict.fromkeys(failure.text for failure in users)
        if len(texts) == 1:
            return f"{name}: error: {users[0].text}"
        return "\n".join(f"{name}: error on rank {failure.rank}: {failure.text}" for failure in users)
    lines = []
    for index, failure in enumerate(failures):
        text = failure.text.rstrip()
        excerpt = text if index == 0 else text.rpartition("\n")[2]
        lines.append(f"{name}: rank {failure.rank} failed{':' if index else ' first:'}\n{excerpt}")
    return "\n".join(lines)


@contextmanager
def _forward_signals(shared_exit_code: Synchronized[int]) -> Iterator[None]:
    """Forward signals to the ranks; the first one sets the shared exit code.

    Ranks start with the signals blocked, so that none ends them during their imports, and unblock them in `run_rank`.
    They inherit the mask of the main thread. Another thread that only waits receives the signals; Python then calls the
    handlers in the main thread.
    """
    forwarded = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]

    def forward(number: int, frame: FrameType | None) -> None:
        if shared_exit_code.value == EXIT_CODE_UNKNOWN:
            shared_exit_code.value = 128 + number
        ranks = multiprocessing.active_children()
        if not ranks:  # none has started
            raise SystemExit(128 + number)
        for process in ranks:
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, number)

    # Starting this helper process unblocks signals here, so start it before they are blocked.
    resource_tracker.ensure_running()
    done = threading.Event()
    threading.Thread(target=done.wait, daemon=True).start()
    handlers = {number: signal.signal(number, forward) for number in forwarded}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        done.set()


def _run_agent(arguments: tuple[object, ...], local_ranks: int, max_restarts: int, nodes: Nodes) -> int | str:
    """Return the largest exit code of the ranks; if one died, a description of that."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Both log each failure with a traceback; `format_failures` reports it once.
    for logs in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(logs).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=local_ranks,
        run_id=quote(nodes.job, safe=""),  # it becomes the name of a folder
        rdzv_backend="c10d",
        rdzv_endpoint=nodes.rendezvous,
        max_restarts=max_restarts,
        start_method="spawn",
        local_addr="localhost" if nodes.count == 1 else None,
        signals_to_handle="SIGQUIT",
    )
    try:
        codes: dict[int, int] = elastic_launch(config, run_rank)(*arguments)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        code = first.exitcode
        outcome = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"rank {rank} {outcome}"
    except SignalException as error:
        return 128 + int(error.sigval)
    return max(codes.values())
