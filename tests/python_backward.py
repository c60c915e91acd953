"""Backward through tensors on a GPU that is not there.

torch's engine has a queue for each device, and none for a GPU without a driver. This one runs the nodes of a graph in
the same order, on the calling thread, with what the engine does between them: it adds the gradients of what is used
twice, casts them to the dtype that the forward had, and gives them to the leaves.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge

Edge = tuple[Node, int]
"""A node, and the index of one of its inputs."""
_FIRST_TASK = 1 << 40
"""Number of the first pass: more than torch's engine counts, so that recomputed activations belong to one pass."""


class _GraphTask:
    """A pass over a graph. Hooks of tensors and nodes are not called, only those of leaves with a new gradient."""

    def __init__(self, roots: Sequence[Edge], captured: Sequence[Edge], number: int, *, keeps_graph: bool) -> None:
        self.captured, self.number, self.keeps_graph = captured, number, keeps_graph
        self.current: Node | None = None
        self._num_edges = _count_edges([node for node, _ in roots])
        self._gradients: dict[Node, dict[int, Tensor]] = {node: {} for node in self._num_edges}
        self._received: list[Tensor] = []  # so that no other tensor has the identity of one of them
        self._num_uses: Counter[int] = Counter()

    def run(self, roots: Sequence[Edge], gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Run all nodes, the latest of the forward first. Returns the gradients of ``captured``."""
        for edge, gradient in zip(roots, gradients, strict=True):
            self._add(edge, gradient)
        results: dict[Edge, Tensor] = {}
        order = count()
        ready = [(_priority(node), next(order), node) for node, edges in self._num_edges.items() if not edges]
        heapq.heapify(ready)
        while ready:
            *_, self.current = heapq.heappop(ready)
            inputs = self._gradients.pop(self.current)
            edges = [(self.current, index) for index in inputs]
            results |= {edge: inputs[edge[1]] for edge in edges if edge in self.captured}
            outputs = self._run_node(self.current, inputs)
            for (node, index), output in zip(self.current.next_functions, outputs, strict=True):
                if node is None:
                    continue
                if output is not None:
                    self._add((node, index), output)
                self._num_edges[node] -= 1
                if not self._num_edges[node]:
                    heapq.heappush(ready, (_priority(node), next(order), node))
        return tuple(results.get(edge) for edge in self.captured)

    def _add(self, edge: Edge, gradient: Tensor) -> None:
        """Add a gradient to those that a node receives."""
        node, index = edge
        metadata = node._input_metadata[index]
        if gradient.shape != torch.Size(metadata.shape):
            gradient = gradient.sum_to_size(metadata.shape)
        assert gradient.device == metadata.device, f"{node.name()} received a gradient on {gradient.device}"
        gradient = gradient.to(metadata.dtype)
        received = self._gradients[node]
        received[index] = received[index] + gradient if index in received else gradient
        self._received.append(gradient)
        self._num_uses[id(gradient)] += 1

    def _run_node(self, node: Node, inputs: dict[int, Tensor]) -> Sequence[Tensor | None]:
        """Gradients for the next functions of a node."""
        if not inputs:
            return [None] * len(node.next_functions)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            if not self.captured:
                self._accumulate(leaf, inputs[0])
            return ()
        if isinstance(node, BackwardCFunction):
            return _run_function(node, inputs)
        num_inputs = len(node._input_metadata)
        outputs = node(*(inputs.get(index) for index in range(num_inputs)))  # type: ignore[operator]
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def _accumulate(self, leaf: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of a leaf; the first one is taken without a copy if no other node has it."""
        if leaf.grad is not None:
            leaf.grad += gradient
        elif self._num_uses[id(gradient)] > 1 or not _has_layout(gradient, leaf):
            leaf.grad = torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)
        else:
            leaf.grad = gradient.detach()
        for hook in (getattr(leaf, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(leaf)


def _edge_of(tensor: Tensor) -> Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _has_layout(gradient: Tensor, leaf: Tensor) -> bool:
    strides = zip(gradient.shape, gradient.stride(), leaf.stride(), strict=True)
    return all(size == 1 or stride == expected for size, stride, expected in strides)


def _count_edges(roots: Sequence[Node]) -> Counter[Node]:
    """Nodes of a graph, and how many edges lead to each."""
    num_edges = Counter(dict.fromkeys(roots, 0))
    stack = list(num_edges)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None:
                if node not in num_edges:
                    stack.append(node)
                num_edges[node] += 1
    return num_edges


def _priority(node: Node) -> int:
    """Leaves first, then the latest node of the forward."""
    return -1 << 62 if hasattr(node, "variable") else -node._sequence_nr()


def _run_function(node: Any, inputs: dict[int, Tensor]) -> Sequence[Tensor | None]:
    """Run the backward of a `torch.autograd.Function`, which receives zeros for outputs without a gradient."""
    gradients = [
        inputs[index] if index in inputs else torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device)
        for index, metadata in enumerate(node._input_metadata)
    ]
    outputs = node.apply(*gradients)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # A function has an output for each argument, and an edge for each tensor among them.
    wanted = iter([output for output, is_needed in zip(outputs, node.needs_input_grad, strict=False) if is_needed])
    return [None if next_node is None else next(wanted) for next_node, _ in node.next_functions]


@contextlib.contextmanager
def python_backward() -> Iterator[None]:
    """Context in which backward passes run in Python, which needs no queue of a device. Second derivatives and
    `Tensor.backward(inputs=...)` are not supported."""
    tasks: list[_GraphTask] = []
    numbers = count(_FIRST_TASK)

    def run_backward(
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        keeps_graph: bool,
        creates_graph: bool,
        inputs: Sequence[Tensor],
        *_: bool,
        accumulate_grad: bool,
        **__: bool,
    ) -> tuple[Tensor | None, ...]:
        assert not creates_graph and not (inputs and accumulate_grad)
        roots, captured = ([_edge_of(tensor) for tensor in tensors] for tensors in (outputs, inputs))
        tasks.append(_GraphTask(roots, captured, next(numbers), keeps_graph=keeps_graph))
        try:
            with torch.no_grad():
                return tasks[-1].run(roots, gradients)
        finally:
            tasks.pop()

    with (
        patch.object(torch.autograd, "_engine_run_backward", run_backward),
        patch.object(torch._C, "_current_autograd_node", lambda: tasks[-1].current if tasks else None),
        patch.object(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: tasks[-1].keeps_graph),
        # Activation checkpointing recomputes once in each pass.
        patch.object(torch._C, "_current_graph_task_id", lambda: tasks[-1].number if tasks else -1),
    ):
        yield
