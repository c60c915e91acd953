"""Compiled blocks, with backends that need no C++ compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from config.finetune.lora import LoraConfig
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.models.lora import add_adapter, find_dropout
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockDiffusion, Causal
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.block_wrapping import checkpoint_activations, compile_blocks

MakeModel = Callable[..., Transformer]

pytestmark = pytest.mark.slow
"""The compiler is loaded, which takes seconds."""

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
CASES: dict[str, tuple[AttentionPattern, dict[str, Any]]] = {
    "two streams": (BlockDiffusion(2), {"backend": "tiled"}),
    "experts": (Bidirectional(), EXPERTS),
    "soft caps": (Causal(), {"attn_logit_softcapping": 5.0, "sandwich_norms": True}),
}


def gradients(model: Transformer, pattern: AttentionPattern, rows: torch.Tensor) -> list[torch.Tensor]:
    tokens = torch.randint(0, 19, (2, 10), generator=torch.Generator().manual_seed(3))
    count = len(rows)
    loss_inputs = LossInputs(
        torch.arange(count), torch.ones(count), load_balancing_weight=float(model.config.num_experts > 0)
    )
    scored = model(tokens, pattern=pattern, output_positions=rows, loss_inputs=loss_inputs)
    return [scored.loss_sum.detach(), *torch.autograd.grad(scored.total_loss, list(model.parameters()))]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_same(tiny_model: MakeModel, case: str, checkpointing: Any) -> None:
    torch._dynamo.reset()
    pattern, overrides = CASES[case]
    plain, model = (tiny_model(torch.float64, **overrides) for _ in range(2))
    compile_blocks(model, "aot_eager")
    checkpoint_activations(model, checkpointing)
    for rows in (torch.tensor([0, 3, 5, 17]), torch.tensor([1, 12]), torch.tensor([0, 4, 5, 8, 9, 19])):
        ours, expected = gradients(model, pattern, rows), gradients(plain, pattern, rows)
        for first, second in zip(ours, expected, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-10)


def test_names_are_those_of_the_model(tiny_model: MakeModel) -> None:
    model = tiny_model()
    names = list(model.state_dict())
    compile_blocks(model, "eager")
    assert list(model.state_dict()) == names


def test_number_of_compilations_is_independent_of_depth_and_documents(tiny_model: MakeModel) -> None:
    """Nor do other numbers of rows, other patterns and documents compile anything."""
    counts = {}
    for depth in (2, 5):
        torch._dynamo.reset()
        compiled: list[Any] = []

        def backend(graph: Any, inputs: Any, compiled: list[Any] = compiled) -> Any:
            compiled.append(graph)
            return graph.forward

        model = tiny_model(num_hidden_layers=depth, backend="tiled")
        compile_blocks(model, backend)
        gradients(model, Causal(), torch.tensor([0, 3, 5]))
        counts[depth] = len(compiled)
        gradients(model, Causal(), torch.tensor([2, 3, 7, 8]))
        documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2], [0] * 10])
        for end in (3, 5, 6):
            gradients(model, BlockDiffusion(end), torch.arange(end))
            gradients(model, Causal(documents.roll(end, 1).sort().values), torch.arange(end))
        assert len(compiled) == counts[depth]
    assert counts[5] == counts[2]


def test_adapters_with_dropout_are_compiled_once_for_all_layers(tiny_model: MakeModel) -> None:
    """But for the first one, whose input needs no gradient, and the last one, which has fewer rows."""
    counts = {}
    for depth in (3, 5):
        torch._dynamo.reset()
        compiled: list[Any] = []

        def backend(graph: Any, inputs: Any, compiled: list[Any] = compiled) -> Any:
            compiled.append(graph)
            return graph.forward

        results = []
        for is_compiled in (True, False):
            model = tiny_model(torch.float64, num_hidden_layers=depth)
            add_adapter(model, LoraConfig(rank=2, dropout=0.5))
            dropout = find_dropout(model)
            assert dropout is not None
            trained = [value for value in model.parameters() if value.requires_grad]
            if is_compiled:
                compile_blocks(model, backend)
            tokens, rows = torch.arange(18).view(2, 9), torch.tensor([0, 3, 5])
            with dropout.forward_of(5, torch.arange(2), 9, rows):
                loss_inputs = LossInputs(rows, torch.ones(3))
                output = model(tokens, pattern=Bidirectional(), output_positions=rows, loss_inputs=loss_inputs)
                results += [output.loss_sum.detach(), *torch.autograd.grad(output.total_loss, trained)]
        half = len(results) // 2
        torch.testing.assert_close(results[:half], results[half:], rtol=1e-10, atol=1e-10)
        counts[depth] = len(compiled)
    assert counts[3] == counts[5] > 0
