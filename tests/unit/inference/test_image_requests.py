"""How texts and chats with images become requests, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from config.generation import GenerationConfig
from config.model import ModelConfig
from diffusionlm.inference.generate import decode, generate, infill, stream
from diffusionlm.inference.healing import HealedText
from diffusionlm.inference.images import check_images, expand_images
from diffusionlm.inference.request_builder import RequestBuilder, prepare_prompt_scoring, prepare_request
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.patterns import BlockCausal
from diffusionlm.models.transformer import Transformer
from diffusionlm.vision.images import PlacedImage
from diffusionlm.vision.messages import IMAGE_TOKENS
from diffusionlm.vision.processor import ImageProcessor
from tests.conftest import MakeConfig
from tests.image_requests import (
    END,
    IMAGE,
    MASK,
    PROCESSOR,
    START,
    compute_logits,
    make_vision_model,
    paint,
    place,
    write_prompt,
)
from tests.qwen3_vl_oracle import CONFIG, VISION
from tests.unit.data.chat_cases import SPECIAL
from tokenizer import CHAT_TEMPLATES, Tokenizer, encode_chat, encode_prompt
from tokenizer.byte_alphabet import BYTE_ORDER


@pytest.fixture(scope="module")
def blocks() -> Transformer:
    return make_vision_model(block_length=4)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes, the tokens of ChatML and those of images, with the ids of the model."""
    vocab = {bytes([byte]): byte for byte in BYTE_ORDER}
    special = {text: 256 + index for index, text in enumerate(SPECIAL)}
    special |= dict(zip(IMAGE_TOKENS, (START, IMAGE, END), strict=True)) | {"<|mask|>": MASK}
    return Tokenizer(vocab, [], special, "qwen", None, mask_token="<|mask|>", eos_token="<|endoftext|>")


@pytest.fixture
def builder(tokenizer: Tokenizer) -> RequestBuilder:
    model = CONFIG.model_copy(update={"block_length": 4, "block_origin": "turn", "eos_token_id": 256})
    template = CHAT_TEMPLATES["chatml"]
    return RequestBuilder.from_config(tokenizer, model, GenerationConfig(), template, processor=PROCESSOR)


def show(*images: Any) -> list[dict[str, Any]]:
    return [{"type": "image", "image": image} for image in images]


def test_positions_move_with_the_placeholders() -> None:
    text, images = write_prompt(5, paint(2, 3), 6, paint(1, 2), 7)
    assert text == [5, START, IMAGE, END, 6, START, IMAGE, END, 7]
    options = RequestOptions(segment_starts=(2, 3, 9), allowed_token_ids={9: [1]}, choices={4: [[1]]})
    healed = expand_images(HealedText(tuple(text[:-1]), options, tuple(text)), images, PROCESSOR, CONFIG)
    expected = [5, START, *[IMAGE] * 6, END, 6, START, IMAGE, IMAGE, END]
    assert healed.token_ids == (*expected,) and healed.plain_token_ids == (*expected, 7)
    assert [(item.start, item.image) for item in healed.images] == [(2, images[0]), (11, images[1])]
    assert healed.options.segment_starts == (2, 8, 15)
    assert healed.options.allowed_token_ids == {15: [1]} and healed.options.choices == {9: [[1]]}
    assert healed.options.processor is PROCESSOR


def test_images_are_files_paths_or_what_was_read(blocks: Transformer, tmp_path: Path) -> None:
    content = paint(2, 3).content
    assert isinstance(content, bytes)
    (tmp_path / "image.png").write_bytes(content)
    text, _ = write_prompt(5, paint(2, 3), 6)
    sources: list[Any] = [paint(2, 3), content, tmp_path / "image.png", str(tmp_path / "image.png")]
    config = GenerationConfig(max_new_tokens=4, temperature=0.0, stop_token_ids=())
    answers = generate(blocks, [text] * 4, config, images=[[image] for image in sources], processor=PROCESSOR)
    assert answers == answers[:1] * 4


def test_canvas_and_stream(blocks: Transformer, tokenizer: Tokenizer) -> None:
    """A canvas has the image before and after its masks; the result has its repeated placeholders."""
    text, images = write_prompt(5, MASK, paint(2, 3), 6, MASK, MASK)
    config = GenerationConfig(temperature=0.0, max_new_tokens=6, stop_token_ids=())
    [filled] = infill(blocks, [text], config, images=[images], processor=PROCESSOR)
    token_ids, _ = place(blocks, 5, MASK, paint(2, 3), 6, MASK, MASK)
    expected = np.array(token_ids)
    is_masked = expected == MASK
    assert np.array_equal(np.array(filled.token_ids)[~is_masked], expected[~is_masked])
    assert MASK not in filled.token_ids and len(filled.logprobs) == 3
    prompt = [5, *text[2:6]]
    [answer] = generate(blocks, [prompt], config, images=[images], processor=PROCESSOR)
    healed = expand_images(prompt, images, PROCESSOR, blocks.config)
    letters = [bytes([token % 200]) for token in range(300)]

    class Letters:
        def token_bytes(self, token: int) -> bytes:
            return letters[token]

    pieces = stream(blocks, Letters(), healed, config)  # type: ignore[arg-type]
    expected_text = b"".join(letters[token] for token in answer.token_ids).decode("utf-8", errors="replace")
    assert "".join(pieces) == expected_text


def test_the_placeholder_is_never_generated(blocks: Transformer) -> None:
    settings = resolve_settings(GenerationConfig(suppress_token_ids=(3,)), blocks.config)
    assert settings.forbidden_token_ids == (MASK, IMAGE, 3)


def test_placeholders_of_a_known_text_are_not_scored() -> None:
    model = make_vision_model(block_length=1, logit_alignment="shifted")
    token_ids, options = place(model, 5, 6, paint(2, 3), 7, 8)
    settings = resolve_settings(GenerationConfig(), model.config)
    [scored] = decode(model, [prepare_prompt_scoring(settings, token_ids, options)])
    assert scored.trajectory is not None
    logprobs_LV = compute_logits(model, token_ids, options.images, BlockCausal(1)).clone()
    logprobs_LV[:, [IMAGE, MASK]] = -torch.inf
    logprobs_LV = logprobs_LV.log_softmax(-1)
    [placed] = options.images
    is_image = [placed.start <= position < placed.end for position in range(len(token_ids))]
    expected = [
        np.nan if is_image[position] or not position else float(logprobs_LV[position - 1, token])
        for position, token in enumerate(token_ids)
    ]
    assert scored.trajectory.logprobs_L == pytest.approx(expected, abs=1e-9, nan_ok=True)
    assert scored.token_ids == tuple(token_ids)


def test_content_parts_of_a_chat(builder: RequestBuilder, tokenizer: Tokenizer) -> None:
    """The image of the first turn moves the end of the first answer, where blocks are counted anew."""
    first, second = paint(2, 3), paint(1, 2)
    plain: list[dict[str, Any]] = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    messages = [
        plain[0] | {"content": [{"type": "text", "text": "a"}, *show(first.content), {"type": "text", "text": "b"}]},
        plain[1],
        plain[2] | {"content": [*show(second.content), {"type": "text", "text": "d"}]},
    ]
    text = builder.encode_chat(messages, answer_prefix="e")
    token_ids, [end] = encode_prompt(tokenizer, CHAT_TEMPLATES["chatml"], plain)
    a, d = token_ids.index(ord("a")), token_ids.index(ord("d"))
    runs = ([START, *[IMAGE] * image.num_tokens, END] for image in (first, second))
    run, other_run = runs
    expected = [*token_ids[: a + 1], *run, *token_ids[a + 1 : d], *other_run, *token_ids[d:], ord("e")]
    assert list(text.token_ids) == expected
    assert text.options.segment_starts == (end + len(run),)
    assert [(item.start, item.image) for item in text.images] == [(a + 2, first), (d + len(run) + 1, second)]
    request = builder.prepare(text, max_new_tokens=5)
    assert request.options.processor is PROCESSOR
    started = builder.encode_chat([*messages[:2]], continues_answer=True)
    assert list(started.token_ids) == expected[: end + len(run) - 1]


def test_text_of_a_chat_stays_text(builder: RequestBuilder, tokenizer: Tokenizer) -> None:
    """Without images the tokens of images are text, as all special tokens; with images they are refused."""
    message = {"role": "user", "content": f"a{IMAGE_TOKENS[1]}"}
    text = builder.encode_chat([message])
    assert IMAGE not in text.token_ids and not text.images and text.options.processor is None
    parts = [{"type": "text", "text": "a<|im_end|>"}, {"type": "text", "text": "b"}]
    joined = builder.encode_chat([{"role": "user", "content": parts}])
    plain = [{"role": "user", "content": "a<|im_end|>b"}]
    template = CHAT_TEMPLATES["chatml"]
    assert list(joined.token_ids) == encode_chat(tokenizer, template, plain, add_generation_prompt=True)
    with pytest.raises(ValueError, match=r"contain <\|image_pad\|> 1 times"):
        builder.encode_chat([{"role": "user", "content": [*show(paint(2, 3).content), *parts, message["content"]]}])
    with pytest.raises(ValueError, match=r"^messages\[1\]\.content\[0\]: the part .* is not supported"):
        builder.encode_chat([message, {"role": "user", "content": [{"type": "video"}]}])


def test_a_canvas_after_a_chat_with_an_image(builder: RequestBuilder, tokenizer: Tokenizer) -> None:
    """The answer is given, a word of it is asked for."""
    question = [{"role": "user", "content": [*show(paint(2, 3).content), {"type": "text", "text": "what?"}]}]
    chat = builder.encode_chat(question)
    canvas = builder.encode_spans([("a ", 3), (" dot", 0)], chat)
    assert canvas.token_ids == (*chat.token_ids, *b"a ", MASK, MASK, MASK, *b" dot")
    assert canvas.options.is_infill and canvas.options.span_lengths == (3,)
    assert canvas.images == chat.images and canvas.options.segment_starts == chat.options.segment_starts
    request = builder.prepare(canvas)
    assert request.masked_positions.tolist() == [len(chat.token_ids) + 2 + offset for offset in range(3)]


REFUSED: dict[str, tuple[list[int], tuple[tuple[int, int], ...], str]] = {
    "fewer placeholders": ([5, IMAGE, IMAGE, 6], ((1, 3),), "takes 6 positions, of which 2 hold a placeholder"),
    "more placeholders": ([5, *[IMAGE] * 7, 6], ((1, 3),), "has 7 image placeholders .* its 1 images take 6"),
    "no image": ([5, IMAGE, 6], (), "has 1 image placeholders .* its 0 images take 0"),
    "another place": ([5, *[IMAGE] * 6, 6], ((2, 3),), "at position 2 takes 6 positions, of which 5 hold"),
    "beyond the end": ([5, *[IMAGE] * 5], ((1, 3),), "of which 5 hold"),
    "two in one place": ([5, *[IMAGE] * 6, 6], ((1, 3), (1, 3)), "of which 0 hold"),
    "before the text": ([*[IMAGE] * 6, 6], ((-1, 3),), "at position -1 takes 6 positions, of which 5 hold"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("is_infill", [False, True])
def test_placeholders_that_are_not_those_of_the_images_are_refused(
    name: str, is_infill: bool, blocks: Transformer
) -> None:
    token_ids, places, message = REFUSED[name]
    images = tuple(PlacedImage(start, paint(2, columns)) for start, columns in places)
    options = RequestOptions(images=images, processor=PROCESSOR, is_infill=is_infill)
    settings = resolve_settings(GenerationConfig(max_new_tokens=3), blocks.config)
    with pytest.raises(ValueError, match=message):
        prepare_request(settings, token_ids, options=options)


def test_refusals(blocks: Transformer, make_config: MakeConfig) -> None:
    text, images = write_prompt(5, paint(2, 3), 6)
    config = GenerationConfig(max_new_tokens=3)

    def refuse(message: str, images: Any = (images,), processor: Any = PROCESSOR, prompt: Any = text) -> None:
        with pytest.raises(ValueError, match=message):
            generate(blocks, [prompt], config, images=images, processor=processor)

    refuse("images: 2 for 1 requests", [images, images])
    refuse("prompt 0: .* 1 image placeholders .* for 2 images", [[*images, *images]])
    refuse("prompt 0: .* has 1 image placeholders .* its 0 images", [[]])
    refuse("prompt 0: image 0: .* no JPEG, PNG or WebP", [[b"nothing"]])
    refuse("prompt 0: image 0: the image is of type ndarray: pass a file", [[np.zeros((8, 8, 3), np.uint8)]])
    refuse("prompt 0: the images of a text are a list", ["image.png"])
    refuse("pass diffusionlm.load_processor", processor=None)
    other = ImageProcessor.for_model(VISION.model_copy(update={"patch_size": 8}), 256, 4096)
    refuse("positions of 16 x 16 pixels, and the model of 8 x 8", processor=other)
    long_text, long = write_prompt(5, paint(8, 8))[0] * 4, [paint(8, 8)] * 4
    message = r"268 tokens \(256 of images\) and max_new_tokens = 3: 271 tokens are more than the model's context"
    refuse(message, [long], prompt=long_text)
    plain: ModelConfig = make_config()
    with pytest.raises(ValueError, match="the model has no vision tower"):
        expand_images(text, images, PROCESSOR, plain)
    with pytest.raises(ValueError, match="the model has no vision tower"):
        check_images(plain, [1, 2], RequestOptions(images=(PlacedImage(0, images[0]),)))
    with pytest.raises(TypeError, match="pictures"):
        generate(blocks, [text], config, pictures=[images])  # type: ignore[call-arg]


def test_a_chat_with_images_needs_a_processor(builder: RequestBuilder) -> None:
    messages = [{"role": "user", "content": show(paint(2, 3).content)}]
    with pytest.raises(ValueError, match=r"pass diffusionlm\.load_processor"):
        replace(builder, processor=None).encode_chat(messages)
