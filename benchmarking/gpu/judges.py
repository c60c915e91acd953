"""Judges of the parts of the check of a GPU machine: what they have shown, and whether their goals are met."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HEAD_SHARE = 0.70
"""Goal: useful FLOPs of head and loss, as a share of the peak of the GPU (docs/performance.md)."""
MFU_GOALS = {"124m": 0.45, "qwen3-0.6b": 0.43, "qwen3-1.7b": 0.50}
"""Goal for a step of training, by shape."""
DECODING_GOAL = 5_000.0
"""Tokens per second: what JetEngine states for SDAR-4B with blocks of 4 and 128 requests on an H200."""
MAX_RESUME_DIFFERENCE = 0.02
"""Relative, between the last losses of a run and of one that resumed: fused attention adds in any order on a GPU."""
MAX_DECODING_DIFFERENCE = 0.01
"""Nats, between mean log-probabilities of greedy tokens in float32 on the GPU and on the CPU."""


@dataclass(frozen=True)
class PartVerdict:
    """What a part that ended in order has shown."""

    is_met: bool
    """Whether its goal is met."""
    result: str


def judge_tests(output: str) -> PartVerdict:
    """Read the last line of pytest: passed tests, and none that was skipped."""
    last_line = (output.strip().splitlines() or [""])[-1]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped|failed|errors?)", last_line)}
    is_met = counts.get("passed", 0) > 0 and set(counts) == {"passed"}
    return PartVerdict(is_met, ", ".join(f"{number} {word}" for word, number in counts.items()) or "no tests")


def read_losses(path: Path) -> dict[int, float]:
    """Step -> loss, from a run's metrics.jsonl."""
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {record["step"]: record["metrics"]["loss"] for record in records if "loss" in record.get("metrics", {})}


def judge_training(directory: Path) -> PartVerdict:
    """Compare the mean of the last three losses with the first."""
    losses = list(read_losses(directory / "metrics.jsonl").values())
    last = sum(losses[-3:]) / 3
    return PartVerdict(last < 0.9 * losses[0], f"loss {losses[0]:.3f} -> {last:.3f}")


def judge_resume(before: dict[int, float], after: dict[int, float], output: str) -> PartVerdict:
    """Compare the last losses; the output must say that the run resumed."""
    last = max(before)
    if "going on from" not in output or last not in after:
        return PartVerdict(False, "the run did not resume")
    difference = abs(after[last] / before[last] - 1.0)
    return PartVerdict(difference <= MAX_RESUME_DIFFERENCE, f"{before[last]:.4f}, resumed {after[last]:.4f}")


def read_logprobs(path: Path) -> list[float]:
    """Mean log-probability of each answer in a file of diffusionlm-infer."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["metrics"]["mean_logprob"] for line in lines]


def judge_decoding(values: list[float], reference: list[float]) -> PartVerdict:
    """Compare answers with those of the CPU."""
    difference = max(abs(value - expected) for value, expected in zip(values, reference, strict=True))
    return PartVerdict(
        difference <= MAX_DECODING_DIFFERENCE, f"{len(values)} answers, difference {difference:.1e} nats"
    )


def read_table(output: str, column: str) -> list[dict[str, str]]:
    """Rows of the first Markdown table that has a column, by header."""
    header: list[str] = []
    rows = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if column in cells:
            header = cells
        elif header and len(cells) == len(header) and not cells[0].startswith("---"):
            rows.append(dict(zip(header, cells, strict=True)))
        elif header and not line.startswith("|"):
            break
    return rows


def read_number(text: str) -> float:
    """A number of a table, which may have commas, a percent sign or a range behind it."""
    return float(text.partition(" ")[0].replace(",", "").rstrip("%"))


def judge_doctor(output: str, device_name: str) -> PartVerdict:
    """The report of the doctor must name the device and end with its summary."""
    summary = (output.strip().splitlines() or [""])[-1]
    is_met = device_name in output and summary.startswith("nothing is broken")
    return PartVerdict(is_met, summary if device_name in output else f"{device_name} is not in the report")


def judge_head(output: str, peak: float | None, goal: float) -> PartVerdict:
    """Compare the rate of the project's head and loss with a share of the peak of the GPU; 0: any rate will do."""
    rows = [row for row in read_table(output, "useful TFLOP/s") if row["implementation"] == "diffusionlm"]
    if not rows:
        return PartVerdict(False, "not measured")
    rate = read_number(rows[0]["useful TFLOP/s"])
    share = None if peak is None else rate * 1e12 / peak
    share_text = "the peak of this device is not known" if share is None else f"{share:.0%} of the peak"
    is_met = rate > 0 and (goal == 0 or (share is not None and share >= goal))
    return PartVerdict(is_met, f"{rows[0]['ms']} ms, {share_text}, {rows[0]['peak MiB']} MiB")


def judge_mfu(output: str, goals: Mapping[str, float]) -> PartVerdict:
    """Compare the MFU of each shape with its goal; a shape that has a goal needs one."""
    rows = read_table(output, "MFU")
    shares = {row["shape"]: read_number(row["MFU"]) / 100 for row in rows if row["MFU"].endswith("%")}
    speeds = {row["shape"]: row["diffusionlm tok/s"] for row in read_table(output, "diffusionlm tok/s")}
    is_met = bool(rows) and all(shares.get(row["shape"], 0.0) >= goals.get(row["shape"], 0.0) for row in rows)
    texts = [
        f"{row['shape']}: {row['step, ms']} ms, MFU {row['MFU']}, {speeds.get(row['shape'], '?')} tok/s" for row in rows
    ]
    return PartVerdict(
        is_met and all(read_number(row["step, ms"]) > 0 for row in rows), "; ".join(texts) or "not measured"
    )


def judge_throughput(output: str, goal: float) -> PartVerdict:
    """Compare the tokens per second of the first cell of the decoding benchmark with the goal; 0: any will do."""
    rows = read_table(output, "tok/s")
    if not rows:
        return PartVerdict(False, "not measured")
    rate = read_number(rows[0]["tok/s"])
    text = f"{rows[0]['tok/s']} tok/s with {rows[0]['batch']} requests, {rows[0]['forwards/s']} forwards/s"
    return PartVerdict(rate > 0 and rate >= goal, text)
