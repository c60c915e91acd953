"""The kernels of a recorded step: one for each operator, or fused as torch.compile does in the blocks.

The compiler's own choice is not computed. The rule: operators of a block that share a tensor are one kernel, until a
matrix product reads what they have written. It reads what it needs from outside once and writes what others read. What
only the backward needs is not written: there it is computed again from what the forward's kernel read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarking.implementations.matrix_products import MatrixProduct
from profiling.roofline.operators import Operator, Phase, TensorUse


@dataclass(frozen=True)
class Kernel:
    """What a GPU computes in one launch."""

    name: str
    part: str
    phase: Phase
    products: tuple[MatrixProduct, ...]
    num_bytes: int
    is_compiled: bool = False

    @property
    def flops(self) -> int:
        return sum(product.flops for product in self.products)


@dataclass(eq=False)
class _Run:
    """Operators of a block that become one kernel."""

    operators: list[Operator] = field(default_factory=list)
    """In the order of the record."""

    def shares_tensor(self, operator: Operator) -> bool:
        """Whether an operator reads what the run reads or writes, or writes it in place."""
        own = {use.storage for each in self.operators for use in (*each.reads, *each.writes)}
        return not own.isdisjoint(use.storage for use in (*operator.reads, *operator.writes))

    @property
    def is_backward(self) -> bool:
        return self.operators[0].phase == "backward"

    def reads(self) -> dict[int, TensorUse]:
        """What is read from outside, by identity; of a tensor that is read twice, the larger use."""
        uses: dict[int, TensorUse] = {}
        written: set[int] = set()
        for operator in self.operators:
            for use in operator.reads:
                if use.storage not in written:
                    uses[use.storage] = max(use, uses.get(use.storage, use), key=lambda each: each.num_bytes)
            written.update(use.storage for use in operator.writes)
        return uses

    def writes(self) -> dict[int, TensorUse]:
        return {use.storage: use for operator in self.operators for use in operator.writes}


def list_kernels(operators: Sequence[Operator], *, is_compiled: bool) -> list[Kernel]:
    """Kernels of a step, in order; ``is_compiled``: the operators of blocks are fused."""
    if not is_compiled:
        return [_kernel_of(operator) for operator in operators]
    steps = _split(operators)
    readers = _find_readers(steps)
    runs = [step for step in steps if isinstance(step, _Run)]
    writers: dict[int, _Run] = {}
    kernels: dict[int, Kernel] = {}
    for run in runs:
        reads = _with_recomputation(run, writers, readers)
        outputs = {identity: use for identity, use in run.writes().items() if _is_stored(run, readers.get(identity))}
        num_bytes = sum(use.num_bytes for use in (*reads.values(), *outputs.values()))
        kernels[id(run)] = Kernel("fused", _part_of(run), run.operators[0].phase, (), num_bytes, is_compiled=True)
        writers |= dict.fromkeys(run.writes(), run)
    return [kernels[id(step)] if isinstance(step, _Run) else _kernel_of(step) for step in steps]


def _kernel_of(operator: Operator) -> Kernel:
    return Kernel(operator.name, operator.part, operator.phase, operator.products, operator.num_bytes)


def _is_fused(operator: Operator) -> bool:
    return operator.layer is not None and operator.call is not None and not operator.products


def _split(operators: Sequence[Operator]) -> list[Operator | _Run]:
    """Operators that stay alone, and runs of the others."""
    order = {id(operator): index for index, operator in enumerate(operators)}
    steps: list[Operator | _Run] = []
    open_runs: list[_Run] = []
    place: tuple[int | None, Phase] | None = None
    for operator in operators:
        if operator.layer is not None and (operator.layer, operator.phase) != place:
            open_runs, place = [], (operator.layer, operator.phase)
        if not _is_fused(operator):
            read = {use.storage for use in operator.reads}
            open_runs = [run for run in open_runs if read.isdisjoint(run.writes())]
            steps.append(operator)
            continue
        joined = [run for run in open_runs if run.shares_tensor(operator)]
        merged = _Run(
            sorted([*(each for run in joined for each in run.operators), operator], key=lambda each: order[id(each)])
        )
        open_runs = [run for run in open_runs if run not in joined] + [merged]
        steps = [step for step in steps if not any(step is run for run in joined)] + [merged]
    return steps


def _find_readers(steps: Sequence[Operator | _Run]) -> dict[int, list[Operator | _Run]]:
    readers: dict[int, list[Operator | _Run]] = {}
    for step in steps:
        uses = step.reads().values() if isinstance(step, _Run) else step.reads
        for use in uses:
            readers.setdefault(use.storage, []).append(step)
    return readers


def _is_stored(run: _Run, readers: Sequence[Operator | _Run] | None) -> bool:
    """Whether a kernel writes a tensor: somebody reads it who does not compute it again."""
    return any(
        reader is not run and (run.is_backward or not isinstance(reader, _Run) or not reader.is_backward)
        for reader in readers or ()
    )


def _with_recomputation(
    run: _Run, writers: dict[int, _Run], readers: dict[int, list[Operator | _Run]]
) -> dict[int, TensorUse]:
    """What a kernel reads, if in place of tensors that the forward did not write it reads what they are made of."""
    reads: dict[int, TensorUse] = {}
    for identity, use in run.reads().items():
        writer = writers.get(identity)
        is_missing = writer is not None and run.is_backward and not _is_stored(writer, readers.get(identity))
        reads |= writer.reads() if is_missing and writer is not None else {identity: use}
    return reads


def _part_of(run: _Run) -> str:
    """The part with most of the bytes; casts are fused with what they are for."""
    sizes: Counter[str] = Counter()
    for operator in run.operators:
        sizes[operator.part] += operator.num_bytes
    names = [name for name in sizes if name != "casts"] or ["casts"]
    return max(names, key=lambda name: sizes[name])
