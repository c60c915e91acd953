"""Saves of a run, one at a time, in a thread beside the training."""

from __future__ import annotations

import threading

from diffusionlm.training.checkpointing.save_coordinator import SINGLE_PROCESS_COORDINATOR, SaveCoordinator
from diffusionlm.training.checkpointing.staging import StagedCheckpoint
from diffusionlm.training.checkpointing.store import CheckpointStore


class AsyncCheckpointer:
    """Writes snapshots. A failure is not raised where it happens, but told by the next `poll` or `wait`.

    Where there are several ranks, each makes the same calls of `start`, `wait` and `close`, and has the same failures.
    A process does not end before its thread does, unless it is killed; then the older checkpoints stand.
    """

    def __init__(
        self, store: CheckpointStore, world: SaveCoordinator = SINGLE_PROCESS_COORDINATOR, *, background: bool = True
    ) -> None:
        self.store = store
        self.world = world
        self.background = background
        self._thread: threading.Thread | None = None
        self._last_error: Exception | None = None
        self._unreported_failures: list[str] = []

    def start(self, snapshot: StagedCheckpoint) -> None:
        """Begin to write, after the one before has been written; returns at once where that goes on in background."""
        self._join()
        self._store_failure()
        if not self.background:
            self._write(snapshot)
            return
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint")
        self._thread.start()

    def pop_failures(self) -> list[str]:
        """Why saves failed of which that has not been told yet; does not wait.

        Raises:
            Exception: what went wrong was no failure to write, but a mistake in this program.
        """
        if self._thread is None or not self._thread.is_alive():
            self._store_failure()
        told, self._unreported_failures = self._unreported_failures, []
        return told

    def wait(self) -> None:
        """Wait for the one that was started last.

        Raises:
            ValueError: it failed; older checkpoints stand. Failures before it are left to `poll`.
        """
        self._join()
        error, self._last_error = self._last_error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the thread and give the ranks' group back; failures are left to `poll`."""
        self._join()
        self.world.close()

    def _write(self, snapshot: StagedCheckpoint) -> None:
        try:
            self.store.save(snapshot.step, snapshot, self.world)
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
