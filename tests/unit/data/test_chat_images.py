"""Images in conversations: their places in documents and rows, what is refused, and what stays out of a row."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from config.data import OnBadRow
from config.finetune.chat import ChatRowsConfig
from diffusionlm.data.chat.conversation import Conversation
from diffusionlm.data.chat.encoder import BAD_IMAGE, CUT, PROMPT_TOO_LONG, REFUSED, TOO_LONG, ChatEncoder, ChatRecords
from diffusionlm.data.chat.formats import ChatRowParser
from diffusionlm.data.loader import collate_rows
from diffusionlm.data.packing import Document, RowFormat, append_mismatch, pack_conversations, pad_to_longest
from diffusionlm.data.sources.record_source import BadRecord
from diffusionlm.data.sources.validation_split import hash_record
from diffusionlm.vision.images import PlacedImage
from tests.unit.data.chat_cases import chat, chat_tokenizer, image_processor, image_tokenizer, picture
from tokenizer import ChatTemplate

EOS, START, STOP, BEGIN, PAD, END = 256, 258, 259, 260, 261, 262
SMALL, LARGE = picture(1, 2), picture(2, 3, seed=1)
USER, ASSISTANT = [START, *b"user\n"], [START, *b"assistant\n"]
SMALL_IDS, LARGE_IDS = [BEGIN, PAD, PAD, END], [BEGIN, *[PAD] * 6, END]
PROCESSOR = image_processor()


def image(content: Any) -> dict[str, Any]:
    return {"type": "image", "image": content}


def make_encoder(
    row_length: int = 1_000,
    block_length: int | None = None,
    on_bad_row: OnBadRow = "skip",
    **options: Any,
) -> ChatEncoder:
    config = ChatRowsConfig.model_validate({"eos_padding": "none"} | options)
    records = ChatRecords(config, "data.source.chat", on_bad_row, processor=PROCESSOR)
    return ChatEncoder(records, image_tokenizer(), row_length, block_length)


def parse(row: dict[str, Any], folder: Path | None = None, **options: Any) -> Conversation:
    conversation = ChatRowParser(ChatRowsConfig.model_validate(options))(row, folder)
    assert not isinstance(conversation, BadRecord), conversation
    return conversation


def encode(encoder: ChatEncoder, row: dict[str, Any]) -> list[Document]:
    conversation = parse(row)
    documents, reasons = encoder.encode(conversation)
    encoder.count(conversation, reasons, len(documents))
    return documents


def places_of(images: tuple[PlacedImage, ...]) -> list[tuple[int, tuple[int, int], Any]]:
    return [(placed.start, placed.image.grid, placed.image.content) for placed in images]


ONE_TURN = chat([image(SMALL), {"type": "text", "text": "what"}], "cat")
ONE_TURN_IDS = [*USER, *SMALL_IDS, *b"what", STOP, 10, *ASSISTANT, *b"cat", STOP]


def test_a_document_has_a_placeholder_for_each_position_of_an_image() -> None:
    (document,) = encode(make_encoder(), ONE_TURN)
    assert document.tokens.tolist() == ONE_TURN_IDS
    assert document.loss_mask.tolist() == [False] * (len(ONE_TURN_IDS) - 4) + [True] * 4
    assert places_of(document.images) == [(len(USER) + 1, (1, 2), SMALL)]
    text = encode(make_encoder(), chat("what", "cat"))[0]
    assert text.images == () and text.tokens.tolist() == [*USER, *b"what", STOP, 10, *ASSISTANT, *b"cat", STOP]


TURNS = chat(["a", image(SMALL)], "x", [image(LARGE), "b", image(SMALL)], "y")


def test_turns_have_the_images_before_them() -> None:
    first = [*USER, *b"a", *SMALL_IDS, STOP, 10, *ASSISTANT, ord("x"), STOP]
    second = [10, *USER, *LARGE_IDS, *b"b", *SMALL_IDS, STOP, 10, *ASSISTANT, ord("y"), STOP]
    starts = [len(USER) + 2, len(first) + 1 + len(USER) + 1, len(first) + 1 + len(USER) + 10]
    expected = list(zip(starts, [(1, 2), (2, 3), (1, 2)], [SMALL, LARGE, SMALL], strict=True))

    (whole,) = encode(make_encoder(block_length=4, turns="all"), TURNS)
    assert whole.tokens.tolist() == first + second
    assert np.flatnonzero(whole.loss_mask).tolist() == [len(first) - 2, len(first) - 1, len(whole) - 2, len(whole) - 1]
    assert whole.segment_ids.tolist() == [0] * len(first) + [1] * len(second)
    assert places_of(whole.images) == expected

    expanded = encode(make_encoder(turns="expand"), TURNS)
    assert [document.tokens.tolist() for document in expanded] == [first, first + second]
    assert [places_of(document.images) for document in expanded] == [expected[:1], expected]
    assert not any(document.loss_mask[document.tokens == PAD].any() for document in [whole, *expanded])


@pytest.mark.parametrize(
    "row",
    [
        chat("<image>what", "cat") | {"image": SMALL},
        chat("what", "cat") | {"image": {"bytes": SMALL, "path": "a.png"}},
        chat([{"type": "image"}, {"type": "text", "text": "what"}], "cat") | {"images": [{"bytes": SMALL}]},
        chat([{"type": "image_url", "image_url": {"url": "a.png"}}, "what"], "cat"),
        chat([image("data:image/png;base64," + base64.b64encode(SMALL).decode()), "what"], "cat"),
        {
            "conversations": [{"from": "human", "value": "<image>what"}, {"from": "gpt", "value": "cat"}],
            "image": "a.png",
        },
        {"prompt": "what", "completion": "cat", "picture": "pictures/../a.png"},
        {"instruction": "<image>what", "output": "cat", "images": ["a.png"]},
    ],
    ids=["mark", "first", "part", "url", "data URL", "LLaVA", "columns", "alpaca"],
)
def test_forms_of_images(row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(SMALL)
    columns = {"image": "picture"} if "picture" in row else {}
    (document,), reasons = make_encoder().encode(parse(row, tmp_path, columns=columns))
    assert document.tokens.tolist() == ONE_TURN_IDS and not reasons
    (placed,) = document.images
    content = placed.image.content
    assert (content.read_bytes() if isinstance(content, Path) else content) == SMALL


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (chat("<image><image>", "x") | {"image": SMALL}, "1 images, and its 1 user messages have 2 marks"),
        (chat([image(SMALL), "a"], "x") | {"image": SMALL}, "1 images, and its messages have images too"),
        (chat("a", [image(SMALL)]), "only user messages may have images"),
        (chat([image(SMALL), "a"], "the <|image_pad|>"), r"contain <\|image_pad\|>"),
        (chat([image("../a.png"), "a"], "x"), "outside of"),
        (chat([image("http://a/b.png"), "a"], "x"), "not fetched"),
        ({"prompt": "q", "chosen": [{"role": "assistant", "content": [image(SMALL)]}], "rejected": "x"}, "only user"),
    ],
)
def test_unusable_images_are_bad_records(row: dict[str, Any], problem: str, tmp_path: Path) -> None:
    record = ChatRowParser(ChatRowsConfig())(row, tmp_path)
    assert isinstance(record, BadRecord) and record.reason == "image cannot be used"
    with pytest.raises(ValueError, match=problem):
        raise ValueError(record.detail)
    without_folder = ChatRowParser(ChatRowsConfig())(chat([image("a.png"), "a"], "x"))
    assert isinstance(without_folder, BadRecord) and "is a path, which is not read here" in without_folder.detail


def test_images_that_cannot_be_read_are_skipped_or_named(tmp_path: Path) -> None:
    contents = {"torn": SMALL[: len(SMALL) // 2], "missing": tmp_path / "none.png", "other": b"GIF89a"}
    for name, content in contents.items():
        conversation = replace(parse(chat([image(content), "a"], "x")), location="c.jsonl, line 7")
        encoder = make_encoder()
        documents, reasons = encoder.encode(conversation)
        encoder.count(conversation, reasons, 0)
        log = encoder.records.skip_log
        assert not documents and log.counts == {BAD_IMAGE: 1}, name
        assert log.examples[BAD_IMAGE].startswith("c.jsonl, line 7: ")
        with pytest.raises(ValueError, match=r"data\.source\.chat: c\.jsonl, line 7: .*the .*on_bad_row = \"skip\""):
            make_encoder(on_bad_row="raise", template="chatml").encode(conversation)
    (kept,) = make_encoder().encode(replace(parse(ONE_TURN), location="c.jsonl, line 8"))[0]
    assert kept.images[0].image.location == "c.jsonl, line 8", "errors of the loader name it"


def test_images_need_a_vision_tower_and_its_tokens() -> None:
    records = ChatRecords(ChatRowsConfig(), "data.source.chat", "skip")
    conversation = replace(parse(ONE_TURN), location="c.jsonl, line 7")
    with pytest.raises(ValueError, match=r"data\.source\.chat: c\.jsonl, line 7: .* no vision tower: .*init_from"):
        ChatEncoder(records, image_tokenizer(), 1_000).encode(conversation)
    with pytest.raises(ValueError, match=r"no special token <\|vision_start\|>, .*special_tokens"):
        ChatEncoder(replace(records, processor=PROCESSOR), chat_tokenizer(), 1_000)


def test_a_template_that_writes_other_placeholders_is_refused() -> None:
    source = image_tokenizer().chat_template
    assert source is not None
    for change in ("message.content | replace('<|image_pad|>', '')", "message.content + '<|image_pad|>'"):
        template = ChatTemplate(source.source.replace("message.content", f"({change})"), source.tokens)
        records = ChatRecords(ChatRowsConfig(), "data.source.chat", "skip", processor=PROCESSOR)
        encoder = ChatEncoder(records, image_tokenizer().with_chat_template(template), 1_000)
        documents, reasons = encoder.encode(parse(ONE_TURN))
        assert not documents and [reason for reason, _ in reasons] == [REFUSED], reasons
    reasoned = parse(ONE_TURN)
    reasoned.messages[1]["reasoning_content"] = "the <|image_pad|>"
    records = ChatRecords(ChatRowsConfig(), "chat", "skip", processor=PROCESSOR)
    encoder = ChatEncoder(records, image_tokenizer("qwen3"), 1_000)
    documents, reasons = encoder.encode(reasoned)
    assert not documents and "1 image placeholders" in reasons[0][1] and "for 0 images" in reasons[0][1]


def test_an_image_is_whole_in_a_row_or_not_in_it() -> None:
    first = [*USER, *b"a", *SMALL_IDS, STOP, 10, *ASSISTANT, ord("x"), STOP]
    (whole,) = encode(make_encoder(block_length=4, turns="all"), TURNS)
    for row_length in range(1, len(whole)):
        drop = make_encoder(row_length, 4, turns="all")
        assert not encode(drop, TURNS)
        assert drop.records.skip_log.examples[TOO_LONG] == (
            f"{len(whole)} tokens in rows of {row_length}, 10 of them for 3 images; raise data.row_length or lower "
            'data.images.max_pixels, or set data.source.chat.truncate_mode = "cut"'
        )
        cut = make_encoder(row_length, 4, turns="all", truncate_mode="cut")
        documents = encode(cut, TURNS)
        (reason,) = cut.records.skip_log.counts
        if not documents:
            assert row_length < len(first) - 1 and reason == PROMPT_TOO_LONG
            continue
        (document,) = documents
        assert reason == CUT and len(document) <= row_length and document.loss_mask[-1]
        num_images = 1 if row_length < len(whole) - 1 else 3
        assert document.images == whole.images[:num_images]
        assert int((document.tokens == PAD).sum()) == sum(placed.image.num_tokens for placed in document.images)


def test_rows_place_the_images_of_their_documents() -> None:
    encoder = make_encoder()
    (document,), (other, *_) = encode(encoder, ONE_TURN), encode(encoder, chat(["b", image(LARGE)], "dog"))
    text = encode(encoder, chat("q", "a"))[0]
    row_format = RowFormat(len(document) + len(other), EOS, has_segments=True)
    ((long, short), (alone,)) = pack_conversations([document, text, other], row_format)
    assert (long, short, alone) == (other, document, text)
    rows = [row_format.build_row(documents) for documents in ([long, short], [alone], [document])]
    starts = [len(USER) + 2, len(other) + len(USER) + 1]
    assert places_of(rows[0].images) == [(starts[0], (2, 3), LARGE), (starts[1], (1, 2), SMALL)]
    assert rows[1].images == ()

    batch = collate_rows(rows, PROCESSOR)
    images, length = batch.images, row_format.row_length
    assert images is not None
    assert images.indices_M.tolist() == [
        *range(starts[0], starts[0] + 6),
        *range(starts[1], starts[1] + 2),
        *range(2 * length + len(USER) + 1, 2 * length + len(USER) + 3),
    ]
    assert (batch.tokens_BL.flatten()[images.indices_M] == PAD).all() and (batch.tokens_BL == PAD).sum() == 10
    assert images.feature_rows_M.tolist() == [*range(8), 6, 7], "the picture of two rows is computed once"
    assert images.grids == ((2, 3), (1, 2))
    large, small = (PROCESSOR.compute_patches(PROCESSOR.read_image(content)) for content in (LARGE, SMALL))
    assert images.patches_PC is not None and torch.equal(images.patches_PC, torch.from_numpy(np.vstack([large, small])))
    assert collate_rows(rows[1:2], PROCESSOR).images is None


def test_preferences_share_the_images_of_their_prompt() -> None:
    prompt = [{"role": "user", "content": [image(SMALL), "what"]}]
    rows: list[dict[str, Any]] = [
        {"prompt": prompt, "chosen": "cat", "rejected": "dog"},
        {"prompt": "what", "chosen": "cat", "rejected": "dog", "image": SMALL},
        {"chosen": "cat", "rejected": "dog", "image": SMALL}
        | {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what"}]}]},
        {"chosen": [*prompt, {"role": "assistant", "content": "cat"}]}
        | {"rejected": [*prompt, {"role": "assistant", "content": "dog"}]},
    ]
    encoder = make_encoder(format="preference")
    for row in rows:
        ((chosen, rejected),), _ = encoder.encode_preference(parse(row))
        assert chosen.tokens.tolist() == ONE_TURN_IDS
        assert rejected.tokens.tolist() == [*ONE_TURN_IDS[:-4], *b"dog", STOP]
        assert chosen.images == rejected.images and places_of(chosen.images) == [(len(USER) + 1, (1, 2), SMALL)]
        placed = RowFormat(100, EOS, has_segments=True).build_row([chosen, rejected]).images
        assert [image.start for image in placed] == [len(USER) + 1, len(chosen) + len(USER) + 1]


def test_labeled_answers_and_their_mismatches_have_the_images_of_the_prompt() -> None:
    encoder = make_encoder(format="unpaired")
    row_format = RowFormat(100, EOS, has_segments=True)
    rows = []
    for content, answer in ((SMALL, "cat"), (LARGE, "horse")):
        conversation = parse(chat([image(content), "what"], answer) | {"label": True}, format="unpaired")
        [(document,)], _ = encoder.encode_preference(conversation, is_unpaired=True)
        rows.append(row_format.build_row([document]))
    appended = append_mismatch(*rows)
    size = len(ONE_TURN_IDS)
    assert places_of(appended.images) == [(len(USER) + 1, (1, 2), SMALL), (size + len(USER) + 1, (1, 2), SMALL)]
    expected = [*ONE_TURN_IDS, *ONE_TURN_IDS[:-4], *b"horse", STOP]
    assert appended.tokens_L[: len(expected)].tolist() == expected
    padded = pad_to_longest(rows)
    assert [row.images for row in padded] == [row.images for row in rows]


def test_the_hash_of_a_conversation_is_that_of_paths_in_the_record_or_of_files(tmp_path: Path) -> None:
    """So a folder that moves, and other keys of a part, keep the validation split."""

    def digest(row: dict[str, Any], folder: Path | None = None) -> bytes:
        return hash_record(parse(row, folder))

    parts = [[{**image(content), "detail": "high"}, "a"] for content in ("x.png", "y.png")]
    here, there = (digest(chat(parts[0], "z"), tmp_path / name) for name in ("here", "there"))
    assert here == there != digest(chat(parts[1], "z"), tmp_path / "here")
    assert digest(chat([image(SMALL), "a"], "z")) == digest(chat("<image>a", "z") | {"image": SMALL})
    assert digest(chat([image(SMALL), "a"], "z")) != digest(chat([image(LARGE), "a"], "z"))
    assert str(parse(chat([image(SMALL), "a"], "z"))) == "a\n\nz", "tokenizers are trained on the text"
    pixels = io.BytesIO()
    Image.new("RGB", (8, 8)).save(pixels, "PNG")
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert len({digest(pair | {"image": content}) for content in (SMALL, LARGE, pixels.getvalue())}) == 3
