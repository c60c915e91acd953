"""Build the noised micro-batches of each optimizer step, in this process or ahead of time in workers.

The first worker runs the loader; further ones tokenize for it. Batches and positions do not depend on the number of
workers. The state of a loader is small and resumes exactly.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.data import DataConfig
from config.model import ModelConfig
from config.training.objective import ObjectiveConfig
from diffusionlm.data.packing import Row, append_mismatch, pad_to_longest, split_row_randomly
from diffusionlm.data.pipeline import (
    MixtureComponent,
    build_preference_reader,
    build_row_reader,
    describe_skipped,
    open_components,
)
from diffusionlm.data.reader import ReaderPosition, ResumableReader, iterate
from diffusionlm.data.tokenization import TextEncoder, WorkerPool, open_text_encoder
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.objectives import Objective, build_objective
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.diffusion.segments import segment_starts
from diffusionlm.vision.batches import build_image_inputs
from diffusionlm.vision.features import FeatureStore
from diffusionlm.vision.processor import ImageProcessor
from tokenizer import Tokenizer

ROWS_PER_READ = 1_024


def collate_rows(
    rows: Sequence[Row], processor: ImageProcessor | None = None, features: FeatureStore | None = None
) -> CleanBatch:
    """Stack B rows of L tokens into tensors of shape [B, L], and compute the patches of their images.

    Args:
        processor: the one that has read the images. None: there are none.
        features: has features of images, which then need no patches. None: there are none.

    Raises:
        ValueError: an image cannot be read any more.
    """
    placed, images = [row.images for row in rows], None
    assert processor is not None or not any(placed), "the encoder of the conversations had it"
    if processor is not None:
        read_features = None if features is None else features.read
        images = build_image_inputs(placed, len(rows[0].tokens_L), processor.compute_patches, read_features)
    segments_BL = _stack([row.segment_ids_L for row in rows if row.segment_ids_L is not None])
    return CleanBatch(
        tokens_BL=torch.from_numpy(np.stack([row.tokens_L for row in rows])).long(),
        loss_mask_BL=torch.from_numpy(np.stack([row.loss_mask_L for row in rows])),
        document_BL=torch.from_numpy(np.stack([row.document_ids_L for row in rows])),
        segment_BL=None if segments_BL is None else segments_BL.long(),
        is_eos_padding_BL=_stack([row.is_eos_padding_L for row in rows if row.is_eos_padding_L is not None]),
        is_desirable_B1=_stack([row.is_desirable_1 for row in rows if row.is_desirable_1 is not None]),
        images=images,
    )


def _stack(values: list[NDArray[Any]]) -> Tensor | None:
    return torch.from_numpy(np.stack(values)) if values else None


def _count_noise_sequences(row: Row) -> int:
    return 1 if row.segment_ids_L is None else len(segment_starts(row.segment_ids_L))


def count_rows(reader: ResumableReader[Row]) -> int:
    """Count the rows of one epoch by reading it."""
    return sum(1 for _ in iterate(reader, ROWS_PER_READ))


@dataclass(frozen=True)
class LoadedStep:
    """What a loader returns for a step. The names of numbers are metric keys under ``data/``."""

    noised_batches: list[NoisedBatch]
    """The forwards of this rank's micro-batches, in order."""
    state: dict[str, Any]
    """A JSON value that says where the next step reads; `StepLoader.load_state_dict` continues from it."""
    tokens_per_second: float
    """Tokens without padding, per second of reading, packing and drawing noise."""
    wait_seconds: float
    buffered_steps: int = 0
    """Steps that the workers had ready when this one was requested; 0 without workers."""
    metrics: dict[str, float] = field(default_factory=dict)
    """More metrics of the step, with their whole names."""


class StepLoader(Protocol):
    """Source of a run's noised batches: `Loader` in this process, `WorkerLoader` with workers."""

    def next_step(self, step: int) -> LoadedStep:
        """Build the batches of a step.

        Raises:
            ValueError: the sources cannot be read, or have no documents.
            ChildProcessError: a worker ended.
        """

    @property
    def can_resume(self) -> bool:
        """A run can continue from the state after the last step. False: only after a later one."""
        return True

    def prefetch(self, step: int) -> None:
        """Prepare the next step while the device computes, if the loader can."""
        return

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state after a step; before the first step only."""

    def close(self) -> None:
        """End the workers; no more steps are requested."""
        return


@dataclass
class Loader(StepLoader):
    """Builds the batches of a step when it is requested, epoch after epoch.

    All ranks read the same rows, and each keeps its part of every step. So rows and noise are the same for any number
    of ranks, and a state serves any number of them.
    """

    rows: ResumableReader[Row]
    objective: Objective
    batch_size: int
    """Rows of a step over all ranks."""
    micro_batch_size: int
    """Rows of one forward."""
    seed: int
    random_length_probability: float = 0.0
    """Probability that the rows of a step are split at random positions."""
    rank: int = 0
    world_size: int = 1
    components: Sequence[MixtureComponent] = ()
    """The sources of the rows, for their skip counts."""
    pads_to_longest: bool = False
    """Each row of a step is filled up to the length of its longest conversation."""
    appends_mismatches: bool = False
    """Each row of a step also has its prompt with the answer of the next row, the last one with that of the first."""
    processor: ImageProcessor | None = None
    """The one that has read the images of the rows. None: there are none."""
    features: FeatureStore | None = None
    """Stored features of images. None: there are none."""

    def __post_init__(self) -> None:
        self.epoch = 0
        self.position: ReaderPosition = None
        self._num_positions = 0
        self._num_padding = 0
        self._num_timed_tokens = 0
        self._seconds = 0.0

    def next_step(self, step: int) -> LoadedStep:
        started = time.perf_counter()
        rows_per_rank = self.batch_size // self.world_size
        first_row = self.rank * rows_per_rank
        all_rows = self._next_rows()
        if self.pads_to_longest:
            all_rows = pad_to_longest(all_rows)
        if self.appends_mismatches:
            all_rows = list(map(append_mismatch, all_rows, [*all_rows[1:], all_rows[0]]))
        self._count_positions(all_rows)
        rows = all_rows[first_row : first_row + rows_per_rank]
        if keyed_rng(self.seed, RngStream.RANDOM_LENGTH, step).random() < self.random_length_probability:
            rows = [
                split_row_randomly(row, keyed_rng(self.seed, RngStream.RANDOM_LENGTH, step, first_row + index))
                for index, row in enumerate(rows)
            ]
        # The segments of conversations are noised as sequences of their own, and each has its own random numbers.
        first_sequences = np.cumsum([0, *map(_count_noise_sequences, all_rows)]).tolist()
        noised_batches = []
        for start in range(0, rows_per_rank, self.micro_batch_size):
            batch = collate_rows(rows[start : start + self.micro_batch_size], self.processor, self.features)
            key = NoiseKey(self.seed, step, first_sequences[first_row + start], first_sequences[-1])
            forwards = (self.objective.build_noised_batch(batch, key), self.objective.build_auxiliary_batch(batch))
            noised_batches += [
                replace(noised_batch, first_row=first_row + start, num_rows=len(batch.tokens_BL))
                for noised_batch in forwards
                if noised_batch is not None
            ]
        seconds = time.perf_counter() - started
        self._seconds += seconds
        return LoadedStep(noised_batches, self.state_dict(), self._num_timed_tokens / self._seconds, seconds)

    def _next_rows(self) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < self.batch_size:
            is_epoch_start = self.position is None
            new_rows, self.position = self.rows.read(self.epoch, self.position, self.batch_size - len(rows))
            if is_epoch_start and not new_rows:
                left_out = describe_skipped(self.components)
                raise ValueError(
                    f"[data]: the sources have no documents to train on{left_out}; check their paths and limits"
                )
            rows += new_rows
            if self.position is None:
                self.epoch += 1
        return rows

    def _count_positions(self, rows: list[Row]) -> None:
        num_positions = sum(row.document_ids_L.size for row in rows)
        num_padding = sum(int((row.document_ids_L < 0).sum()) for row in rows)
        self._num_positions += num_positions
        self._num_padding += num_padding
        self._num_timed_tokens += num_positions - num_padding

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON value that says where the next step reads."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_positions": self._num_positions,
            "padding": self._num_padding,
            "skip_logs": [[asdict(log) for log in component.skip_logs] for component in self.components],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self._num_positions, self._num_padding = state["num_positions"], state["padding"]
        # Older states have no logs, or none of synthetic sources, which are first.
        for component, saved in zip(self.components, state.get("skip_logs", ()), strict=False):
            for log, log_state in zip(reversed(component.skip_logs), reversed(saved), strict=False):
                vars(log).update(log_state)


@dataclass(frozen=True)
class LoaderSpec:
    """The configuration of a loader; it can be sent to another process."""

    data: DataConfig
    tokenizer: Tokenizer
    row_length: int
    objective: ObjectiveConfig
    model: ModelConfig
    batch_size: int
    micro_batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1
    processor: ImageProcessor | None = None
    """Reads the images of conversations. None: the model has no vision tower."""
    features: FeatureStore | None = None
    """Stored features of images. None: there are none."""

    def open(self, components: list[MixtureComponent] | None = None, encoder: TextEncoder | None = None) -> Loader:
        """Build the loader.

        Args:
            components: the training sources, if they are open already.
            encoder: None: tokenize in this process.

        Raises:
            ValueError: the sources cannot be read, or the rows do not fit.
        """
        components = open_components(self.data, "train", processor=self.processor) if components is None else components
        sources = (components, self.data, self.tokenizer, self.row_length, self.seed)
        block_length = self.objective.longest_block_length
        is_unpaired = self.objective.kind == "preference" and self.objective.loss.is_unpaired
        if self.objective.kind == "preference":
            rows = build_preference_reader(*sources, block_length, is_unpaired=is_unpaired)
        else:
            rows = build_row_reader(*sources, encoder=encoder, block_length=block_length)
        return Loader(
            rows=rows,
            objective=build_objective(self.objective, self.model),
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            seed=self.seed,
            random_length_probability=self.data.random_length_probability,
            rank=self.rank,
            world_size=self.world_size,
            components=components,
            pads_to_longest=self.data.pads_to_longest,
            appends_mismatches=is_unpaired,
            processor=self.processor,
            features=self.features,
        )


class WorkerLoader(StepLoader):
    """A loader whose loader runs in another process, up to `data.prefetch_steps` ahead."""

    def __init__(self, spec: LoaderSpec) -> None:
        self._spec = spec
        self._state: dict[str, Any] | None = None
        self._pool: WorkerPool | None = None
        self._futures: deque[Future[Path]] = deque()
        self._next_step = 0

    def next_step(self, step: int) -> LoadedStep:
        if self._pool is None:
            death = ChildProcessError(
                "the process that loads data ended; if the system ran out of memory, lower data.prefetch_steps, "
                "data.document_shuffle_window or data.row_shuffle_window"
            )
            self._pool, self._next_step = WorkerPool(1, _WorkerJob(self._spec, self._state), death), step
        assert step == self._next_step, "workers build the steps in order"
        started, num_buffered = time.perf_counter(), sum(future.done() for future in self._futures)
        try:
            while len(self._futures) <= self._spec.data.prefetch_steps:
                self._futures.append(self._pool.submit(_WorkerJob.build_step, step + len(self._futures)))
            loaded: LoadedStep = self._pool.wait(self._futures.popleft())
        except BaseException:
            self.close()
            raise
        wait_seconds = time.perf_counter() - started
        self._next_step = step + 1
        return replace(loaded, wait_seconds=wait_seconds, buffered_steps=num_buffered)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self._pool is None, "the workers have started already"
        self._state = state

    def close(self) -> None:
        """End the workers and drop the steps that they had ready."""
        if self._pool is not None:
            self._pool.close()


class _WorkerJob:
    """What the process of a `WorkerLoader` does: it opens the loader in its first call."""

    def __init__(self, spec: LoaderSpec, state: dict[str, Any] | None) -> None:
        self._spec, self._state = spec, state
        self._loader: Loader | None = None

    def build_step(self, step: int) -> LoadedStep:
        if self._loader is None:
            torch.set_num_threads(1)
            self._encoder = open_text_encoder(self._spec.tokenizer, self._spec.data.workers - 1)
            self._loader = self._spec.open(encoder=self._encoder.__enter__())
            if self._state is not None:
                self._loader.load_state_dict(self._state)
        return self._loader.next_step(step)
