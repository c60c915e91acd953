"""README.md beside the weights: what the model is, how it was made, how good it is, and how it is run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from config.families.registry import get_family
from config.generation import DEFAULT_NEW_TOKENS
from config.model import ModelConfig
from diffusionlm.checkpoints.manifest import MANIFEST, ManifestEntries, make_manifest_entries
from files.atomic import write_text_atomic
from profiling.flops import count_idle_parameters

CARD_FILE = "README.md"
TRAINING_HEADING = "## Training"
_UNLISTED_FILES = (CARD_FILE, MANIFEST, "state.json")
"""Files that the card says nothing of: they are about it, or not of the model."""


@dataclass(frozen=True)
class CardDataSource:
    """Data that a model was trained on."""

    name: str
    provenance: str
    """Where the documents are and how many or how large, for people."""
    identity: str
    """Changes when the documents do."""
    share: float
    """Of the rows."""
    dataset: str | None = None
    """Its name on the Hugging Face Hub, if it is from there."""


@dataclass(frozen=True)
class ValidationBound:
    """What a validation came to, in nats per token."""

    nats_per_token: float
    standard_error: float
    step: int
    is_exact: bool = False
    """Otherwise the truth is at most this."""


@dataclass(frozen=True)
class CardTraining:
    """How a model was made. Plain values: the run goes on while its card is written."""

    name: str
    """Of the run."""
    step: int
    max_steps: int
    batch_size: int
    """Rows of a step."""
    row_length: int
    """Tokens of a row."""
    tokens_seen: int
    sources: tuple[CardDataSource, ...]
    objective: str
    """TOML."""
    optimizer: str
    command: str
    tokenizer_fingerprint: str
    init_from: str | None = None
    """The model that the weights began as."""
    ema_decay: float = 0.0
    """Of the average that the weights are; 0: they are none."""
    bound: ValidationBound | None = None


def write_model_card(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    training: CardTraining | None = None,
    source: Path | None = None,
) -> None:
    """README.md of a model directory, whose other files are all there.

    Args:
        folder: of the model.
        config: of the model.
        weights: as they were written.
        training: of the run that made it, where this is known.
        source: the directory that the model was converted from; what the card there says of training is taken over.

    Raises:
        OSError: a file cannot be read, or the card written.
    """
    training_text = "" if training is None else _training_section(training)
    if source is not None:
        training_text += _conversion_section(source)
    name = None if training is None else training.name
    datasets = () if source is None else _parse_datasets(_read_card(source))
    if training is not None:
        datasets += tuple(each.dataset for each in training.sources if each.dataset)
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in _UNLISTED_FILES]
    num_parameters = sum(weight.numel() for weight in weights.values())
    text = _format_card(config, num_parameters, make_manifest_entries(folder, files), training_text, name, datasets)
    (folder / CARD_FILE).write_text(text, encoding="utf-8")


def update_training_section(folder: Path, training: CardTraining) -> None:
    """Say what became known of a run after its checkpoint was sealed, in the card of that.

    Whenever this is interrupted, the checkpoint verifies: the manifest has no entry of the card while it changes.

    Raises:
        OSError: something cannot be written.
        ValueError: the card or the manifest are not what was written with the weights; they stay as they are.
    """
    card = (folder / CARD_FILE).read_text(encoding="utf-8")
    found = _find_training_section(card)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        others = {name: entry for name, entry in manifest["files"].items() if name != CARD_FILE}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / MANIFEST}: damaged manifest: {error!r}") from error
    if found is None:
        raise ValueError(f"{folder / CARD_FILE} has no {TRAINING_HEADING!r}")
    _write_manifest(folder, others)
    write_text_atomic(folder / CARD_FILE, card.replace(found, _training_section(training).strip(), 1))
    _write_manifest(folder, others | make_manifest_entries(folder, [folder / CARD_FILE]))


def _write_manifest(folder: Path, entries: ManifestEntries) -> None:
    write_text_atomic(folder / MANIFEST, json.dumps({"files": dict(sorted(entries.items()))}, indent=1) + "\n")


def _format_card(
    config: ModelConfig,
    num_parameters: int,
    files: ManifestEntries,
    training_text: str,
    name: str | None,
    datasets: tuple[str, ...],
) -> str:
    family = get_family(config).model_type
    title = family if name is None else name
    sums = {each: f"{entry['bytes']:,} bytes, SHA-256 `{entry['sha256']}`" for each, entry in files.items()}
    unknown = "" if training_text else f"{TRAINING_HEADING}\n\nNothing is known here of how it was made.\n\n"
    return (
        f"{_front_matter(config, datasets)}\n# {_escape_markdown(title)}, {num_parameters:,} parameters\n\n"
        f"{_describe_model_kind(config)}.\n\n"
        f"## Architecture\n\n{_format_table(_architecture_rows(config, family, num_parameters))}\n\n{training_text}{unknown}"
        f"{_use_section(config)}{_limits_section(config)}"
        f"## Files\n\n{_format_table(sums)}\n"
    )


def _front_matter(config: ModelConfig, datasets: tuple[str, ...]) -> str:
    """What the Hugging Face Hub reads; JSON is YAML."""
    kind = "masked-diffusion" if config.block_length is None else "block-diffusion"
    tags = ["text-generation"] if config.is_autoregressive else ["text-generation", kind, "diffusion"]
    lines = ["library_name: diffusionlm", "pipeline_tag: text-generation", "license: unknown"]
    lines.append(f"tags: [{', '.join(tags)}]")
    if datasets:
        lines.append(f"datasets: {json.dumps(list(dict.fromkeys(datasets)))}")
    return "\n".join(["---", *lines, "---", ""])


def _describe_model_kind(config: ModelConfig) -> str:
    if config.is_autoregressive:
        return "An autoregressive language model"
    if config.block_length is None:
        return "A masked diffusion language model, which fills the whole sequence at once"
    return f"A block diffusion language model, which fills blocks of {config.block_length} tokens one after the other"


def _architecture_rows(config: ModelConfig, family: str, num_parameters: int) -> dict[str, str]:
    rows: dict[str, object] = {
        "family (`model_type`)": family,
        "parameters": f"{num_parameters:,}",
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "feed-forward size": _feed_forward_size(config),
        "heads": f"{config.num_attention_heads} of {config.head_dim}",
        "key-value heads": config.num_key_value_heads,
        "context": f"{config.max_position_embeddings:,} tokens",
        "rotary base": f"{config.rope_theta:,.0f}",
        "vocabulary": f"{config.vocab_size:,}",
        "embedding and head": "one matrix" if config.tie_word_embeddings else "two matrices",
        "block length": "the whole row" if config.block_length is None else f"{config.block_length:,}",
        "mask token": "none" if config.mask_token_id is None else config.mask_token_id,
        "output that predicts token i": "i - 1" if config.logit_alignment == "shifted" else "i",
    }
    if config.num_experts:
        active = num_parameters - count_idle_parameters(config)
        rows["parameters"] = f"{num_parameters:,}, of which a token meets {active:,}"
        rows["experts"] = f"{config.num_experts_per_tok} of {config.num_experts} for each token"
    return {key: str(value) for key, value in rows.items()}


def _feed_forward_size(config: ModelConfig) -> str:
    is_sparse = {config.is_sparse(layer) for layer in range(config.num_hidden_layers)}
    whole = [str(config.intermediate_size)] if False in is_sparse else []
    experts = [f"{config.moe_intermediate_size} of each expert"] if True in is_sparse else []
    return ", ".join(whole + experts)


def _training_section(training: CardTraining) -> str:
    """Up to the next heading."""
    bound = training.bound
    rows = {
        "steps": f"{training.step:,} of {training.max_steps:,}, of {training.batch_size:,} rows of up to "
        f"{training.row_length:,} tokens",
        "tokens seen": f"{training.tokens_seen:,}",
        "optimizer": training.optimizer,
        "weights": f"averaged, decay {training.ema_decay:g}" if training.ema_decay else "of the last step",
        "began as": "random numbers" if training.init_from is None else _escape_markdown(training.init_from),
        "tokenizer": f"`{training.tokenizer_fingerprint}`",
        "validation": "not known" if bound is None else _format_bound(bound),
    }
    data = "\n".join(
        f"| {_escape_markdown(each.name)} | {_escape_markdown(each.provenance)} | {_escape_markdown(each.identity)} | {each.share:.1%} |"
        for each in training.sources
    )
    return (
        f"{TRAINING_HEADING}\n\n{_format_table(rows)}\n\n"
        f"Data:\n\n| source | where | identity | share |\n|---|---|---|---|\n{data}\n\n"
        f"Objective:\n\n{_fence_code(training.objective, 'toml')}\n\n"
        "Made again by this, typed where the run was started, since relative paths begin there; DIR is where the run "
        f"saved the model and its `config.toml`:\n\n{_fence_code(training.command, 'bash')}\n\n"
    )


def _format_bound(bound: ValidationBound) -> str:
    sign = "" if bound.is_exact else "at most "
    return f"{sign}{bound.nats_per_token:.3f} ± {bound.standard_error:.3f} nats per token, at step {bound.step:,}"


def _conversion_section(source: Path) -> str:
    """What is known of a model that was converted, from the card of the other one."""
    card = _read_card(source)
    there = _find_training_section(card)
    if there is None:
        name = _escape_markdown(source.resolve().name)
        return f"{TRAINING_HEADING}\n\nConverted from {name}, of which no card tells how it was made.\n\n"
    body = there.removeprefix(TRAINING_HEADING).strip()
    title = re.search(r"^# (.*)$", card, re.MULTILINE)
    name = title[1] if title else _escape_markdown(source.resolve().name)
    note = f"Converted from {name}. What follows is said of that model, before it was converted."
    # Once it was converted more often: the origins stand one above the other.
    return f"{TRAINING_HEADING}\n\n{note}\n\n{body}\n\n"


def _read_card(source: Path) -> str:
    """Whosever it is; empty: there is none that can be read."""
    try:
        return (source / CARD_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _parse_datasets(card: str) -> tuple[str, ...]:
    """Of the head of a card of ours."""
    head = re.match(r"---\nlibrary_name: diffusionlm\n.*?^---$", card, re.DOTALL | re.MULTILINE)
    named = re.search(r"^datasets: (\[.*\])$", head[0], re.MULTILINE) if head else None
    try:
        names = json.loads(named[1]) if named else []
    except ValueError:  # Somebody wrote it anew.
        return ()
    return tuple(name for name in names if isinstance(name, str))


def _find_training_section(card: str) -> str | None:
    """What a card of ours says of training, from its heading on; None: it is none, or says nothing."""
    if "library_name: diffusionlm" not in card:
        return None
    match = re.search(rf"^{TRAINING_HEADING}\n.*?(?=^## Use$)", card, re.DOTALL | re.MULTILINE)
    return match[0].strip() if match else None


def _use_section(config: ModelConfig) -> str:
    """Commands that fit the context, and leave room for a prompt."""
    context = config.max_position_embeddings
    new = "" if context >= 2 * DEFAULT_NEW_TOKENS else f" --max-new-tokens {max(1, context // 2)}"
    shell = f'diffusionlm-infer --model . --prompt "..."{new}'
    if config.block_length is None:
        hole = "before [MASK:6] after" if context >= 32 else f"a[MASK:{max(1, context // 4)}]b"
        shell += f'\ndiffusionlm-infer --model . --infill "{hole}"'
    python = (
        'import diffusionlm\n\nmodel = diffusionlm.load_model(".")\ntokenizer = diffusionlm.load_tokenizer(".")\n'
        f"options = diffusionlm.GenerationConfig(max_new_tokens={max(1, min(32, context // 2))})\n"
        'done = diffusionlm.generate(model, [tokenizer.encode("...")], options)\n'
        "print(tokenizer.decode(done[0].token_ids))"
    )
    return f"## Use\n\n{_fence_code(shell, 'bash')}\n\n{_fence_code(python, 'python')}\n\n"


def _limits_section(config: ModelConfig) -> str:
    return (
        "## Limits\n\n"
        f"- A prompt and its answer together have at most {config.max_position_embeddings:,} tokens.\n"
        "- It says what is likely after its data, true or not; nothing here was done against false or harmful text.\n"
        "- The licence is not known: it follows from the data, and from the model that the weights began as.\n\n"
    )


def _format_table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())])


def _escape_markdown(text: str) -> str:
    """Text of others on one line, in which nothing is Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>|#~$&])", r"\\\1", " ".join(text.split()))


def _fence_code(text: str, language: str) -> str:
    """Text as it is, whatever backticks are in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.strip()}\n{fence}"
