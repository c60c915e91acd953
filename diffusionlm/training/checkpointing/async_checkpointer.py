"""Write checkpoints in a background thread, one at a time."""

from __future__ import annotations

import threading

from ddp.process_group import SINGLE_PROCESS, World
from diffusionlm.training.checkpointing.staging import SnapshotMemory, StagedCheckpoint
from diffusionlm.training.checkpointing.store import CheckpointStore


class AsyncCheckpointer:
    """Writes staged checkpoints. `pop_failures` and `wait` report failures, not `start`.

    With several ranks, all make the same calls of `start`, `wait` and `close` and see the same failures. A process ends
    only after its thread, unless it is killed; then older checkpoints are intact.
    """

    def __init__(self, store: CheckpointStore, world: World = SINGLE_PROCESS, *, background: bool = True) -> None:
        """``world``: all ranks, with a group of their own (`World.with_own_group`)."""
        self.store = store
        self.world = world
        self.background = background
        self._thread: threading.Thread | None = None
        self._last_error: Exception | None = None
        self._unreported_failures: list[str] = []
        self._memory = SnapshotMemory()

    def reserve_memory(self) -> SnapshotMemory:
        """Wait for the previous checkpoint, whose copies are in this memory, and return it for the next one: there are
        never two snapshots in memory."""
        self._join()
        return self._memory

    def start(self, checkpoint: StagedCheckpoint) -> None:
        """Wait for the previous checkpoint, then start to write this one; in the background if enabled."""
        self._join()
        self._store_failure()
        if not self.background:
            self._write(checkpoint)
            return
        self._thread = threading.Thread(target=self._write, args=(checkpoint,), name="checkpoint")
        self._thread.start()

    def pop_failures(self) -> list[str]:
        """Return failures that were not reported yet; does not wait.

        Raises:
            Exception: any error other than a failure to write: a bug in this program.
        """
        if self._thread is None or not self._thread.is_alive():
            self._store_failure()
        failures, self._unreported_failures = self._unreported_failures, []
        return failures

    def wait(self) -> None:
        """Wait for the last started checkpoint.

        Raises:
            ValueError: it could not be written; older checkpoints are intact. `pop_failures` reports earlier failures.
        """
        self._join()
        error, self._last_error = self._last_error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the thread, free the memory and destroy the process group; `pop_failures` still reports failures."""
        self._join()
        self._memory.close()
        self.world.close_group()

    def _write(self, checkpoint: StagedCheckpoint) -> None:
        try:
            self.store.save(checkpoint, self.world)
        except Exception as error:
            self._last_error = error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _store_failure(self) -> None:
        error, self._last_error = self._last_error, None
        if isinstance(error, ValueError):
            self._unreported_failures.append(str(error))
        elif error is not None:
            raise error
