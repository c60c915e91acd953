"""The card beside the weights: exact, whatever the text of others in it, and never a danger to a checkpoint."""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.infer import main
from config.convert import ConvertConfig
from diffusionlm.checkpoints import model_card
from diffusionlm.checkpoints.convert import convert, prepare_conversion
from diffusionlm.checkpoints.huggingface import save_model, save_model_directory
from diffusionlm.checkpoints.manifest import verify_directory, write_directory_atomically
from diffusionlm.checkpoints.model_card import (
    CardTraining,
    ValidationBound,
    update_training_section,
    write_model_card,
)
from files.atomic import write_text_atomic
from tests.conftest import MakeModel
from tokenizer import Tokenizer

TRAINING = CardTraining(
    name="first_try",
    facts={"tokens seen": "327,680", "validation": str(ValidationBound(3.98765, 0.0184, 40))},
    sources=(
        ("stories", "a file of stories", "files/train/0a1b", "75.0%"),
        ("web", "https://example.com", "hub/0c2d", "25.0%"),
    ),
    sections={"Objective": 'kind = "masked_diffusion"\n'},
    command="diffusionlm-train --config DIR/config.toml --set run.directory=runs/again",
    datasets=("someone/stories",),
)


def card_of(model: Any, folder: Path, training: CardTraining | None = None) -> str:
    folder.mkdir(exist_ok=True)
    save_model(model, folder)
    write_model_card(folder, model.config, dict(model.named_parameters()), training)
    return (folder / "README.md").read_text(encoding="utf-8")


def front_matter(card: str) -> dict[str, Any]:
    begin, matter, _ = card.split("---\n", 2)
    assert begin == ""
    values: dict[str, Any] = yaml.safe_load(matter)
    return values


def rows(card: str) -> dict[str, str]:
    cells = [line[2:-2].split(" | ") for line in card.splitlines() if line.startswith("| ") and line != "| | |"]
    return {cell[0]: cell[1] for cell in cells if len(cell) == 2}


def test_card_has_the_facts_of_the_run(tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model(block_length=4)
    card = card_of(model, tmp_path, TRAINING)
    assert front_matter(card) == {
        "library_name": "diffusionlm",
        "pipeline_tag": "text-generation",
        "license": "unknown",
        "tags": ["text-generation", "block-diffusion", "diffusion"],
        "datasets": ["someone/stories"],
    }
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert f"# first\\_try, {numbers:,} parameters\n" in card
    facts = rows(card)
    assert facts["parameters"] == f"{numbers:,}" and facts["layers"] == "2"
    assert facts["tokens seen"] == "327,680"
    assert facts["validation"] == "at most 3.988 ± 0.018 nats per token, at step 40"
    assert "| stories | a file of stories | files/train/0a1b | 75.0% |\n| web |" in card
    assert '```toml\nkind = "masked_diffusion"\n```' in card
    assert "```bash\ndiffusionlm-train --config DIR/config.toml --set run.directory=runs/again\n```" in card
    assert "--infill" not in card, "blocks are written one after the other"


def test_kinds_of_models(tiny_model: MakeModel, tmp_path: Path) -> None:
    masked = card_of(tiny_model(), tmp_path)
    assert "computes the same logits for a whole sequence" in masked and "sliding windows" not in masked
    assert "masked-diffusion" in front_matter(masked)["tags"] and "--infill" in masked
    assert "The training of this model is unknown." in masked and "datasets" not in front_matter(masked)
    next_token = card_of(tiny_model(block_length=1, logit_alignment="shifted", mask_token_id=None), tmp_path)
    assert front_matter(next_token)["tags"] == ["text-generation"] and rows(next_token)["mask token"] == "none"
    assert "loads this directory and computes the same logits." in next_token
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "qk_norm": True}
    assert "sliding windows see one position more" in card_of(tiny_model(**sliding), tmp_path)
    assert "`transformers` has no `llada`" in card_of(tiny_model(model_type="llada", qk_norm=False), tmp_path)
    mixture = tiny_model(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, mlp_only_layers=(1,))
    facts, numbers = rows(card_of(mixture, tmp_path)), sum(parameter.numel() for parameter in mixture.parameters())
    assert facts["experts"] == "2 of 4 per token"
    # Two of the four experts, each three matrices of 24 x 8, are idle in the layer that has some.
    assert facts["parameters"] == f"{numbers:,}, of which {numbers - 2 * 3 * 24 * 8:,} are active for a token"


@pytest.mark.parametrize("context", [8, 33, 256])
def test_usage_section_matches_the_context_length(
    context: int, tokenizer: Tokenizer, tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(
        vocab_size=tokenizer.vocab_size,
        mask_token_id=tokenizer.mask_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        max_position_embeddings=context,
        begin_with_eos=True,
    )
    save_model_directory(model, tokenizer, tmp_path / "model")
    _, shell, python = re.split("```(?:bash|python)\n", (tmp_path / "model" / "README.md").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path / "model")
    commands = shell.partition("```")[0].strip().splitlines()
    assert len(commands) == 2
    for command in commands:
        main(shlex.split(command)[1:])
    assert ("--max-new-tokens" in commands[0]) == (context < 128)
    exec(python.partition("```")[0], {})


def test_text_of_others_stays_text(tiny_model: MakeModel, tmp_path: Path) -> None:
    hostile_text = "a|b\n## Use\n<script>x</script> `c` [d](e) \\ **f**"
    training = replace(
        TRAINING,
        name=hostile_text,
        facts={"started from": hostile_text},
        sources=((hostile_text, hostile_text, hostile_text, "100.0%"),),
        sections={"Objective": "````\n## Use\n"},
        datasets=('x"]\nlicense: mit',),
    )
    card = card_of(tiny_model(), tmp_path, training)
    assert front_matter(card)["datasets"] == ['x"]\nlicense: mit'] and front_matter(card)["license"] == "unknown"
    escaped = r"a\|b \#\# Use \<script\>x\</script\> \`c\` \[d\](e) \\ \*\*f\*\*"
    assert f"| {escaped} | {escaped} | {escaped} | 100.0% |" in card
    assert f"# {escaped}, " in card and rows(card)["started from"] == escaped
    assert "`````toml\n````\n## Use\n`````" in card


@pytest.mark.parametrize("line", ['datasets: ["a/b", 3', "datasets:\n- a/b", "datasets: [1]", ""])
def test_a_head_that_somebody_wrote_anew_names_no_datasets(line: str) -> None:
    assert model_card._parse_datasets(f'---\nlibrary_name: diffusionlm\n{line}\n---\n\ndatasets: ["c/d"]\n') == ()
    assert model_card._parse_datasets(f'---\n{line}\ndatasets: ["a/b"]\n---\n') == ()


def sealed(tiny_model: MakeModel, target: Path) -> Path:
    def write(folder: Path) -> None:
        card_of(tiny_model(), folder, TRAINING)

    write_directory_atomically(target, write)
    return target


LATER = replace(TRAINING, facts={**TRAINING.facts, "validation": str(ValidationBound(2.0, 0.01, 40, is_exact=True))})


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_the_final_bound_is_put_in_later_and_a_kill_damages_nothing(
    writes: int, tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, done = sealed(tiny_model, tmp_path / "model"), [0]
    before = (folder / "README.md").read_text(encoding="utf-8")

    def write(path: Path, text: str) -> None:
        if done[0] == writes:
            raise OSError("killed")
        done[0] += 1
        write_text_atomic(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(model_card, "write_text_atomic", write)
        with pytest.raises(OSError, match="killed"):
            update_training_section(folder, LATER)
    verify_directory(folder, must_have_manifest=True)
    update_training_section(folder, LATER)
    after = (folder / "README.md").read_text(encoding="utf-8")
    assert after == before.replace("at most 3.988 ± 0.018 nats", "2.000 ± 0.010 nats")
    verify_directory(folder, must_have_manifest=True)
    assert "README.md" in json.loads((folder / "MANIFEST.json").read_text())["files"]


def test_foreign_card_is_not_replaced(tiny_model: MakeModel, tmp_path: Path) -> None:
    folder = sealed(tiny_model, tmp_path / "model")
    (folder / "README.md").write_text("# mine\n", encoding="utf-8")
    manifest = (folder / "MANIFEST.json").read_bytes()
    with pytest.raises(ValueError, match=r"README\.md has no '## Training'"):
        update_training_section(folder, LATER)
    assert (folder / "README.md").read_text() == "# mine\n" and (folder / "MANIFEST.json").read_bytes() == manifest


def test_card_of_a_converted_model_names_its_source(
    tiny_model: MakeModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = tiny_model(
        vocab_size=tokenizer.vocab_size,
        mask_token_id=tokenizer.mask_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    source = tmp_path / "source"
    save_model_directory(model, tokenizer, source)

    def convert_to(name: str, path: Path = source, **options: Any) -> str:
        convert(prepare_conversion(ConvertConfig(source=path, target=tmp_path / name, **options)))
        return (tmp_path / name / "README.md").read_text(encoding="utf-8")

    assert "Converted from qwen3" in convert_to("plain")
    card_of(model, source, TRAINING)
    card = convert_to("half", dtype="bfloat16")
    assert card.count("\n## Training\n") == card.count("\n## Use\n") == 1
    assert "Converted from first\\_try, " in card and rows(card)["tokens seen"] == "327,680"
    assert front_matter(card)["datasets"] == ["someone/stories"]
    assert "DIR is the checkpoint with the run's `config.toml`:" in card
    assert front_matter(convert_to("quarter", tmp_path / "half"))["datasets"] == ["someone/stories"]
    os.remove(source / "README.md")
    assert "Converted from source, whose training is unknown." in convert_to("bare")
