"""Images of messages: parts, data URLs, paths that may be read, and images of a record."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from diffusionlm.vision.messages import IMAGE_PLACEHOLDER, IMAGE_TOKENS, place_images, split_images

FILE = b"\x89PNG..."
URL = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"


def make_user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def make_image(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


def make_text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_placeholder() -> None:
    assert IMAGE_PLACEHOLDER == "<|vision_start|><|image_pad|><|vision_end|>"


def test_messages_of_text_are_the_same_objects() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a <image>"},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    split, images = split_images(messages)
    assert [id(message) for message in split] == [id(message) for message in messages] and images == []


def test_parts_become_text_in_order() -> None:
    messages = [
        {"role": "system", "content": [make_text("Be "), "brief."]},
        make_user(make_image(b"1"), make_text("and"), make_image(b"2"), "?"),
        {"role": "assistant", "content": "Both."},
        make_user("Why", make_image(b"3")) | {"name": "x"},
    ]
    split, images = split_images(messages)
    assert split == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"{IMAGE_PLACEHOLDER}and{IMAGE_PLACEHOLDER}?"},
        {"role": "assistant", "content": "Both."},
        {"role": "user", "content": f"Why{IMAGE_PLACEHOLDER}", "name": "x"},
    ]
    assert images == [b"1", b"2", b"3"] and split[2] is messages[2]


def test_forms_of_an_image(tmp_path: Path) -> None:
    picture = Image.new("RGB", (1, 1))
    (tmp_path / "images").mkdir()
    inside = tmp_path.resolve() / "images" / "a.png"
    forms: list[tuple[dict[str, Any], Any]] = [
        (make_image(FILE), FILE),
        (make_image(picture), picture),
        (make_image(URL), FILE),
        (make_image(URL.replace("data:image/png;", "DATA:image/webp;charset=utf-8;")), FILE),
        (make_image({"bytes": FILE, "path": "../name.png"}), FILE),
        (make_image({"bytes": None, "path": "images/a.png"}), inside),
        (make_image("images/a.png") | {"text": None, "index": 0}, inside),
        (make_image("images/../images/a.png"), inside),
        (make_image(str(inside)), inside),
        (make_image(Path("/anywhere/a.png")), Path("/anywhere/a.png")),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}, FILE),
        ({"type": "image_url", "image_url": URL}, FILE),
    ]
    for part, expected in forms:
        assert split_images([make_user(part)], tmp_path)[1] == [expected]


@pytest.mark.parametrize(
    "path", ["../secret.png", "images/../../secret.png", "/etc/passwd", "link.png", "links/secret.png", "..", "loop"]
)
def test_paths_may_not_leave_the_folder(path: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(FILE)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "links").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder / "loop")
    with pytest.raises(ValueError, match=r"^messages\[0\]\.content\[0\]: the image '.*' is (outside of .*|no path)"):
        split_images([make_user(make_image(path))], folder)


def test_links_inside_of_the_folder_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(FILE)
    (tmp_path / "link.png").symlink_to(tmp_path / "a.png")
    (tmp_path / "folder").symlink_to(tmp_path)
    images = split_images([make_user(make_image("link.png"))], tmp_path / "folder")[1]
    assert images == [tmp_path.resolve() / "a.png"]


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (make_image("a.png"), "'a.png' is a path, which is not read here: send the file as a data URL"),
        (make_image({"path": "a.png"}), "is a path, which is not read here"),
        (make_image("https://example.org/a.png"), "is not fetched: send it as data URL"),
        ({"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}, "is not fetched"),
        (make_image("file:///etc/passwd"), "is not fetched"),
        (make_image("data:text/plain;base64,AAAA"), "is not supported: write data:image/png;base64"),
        (make_image("data:image/png,AAAA"), "is not supported"),
        (make_image("data:image/png;base64,AA*AA"), "is not valid base64 .*: encode the file again"),
        (make_image("data:image/png;base64,AAA"), "is not valid base64"),
        (make_image("data:image/png;base64,ÄÖ=="), "is not valid base64"),
        (make_image(None), "the image is None: expected a path, a data URL, bytes or a Pillow image"),
        (make_image({}), "the image is None"),
        (make_image(7), "the image is 7"),
        ({"type": "image_url", "image_url": {}}, "the image is None"),
        ({"type": "video", "video": "a.mp4"}, "{'type': 'video', .*} is not supported: expected"),
        ({"type": "text"}, "{'type': 'text'} is not supported"),
        ({"type": "text", "text": 7}, "is not supported"),
        (7, "the part 7 is not supported"),
    ],
)
def test_parts_that_are_refused(part: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"^messages\[1\]\.content\[1\]: .*{problem}"):
        split_images([{"role": "system", "content": "x"}, make_user("text", part)])


def test_null_in_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no path"):
        split_images([make_user(make_image("a\0.png"))], tmp_path)


@pytest.mark.parametrize("role", ["assistant", "system", "tool", None])
def test_only_users_have_images(role: str | None) -> None:
    with pytest.raises(ValueError, match=rf"^messages\[0\]\.content\[0\]: only user messages may .* of {role!r}$"):
        split_images([{"role": role, "content": [make_image(FILE)]}])


@pytest.mark.parametrize("token", IMAGE_TOKENS)
def test_tokens_of_images_in_a_text_with_images_are_refused(token: str) -> None:
    half = len(token) // 2
    for parts in ([token], [token[:half], make_text(token[half:])], [IMAGE_PLACEHOLDER]):
        with pytest.raises(ValueError, match=r"the texts contain .* 1 times, which marks an image: remove it"):
            split_images([make_user(make_image(FILE), *parts)])
    with pytest.raises(ValueError, match="1 times"):
        split_images([make_user(make_image(FILE)), {"role": "assistant", "content": token}])
    assert split_images([make_user(token)])[0][0]["content"] == token


def place(messages: list[dict[str, Any]], *images: Any) -> tuple[list[Any], list[Any]]:
    split, raw_images = split_images(place_images(messages, images))
    return [message["content"] for message in split], raw_images


def test_images_of_a_record_stand_at_their_marks() -> None:
    messages = [
        {"role": "system", "content": "<image> means an image"},
        {"role": "user", "content": "<image>\nAnd <image>?"},
        {"role": "assistant", "content": "<image>"},
        make_user(make_text("This:"), {"type": "image", "text": None}, "or <image>"),
    ]
    contents, images = place(messages, b"1", b"2", b"3", b"4")
    assert contents == [
        "<image> means an image",
        f"{IMAGE_PLACEHOLDER}\nAnd {IMAGE_PLACEHOLDER}?",
        "<image>",
        f"This:{IMAGE_PLACEHOLDER}or {IMAGE_PLACEHOLDER}",
    ]
    assert images == [b"1", b"2", b"3", b"4"]
    assert messages[3]["content"][1] == {"type": "image", "text": None}, "the record is as it was"


def test_images_without_marks_stand_before_the_first_user_text() -> None:
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    contents, images = place(messages, b"1", b"2")
    assert contents == ["s", f"{IMAGE_PLACEHOLDER * 2}u", "a", "u"] and images == [b"1", b"2"]


def test_record_without_images() -> None:
    messages = [{"role": "user", "content": "u"}, make_user(make_image(FILE)), {"role": "assistant", "content": None}]
    assert [id(message) for message in place_images(messages, [])] == [id(message) for message in messages]


@pytest.mark.parametrize(
    ("messages", "num_images", "problem"),
    [
        ([make_user("<image> <image>")], 1, "^the record has 1 images, and its 1 user messages have 2 marks <image>"),
        ([make_user("<image>"), make_user("x")], 2, "has 2 images, and its 2 user messages have 1 marks"),
        ([make_user({"type": "image"})], 0, "has 0 images, and its 1 user messages have 1 marks"),
        ([{"role": "assistant", "content": "x"}], 1, "has 1 images, and its 0 user messages have 0 marks"),
        ([make_user("<image>", make_image(FILE))], 1, "has 1 images, and its messages have images too"),
        ([make_user({"type": "image_url", "image_url": URL})], 1, "and its messages have images too"),
        ([{"role": "user", "content": None}], 1, r"^messages\[0\]: the part None is not supported"),
    ],
)
def test_wrong_numbers_of_images(messages: list[dict[str, Any]], num_images: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        place_images(messages, [FILE] * num_images)
