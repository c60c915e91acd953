"""Starts the ranks of a run on this machine, by torch's own elastic agent, and ends as they end.

What the agent does not do, and a training run needs:

* Signals. The agent ends its ranks, kills them after half a minute, and exits with 1 and a traceback. Here a signal is
  passed on to each rank, once, whoever it was sent to; the ranks finish their step and save, and their exit code is the
  command's.
* Restarts. The agent starts the ranks anew after any failure; here not after one that is the user's to mend, nor after
  a signal.
* Errors. What several ranks have to say is said once.
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

from config.parallel import MultiProcessOptions
from profiling.cores import usable_cores

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What asks a run to save and end: Ctrl-C, a batch system, Slurm's warning. Where the launcher itself is gone, its
ranks get SIGINT from the system."""
EXIT_CODE_UNKNOWN = -1
"""How a run ends, while that is open."""

RankFunction = Callable[[], int]
"""What a rank runs, a picklable function; returns its exit code."""


@dataclass(frozen=True)
class Nodes:
    """The machines of a run."""

    count: int = 1
    rendezvous: str = "localhost:0"
    """HOST:PORT where the machines meet: HOST is one of them. Port 0: any free one, where there is one machine."""
    job: str = "diffusionlm"
    """What tells this run from others that meet there."""


@dataclass(frozen=True)
class RankFailure:
    """What ended a rank."""

    rank: int
    attempt: int
    """Restarts before this."""
    is_user_error: bool
    """Whether it is an error that the user can mend; else one of the program or the machine."""
    text: str
    at: float
    """Seconds since the epoch."""


def count_local_ranks(parallel: MultiProcessOptions, device: str) -> int:
    """Ranks to start on this machine; ``device`` is `run.device`.

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
    """Run ``act`` in ``local_ranks`` fresh processes of this machine, with torchrun's environment, and wait for them.

    Each has its share of the cores as OMP_NUM_THREADS, unless that is set. Errors go to stderr, headed by ``name``. To
    be called by the main thread.

    Returns:
        The exit code: that of the ranks, which is 128 + signal where one stopped them; 1 where one failed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // local_ranks)))
    # Else the agent keeps one store over all restarts, in which new ranks find the addresses of dead ones.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    shared_exit_code: Synchronized[int] = multiprocessing.get_context("spawn").Value("i", EXIT_CODE_UNKNOWN)
    with tempfile.TemporaryDirectory(prefix="diffusionlm-ranks-") as folder, _forward_signals(shared_exit_code):
        outcome = _run_agent((function, shared_exit_code, folder, name), local_ranks, max_restarts, nodes or Nodes())
        failures = read_failures(Path(folder))
    if isinstance(outcome, int) and outcome != 1:
        return outcome
    last = [failure for failure in failures if failure.attempt == failures[-1].attempt]
    is_user_error = any(failure.is_user_error for failure in last)
    ended_by = shared_exit_code.value
    if ended_by > 128 and not is_user_error:
        print(f"{name}: ended by {signal.Signals(ended_by - 128).name}, before it could save", file=sys.stderr)
        return ended_by
    told = [format_failures(name, last)] if last else []
    if isinstance(outcome, str) and not is_user_error:
        told.append(f"{name}: {outcome}")
    print("\n".join(told), file=sys.stderr, flush=True)
    return 1


def run_rank(function: RankFunction, shared_exit_code: Synchronized[int], folder: str, name: str) -> int:
    """What the agent starts in each process: ``act``, and a note of how it failed, if it does.

    ``verdict`` is how the run ends, once that is known; a rank that is started later does so at once.
    """
    launcher = os.getppid()
    # The terminal's Ctrl-C now reaches the launcher alone, which passes it on as any other signal.
    with suppress(PermissionError):
        os.setsid()
    pending = [number for number in FORWARDED_SIGNALS if number in signal.sigpending()]
    if pending or shared_exit_code.value != EXIT_CODE_UNKNOWN:
        return shared_exit_code.value if shared_exit_code.value != EXIT_CODE_UNKNOWN else 128 + pending[0]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
    rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt and os.environ["LOCAL_RANK"] == "0":
        before = [failure for failure in read_failures(Path(folder)) if failure.attempt == attempt - 1]
        why = format_failures(name, before) or f"{name}: a rank died without a word"
        most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        print(f"{why}\n{name}: all ranks start anew, {attempt} of {most} times", file=sys.stderr, flush=True)
    try:
        code = function()
        if os.getppid() != launcher:  # for whom torch would have this process wait
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code
    except (ValueError, OSError) as error:
        shared_exit_code.value = 1
        whole = os.environ.get("DIFFUSIONLM_TRACEBACK") == "1"
        failure = RankFailure(rank, attempt, True, traceback.format_exc() if whole else str(error), time.time())
    except Exception:
        failure = RankFailure(rank, attempt, False, traceback.format_exc(), time.time())
    _write_failure(failure, Path(folder))
    raise SystemExit(1)


def _write_failure(failure: RankFailure, folder: Path) -> None:
    part = folder / f"{failure.attempt}-{failure.rank}.part"
    part.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    part.rename(part.with_suffix(".json"))


def read_failures(folder: Path) -> list[RankFailure]:
    """What ranks of this machine have put down, in the order of time."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("*.json")]
    return sorted((RankFailure(**json.loads(text)) for text in texts), key=lambda failure: failure.at)


def format_failures(name: str, failures: Sequence[RankFailure]) -> str:
    """What to say of them, in the order of time: the user's errors alone, where there are any, since the others follow
    from these. Else the first traceback, and the last lines of the others."""
    users = [failure for failure in failures if failure.is_user_error]
    if users:
        texts = dict.fromkeys(failure.text for failure in users)
        if len(texts) == 1:
            return f"{name}: error: {users[0].text}"
        return "\n".join(f"{name}: error on rank {failure.rank}: {failure.text}" for failure in users)
    lines = []
    for index, failure in enumerate(failures):
        text = failure.text.rstrip()
        shown = text if index == 0 else text.rpartition("\n")[2]
        lines.append(f"{name}: rank {failure.rank} failed{':' if index else ' first:'}\n{shown}")
    return "\n".join(lines)


@contextmanager
def _forward_signals(shared_exit_code: Synchronized[int]) -> Iterator[None]:
    """Pass signals on to the ranks; the first one is the verdict.

    Ranks start with them blocked, and are not ended in the middle of their imports: they take them up in `run_rank`.
    The main thread blocks them for that, since its processes inherit it. A thread that only waits takes them, and
    Python then calls the handlers in the main one.
    """
    forwarded = [number for number in FORWARDED_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]

    def pass_on(number: int, frame: FrameType | None) -> None:
        if shared_exit_code.value == EXIT_CODE_UNKNOWN:
            shared_exit_code.value = 128 + number
        ranks = multiprocessing.active_children()
        if not ranks:  # nothing has begun
            raise SystemExit(128 + number)
        for process in ranks:
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, number)

    # Python's helper process unblocks signals here when it is started, so that must be over.
    resource_tracker.ensure_running()
    done = threading.Event()
    threading.Thread(target=done.wait, daemon=True).start()
    handlers = {number: signal.signal(number, pass_on) for number in forwarded}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        done.set()


def _run_agent(arguments: tuple[object, ...], local_ranks: int, max_restarts: int, nodes: Nodes) -> int | str:
    """The largest exit code, if all ranks have one; else what became of the one that failed."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # They log each failure with a traceback of their own; `describe` says it once.
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
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"rank {rank} {how}"
    except SignalException as error:
        return 128 + int(error.sigval)
    return max(codes.values())
