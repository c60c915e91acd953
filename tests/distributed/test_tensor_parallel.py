"""Ranks that divide a model compute what one process does, with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from config.finetune.lora import LoraConfig
from ddp.all_to_all_rows import TensorMatrixExchange
from ddp.mesh import Axis, Shard
from ddp.process_group import World
from ddp.tensor_parallel import apply_tensor_parallel
from diffusionlm.inference.decoder import Decoder
from diffusionlm.kernels.cross_entropy import LossInputs, LossOutput
from diffusionlm.models.lora import add_adapter, find_dropout, keep_start
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.muon import Muon
from diffusionlm.training.block_wrapping import checkpoint_activations, compile_blocks
from tests.conftest import MakeConfig, MakeModel
from tests.decoding_jobs import BLOCKS, limit_decoder, make_jobs, run_all
from tests.distributed.forked import run_ranks

MIXTURE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
GEMMA = {
    "sandwich_norms": True,
    "norm_offset": True,
    "scale_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 2.0,
    "backend": "eager",
}
REGULARIZED = {"label_smoothing": 0.2, "z_loss": 0.02, "excluded_token": 18}
ROWS, OUTPUTS, HIDDEN, LAYERS = 2 * 8, 5, 24, 2
"""Positions and output positions of `make_batch`; sizes of the tiny model."""


@dataclass(frozen=True)
class Case:
    world_size: int = 2
    model: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    checkpointing: Any = "none"
    dtype: torch.dtype = torch.float64
    sequence_norms: bool = False

    def build(self, tiny_model: MakeModel) -> Transformer:
        """The whole model, with an adapter that is not at its start."""
        model = tiny_model(**{"dtype": self.dtype, "tie_word_embeddings": False, **self.model})
        if self.lora is not None:
            add_adapter(model, LoraConfig(**self.lora))
            generator = torch.Generator().manual_seed(5)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape, generator=generator, dtype=self.dtype)
                    parameter.data = parameter.data.to(self.dtype) + 0.3 * noise
        return model


CASES = {
    "tied": Case(2, {"tie_word_embeddings": True}),
    "replicated keys, biases": Case(4, {"attention_bias": True, "attention_output_bias": True}, REGULARIZED),
    "one key head, no norms": Case(4, {"num_key_value_heads": 1, "qk_norm": False, "tie_word_embeddings": True}),
    "float32": Case(2, {"attention_bias": True}, REGULARIZED, dtype=torch.float32),
    "gemma": Case(2, {**GEMMA, "tie_word_embeddings": True}, REGULARIZED),
    "mixture": Case(2, {**MIXTURE, "mlp_only_layers": (1,)}, {"load_balancing_weight": 3.0}),
    "mixture, replicated keys": Case(4, {**MIXTURE, "num_key_value_heads": 2}, {"load_balancing_weight": 3.0}),
    "a rank without tokens": Case(
        4, {"vocab_size": 5, **dict.fromkeys(("mask_token_id", "eos_token_id", "pad_token_id"), 4)}
    ),
    "low rank": Case(
        4,
        {"attention_bias": True, "attention_output_bias": True},
        lora={"rank": 2, "targets": "all-linear", "bias": "all"},
    ),
    "low rank, head, router": Case(
        2, MIXTURE, lora={"rank": 2, "targets": r".*(q_proj|down_proj|\.mlp\.gate|lm_head)", "rslora": True}
    ),
    "low rank, row norms, dropout": Case(
        2,
        lora={"rank": 2, "targets": ("k_proj", "up_proj"), "dora": True, "dropout": 0.3, "modules_to_save": ("norm",)},
    ),
    "divided norms": Case(2, {"attention_output_bias": True, "num_key_value_heads": 4}, sequence_norms=True),
    "divided norms, experts": Case(
        2, MIXTURE, {"load_balancing_weight": 3.0}, checkpointing="full", sequence_norms=True
    ),
    "full checkpointing": Case(2, MIXTURE, {"load_balancing_weight": 3.0}, checkpointing="full"),
    "selective checkpointing": Case(
        2, {"attention_output_bias": True, "num_key_value_heads": 4}, checkpointing="selective"
    ),
}


def axis_of(world: World) -> Axis:
    return Axis(world.size, world.rank, dist.group.WORLD)


def make_batch(vocab_size: int, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor, LossInputs]:
    """Tokens, output positions and loss inputs; two weights are zero."""
    generator = torch.Generator().manual_seed(3)
    tokens_BL = torch.randint(vocab_size, (2, ROWS // 2), generator=generator)
    positions_P = torch.randperm(ROWS, generator=generator)[:OUTPUTS].sort().values
    targets_P = torch.randint(vocab_size - 1, (OUTPUTS,), generator=generator)
    weights_P = torch.rand(OUTPUTS, generator=generator, dtype=dtype)
    weights_P[1::2] = 0.0
    return tokens_BL, positions_P, LossInputs(targets_P, weights_P, **options)


@dataclass(frozen=True)
class Result:
    output: dict[str, Tensor]
    """Loss, its parts and the logits."""
    gradients: dict[str, Tensor]


def compute(model: Transformer, case: Case) -> Result:
    """Loss, logits and gradients of all trained parameters."""
    checkpoint_activations(model, case.checkpointing)
    tokens_BL, positions_P, loss_inputs = make_batch(model.config.vocab_size, case.dtype, **case.loss)
    dropout, pattern = find_dropout(model), Bidirectional()
    context: Any = nullcontext()
    if dropout is not None:
        context = dropout.dropout_context(7, torch.arange(2), ROWS // 2, positions_P)
    with context:
        output: LossOutput = model(tokens_BL, pattern=pattern, output_positions=positions_P, loss_inputs=loss_inputs)
        logits_BLV = model(tokens_BL, pattern=pattern)
    # The logits take part in the gradient too, as in losses that are computed outside of the model.
    total = output.total_loss + 0.01 * logits_BLV.square().mean()
    total.backward()
    parts = {"loss": output.loss_sum.detach(), "nll": output.nll_N, "logits": logits_BLV.detach()}
    if output.load_balancing_loss is not None:
        parts["load balancing"] = output.load_balancing_loss.detach()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return Result(parts, gradients)


def pad(part: Tensor, shape: torch.Size) -> Tensor:
    """A part with zeros behind it."""
    padded = part.new_zeros(shape)
    padded[tuple(slice(size) for size in part.shape)] = part
    return padded


def join(shards: list[Shard], parts: list[Tensor]) -> Tensor:
    """The whole gradient of the parts of all ranks; padding is zero, and copies are equal."""
    whole = parts[0].new_full(shards[0].whole_shape, 0.0 if shards[0].has_partial_gradient else torch.nan)
    for shard, part in zip(shards, parts, strict=True):
        own = part[tuple(slice(size) for size in shard.shape)]
        assert torch.equal(pad(own, part.shape), part), "padding has a gradient"
        place = shard.select(whole)
        if shard.has_partial_gradient:
            place += own
        else:
            assert place.isnan().all() or torch.equal(place, own), "copies differ"
            place.copy_(own)
    return whole


def assert_close(actual: Tensor, expected: Tensor, name: str) -> None:
    """Norm of the difference, relative to that of what is expected."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    difference = float((actual - expected).norm()) / max(float(expected.norm()), 1.0)
    # In float32 the gradients of one process are no closer to those in float64.
    assert difference < (1e-12 if expected.dtype == torch.float64 else 4e-6), f"{name}: {difference}"


@pytest.mark.parametrize("name", CASES)
def test_a_divided_model_equals_a_whole_one(name: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    case = CASES[name]

    def act(world: World) -> tuple[dict[str, Shard], Result]:
        model = case.build(tiny_model)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        shards = apply_tensor_parallel(model, axis_of(world), sequence_norms=case.sequence_norms)
        parameters = dict(model.named_parameters())
        assert shards.keys() == parameters.keys()
        assert {name for name, parameter in parameters.items() if parameter.requires_grad} == trained
        return shards, compute(model, case)

    shards_of_rank, results = zip(*run_ranks(act, tmp_path, case.world_size), strict=True)
    model = case.build(tiny_model)
    expected = compute(model, case)
    for result in results:
        assert result.output.keys() == expected.output.keys()
        assert result.gradients.keys() == expected.gradients.keys()
        for part, value in expected.output.items():
            assert torch.equal(result.output[part], results[0].output[part])
            assert_close(result.output[part], value, part)
    for parameter, gradient in expected.gradients.items():
        shards = [shards[parameter] for shards in shards_of_rank]
        assert shards[0].whole_shape == gradient.shape
        assert sum(shard.shape.numel() / shard.num_holders for shard in shards) == gradient.numel()
        assert_close(join(shards, [result.gradients[parameter] for result in results]), gradient, parameter)


@pytest.mark.slow
def test_compiled_blocks(tiny_model: MakeModel, tmp_path: Path) -> None:
    """The compiler traces the collectives: a block is one graph."""
    case = Case(model={"attention_output_bias": True}, checkpointing="full")

    def act(world: World) -> None:
        models = [case.build(tiny_model) for _ in range(2)]
        for model in models:
            apply_tensor_parallel(model, axis_of(world))
        compile_blocks(models[1], "aot_eager")
        torch._dynamo.utils.counters.clear()  # of tests in this process before
        expected, result = [compute(model, case) for model in models]
        assert not torch._dynamo.utils.counters["graph_break"]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
        for name, gradient in expected.gradients.items():
            assert_close(result.gradients[name], gradient, name)

    run_ranks(act, tmp_path, timeout=300)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_model_on_meta_gets_the_parts_of_whole_weights(is_tied: bool, tiny_model: MakeModel, tmp_path: Path) -> None:
    """Names, dtypes, frozen parameters and tied weights stay; rows behind the vocabulary are zero."""

    def act(world: World) -> None:
        whole = tiny_model(torch.bfloat16, tie_word_embeddings=is_tied, attention_output_bias=True)
        whole.model.norm.weight.requires_grad_(False)
        whole.get_parameter("model.layers.1.self_attn.k_proj.weight").requires_grad_(False)
        with torch.device("meta"):
            model = Transformer(whole.config)
        for name, parameter in whole.named_parameters():
            model.get_parameter(name).requires_grad_(parameter.requires_grad)
        model = model.to(torch.bfloat16)
        shards = apply_tensor_parallel(model, axis_of(world))
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
        filled = {}
        for name, parameter in model.named_parameters():
            assert parameter.is_meta
            shard = shards[name]
            filled[name] = torch.zeros(parameter.shape, dtype=parameter.dtype)
            filled[name][tuple(slice(size) for size in shard.shape)] = shard.select(whole.get_parameter(name).detach())
        apply_tensor_parallel(whole, axis_of(world))
        parameters = dict(whole.named_parameters())
        assert filled.keys() == parameters.keys()
        for name, parameter in parameters.items():
            assert torch.equal(filled[name], parameter)
            assert parameter.dtype == torch.bfloat16
            assert parameter.requires_grad == model.get_parameter(name).requires_grad
        assert whole.lm_head.out_features == whole.model.embed_tokens.num_embeddings == 5
        assert whole.has_collective_forwards
        assert filled["model.embed_tokens.weight"][shards["model.embed_tokens.weight"].shape[0] :].eq(0.0).all()

    run_ranks(act, tmp_path, 4)


def test_parts_of_one_rank_are_whole(tiny_model: MakeModel) -> None:
    model = tiny_model()
    before = dict(model.named_parameters())
    assert apply_tensor_parallel(model, Axis()) == {name: Shard.whole(value.shape) for name, value in before.items()}
    assert all(value is before[name] for name, value in model.named_parameters())


@contextmanager
def recorded() -> Iterator[list[tuple[str, int]]]:
    """Each all-reduce, as its operator and the number of elements, in order."""
    calls: list[tuple[str, int]] = []
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any) -> Any:
        calls.append(("max" if op == dist.ReduceOp.MAX else "sum", tensor.numel()))
        return original(tensor, op, group, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        yield calls


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_the_number_of_collectives_and_elements(checkpointing: Any, tiny_model: MakeModel, tmp_path: Path) -> None:
    case = Case(model=MIXTURE)

    def act(world: World) -> tuple[list[tuple[str, int]], list[tuple[str, int]], list[tuple[str, int]]]:
        model = case.build(tiny_model)
        apply_tensor_parallel(model, axis_of(world))
        checkpoint_activations(model, checkpointing)
        tokens_BL, positions_P, loss_inputs = make_batch(19, case.dtype, label_smoothing=0.1)
        options: Any = {"pattern": Bidirectional(), "output_positions": positions_P}
        with recorded() as forward:
            output = model(tokens_BL, loss_inputs=loss_inputs, **options)
        with recorded() as backward:
            output.loss_sum.backward()
        with recorded() as decoding, torch.inference_mode():
            model(tokens_BL, **options)
        return forward, backward, decoding

    rows, outputs = ("sum", ROWS * HIDDEN), ("sum", OUTPUTS * HIDDEN)
    blocks = [rows] * 2 * (LAYERS - 1) + [outputs] * 2
    # The largest logit; the sum of exponentials, the target's logit and the mean of label smoothing.
    loss = [("max", OUTPUTS), ("sum", 3 * OUTPUTS)]
    # Head; feed-forward and attention of each layer. Checkpointing repeats the sum after attention.
    repeated = [[outputs], [rows]] if checkpointing != "none" else [[], []]
    backward = [outputs, *repeated[0], outputs, rows, *(LAYERS - 1) * [*repeated[1], rows, rows]]
    for calls in run_ranks(act, tmp_path):
        assert calls == ([rows, *blocks, *loss], backward, [rows, *blocks])


def test_logits_are_whole_or_those_of_the_rank(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Also in autocast and in inference mode; the soft cap does not reach the padding."""

    def act(world: World) -> None:
        whole = tiny_model(torch.float64, **GEMMA)
        tokens_BL, _, loss_inputs = make_batch(19, torch.float64)
        expected = whole(tokens_BL, pattern=Bidirectional()).detach()
        apply_tensor_parallel(whole, axis_of(world))
        with torch.inference_mode():
            assert_close(whole(tokens_BL, pattern=Bidirectional()), expected, "logits")
            whole.keeps_vocabulary_shards = True
            own = whole(tokens_BL, pattern=Bidirectional())
        assert own.shape[-1] == 10
        assert_close(own[..., : 10 - world.rank], expected[..., 10 * world.rank : 10 * (world.rank + 1)], "own logits")
        assert world.rank == 0 or own[..., 9].eq(-torch.inf).all()
        assert whole.vocabulary_shard is not None
        columns_RBLC = whole.vocabulary_shard.all_gather(own)
        assert_close(torch.cat([*columns_RBLC], dim=-1)[..., :19], expected, "columns of all ranks")
        one_process, divided = tiny_model(scale=0.1), tiny_model(scale=0.1)
        apply_tensor_parallel(divided, axis_of(world))
        positions_P = torch.arange(OUTPUTS)
        with torch.autocast("cpu", torch.bfloat16):
            losses = [
                model(tokens_BL, pattern=Bidirectional(), output_positions=positions_P, loss_inputs=loss_inputs)
                for model in (one_process, divided)
            ]
            logits = divided(tokens_BL, pattern=Bidirectional())
        assert logits.dtype == torch.bfloat16 and losses[1].nll_N.dtype == torch.float32
        torch.testing.assert_close(losses[1].nll_N, losses[0].nll_N, rtol=0.02, atol=0.02)
        losses[1].loss_sum.backward()

    run_ranks(act, tmp_path)


@pytest.mark.parametrize("deterministic", [False, True])
def test_decoding_with_a_cache(deterministic: bool, tiny_model: MakeModel, tmp_path: Path) -> None:
    """Each rank caches the keys of its heads. Deterministic decoding computes with a deep copy of the model."""
    shape = {"vocab_size": 23, "mask_token_id": 22, "eos_token_id": 21, "max_position_embeddings": 40}
    values = {**shape, **MIXTURE, "block_length": 4}

    def act(world: World) -> None:
        model = tiny_model(torch.float64, **values).eval()
        jobs = make_jobs(model, [BLOCKS[0], BLOCKS[2], BLOCKS[6]], 4)
        limits = limit_decoder(40, 4, deterministic=deterministic)
        expected = run_all(Decoder(model, *limits), jobs, [0, 0, 1, 2])
        apply_tensor_parallel(model, axis_of(world))
        decoder = Decoder(model, *limits)
        assert decoder.cache is not None and len(decoder.cache.keys_KTH[0]) == model.num_key_value_heads == 1
        for answer, other in zip(run_all(decoder, jobs, [0, 0, 1, 2]), expected, strict=True):
            assert answer.token_ids == other.token_ids
            torch.testing.assert_close(answer.logprobs, other.logprobs, rtol=1e-9, atol=1e-9)

    run_ranks(act, tmp_path)


@pytest.mark.parametrize(
    ("num_ranks", "values", "message"),
    [
        (3, {}, r"parallel\.tensor = 3 does not divide the model's num_attention_heads = 4: set it to a divisor"),
        (4, {"intermediate_size": 42}, "intermediate_size = 42"),
        (4, {**MIXTURE, "moe_intermediate_size": 6}, "moe_intermediate_size = 6"),
        (
            6,
            {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 48},
            r"neither divides the model's num_key_value_heads = 4 nor is a multiple of it",
        ),
    ],
)
def test_sizes_that_ranks_cannot_divide(
    num_ranks: int, values: dict[str, Any], message: str, make_config: MakeConfig
) -> None:
    with torch.device("meta"):
        model = Transformer(make_config(**values))
    with pytest.raises(ValueError, match=message):
        apply_tensor_parallel(model, Axis(num_ranks))


def test_a_model_of_experts_alone_may_have_any_intermediate_size(make_config: MakeConfig) -> None:
    """No layer has it. An expert of another rank has no projections."""
    with torch.device("meta"):
        model = Transformer(make_config(**MIXTURE, intermediate_size=41))
    model.set_submodule("model.layers.0.mlp.experts.1", nn.Module())
    shards = apply_tensor_parallel(model, Axis(4, 3))
    assert shards.keys() == dict(model.named_parameters()).keys()
    assert shards["model.layers.0.mlp.experts.2.down_proj.weight"].offsets == (0, 6)
    assert not any(name.startswith("model.layers.0.mlp.experts.1.") for name in shards)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dora": True}, r"lora\.dora = true, model\.layers\.0\.self_attn\.o_proj"),
        ({"dropout": 0.1, "targets": ("q_proj", "down_proj")}, r"lora\.dropout, model\.layers\.0\.mlp\.down_proj"),
        ({"init": "pissa"}, r'lora\.init = "pissa", model\.layers\.0'),
        ({"trainable_tokens": "mask"}, r"lora\.trainable_tokens, model\.embed_tokens: leave it out"),
    ],
)
def test_adapters_without_a_form_for_several_ranks(values: dict[str, Any], message: str, tiny_model: MakeModel) -> None:
    model = tiny_model()
    add_adapter(model, LoraConfig(rank=2, **values))
    with pytest.raises(ValueError, match=message):
        apply_tensor_parallel(model, Axis(2))
    apply_tensor_parallel(model, Axis())


def test_kept_and_quantized_adapters_are_refused(tiny_model: MakeModel) -> None:
    model = tiny_model()
    add_adapter(model, LoraConfig(rank=2))
    keep_start(model)
    with pytest.raises(ValueError, match=r"lora\.init_from with a reference"):
        apply_tensor_parallel(model, Axis(2))
    model = tiny_model()
    add_adapter(model, LoraConfig(rank=2))
    projection: Any = model.get_submodule("model.layers.0.mlp.up_proj")
    projection.quantized = object()
    with pytest.raises(ValueError, match=r'lora\.base = "nf4", model\.layers\.0\.mlp\.up_proj'):
        apply_tensor_parallel(model, Axis(2))


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_exchange_applies_a_function_to_whole_matrices(
    world_size: int, tiny_model: MakeModel, tmp_path: Path
) -> None:
    """Those that are divided by rows, columns or the vocabulary, that several ranks have, or that all have."""

    def act(world: World) -> int:
        model = tiny_model(tie_word_embeddings=False, **MIXTURE)
        whole = {name: value.detach() for name, value in model.named_parameters() if value.dim() == 2}
        shards = apply_tensor_parallel(model, axis_of(world))
        matrices = [(name, value) for name, value in model.named_parameters() if value.dim() == 2]
        exchange = TensorMatrixExchange({value: shards[name] for name, value in matrices}, axis_of(world))
        computed: list[torch.Size] = []

        def reverse(values: list[Tensor]) -> list[Tensor]:
            computed.extend(value.shape for value in values)
            return [value.flip(0, 1) for value in values]

        results = exchange([value for _, value in matrices], [value.detach() for _, value in matrices], reverse)
        for (name, value), result in zip(matrices, results, strict=True):
            assert torch.equal(result, pad(shards[name].select(whole[name].flip(0, 1)), value.shape)), name
            assert exchange.shapes[value] == whole[name].shape
        routers = [shape for shape in computed if shape == (3, HIDDEN)]
        assert len(routers) == LAYERS
        return len(computed) - len(routers)

    counts = run_ranks(act, tmp_path, world_size)
    assert sum(counts) == 2 + LAYERS * (4 + 9) and min(counts) > 0


@pytest.mark.parametrize("world_size", [2, 4])
def test_muon_updates_whole_matrices(world_size: int, tiny_model: MakeModel, tmp_path: Path) -> None:
    def train(model: Transformer, shards: dict[str, Shard] | None, axis: Axis) -> dict[str, nn.Parameter]:
        """Two steps with gradients that do not depend on the ranks."""
        matrices = {name: value for name, value in model.named_parameters() if value.dim() == 2}
        exchange = None
        if shards is not None:
            exchange = TensorMatrixExchange({value: shards[name] for name, value in matrices.items()}, axis)
        options: Any = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "dtype": torch.float32}
        optimizer = Muon(matrices.values(), row_exchange=exchange, **options)
        generator = torch.Generator().manual_seed(4)
        for _ in range(2):
            for name, value in matrices.items():
                shape = value.shape if shards is None else shards[name].whole_shape
                gradient = torch.randn(shape, generator=generator)
                value.grad = gradient if shards is None else pad(shards[name].select(gradient), value.shape)
            optimizer.step()
        return matrices

    def act(world: World) -> None:
        models = [tiny_model(tie_word_embeddings=False, **MIXTURE) for _ in range(2)]
        expected = train(models[0], None, Axis())
        shards = apply_tensor_parallel(models[1], axis_of(world))
        for name, value in train(models[1], shards, axis_of(world)).items():
            part = pad(shards[name].select(expected[name].detach()), value.shape)
            torch.testing.assert_close(value.detach(), part, rtol=0.0, atol=1e-6, msg=partial("{} {}".format, name))

    run_ranks(act, tmp_path, world_size)
