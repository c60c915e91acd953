"""Keys of older versions and of other programs: renamed while a config is loaded, or explained in the error.

Keys are whole dotted keys of a config file, where no table is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from files.toml_text import KeyPath

ANY = object()


@dataclass(frozen=True)
class Renamed:
    """An old key, or one of its old values, and what it is called now."""

    key: str
    new: Mapping[str, Any]
    """New keys with their values. `ANY`: the value of the old key. Keys after the first one yield to values that the
    config has for them."""
    value: Any = ANY
    """The old value. `ANY`: each one."""
    where: Mapping[str, Any] = field(default_factory=dict)
    """Other keys with the values that this row is for."""
    table: str = ""
    """The keys are those of each table of this name, wherever it stands. Empty: of the whole config."""


RENAMED = (
    Renamed("fill", {"eos_padding": ANY}, table="chat"),
    Renamed("objective.fill_weight", {"objective.eos_padding_weight": ANY}),
    Renamed("objective.beta", {"objective.loss.beta": ANY}, where={"objective.kind": "preference"}),
    Renamed("bench.details", {"bench.memory": ANY}),
    Renamed("serve.max_holes", {"serve.max_masked_spans": ANY}),
    Renamed("serve.max_rows", {"serve.max_num_batched_tokens": ANY}),
    Renamed("objective.loss", {"objective.normalizer": "targets"}, "elbo"),
    Renamed("objective.loss", {"objective.normalizer": "rows"}, "guidelines"),
    Renamed("objective.loss", {"objective.normalizer": "rows", "objective.label_smoothing": 0.1}, "soft_ce"),
    Renamed(
        "objective.loss",
        {"objective.normalizer": "rows", "objective.estimator.weight": "uniform"},
        "dllm",
        where={"objective.kind": "block_diffusion"},
    ),
    Renamed("objective.loss", {"objective.normalizer": "masked_rows"}, "dllm"),
    Renamed("objective.loss", {"objective.normalizer": "masked"}, "masked_mean"),
)
"""Old spellings; the first row of a key that fits counts."""


@dataclass(frozen=True)
class Removed:
    """Return what to do instead of setting a key that is no more."""

    remedy: str
    default: Any = None
    """The value that run directories of older versions hold; it is ignored."""


REMOVED: Mapping[str, Removed] = {
    "optimizer.hidden": Removed("set learning_rate, momentum, weight_decay or precision in [optimizer]"),
    "optimizer.adjust_lr": Removed("scale optimizer.learning_rate", "match_rms_adamw"),
    **{
        f"optimizer.{group}.{key}": Removed(f"set optimizer.{key}, or with muon optimizer.rest.{key}, for all groups")
        for group in ("head", "embed", "router", "scalar")
        for key in ("betas", "eps")
    },
    "bench.prompts": Removed("prompts are bench.prompt_length random tokens"),
    "validation": Removed("bound a likelihood with diffusionlm-eval"),
    "requests.vocabulary": Removed("name token ids in requests.file"),
    "exact_match": Removed(
        'write [[tasks]] with kind = "exact_match", the same source, split and generation, and max_prompts as limit; '
        '[data] beside it is a task of kind = "perplexity"'
    ),
    "objective.mask_noise_std": Removed("the noise has a standard deviation of 0.02", 0.02),
    "objective.estimator.cart_p": Removed("p is 0.3, as in Dream", 0.3),
    "output.format": Removed(
        "files are arrays of token ids (train-00000.bin, dtype in index.json) with the offsets of documents beside "
        "them (train-00000.idx)"
    ),
    "max_shard_gigabytes": Removed("weight files have at most 5 GB", 5.0),
    "schedule.decay_steps": Removed("set schedule.decay_fraction"),
}

FOREIGN_KEYS = {
    "training.max_train_iteration": "unknown key; set training.max_steps (optimizer steps)",
    "training.grad_accum_steps": "unknown key; training.batch_size / training.micro_batch_size is the number of steps",
    "training.neftune_noise_alpha": "unknown key; set training.neftune_alpha",
    "training.seed": "unknown key; set run.seed",
    "model.device": "unknown key; set run.device",
    "model.dtype": "unknown key; set training.precision",
    "model.vocab_size": "unknown key; set tokenizer.vocab_size",
    "objective.loss": 'unknown key; set objective.normalizer = "targets", "rows", "masked_rows" or "masked"',
    "optimizer.optimizer_name": "unknown key; set optimizer.kind",
    "optimizer.max_learning_rate": "unknown key; set optimizer.learning_rate",
    "optimizer.lr_schedule": "unknown key; set schedule.kind",
    "optimizer.warmup_iters": "unknown key; set schedule.warmup_steps",
    "lora.r": "unknown key; set lora.rank",
    "lora.lora_alpha": "unknown key; set lora.alpha",
    "lora.lora_dropout": "unknown key; set lora.dropout",
    "lora.target_modules": "unknown key; set lora.targets",
    "lora.exclude_modules": "unknown key; set lora.exclude",
    "lora.additional_target": "unknown key; set lora.modules_to_save",
    "lora.init_lora_weights": "unknown key; set lora.init",
    "peft": "unknown section; use [lora]",
    "ddp": 'unknown section; use [parallel] with strategy = "ddp" or "fsdp"',
    "deepspeed": 'unknown section; use [parallel] with strategy = "ddp" (ZeRO stage 1) or "fsdp" (stage 3)',
    "accelerate": "unknown section; use [parallel], and start the run with diffusionlm-train-ddp or torchrun",
    "wandb": "unknown section; use [logging.wandb]",
}
"""Keys that similar names and the keys of other sections do not lead to, most of other training programs -> advice."""


def find_renamed(tree: Mapping[str, Any]) -> Iterator[tuple[KeyPath, dict[KeyPath, Any]]]:
    """Iterate over the old keys in the tables of a config, with the new keys and values that stand for each."""
    seen: set[KeyPath] = set()
    for row in RENAMED:
        for path, table in [((), tree)] if not row.table else _find_tables(tree, row.table):
            old, value = (*path, *row.key.split(".")), read_key(table, row.key)
            fits = row.value in (ANY, value) and all(read_key(table, key) == text for key, text in row.where.items())
            if value is not None and fits and old not in seen:
                seen.add(old)
                new_values = {key: value if new is ANY else new for key, new in row.new.items()}
                yield old, {(*path, *key.split(".")): new for key, new in new_values.items()}


def _find_tables(node: Any, name: str, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """Iterate over the tables of a name, also of those in arrays, with their paths."""
    children = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        if key == name and isinstance(child, Mapping):
            yield (*path, key), child
        yield from _find_tables(child, name, (*path, key))


def find_removed(tree: Mapping[str, Any]) -> list[str]:
    """List the keys in the tables of a config that are no more, and have the value that changes nothing."""
    found = ((key, row.default, read_key(tree, key)) for key, row in REMOVED.items())
    return [key for key, default, value in found if value is not None and value == default]


def explain_key(key: str) -> str | None:
    """Return what to do about a key that no section has. None: it is in no table."""
    return f"was removed; {REMOVED[key].remedy}" if key in REMOVED else FOREIGN_KEYS.get(key)


def read_key(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key. None: there is none."""
    node: Any = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node
