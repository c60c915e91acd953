"""Compiled blocks, with backends that need no C++ compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockDiffusion, Causal
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.block_wrapping import compile_blocks
from tests.conftest import MakeModel

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")]
"""The compiler is loaded, which takes seconds."""

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
CAPS = {"attn_logit_softcapping": 5.0, "sandwich_norms": True}
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2], [0] * 10])
CASES: dict[str, tuple[AttentionPattern, dict[str, Any]]] = {
    "no mask": (Bidirectional(), {}),
    "documents": (Bidirectional(DOCUMENTS), {"backend": "sdpa"}),
    "two streams, tiled": (BlockDiffusion(2), {"backend": "tiled"}),
    "two streams, flex": (BlockDiffusion(2), {"backend": "flex"}),
    "experts": (Bidirectional(), EXPERTS),
    "soft caps": (Causal(), CAPS),
    "soft caps, documents": (Causal(DOCUMENTS), {"backend": "eager", **CAPS}),
    "soft caps, flex": (Causal(DOCUMENTS), {"backend": "flex", **CAPS}),
}
NUM_GRAPHS = {"two streams, tiled": 8, "experts": 4}
"""Graphs of the ordinary block and the last one together, where they are not one graph each: tiles and experts are not
compiled, and split a block into four or two."""


@pytest.fixture(autouse=True)
def _flex_with_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention has no backward on a CPU; what a compiler records of it has one, made of torch's operators."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    monkeypatch.setattr("diffusionlm.models.flex._check_backward", lambda *tensors: None)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def gradients(model: Transformer, pattern: AttentionPattern, rows: torch.Tensor) -> list[torch.Tensor]:
    tokens = torch.randint(0, 19, (2, 10), generator=torch.Generator().manual_seed(3))
    count = len(rows)
    loss_inputs = LossInputs(
        torch.arange(count), torch.ones(count), load_balancing_weight=float(model.config.num_experts > 0)
    )
    scored = model(tokens, pattern=pattern, output_positions=rows, loss_inputs=loss_inputs)
    return [scored.loss_sum.detach(), *torch.autograd.grad(scored.total_loss, list(model.parameters()))]


class CountingBackend:
    """Runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


@pytest.mark.parametrize("case", CASES)
def test_a_block_is_one_graph_for_any_rows_documents_and_blocks(tiny_model: MakeModel, case: str) -> None:
    """It is compiled once, and the last block once, which has fewer rows. A validation compiles nothing."""
    pattern, overrides = CASES[case]
    backend = CountingBackend()
    model = tiny_model(num_hidden_layers=4, **overrides)
    compile_blocks(model, backend)
    for end, num_rows in ((2, 3), (3, 5), (5, 7), (8, 2)):
        if isinstance(pattern, BlockDiffusion):
            pattern = BlockDiffusion(end)
        elif pattern.documents_BL is not None:
            pattern = pattern.with_documents(DOCUMENTS.roll(end, 1).sort().values)
        gradients(model, pattern, torch.arange(num_rows))
        with torch.no_grad():
            model(torch.zeros(3, end * 2, dtype=torch.int64), pattern=Causal())
    assert backend.count == NUM_GRAPHS.get(case, 2)
    has_breaks = bool(torch._dynamo.utils.counters["graph_break"])
    assert has_breaks == (case in NUM_GRAPHS)


def test_versions_of_a_block(tiny_model: MakeModel) -> None:
    """Another batch size costs a version of each of both blocks, one row and no row a version each of the last one; all
    of them and those of a frozen embedding are compiled."""
    backend = CountingBackend()
    model = tiny_model()
    compile_blocks(model, backend)
    counts = []
    for is_frozen in (False, True):
        model.model.embed_tokens.weight.requires_grad_(not is_frozen)
        for batch, num_rows in ((4, 3), (3, 2), (2, 5), (2, 1), (2, 0), (1, 4)):
            rows, tokens = torch.arange(num_rows), torch.zeros(batch, 6, dtype=torch.int64)
            loss_inputs = LossInputs(rows, torch.ones(num_rows))
            model(tokens, pattern=Causal(), output_positions=rows, loss_inputs=loss_inputs).total_loss.backward()
            counts.append(backend.count)
    assert counts[:6] == [2, 4, 4, 5, 6, 8]
    assert counts[6:] == [9, 9, 9, 9, 9, 10]
