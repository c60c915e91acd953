"""Items with images: where they stand in the prompt, the answers, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from config.generation import GenerationConfig
from config.model import ModelConfig
from diffusionlm.evaluation.likelihood.scoring import conditional_likelihood
from diffusionlm.evaluation.tasks.evaluation import evaluate_task
from diffusionlm.evaluation.tasks.items import read_task_items
from diffusionlm.evaluation.tasks.preparation import PreparedItems, prepare_items
from diffusionlm.inference.generate import generate
from diffusionlm.inference.images import expand_images
from diffusionlm.models.transformer import Transformer
from diffusionlm.vision.messages import IMAGE_PLACEHOLDER
from tests.conftest import MakeModel
from tests.image_chats import BLUE, MODEL_KEYS, PROCESSOR, RED, TOKENIZER, image_part, to_data_url
from tests.unit.evaluation.tasks.conftest import TASK

GENERATION = {"max_new_tokens": 5, "temperature": 1.0}
Prepare = Callable[..., PreparedItems]


@pytest.fixture(scope="module")
def image_model(tiny_model: MakeModel) -> Transformer:
    return tiny_model(torch.float64, **MODEL_KEYS).eval()


@pytest.fixture
def prepare(tmp_path: Path, image_model: Transformer) -> Prepare:
    """``prepare(kind, records, model=..., **options)``: a task whose folder has red.png, and its prompts."""
    (tmp_path / "red.png").write_bytes(RED)

    def make(kind: str, records: list[Any], model: ModelConfig = image_model.config, **options: Any) -> PreparedItems:
        path = tmp_path / "items.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        task = TASK.validate_python({"kind": kind, "data": path, **options})
        return prepare_items(task, read_task_items(task), TOKENIZER, model, None if model.vision is None else PROCESSOR)

    return make


def encode(*texts: str) -> list[int]:
    """Messages in turn and the beginning of an answer, with a placeholder token for each image."""
    roles = ["user" if index % 2 == 0 else "assistant" for index in range(len(texts))]
    turns = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in zip(roles, texts, strict=True)]
    return TOKENIZER.encode("".join([*turns, "<|im_start|>assistant\n"]), allow_special=True)


def check_answers(task: PreparedItems, model: Transformer, prompts: list[list[int]], images: list[list[bytes]]) -> None:
    """The task's answers are those of `generate` to these prompts."""
    suppressed = task.requests.settings.config.suppress_token_ids
    for result, item, prompt, files in zip(evaluate_task(model, task), task.items, prompts, images, strict=True):
        config = GenerationConfig.model_validate({**GENERATION, "suppress_token_ids": suppressed})
        seed = task.build_request(item, 0).seed
        [expected] = generate(model, [prompt], config, [seed], images=[files], processor=PROCESSOR)
        assert result.output == TOKENIZER.decode_bytes(expected.token_ids).decode(errors="replace")


def test_questions_from_a_template(prepare: Prepare, image_model: Transformer) -> None:
    """Images precede the question, or stand at its marks; examples have theirs, as turns and in one text."""
    records: list[dict[str, Any]] = [
        {"question": "how many?", "answer": "#### 1", "image": "red.png"},
        {"question": "is <image> in <image>?", "answer": "2", "images": [to_data_url(BLUE), "red.png"]},
        {"question": "no picture", "answer": "3", "image": None},
    ]
    prompt = {"format": "chat", "template": "{question}"}
    task = prepare("gsm8k", records, prompt=prompt, generation=GENERATION)
    questions = [
        f"{IMAGE_PLACEHOLDER}how many?",
        f"is {IMAGE_PLACEHOLDER} in {IMAGE_PLACEHOLDER}?",
        "no picture",
    ]
    files = [[RED], [BLUE, RED], []]
    check_answers(task, image_model, [encode(text) for text in questions], files)
    assert len({task.hash_prompt(item) for item in task.items}) == 3
    shots = {"shots": 1, "shots_data": str(task.config.data)}
    turns = prepare("gsm8k", records, prompt={**prompt, **shots}, generation=GENERATION)
    expected = [(questions[1 if index == 0 else 0], text) for index, text in enumerate(questions)]
    golds = ["2", "#### 1", "#### 1"]
    prompts = [encode(shot, gold, text) for (shot, text), gold in zip(expected, golds, strict=True)]
    check_answers(turns, image_model, prompts, [[*files[1], RED], [RED, *files[1]], [RED]])
    one = [records[0], {**records[0], "question": "what?", "image": to_data_url(BLUE)}]
    text = prepare("gsm8k", one, prompt={**prompt, **shots, "shots_as": "text"}, generation=GENERATION)
    marks = IMAGE_PLACEHOLDER * 2
    prompts = [encode(f"{marks}what? #### 1\n\nhow many?"), encode(f"{marks}how many? #### 1\n\nwhat?")]
    check_answers(text, image_model, prompts, [[BLUE, RED], [RED, BLUE]])


def test_conversations(prepare: Prepare, image_model: Transformer) -> None:
    """With parts, and with a column of images, in the formats of training."""
    parts = [{"type": "text", "text": "what "}, {"type": "image", "image": "red.png"}]
    answer = {"role": "assistant", "content": "red"}
    records = [
        {"messages": [{"role": "user", "content": parts}, answer]},
        {"messages": [{"role": "user", "content": [image_part(BLUE)]}, answer]},
        {"messages": [{"role": "user", "content": "what"}, answer], "image": "red.png"},
    ]
    task = prepare("exact_match", records, generation=GENERATION)
    texts = [f"what {IMAGE_PLACEHOLDER}", IMAGE_PLACEHOLDER, f"{IMAGE_PLACEHOLDER}what"]
    check_answers(task, image_model, [encode(text) for text in texts], [[RED], [BLUE], [RED]])
    assert len({task.hash_prompt(item) for item in task.items}) == 3


def test_options_after_images(prepare: Prepare, image_model: Transformer) -> None:
    """Their log-likelihoods are those of `conditional_likelihood`. White space at the end of a prompt is theirs."""
    pictures = {"red.png": RED, to_data_url(BLUE): BLUE}
    records = [{"question": "what", "choices": ["a", "b"], "gold": 0, "image": image} for image in pictures]
    task = prepare("multiple_choice", records, prompt={"format": "chat", "template": "{question}"})
    *prompt, line_feed = encode(f"{IMAGE_PLACEHOLDER}what")
    for result, file in zip(evaluate_task(image_model, task), pictures.values(), strict=True):
        context = expand_images(prompt, [file], PROCESSOR, image_model.config)
        answers = [[line_feed, *TOKENIZER.encode(text)] for text in ("a", "b")]
        expected = [conditional_likelihood(image_model, context, answer).log_likelihood for answer in answers]
        assert result.option_log_likelihoods == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("kind", "record", "options", "message"),
    [
        ("gsm8k", {"image": "red.png"}, {}, r'item \'0\': it has images.*set prompt.format = "chat"'),
        ("multiple_choice", {"image": "red.png", "choices": ["a", "b"], "gold": 0}, {}, "it has images, which only"),
        ("gsm8k", {"image": "../red.png"}, {"prompt": {"format": "chat"}}, r"line 1: item '0': .*outside of"),
        ("gsm8k", {"image": "gone.png"}, {"prompt": {"format": "chat"}}, r"item '0': .*gone.png: the image cannot"),
        ("gsm8k", {"images": ["red.png"], "question": "<image><image>"}, {"prompt": {"format": "chat"}},
         "has 1 images, and its 1 user messages have 2 marks"),
    ],
)  # fmt: skip
def test_what_is_refused(prepare: Prepare, kind: str, record: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(kind, [{"question": "q", "answer": "1", **record}], **options)


def test_a_model_without_vision(prepare: Prepare, image_model: Transformer) -> None:
    keys = ("vision", "image_token_id", "vision_start_token_id", "vision_end_token_id")
    model = image_model.config.model_copy(update=dict.fromkeys(keys))
    record = {"question": "q", "answer": "1", "image": "red.png"}
    with pytest.raises(ValueError, match="item '0': the model has no vision tower"):
        prepare("gsm8k", [record], model, prompt={"format": "chat"})
