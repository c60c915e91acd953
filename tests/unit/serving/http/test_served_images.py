"""Images in chats: answers over a socket are those of `generate`, prefixes with images are shared, and what is no image
for this server is refused with its place."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from diffusionlm.checkpoints.adapter_files import load_adapter, read_adapter
from diffusionlm.inference.generate import Generation, generate
from diffusionlm.models.row_adapters import share_weights
from diffusionlm.models.transformer import Transformer
from diffusionlm.vision.messages import IMAGE_PLACEHOLDER, IMAGE_TOKENS
from diffusionlm.vision.processor import ImageProcessor
from tests.image_chats import (
    BLUE,
    NUM_TOKENS,
    PROCESSOR,
    RED,
    TOKENIZER,
    image_part,
    to_data_url,
    to_jpeg,
    url_part,
)
from tests.unit.serving.http.conftest import NAME, RunningServer, StartServer, decoding_config
from tests.unit.serving.test_adapters import write_adapter

CHATS = "/v1/chat/completions"
PARTS = [{"type": "text", "text": "the cat "}, image_part(RED), {"type": "text", "text": "sat"}]
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": PARTS}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": {"enum": ["cat", "dog"]}}}
BODY: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 8, "temperature": 1.0, "seed": 7}


def decode_alone(server: RunningServer, files: list[bytes], text: str, seed: int = 7, model: Any = None) -> Generation:
    """The answer of `generate` to a message whose text has a placeholder for each file."""
    prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    ids = TOKENIZER.encode(prompt, allow_special=True)
    config = decoding_config(server, max_new_tokens=8, temperature=1.0)
    [answer] = generate(model or server.model, [ids], config, [seed], images=[files], processor=PROCESSOR)
    return answer


def ask(server: RunningServer, **fields: Any) -> Any:
    status, _, answer = server.request("POST", CHATS, {**BODY, "return_token_ids": True, **fields})
    assert status == 200, answer
    return answer


def test_answers_are_those_of_generate(image_server: RunningServer) -> None:
    """With the picture where it stands among the texts; two choices; a stream; another picture, another answer."""
    client = openai.OpenAI(base_url=image_server.url, api_key="none", _strict_response_validation=True, max_retries=0)
    text = f"the cat {IMAGE_PLACEHOLDER}sat"
    expected = [decode_alone(image_server, [RED], text, seed) for seed in (7, 8)]
    options: Any = {"model": NAME, "max_tokens": 8, "temperature": 1.0, "seed": 7}
    answer = client.chat.completions.create(messages=MESSAGES, n=2, **options, extra_body={"return_token_ids": True})  # type: ignore[arg-type]
    assert [tuple(choice.token_ids) for choice in answer.choices] == [item.token_ids for item in expected]  # type: ignore[attr-defined]
    prompt_ids = answer.choices[0].prompt_token_ids  # type: ignore[attr-defined]
    assert prompt_ids.count(image_server.model.config.image_token_id) == NUM_TOKENS
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt_ids)
    chunks = client.chat.completions.create(messages=MESSAGES, stream=True, **options)  # type: ignore[arg-type]
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)  # type: ignore[union-attr]
    assert streamed == answer.choices[0].message.content
    blue = ask(image_server, messages=[{"role": "user", "content": [PARTS[0], image_part(BLUE), PARTS[2]]}])
    assert tuple(blue["choices"][0]["token_ids"]) == decode_alone(image_server, [BLUE], text).token_ids
    assert blue["choices"][0]["token_ids"] != answer.choices[0].token_ids  # type: ignore[attr-defined]


def test_several_images_and_formats(image_server: RunningServer) -> None:
    """In the order of the parts; the file's own format counts, not that of the URL."""
    jpeg = to_jpeg(RED)
    parts = [image_part(BLUE), url_part(to_data_url(jpeg), detail="high")]
    answer = ask(image_server, messages=[{"role": "user", "content": parts}])["choices"][0]
    expected = decode_alone(image_server, [BLUE, jpeg], IMAGE_PLACEHOLDER * 2)
    assert tuple(answer["token_ids"]) == expected.token_ids
    swapped = ask(image_server, messages=[{"role": "user", "content": parts[::-1]}])["choices"][0]
    assert swapped["token_ids"] != answer["token_ids"]


def test_a_second_turn_reuses_the_picture(start_server: StartServer, image_model: Transformer) -> None:
    """The prefix with the same picture is cached; another picture ends the common prefix before itself."""
    server = start_server(image_model, tokenizer=TOKENIZER, processor=PROCESSOR, page_size=4, deterministic=True)
    first = ask(server)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    answer = first["choices"][0]["message"]["content"]
    turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": "the mat"}]
    uncached = start_server(
        image_model, tokenizer=TOKENIZER, processor=PROCESSOR, prefix_cache=False, deterministic=True
    )
    ids = first["choices"][0]["prompt_token_ids"]
    start = ids.index(image_model.config.image_token_id)
    for picture, bounds in ((RED, (start + NUM_TOKENS, 384)), (BLUE, (0, start))):
        content = [PARTS[0], image_part(picture), PARTS[2]]
        messages = [{"role": "user", "content": content}, *turns]
        second = ask(server, messages=messages)
        assert bounds[0] <= second["usage"]["prompt_tokens_details"]["cached_tokens"] <= bounds[1]
        assert second["choices"] == ask(uncached, messages=messages)["choices"]


def test_constraints_and_prompt_logprobs(image_server: RunningServer) -> None:
    stop = [image_server.tokenizer.eos_token_id]
    answer = ask(image_server, max_tokens=16, response_format=FORMAT, prompt_logprobs=1, stop_token_ids=stop)
    choice, places = answer["choices"][0], answer["prompt_logprobs"]
    assert json.loads(choice["message"]["content"]) in ("cat", "dog")
    images = [
        index
        for index, token in enumerate(choice["prompt_token_ids"])
        if token == image_server.model.config.image_token_id
    ]
    assert len(places) == len(choice["prompt_token_ids"])
    assert [index for index, place in enumerate(places) if place is None] == images
    ids = choice["prompt_token_ids"]
    scores = [place[str(token)]["logprob"] for place, token in zip(places, ids, strict=True) if place is not None]
    assert min(scores) > -1000, "tokens of the prompt that an answer may not have are scored, too"


def test_an_adapter_reads_the_picture(start_server: StartServer, image_model: Transformer, tmp_path: Path) -> None:
    write_adapter(share_weights(image_model), tmp_path / "a", 1, {"rank": 2, "targets": ("q_proj", "down_proj")})
    adapter = read_adapter(image_model, tmp_path / "a")
    server = start_server(
        image_model, tokenizer=TOKENIZER, processor=PROCESSOR, adapters={"a": adapter}, deterministic=True
    )
    adapted = share_weights(image_model)
    load_adapter(adapted, tmp_path / "a")
    text = f"the cat {IMAGE_PLACEHOLDER}sat"
    expected = [decode_alone(server, [RED], text, model=model).token_ids for model in (adapted, image_model)]
    assert expected[0] != expected[1]
    answers = [tuple(ask(server, model=name)["choices"][0]["token_ids"]) for name in ("a", NAME)]
    assert answers == expected


def test_images_are_read_beside_the_event_loop(image_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    read_image = ImageProcessor.read_image

    def note_thread(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read_image(*args, **options)

    monkeypatch.setattr(ImageProcessor, "read_image", note_thread)
    ask(image_server)
    assert len(threads) == 1 and threads[0].startswith("diffusionlm-prepare-")


def test_tokens_of_a_chat_with_a_picture(image_server: RunningServer) -> None:
    status, _, answer = image_server.request("POST", "/tokenize", {"messages": MESSAGES})
    assert status == 200 and answer["tokens"] == ask(image_server)["choices"][0]["prompt_token_ids"]


def test_models_say_whether_they_read_images(image_server: RunningServer, server: RunningServer) -> None:
    has_vision = [item.request("GET", "/v1/models")[2]["data"][0]["has_vision"] for item in (image_server, server)]
    assert has_vision == [True, False]


def refuse(server: RunningServer, *parts: Any, role: str = "user") -> tuple[int, str, str]:
    messages = [{"role": "system", "content": "the"}, {"role": role, "content": [PARTS[0], *parts]}]
    status, _, body = server.request("POST", CHATS, {**BODY, "messages": messages})
    assert status >= 400, body
    return status, body["error"]["param"], body["error"]["message"]


PART = "messages[1].content[1]"


@pytest.mark.parametrize(
    ("part", "param", "message"),
    [
        (url_part("https://a.org/b.png"), f"{PART}.image_url.url", "fetches nothing"),
        (url_part("file:///etc/passwd"), f"{PART}.image_url.url", "fetches nothing"),
        (url_part("/etc/passwd"), f"{PART}.image_url.url", "data:image/png;base64,"),
        (url_part(to_data_url(RED), detail="low"), f"{PART}.image_url.detail", "'auto' or 'high'"),
        ({"type": "image_url", "image_url": to_data_url(RED)}, f"{PART}.image_url", "valid dictionary"),
        ({"type": "image_url"}, PART, '{"type": "image_url", "image_url"'),
        ({"type": "image_url", "text": "a"}, PART, '{"type": "image_url", "image_url"'),
        ({**image_part(RED), "type": "text", "text": "a"}, PART, '{"type": "image_url", "image_url"'),
        ({"type": "input_audio", "input_audio": {}}, f"{PART}.type", "'text' or 'image_url'"),
        (url_part("data:text/html;base64,PGI+"), PART, "is not supported: write data"),
        (url_part("data:image/png;base64,???"), PART, "not valid base64"),
        (image_part(b"GIF89a"), PART, "no JPEG, PNG or WebP"),
        (image_part(RED[:-30]), PART, "damaged or truncated"),
        ({"type": "text", "text": IMAGE_TOKENS[1]}, "messages", "<|image_pad|>"),
    ],
)  # fmt: skip
def test_what_is_no_image(image_server: RunningServer, part: Any, param: str, message: str) -> None:
    """Beside a good one; a request after it is answered."""
    assert refuse(image_server, part, image_part(RED))[:2] == (400, param)
    assert message in refuse(image_server, part, image_part(RED))[2]
    image_server.wait_until_idle()


def test_images_belong_to_users(image_server: RunningServer) -> None:
    status, param, message = refuse(image_server, image_part(RED), role="assistant")
    assert (status, param) == (400, PART) and "only user messages may have images" in message


def test_limits(start_server: StartServer, image_model: Transformer) -> None:
    """Of the number of images, of the bytes of a body, of the context, and of pixels."""
    server = start_server(image_model, tokenizer=TOKENIZER, processor=PROCESSOR, max_images=3, max_body=20_000)
    assert ask(server, messages=[{"role": "user", "content": [image_part(RED)] * 3}])
    status, param, message = refuse(server, *[image_part(RED)] * 4)
    assert (status, param) == (400, "messages") and "serve.max_images = 3" in message
    status, _, body = server.request("POST", CHATS, {**BODY, "messages": [{"role": "user", "content": "a" * 20_000}]})
    assert (status, body["error"]["code"]) == (413, "body_too_large") and "serve.max_body" in body["error"]["message"]
    large = ImageProcessor.for_model(image_model.config.vision, min_pixels=160 * 160)  # type: ignore[arg-type]
    server = start_server(image_model, tokenizer=TOKENIZER, processor=large)
    status, _, body = server.request("POST", CHATS, BODY)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert body["error"]["param"] == "messages" and "max_position_embeddings" in body["error"]["message"]


def test_a_model_without_vision_refuses_images(server: RunningServer) -> None:
    status, param, message = refuse(server, image_part(RED))
    assert (status, param) == (400, PART) and "this model reads no images" in message
