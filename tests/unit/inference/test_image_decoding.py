"""Decoding with images: tokens and log-probabilities are those of forwards of the whole text, whatever cache, batch and
order they are computed in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from config.finetune.lora import LoraConfig
from config.generation import GenerationConfig
from diffusionlm.inference import cuda_graphs
from diffusionlm.inference import decoder as decoder_module
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import decode, generate, infill, to_generation
from diffusionlm.inference.images import TextImages, join_images
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.models.lora import LoRALinear, add_adapter
from diffusionlm.models.patterns import Bidirectional, BlockCausal
from diffusionlm.models.row_adapters import ModelAdapter
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import SequenceSlice
from diffusionlm.vision.images import EncodedImage, PlacedImage, compute_mrope_positions
from tests.decoding_jobs import LIMITS, add_requests, assert_same, drain, limit_decoder, run_all, settings_of
from tests.image_requests import (
    IMAGE,
    MASK,
    PROCESSOR,
    compute_logits,
    compute_masked_logits,
    make_image_jobs,
    make_vision_model,
    paint,
    place,
    write_prompt,
)
from tests.qwen3_vl_oracle import CONFIG, VISION, build_oracle, build_ours, compute_in_double
from tests.recorded_graph import RecordedGraph, make_pools_of

BLOCK_OPTIONS: list[dict[str, Any]] = [
    {"denoising_steps": 2, "stop_token_ids": ()},
    {"remasking_strategy": "p2", "temperature": 1.0},
    {"cfg_scale": 1.5, "block_length": 8},
    {"cache": "none"},
    {"block_length": 1},
]
CANVAS_OPTIONS: list[dict[str, Any]] = [
    {"block_length": 4, "cache": "none"},
    {"block_length": 4, "cache": "prefix", "denoising_steps": 2},
    {"block_length": 4, "cache": "dual"},
    {"block_length": 6, "cache": "dual", "cfg_scale": 1.0},
]


@pytest.fixture(scope="module")
def blocks() -> Transformer:
    return make_vision_model(block_length=4)


@pytest.fixture(scope="module")
def shifted_blocks() -> Transformer:
    return make_vision_model(block_length=4, logit_alignment="shifted")


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make_vision_model()


def decode_in_full_forwards(
    model: Transformer, token_ids: list[int], images: tuple[PlacedImage, ...], length: int, block_length: int
) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of greedy decoding from left to right, each from a forward of the whole text."""
    shift, tokens, logprobs = int(model.config.logit_alignment == "shifted"), list(token_ids), []
    for position in range(len(token_ids), len(token_ids) + length):
        end = -(-(position + 1) // block_length) * block_length
        canvas = [*tokens, *[MASK] * (end - len(tokens))]
        logits_V = compute_logits(model, canvas, images, BlockCausal(block_length))[position - shift].clone()
        logits_V[[MASK, IMAGE]] = -torch.inf
        logprobs_V = logits_V.log_softmax(-1)
        tokens.append(int(logprobs_V.argmax()))
        logprobs.append(float(logprobs_V.max()))
    return tokens[len(token_ids) :], logprobs


@pytest.mark.parametrize("cache", ["block", "none"])
@pytest.mark.parametrize("name", ["blocks", "shifted_blocks"])
def test_answers_are_those_of_full_forwards(name: str, cache: str, request: pytest.FixtureRequest) -> None:
    """Images at the beginning, in the middle, across blocks, and as the end of the prompt."""
    model: Transformer = request.getfixturevalue(name)
    config = GenerationConfig(max_new_tokens=9, remasking_strategy="sequential", cache=cache, stop_token_ids=())
    prompts: list[list[int | EncodedImage]] = [
        [paint(3, 2), 5, 6],
        [5, 6, 7, paint(2, 5), 8, paint(2, 5, 1)],
        [5, paint(2, 5), paint(1, 1)],
        [5, 6, 7],
    ]
    texts, images = zip(*(write_prompt(*parts) for parts in prompts), strict=True)
    answers = generate(model, texts, config, images=images, processor=PROCESSOR)
    for parts, answer in zip(prompts, answers, strict=True):
        token_ids, options = place(model, *parts)
        expected, logprobs = decode_in_full_forwards(model, token_ids, options.images, 9, 4)
        assert list(answer.token_ids) == expected
        assert answer.logprobs == pytest.approx(logprobs, abs=1e-9)
    assert len({answer.token_ids for answer in answers}) == 4


def test_causal_answers_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = build_oracle(torch.float64)
    compute_in_double(monkeypatch, oracle)
    changes = {"mask_token_id": None, "block_length": 1, "logit_alignment": "shifted"}
    model = build_ours(oracle, CONFIG.model_copy(update=changes))
    parts: list[int | EncodedImage] = [5, 6, paint(2, 3), 7, paint(4, 1), 8]
    text, images = write_prompt(*parts)
    config = GenerationConfig(max_new_tokens=8, stop_token_ids=())
    [answer] = generate(model, [text], config, images=[images], processor=PROCESSOR)
    patches_PC = torch.from_numpy(np.concatenate([PROCESSOR.compute_patches(image) for image in images])).double()
    token_ids, _ = place(model, *parts)
    tokens_1L = torch.tensor([token_ids])
    expected = oracle.generate(
        input_ids=tokens_1L,
        attention_mask=torch.ones_like(tokens_1L),
        pixel_values=patches_PC.unflatten(-1, (3, 1, -1)).expand(-1, 3, 2, -1).flatten(1),
        image_grid_thw=torch.tensor([[1, 4, 6], [1, 8, 2]]),
        mm_token_type_ids=(tokens_1L == IMAGE).int(),
        max_new_tokens=8, do_sample=False, suppress_tokens=[IMAGE], output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    assert answer.token_ids == tuple(expected.sequences[0, len(token_ids) :].tolist())
    logits_NV = torch.stack(expected.logits)[:, 0].double()
    logits_NV[:, IMAGE] = -torch.inf
    assert answer.logprobs == pytest.approx(logits_NV.log_softmax(-1).max(-1).values.tolist(), abs=1e-6)


def test_another_image_gives_another_answer(blocks: Transformer) -> None:
    text, _ = write_prompt(5, paint(2, 3), 6)
    config = GenerationConfig(max_new_tokens=8, stop_token_ids=())
    images = [[paint(2, 3)], [paint(2, 3, 1)], [paint(3, 2)]]
    answers = generate(blocks, [text] * 3, config, [0] * 3, images=images, processor=PROCESSOR)
    assert len({answer.logprobs for answer in answers}) == 3 and len({answer.token_ids for answer in answers}) > 1


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", ["blocks", "shifted_blocks"])
def test_requests_together_have_the_answers_of_each_alone(
    name: str, limits: str, request: pytest.FixtureRequest
) -> None:
    """Images are read in parts, after preemption again, and from shared pages."""
    model: Transformer = request.getfixturevalue(name)
    jobs = make_image_jobs(model, BLOCK_OPTIONS, 14)
    num_pages, engine_limits = LIMITS[limits]
    decoder = Decoder(model, num_pages + 16, engine_limits)
    arrivals = np.random.default_rng(1).integers(0, 6, len(jobs)).tolist()
    answers = run_all(decoder, jobs, arrivals)
    for job, answer in zip(jobs, answers, strict=True):
        assert_same(answer, decode(model, [job])[0])
    assert not decoder.runner._read_features._features, "features are freed with the last request that has them"
    if limits in ("few pages", "everything"):
        assert decoder.counts.num_preemptions


def test_bidirectional_requests_together(model: Transformer) -> None:
    jobs = make_image_jobs(model, CANVAS_OPTIONS, 10)
    answers = run_all(Decoder(model, *limit_decoder(100, 4)), jobs, [0, 0, 0, 1, 1, 2, 3, 3, 4, 4])
    for job, answer in zip(jobs, answers, strict=True):
        assert_same(answer, decode(model, [job])[0])


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_bidirectional_caches_are_exact_in_one_layer(cache: str) -> None:
    """There keys and values depend on their own position alone. Masks are before the image, too."""
    vision = VISION.model_copy(update={"deepstack_visual_indexes": ()})
    model = make_vision_model(num_hidden_layers=1, vision=vision)
    text, images = write_prompt(5, MASK, 6, MASK, MASK, paint(2, 3), 7, MASK, paint(1, 2), MASK, MASK, 8, MASK)
    keys: dict[str, Any] = {"block_length": 3, "denoising_steps": 3, "remasking_strategy": "sequential"}
    expected, ours = (
        infill(model, [text], GenerationConfig(**keys, cache=name), images=[images], processor=PROCESSOR)
        for name in ("none", cache)
    )
    assert_same(ours[0], expected[0])
    assert ours[0].num_forwards == 7


@pytest.mark.parametrize("name", ["model", "blocks"])
def test_guidance_masks_images_at_the_same_position_ids(name: str, request: pytest.FixtureRequest) -> None:
    """The second step reads the token of the first one at its distance from the masks in place of the image."""
    network: Transformer = request.getfixturevalue(name)
    parts: list[int | EncodedImage] = [MASK, 6, paint(2, 5), 7, MASK]
    text, images = write_prompt(*parts)
    config = GenerationConfig(cfg_scale=0.5, remasking_strategy="sequential", block_length=4)
    [answer] = infill(network, [text], config, images=[images], processor=PROCESSOR)
    canvas, placed = place(network, *parts)
    masked, logprobs = [MASK] * len(canvas), []
    pattern = Bidirectional() if name == "model" else BlockCausal(4)
    for position in (0, len(canvas) - 1):
        given_LV, masked_LV = (
            compute_logits(network, canvas, placed.images, pattern),
            compute_masked_logits(network, masked, placed.images, pattern),
        )
        logits_V = masked_LV[position] + 1.5 * (given_LV - masked_LV)[position]
        logits_V[[MASK, IMAGE]] = -torch.inf
        canvas[position] = masked[position] = int(logits_V.argmax())
        logprobs.append(float(logits_V.log_softmax(-1).max()))
    assert list(answer.token_ids) == canvas
    assert answer.logprobs == pytest.approx(logprobs, abs=1e-9)


@pytest.mark.parametrize("name", ["blocks", "shifted"])
def test_deterministic_log_probabilities_are_the_same_bits(name: str) -> None:
    alignment = "shifted" if name == "shifted" else "same_position"
    model = make_vision_model(torch.float32, block_length=4, logit_alignment=alignment)
    options = [BLOCK_OPTIONS[0], BLOCK_OPTIONS[1], {"block_length": 8}]
    jobs = make_image_jobs(model, options, 8, seed=1)
    expected = [run_all(Decoder(model, *limit_decoder(60, 4, deterministic=True)), [job], [0])[0] for job in jobs]
    for page_size, budget, prefix_cache in ((1, 5, True), (4, 30, True), (16, 100, False)):
        limits = limit_decoder(
            240 // page_size, page_size, deterministic=True, max_num_batched_tokens=budget, prefix_cache=prefix_cache
        )
        answers = run_all(Decoder(model, *limits), jobs, [0, 0, 0, 1, 2, 2, 5, 9])
        assert answers == expected
    for job, answer in zip(jobs, expected, strict=True):
        assert answer.logprobs == pytest.approx(decode(model, [job])[0].logprobs, abs=1e-4)


def test_a_tile_reads_the_end_of_a_cached_image() -> None:
    """The last block of the prompt holds it, and is read again for the output before the next block."""
    model = make_vision_model(torch.float32, block_length=4, logit_alignment="shifted")
    token_ids, options = place(model, 1, 2, 3, 4, paint(2, 7))
    assert len(token_ids) == 20 and options.images[0].end == 19
    job = prepare_request(settings_of(model, stop_token_ids=()), token_ids, options=options)
    decoder = Decoder(model, *limit_decoder(60, 1, deterministic=True, prefix_cache=True))
    answers = []
    for num_cached in (0, 19):
        [active] = add_requests(decoder, job)
        drain(decoder, active)
        assert active.num_cached_tokens == num_cached
        answers.append(to_generation(active))
    assert answers[0] == answers[1]


def record_grids(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The grids of the images that the tower computes, call by call."""
    grids: list[Any] = []
    tower = model.model.visual
    assert tower is not None
    forward = tower.forward

    def record(patches_PC: Tensor, own: Any) -> Tensor:
        grids.append(own)
        return forward(patches_PC, own)

    monkeypatch.setattr(tower, "forward", record)
    return grids


def test_pages_are_shared_by_texts_with_the_same_images(blocks: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image takes positions 5 to 20, so pages of 4 from the second to the sixth hold it. A text whose image is in
    the cache does not read it."""
    grids = record_grids(blocks, monkeypatch)
    decoder = Decoder(blocks, *limit_decoder(60, 4, prefix_cache=True))

    def run(image: EncodedImage, last: int) -> tuple[int, int]:
        token_ids, options = place(blocks, 1, 2, 3, 4, image, last, 6, 7, 8)
        prepared = prepare_request(settings_of(blocks, stop_token_ids=()), token_ids, options=options)
        [active] = add_requests(decoder, prepared)
        grids.clear()
        drain(decoder, active)
        num_calls = len(grids)
        assert_same(to_generation(active), decode(blocks, [prepared])[0])
        return active.num_cached_tokens, num_calls

    first, second = paint(4, 4), paint(4, 4, 1)
    assert run(first, 5) == (0, 1)
    assert run(first, 5) == (24, 0)
    assert run(first, 9) == (20, 1), "the last block of the image has another token"
    assert run(second, 5) == (4, 1), "the first page has no image"
    assert run(second, 5) == (24, 0)
    assert run(first, 5) == (24, 0)
    assert run(paint(2, 8), 5) == (4, 1), "as many positions, but others"


def test_requests_share_the_features_of_equal_images(blocks: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts with the same image, of one text with it twice, and after preemption: the tower computes it once."""
    grids = record_grids(blocks, monkeypatch)
    settings = settings_of(blocks, max_new_tokens=12, stop_token_ids=())
    prompts: list[list[int | EncodedImage]] = [[1, paint(2, 3), 2, paint(2, 3)], [3, paint(2, 3)], [4, paint(1, 2)]]
    jobs = []
    for parts in prompts:
        token_ids, options = place(blocks, *parts)
        jobs.append(prepare_request(settings, token_ids, options=options))
    decoder = Decoder(blocks, *limit_decoder(24, 2))
    run_all(decoder, jobs, [0, 0, 0])
    assert grids == [((2, 3),), ((1, 2),)] and decoder.counts.num_preemptions
    assert not decoder.runner._read_features._features, "they are freed with the last request"


def test_features_are_freed_with_their_request(blocks: Transformer) -> None:
    """Not with the last one of a list, such as the prompts of `generate`."""
    jobs = []
    for number, num_tokens in enumerate((1, 12)):
        token_ids, options = place(blocks, 1, paint(2, 3, number))
        settings = settings_of(blocks, max_new_tokens=num_tokens, stop_token_ids=())
        jobs.append(prepare_request(settings, token_ids, options=options))
    decoder = Decoder(blocks, *limit_decoder(24, 2))
    requests = add_requests(decoder, *jobs)
    while not requests[0].is_done:
        decoder.step()
    assert not requests[0].image_features and requests[1].image_features
    drain(decoder, *requests)
    assert not decoder.runner._read_features._features


def test_an_image_that_cannot_be_read_ends_its_request(blocks: Transformer, tmp_path: Path) -> None:
    """Its file has changed since the request was prepared; the others go on."""
    settings = settings_of(blocks, stop_token_ids=())
    file = tmp_path / "image.png"
    file.write_bytes(paint(2, 3).content)  # type: ignore[arg-type]
    jobs = []
    for image in (paint(2, 3, 1), PROCESSOR.read_image(file)):
        token_ids, options = place(blocks, 1, 2, image)
        jobs.append(prepare_request(settings, token_ids, options=options))
    file.write_bytes(b"")
    decoder = Decoder(blocks, *limit_decoder(20, 4))
    requests = add_requests(decoder, *jobs)
    drain(decoder, *requests)
    assert_same(to_generation(requests[0]), decode(blocks, [jobs[0]])[0])
    assert isinstance(requests[1].error, ValueError) and "image.png" in str(requests[1].error)
    with pytest.raises(ValueError, match=r"image\.png"):
        decode(blocks, [jobs[1]])


@pytest.mark.parametrize("name", ["blocks", "model"])
def test_steps_after_an_image_have_cuda_graphs(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph has the position ids behind the image; a forward that reads a part of it has none."""
    network: Transformer = request.getfixturevalue(name)
    graphs: list[RecordedGraph] = []
    options = [*BLOCK_OPTIONS[:2], {"cfg_scale": 1.5}] if name == "blocks" else CANVAS_OPTIONS[1:]
    jobs = make_image_jobs(network, options, 8)
    expected = [decode(network, [job])[0] for job in jobs]
    monkeypatch.setattr(decoder_module, "select_graph_pool", lambda model: make_pools_of(make_graph))
    monkeypatch.setattr(cuda_graphs, "MIN_USES", 0)

    def make_graph() -> RecordedGraph:
        graphs.append(RecordedGraph())
        return graphs[-1]

    for prompt, answer in zip(jobs, expected, strict=True):
        assert_same(decode(network, [prompt])[0], answer)
    replays = sum(graph.num_replays for graph in graphs)
    for ours, answer in zip(run_all(Decoder(network, *limit_decoder(100, 4)), jobs, [0] * 8), expected, strict=True):
        assert_same(ours, answer)
    assert 20 < replays < sum(graph.num_replays for graph in graphs)


def test_a_request_has_images_and_an_adapter() -> None:
    model, adapted = (make_vision_model(block_length=4) for _ in range(2))
    add_adapter(adapted, LoraConfig(rank=2, targets=("q_proj", "down_proj")))
    for parameter_name, parameter in adapted.named_parameters():
        if parameter_name.endswith("lora_B"):
            nn.init.normal_(parameter, std=0.1)
    jobs = make_image_jobs(model, BLOCK_OPTIONS[:1], 4)
    expected = [decode(own, [job])[0] for own, job in zip([model] * 3 + [adapted], jobs, strict=True)]
    for module_name, module in adapted.named_modules():
        if isinstance(module, LoRALinear):
            module.weight = model.get_parameter(f"{module_name}.weight")
    adapter = ModelAdapter.from_model(adapted)
    decoder = Decoder(model, *limit_decoder(100, 4))
    decoder.runner.prepare_adapter(adapter)
    for ours, answer in zip(run_all(decoder, jobs, [0] * 4, adapter), expected, strict=True):
        assert_same(ours, answer)
    [name] = [name for name, module in model.named_modules() if name.endswith("visual.merger.linear_fc1")]
    with pytest.raises(ValueError, match=f"{name}, a part of the vision tower"):
        decoder.runner.prepare_adapter(ModelAdapter({name: adapter.modules["model.layers.0.mlp.down_proj"]}, {}))


def test_images_of_the_inputs_of_a_forward(model: Transformer) -> None:
    """A text without images, then one whose forward reads the end of one image, words, and all of another."""
    first, second = torch.arange(12.0).view(1, 6, 2), torch.arange(20.0, 24.0).view(1, 2, 2)
    placed = (PlacedImage(2, paint(2, 3)), PlacedImage(9, paint(1, 2)))
    positions_3L = compute_mrope_positions(14, placed)
    assert positions_3L[:, 6:].tolist() == [
        [2, 2, 5, 6, 6, 8, 9, 10], [3, 3, 5, 6, 6, 8, 9, 10], [3, 4, 5, 6, 7, 8, 9, 10]
    ]  # fmt: skip
    images = TextImages(positions_3L, ((2, first), (9, second)))
    sequences = [
        SequenceSlice(3, 5, 5, Bidirectional(), pages=range(9)),
        SequenceSlice(6, 12, 12, Bidirectional(), pages=range(9)),
    ]
    inputs = join_images(model, sequences, [None, images])
    assert inputs is not None and inputs.features_EFD is not None
    assert inputs.positions_3BS.tolist() == [
        [[3, 4, 2, 2, 5, 6, 6, 8]], [[3, 4, 3, 3, 5, 6, 6, 8]], [[3, 4, 3, 4, 5, 6, 7, 8]]
    ]  # fmt: skip
    assert inputs.indices_M.tolist() == [2, 3, 5, 6]
    assert inputs.features_EFD[:, inputs.feature_rows_M].tolist() == [[[8, 9], [10, 11], [20, 21], [22, 23]]]
    assert [images.has_text_alone(*limits) for limits in ((0, 2), (8, 9), (11, 14), (0, 3), (8, 10), (7, 9))] == [
        True, True, True, False, False, False
    ]  # fmt: skip
    assert not TextImages(positions_3L).has_text_alone(0, 9), "masks in place of an image have other position ids"
    assert join_images(model, sequences, [None, None]) is None
    part = images.restrict(6, 12)
    assert part.positions_3L[:, 6:].tolist() == positions_3L[:, 6:12].tolist()
    assert [(start, features.tolist()) for start, features in part.features] == [
        (6, [[[8, 9], [10, 11]]]), (9, second.tolist())
    ]  # fmt: skip
