"""Training on conversations, from rows of any format to a checkpoint that answers."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from cli.infer.inputs import Input, encode_inputs
from cli.train import check_files, format_summary, suggest_next_command
from config.dump import to_toml_values
from config.eval import EvalConfig
from config.evaluation.tasks import TrainingEvaluationConfig
from config.generation import GenerationConfig
from config.load import ConfigError, load_config
from config.train import TrainConfig
from config.training.validation import SamplesConfig
from diffusionlm import generate, load_model, load_tokenizer
from diffusionlm.checkpoints.model_files import read_model_description
from diffusionlm.data.pipeline import build_row_reader, open_components
from diffusionlm.evaluation.tasks.evaluation import LiveEvaluation
from diffusionlm.evaluation.text_likelihood import OpenedText, evaluate_likelihood
from diffusionlm.inference.request_builder import RequestBuilder
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.training.loop import train
from logger.pages.terminal import render_text
from tests.tiny_run import read_events, read_records, read_steps, write_train_config
from tokenizer import CHAT_TEMPLATES, encode_chat

QUESTIONS = [(f"what is {index}?", f"it is {index}") for index in range(120)]
SYSTEM = "be kind"

MESSAGES = [
    {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }
    for question, answer in QUESTIONS
]


def chat_config(folder: Path, name: str, rows: list[dict[str, Any]], **changes: dict[str, Any]) -> TrainConfig:
    """Eight steps of block diffusion with ChatML and a tokenizer of bytes."""
    data, held_out = folder / f"{name}.jsonl", folder / f"{name}-validation.jsonl"
    data.write_text("\n".join(map(json.dumps, rows[:100])))
    held_out.write_text("\n".join(map(json.dumps, rows[100:])))
    source = {
        "kind": "files",
        "paths": [str(data)],
        "validation_paths": [str(held_out)],
        "chat": {"template": "chatml"},
    }
    sections: dict[str, dict[str, Any]] = {
        "run": {"directory": str(folder / name)},
        "model": {"max_position_embeddings": 96},
        "tokenizer": {"vocab_size": 260, "special_tokens": ["<|im_start|>", "<|im_end|>"]},
        "data": {"source": source, "document_shuffle_window": 16},
        "objective": {"kind": "block_diffusion", "block_length": 4},
        "training": {"batch_size": 2, "max_steps": 4},
        "validation": {"final_rows": 1},
    }
    return load_config(TrainConfig, write_train_config(folder, name, **(sections | changes)))


@pytest.mark.slow
def test_the_checkpoint_answers(tmp_path: Path) -> None:
    config = chat_config(tmp_path, "messages", MESSAGES)
    result = train(config)
    command = suggest_next_command(config.run.directory, result.example_input, is_chat=True)
    assert " --chat 'what is 100?'" in command

    model = read_model_description(config.run.directory)
    tokenizer = model.tokenizer
    assert tokenizer.chat_template is not None
    stop = tokenizer.special_tokens["<|im_end|>"]
    settings = resolve_settings(GenerationConfig(max_new_tokens=8), model.config)
    assert stop in settings.stop_token_ids and settings.config.block_origin == "turn"
    messages = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTIONS[100][0]})
    builder = RequestBuilder(tokenizer, settings, tokenizer.chat_template)
    (encoded,) = encode_inputs([Input("chat", messages=messages)], builder, 0)
    components = open_components(config.data, "validation")
    data = config.data.model_copy(update={"document_shuffle_window": 0, "row_shuffle_window": 0, "rows": "padded"})
    rows, _ = build_row_reader(components, data, tokenizer, 96, 0, block_length=4).read(0, None, 1)
    prompt = rows[0].tokens_L[: len(encoded.token_ids)]
    assert prompt.tolist() == list(encoded.token_ids)
    assert not rows[0].loss_mask_L[: len(prompt)].any() and rows[0].loss_mask_L[len(prompt)]
    assert rows[0].is_eos_padding_L is not None
    answer = rows[0].tokens_L[rows[0].loss_mask_L & ~rows[0].is_eos_padding_L].tolist()
    assert tokenizer.decode(answer) == f"{QUESTIONS[100][1]}<|im_end|>" and answer[-1] == stop


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_left_out_is_told_once_and_in_the_summary(workers: int, tmp_path: Path) -> None:
    """Also if the run was interrupted: it reads some records again, and counts each once."""
    rows: list[dict[str, Any]] = [row if index % 4 else {"prompt": "x"} for index, row in enumerate(MESSAGES)]

    def config_of(name: str, max_steps: int) -> TrainConfig:
        plain = chat_config(tmp_path, name, rows)
        source = to_toml_values(plain.data.source) | {"on_bad_row": "skip"}
        data = {"source": source, "document_shuffle_window": 16, "workers": workers}
        changes = {"data": data, "training": {"batch_size": 2, "max_steps": max_steps}}
        return chat_config(tmp_path, name, rows, **changes, checkpoint={"config_change": "accept"})

    for name, steps in (("whole", (40,)), ("resumed", (7, 40))):
        for max_steps in steps:
            config = config_of(name, max_steps)
            (config.run.directory / "summary.json").unlink(missing_ok=True)
            train(config)
        texts = [event["text"] for event in read_events(config, "data")]
        assert any(text.startswith("warning: 25% of the records") and "line 1:" in text for text in texts)
        assert read_steps(config)[-1]["data/skipped"] == 25
        (line,) = json.loads((config.run.directory / "summary.json").read_text())["skipped_records"]
        assert line.startswith("files-0: 25 of 100 records: no conversation; the first: ")
        assert f"{name}.jsonl, line 1: " in line and "chat.columns" in line
        assert f"data: {line}" in texts
        assert any(text.startswith("validation data: ") for text in texts)


@pytest.mark.parametrize(
    ("objective", "turns", "origin"),
    [
        ("block_diffusion", "all", "turn"),
        ("block_diffusion", "expand", "text"),
        ("block_diffusion", "last", "text"),
        ("masked_diffusion", "all", "text"),
    ],
)
def test_blocks_are_counted_from_turns_where_a_row_has_several_answers(
    objective: str, turns: str, origin: str, tmp_path: Path
) -> None:
    source = {"kind": "chat_tasks", "chat": {"template": "chatml", "turns": turns}}
    section = {"kind": objective} | ({"block_length": 4} if objective == "block_diffusion" else {})
    path = write_train_config(tmp_path, data={"source": source}, objective=section)
    assert load_config(TrainConfig, path).block_origin == origin


def test_a_tokenizer_without_the_special_tokens_is_refused(tmp_path: Path) -> None:
    config = chat_config(tmp_path, "plain", MESSAGES, tokenizer={"vocab_size": 260})
    with pytest.raises(ValueError, match=r'data.source.chat.template = "chatml": .*tokenizer.special_tokens'):
        train(config)


def test_bad_settings_are_refused_before_torch(tmp_path: Path) -> None:
    rows = MESSAGES
    for section, problem in (
        ({"eos_padding": "block"}, 'chat.eos_padding = "block" fills the last block'),
        (
            {"eos_padding": "length:16"},
            'chat.eos_padding = "length:16" leaves no room for a prompt: .* at most 16 tokens',
        ),
        ({"roles": {"wizard": "sorcerer"}}, 'roles.wizard = "sorcerer": expected "system"'),
    ):
        path = write_train_config(tmp_path, data={"source": {"kind": "chat_tasks", "chat": section}})
        with pytest.raises(ConfigError, match=problem):
            load_config(TrainConfig, path)
    config = chat_config(tmp_path, "named", rows)
    for template, problem in (("chatty", "no such built-in template"), (None, "the tokenizer has no chat template")):
        source = to_toml_values(config.data.source) | {"chat": {"template": template} if template else {}}
        changed = chat_config(tmp_path, "changed", rows, data={"source": source})
        with pytest.raises(ValueError, match=rf"data.source.chat.template.*{problem}"):
            check_files(changed)


def test_a_changed_template_file_is_refused_when_a_run_continues(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(CHAT_TEMPLATES["chatml"].source)
    base = chat_config(tmp_path, "own", MESSAGES)
    source = to_toml_values(base.data.source) | {"chat": {"template": str(template)}}
    training = {"batch_size": 2, "max_steps": 2}
    config = chat_config(tmp_path, "own", MESSAGES, data={"source": source}, training=training)
    train(config)
    train(config)
    template.write_text(CHAT_TEMPLATES["chatml"].source.replace("content +", "content|trim +"))
    with pytest.raises(
        ValueError, match=rf"step-00000002.*data\.source\.chat\.template = {template}\. .*config_change"
    ):
        train(config)
    accepting = config.checkpoint.model_copy(update={"config_change": "accept"})
    assert train(config.model_copy(update={"checkpoint": accepting})).step == 2


@pytest.mark.parametrize("attention", ["block_diffusion", "prompt_and_own_block"])
def test_samples_are_answers_to_held_out_prompts_with_the_attention_of_training(attention: str, tmp_path: Path) -> None:
    base = chat_config(tmp_path, "chats", MESSAGES)
    chat = {"template": "chatml", "turns": "expand", "eos_padding": "length:8"}
    source = to_toml_values(base.data.source) | {"chat": chat}
    objective = {"kind": "block_diffusion", "block_length": 4, "attention": attention}
    training = {"batch_size": 2, "max_steps": 1}
    model = {"max_position_embeddings": 104}
    config = chat_config(
        tmp_path,
        "chats",
        MESSAGES,
        model=model,
        data={"source": source},
        objective=objective,
        training=training,
    )
    train(config.model_copy(update={"samples": SamplesConfig(every_steps=1)}))
    samples = read_events(config, "sample")
    description = read_model_description(config.run.directory)
    generation = GenerationConfig(max_new_tokens=8)
    if attention == "prompt_and_own_block":
        generation = GenerationConfig(max_new_tokens=8, attention="prompt_and_own_block")
    prompts = []
    for question, _ in QUESTIONS[100:103]:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        prompts.append(encode_chat(description.tokenizer, "chatml", messages, add_generation_prompt=True))
    expected = generate(load_model(config.run.directory), prompts, generation)
    for sample, prompt, answer in zip(samples, prompts, expected, strict=True):
        given, filled = sample["values"]["given"], sample["values"]["filled"]
        assert given == description.tokenizer.decode(prompt) and given.endswith("<|im_start|>assistant\n")
        assert filled == description.tokenizer.decode([*prompt, *answer.token_ids])
        assert sample["values"]["step_map"] == [None] * len(prompt) + list(answer.step_map)


@pytest.mark.slow
def test_answers_and_eos_padding_are_reported_apart(tmp_path: Path) -> None:
    chat = {"template": "chatml", "eos_padding": "length:8", "turns": "expand"}
    source = {"kind": "chat_tasks", "max_length": 3, "documents_per_epoch": 60, "validation_documents": 12}
    config = chat_config(
        tmp_path,
        "apart",
        [],
        data={"source": source | {"chat": chat}, "rows": "best_fit", "document_shuffle_window": 16},
        objective={"kind": "block_diffusion", "block_length": 4, "eos_padding_weight": 0.5, "next_token_weight": 0.2},
        validation={"every_steps": 2, "rows": 4, "final_rows": 4, "ngrams": True},
    )
    summary = train(config).summary
    for metrics in read_steps(config):
        parts = sorted([metrics["loss_answer"], metrics["loss_eos_padding"]])
        loss = metrics["loss"] - 0.2 * metrics["loss_next_token"] * 0.95
        assert parts[0] - 0.5 <= loss <= parts[1] + 0.5
    validations = [record["metrics"] for record in read_records(config) if "val_nats_per_token" in record["metrics"]]
    assert validations and all(metrics["val_eos_padding_nats_per_token"] > 0 for metrics in validations)
    assert summary is not None and summary.evaluation.eos_padding_nats_per_token is not None and not summary.ngrams
    assert "EOS padding after answers" in render_text(format_summary(config.run.directory), StringIO())


def test_a_validation_of_one_row_says_that_it_has_no_standard_error(tmp_path: Path) -> None:
    """Of eight conversations two are held out, and share a row."""
    source = {"kind": "files", "paths": [str(tmp_path / "few.jsonl")], "chat": {"template": "chatml"}}
    changes: dict[str, dict[str, Any]] = {"validation": {"every_steps": 2}, "samples": {"every_steps": 0}}
    model = {"max_position_embeddings": 192}
    config = chat_config(tmp_path, "few", MESSAGES[:8], data={"source": source}, model=model, **changes)
    train(config)
    note = "nats per token (one row: no standard error)"
    assert [note in event["text"] for event in read_events(config, "validation")] == [True]
    assert any("warning: validation has one row" in event["text"] for event in read_events(config, "data"))
    card = (config.run.directory / "checkpoints/latest/README.md").read_text(encoding="utf-8")
    summary = render_text(format_summary(config.run.directory), StringIO())
    assert note in card and "(one row: no standard error)" in summary
    assert " inf" not in card + summary + "".join(event["text"] for event in read_records(config, "event"))


def test_nothing_left_says_why(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 100, "completion": str(index)} for index in range(120)]
    config = chat_config(tmp_path, "short", rows)
    with pytest.raises(ValueError, match=r"no validation text \(left out: .* longer than a row;.*line \d+: ") as error:
        train(config)
    assert "data.row_length" in str(error.value) and "validation_fraction" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["block_diffusion", "masked_diffusion"])
def test_eight_conversations_are_learned_by_heart(kind: str, tmp_path: Path) -> None:
    """All answers are right, and end with a stop token; to the prompts of others they are wrong."""
    colors = ["red", "green", "blue", "white", "black", "grey", "pink", "gold"]
    path = tmp_path / "answers.jsonl"
    path.write_text(
        "\n".join(json.dumps({"prompt": f"color {index}", "completion": color}) for index, color in enumerate(colors))
    )
    chats = {"template": "chatml", "eos_padding": "length:8"}  # the canvas of the evaluation below
    source = {"kind": "files", "paths": [str(path)], "validation_paths": [str(path)], "chat": chats}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = chat_config(
        tmp_path,
        "colors",
        [],
        model={**sizes, "intermediate_size": 64, "max_position_embeddings": 64},
        data={"source": source, "rows": "padded"},
        objective={"kind": kind} | ({"block_length": 4} if kind == "block_diffusion" else {}),
        training={"batch_size": 8, "max_steps": 300},
        checkpoint={"every_steps": 1_000},
    )
    train(config)
    task = {"kind": "exact_match", "source": source, "generation": {"max_new_tokens": 8}}
    model = load_model(config.run.directory)
    tasks = LiveEvaluation(
        TrainingEvaluationConfig.model_validate({"tasks": [task]}), load_tokenizer(config.run.directory), model.config
    )
    [(result, _)] = tasks.evaluate(model)
    assert result.num_items == 8
    assert result.list_logged_values() == {
        "tasks/exact_match/exact_match": 1.0,
        "tasks_standard_error/exact_match/exact_match": 0.0,
        "tasks_stopped/exact_match": 1.0,
    }
    values = {"model": {"path": str(config.run.directory)}}
    data = {"source": source, "rows": "padded", "row_length": 64}
    likelihood = {"kind": "nelbo", "prompt_gap": True}
    bound = evaluate_likelihood(
        OpenedText(EvalConfig.model_validate({"model": values["model"], "data": data, "likelihood": likelihood})), model
    )
    assert bound.prompt_gap is not None and bound.prompt_gap.nats_per_token > 10 * bound.nats_per_token
