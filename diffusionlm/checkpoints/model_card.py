"""Write the model card, README.md: architecture, training, validation bound and use of a model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from config.generation import DEFAULT_NEW_TOKENS
from config.model import ModelConfig
from diffusionlm.checkpoints.manifest import MANIFEST, format_manifest, make_manifest_entries
from diffusionlm.families.family import SLIDING
from diffusionlm.families.hub import describe_origin
from diffusionlm.families.registry import get_family
from files.atomic import write_text_atomic
from files.json_files import read_json_object
from profiling.flops import count_idle_parameters, count_vision_parameters

CARD_FILE = "README.md"
TRAINING_HEADING = "## Training"


@dataclass(frozen=True)
class ValidationBound:
    """Result of a validation, in nats per token."""

    nats_per_token: float
    standard_error: float
    step: int
    is_exact: bool = False
    """The value is the exact negative log-likelihood. False: an upper bound of it."""

    def __str__(self) -> str:
        sign = "" if self.is_exact else "at most "
        return f"{sign}{self.format_value('±')}, at step {self.step:,}"

    def format_value(self, plus_minus: str) -> str:
        """Format the value with its unit and standard error, which a single row does not have."""
        if not math.isfinite(self.standard_error):
            return f"{self.nats_per_token:.3f} nats per token (one row: no standard error)"
        return f"{self.nats_per_token:.3f} {plus_minus} {self.standard_error:.3f} nats per token"


@dataclass(frozen=True)
class CardTraining:
    """How a model was trained, as text. It does not hold the run, which continues while the card is written."""

    name: str
    facts: Mapping[str, str]
    """Rows of the table, such as "steps" and "tokens seen"."""
    sources: tuple[tuple[str, str, str, str], ...]
    """Name, location and size, identity (which changes if the documents do) and share of each source of data."""
    sections: Mapping[str, str]
    """Title, such as "Objective" -> section of the config as TOML."""
    command: str
    datasets: tuple[str, ...] = ()
    """Names of sources on the Hugging Face Hub."""
    adapter_base: str | None = None
    """Name of the base of an adapter: on the Hub, or a path without the folders of this machine. None: the run trains
    the whole model."""
    is_base_on_hub: bool = False


def write_model_card(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    training: CardTraining | None = None,
    source: Path | None = None,
) -> None:
    """Write README.md of a model directory.

    Args:
        folder: the model directory.
        config: of the model.
        weights: as in the weight files.
        training: of the run that trained the model. None: unknown.
        source: the directory that the model was converted from. Its card's training section is copied.

    Raises:
        OSError: a file cannot be read, or the card cannot be written.
    """
    title, training_text, datasets = get_family(config).model_type, "", tuple[str, ...]()
    if source is not None:
        training_text, datasets = _conversion_section(source), _parse_datasets(_read_card(source))
    if training is not None:
        title, training_text = training.name, _training_section(training) + training_text
        datasets += training.datasets
    training_text = training_text or f"{TRAINING_HEADING}\n\nThe training of this model is unknown.\n\n"
    num_parameters = sum(weight.numel() for weight in weights.values())
    base = None if training is None else training.adapter_base
    kind = _describe_model_kind(config)
    if base is not None:
        kind = f"A low-rank adapter (LoRA) in PEFT's format. With its base, {_escape_markdown(base)}: {kind}"
    matter = _front_matter(config, datasets, training)
    if training is not None and base is not None and not training.is_base_on_hub:
        base = "BASE"
    text = (
        f"{matter}\n# {_escape_markdown(title)}, {num_parameters:,} parameters\n\n{kind}.\n\n"
        f"## Architecture\n\n{_format_table(_architecture_rows(config, num_parameters))}\n\n{training_text}"
        f"{_use_section(config, base)}{_limits_section(config)}"
    )
    (folder / CARD_FILE).write_text(text, encoding="utf-8")


def update_training_section(folder: Path, training: CardTraining) -> None:
    """Replace the training section in the card of a complete checkpoint.

    The checkpoint verifies at any time, because the manifest has no entry of the card while the card changes.

    Raises:
        OSError: a file cannot be written.
        ValueError: the card or the manifest was changed by others; they stay unchanged.
    """
    card = (folder / CARD_FILE).read_text(encoding="utf-8")
    section = _find_training_section(card)
    try:
        manifest = read_json_object(folder / MANIFEST)
        entries = {name: entry for name, entry in manifest["files"].items() if name != CARD_FILE}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / MANIFEST}: damaged manifest: {error!r}") from error
    if section is None:
        raise ValueError(f"{folder / CARD_FILE} has no {TRAINING_HEADING!r}")
    write_text_atomic(folder / MANIFEST, format_manifest(entries))
    write_text_atomic(folder / CARD_FILE, card.replace(section, _training_section(training).strip(), 1))
    entries |= make_manifest_entries(folder, [folder / CARD_FILE])
    write_text_atomic(folder / MANIFEST, format_manifest(entries))


def _front_matter(config: ModelConfig, datasets: tuple[str, ...], training: CardTraining | None) -> str:
    """Format the YAML metadata that the Hugging Face Hub reads. JSON is valid YAML."""
    kind = "masked-diffusion" if config.block_length is None else "block-diffusion"
    task = "text-generation" if config.vision is None else "image-text-to-text"
    tags = [task] if config.is_autoregressive else [task, kind, "diffusion"]
    base = None if training is None else training.adapter_base
    tags += [] if base is None else ["lora", "peft"]
    lines = ["library_name: diffusionlm", f"pipeline_tag: {task}", "license: unknown"]
    lines.append(f"tags: [{', '.join(tags)}]")
    if training is not None and training.is_base_on_hub:
        lines += [f"base_model: {base}", "base_model_relation: adapter"]
    if datasets:
        lines.append(f"datasets: {json.dumps(list(dict.fromkeys(datasets)))}")
    return "\n".join(["---", *lines, "---", ""])


def _describe_model_kind(config: ModelConfig) -> str:
    if config.is_autoregressive:
        return "An autoregressive language model"
    if config.block_length is None:
        return "A masked diffusion language model, which fills in the whole sequence at once"
    return (
        f"A block diffusion language model, which fills in blocks of {config.block_length} tokens one after the other"
    )


def _architecture_rows(config: ModelConfig, num_parameters: int) -> dict[str, str]:
    rows: dict[str, object] = {
        "family (`model_type`)": get_family(config).model_type,
        "parameters": f"{num_parameters:,}",
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "context": f"{config.max_position_embeddings:,} tokens",
        "vocabulary": f"{config.vocab_size:,}",
        "block length": "the whole sequence" if config.block_length is None else f"{config.block_length:,}",
        "mask token": "none" if config.mask_token_id is None else config.mask_token_id,
        "output that predicts token i": "i - 1" if config.logit_alignment == "shifted" else "i",
    }
    if config.clean_alignment is not None:
        rows["committed text"] = "token-causal, output i - 1 predicts token i"
    if config.num_experts:
        active = num_parameters - count_idle_parameters(config)
        rows["parameters"] = f"{num_parameters:,}, of which {active:,} are active for a token"
        rows["experts"] = f"{config.num_experts_per_tok} of {config.num_experts} per token"
    if config.vision is not None:
        tower, mergers = count_vision_parameters(config)
        rows["vision"] = f"{tower:,} parameters of the tower, {mergers:,} of its mergers"
    return {key: str(value) for key, value in rows.items()}


def _training_section(training: CardTraining) -> str:
    """Format the section up to the next heading."""
    rows = {key: _escape_markdown(value) for key, value in training.facts.items()}
    data = "\n".join(f"| {' | '.join(map(_escape_markdown, source))} |" for source in training.sources)
    sections = "".join(f"{title}:\n\n{_fence_code(text, 'toml')}\n\n" for title, text in training.sections.items())
    return (
        f"{TRAINING_HEADING}\n\n{_format_table(rows)}\n\n"
        f"Data:\n\n| source | where | identity | share |\n|---|---|---|---|\n{data}\n\n{sections}"
        "To train it again, run this in the directory where the run was started (relative paths begin there); "
        f"DIR is the checkpoint with the run's `config.toml`:\n\n{_fence_code(training.command, 'bash')}\n\n"
    )


def _conversion_section(source: Path) -> str:
    """Format the training section of a converted model: that of the source's card."""
    card = _read_card(source)
    section = _find_training_section(card)
    if section is None:
        name = _escape_markdown(describe_origin(source))
        return f"{TRAINING_HEADING}\n\nConverted from {name}, whose training is unknown.\n\n"
    body = section.removeprefix(TRAINING_HEADING).strip()
    title = re.search(r"^# (.*)$", card, re.MULTILINE)
    name = title[1] if title else _escape_markdown(describe_origin(source))
    # A model that was converted several times has several of these notes, the newest first.
    note = f"Converted from {name}. The rest of this section describes that model."
    return f"{TRAINING_HEADING}\n\n{note}\n\n{body}\n\n"


def _read_card(source: Path) -> str:
    """Read a directory's card, of any program. Empty: there is none, or it is not text."""
    try:
        return (source / CARD_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _parse_datasets(card: str) -> tuple[str, ...]:
    """Read the datasets in the metadata of a card of this program. Empty: another program's card, or no datasets."""
    head = re.match(r"---\nlibrary_name: diffusionlm\n.*?^---$", card, re.DOTALL | re.MULTILINE)
    match = re.search(r"^datasets: (\[.*\])$", head[0], re.MULTILINE) if head else None
    try:
        names = json.loads(match[1]) if match else []
    except (ValueError, RecursionError):  # it was edited by hand
        return ()
    return tuple(name for name in names if isinstance(name, str))


def _find_training_section(card: str) -> str | None:
    """Find the training section, with its heading, in a card of this program. None: there is none."""
    if "library_name: diffusionlm" not in card:
        return None
    match = re.search(rf"^{TRAINING_HEADING}\n.*?(?=^## Use$)", card, re.DOTALL | re.MULTILINE)
    return match[0].strip() if match else None


def _use_section(config: ModelConfig, base: str | None) -> str:
    """Format commands whose lengths fit the context, with room for a prompt; ``base``: of an adapter."""
    context = config.max_position_embeddings
    length = "" if context >= 2 * DEFAULT_NEW_TOKENS else f" --max-new-tokens {max(1, context // 2)}"
    model, load = "--model .", '"."'
    if base is not None:
        model, load = f"--model {base} --adapter .", f'"{base}", adapter="."'
    shell = f'diffusionlm-infer {model} --prompt "..."{length}'
    if config.block_length is None and base is None:
        text = "before [MASK:6] after" if context >= 32 else f"a[MASK:{max(1, context // 4)}]b"
        shell += f'\ndiffusionlm-infer --model . --infill "{text}"'
    python = (
        f'import diffusionlm\n\nmodel = diffusionlm.load_model({load})\ntokenizer = diffusionlm.load_tokenizer(".")\n'
        f"options = diffusionlm.GenerationConfig(max_new_tokens={max(1, min(32, context // 2))})\n"
        'done = diffusionlm.generate(model, [tokenizer.encode("...")], options)\n'
        "print(tokenizer.decode(done[0].token_ids))"
    )
    if base is not None:
        shell += f"\ndiffusionlm-convert --source {base} --adapter . --target MERGED"
        python += (
            "\n\n# PEFT puts it on the same base:\nfrom peft import PeftModel\n"
            f"from transformers import {_auto_class(config)}\n\n"
            f'model = PeftModel.from_pretrained({_auto_class(config)}.from_pretrained("{base}"), ".")'
        )
    return (
        f"## Use\n\n{_fence_code(shell, 'bash')}\n\n{_fence_code(python, 'python')}\n\n{_transformers_text(config)}\n\n"
    )


def _transformers_text(config: ModelConfig) -> str:
    """Describe what transformers computes from the directory."""
    family = get_family(config)
    if family.diffusion_defaults is not None:
        return f"`transformers` has no `{family.model_type}`: it needs the code that the family's models come with."
    loads = f"`transformers.{_auto_class(config)}.from_pretrained` loads this directory"
    if config.block_length == 1:
        return f"{loads} and computes the same logits."
    needs = "with a block-causal `attention_mask` [batch, 1, query, key]"
    if config.block_length is None:
        window = "; sliding windows see one position more on each side" * (SLIDING in (config.layer_types or ()))
        needs = f"for a whole sequence (version 5.23 or newer, which reads `is_causal`{window})"
    return f"{loads} and computes the same logits {needs}. Its `generate` does not decode diffusion models."


def _auto_class(config: ModelConfig) -> str:
    return "AutoModelForCausalLM" if config.vision is None else "AutoModelForImageTextToText"


def _limits_section(config: ModelConfig) -> str:
    return (
        "## Limits\n\n"
        f"- Prompt and answer together have at most {config.max_position_embeddings:,} tokens.\n"
        "- Its text is likely under its training data, which does not make it true; nothing prevents harmful text.\n"
        "- License unknown: it depends on the data, and on the model that training started from.\n"
    )


def _format_table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())])


def _escape_markdown(text: str) -> str:
    """Put a text on one line and escape Markdown and HTML."""
    return re.sub(r"([\\`*_{}\[\]<>|#~$&])", r"\\\1", " ".join(text.split()))


def _fence_code(text: str, language: str) -> str:
    """Format a code block, with a fence that is longer than any backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.strip()}\n{fence}"
