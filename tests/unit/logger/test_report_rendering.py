"""The page of a report: its content, its notes on problems, and that no content of a run can break it."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from logger.report import read_run, read_runs, write_report
from logger.report.page import render_report
from logger.report.plots import main_plots, other_metrics

VOID = {"meta", "link", "input", "path", "br"}


class Outline(HTMLParser):
    """Elements, checked to be closed in order; the text outside of scripts and styles; the figures' titles."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.titles: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> in {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            return
        self.text.append(data)
        if self.open[-2:] == ["div", "h3"]:
            self.titles.append(data)

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


def summary(nats: float, steps: int) -> dict[str, Any]:
    evaluation = {
        "nats_per_token": nats,
        "standard_error": 0.02,
        "bits_per_byte": nats / 3,
        "bits_per_byte_standard_error": 0.005,
        "unigram_entropy": 6.1,
        "by_masked_fraction": [[0.0, 0.5, 3.5], [0.5, 1.0, 4.5]],
        "fills": [{"fraction": 0.15, "top1_accuracy": 0.44, "top5_accuracy": 0.7, "majority_baseline": 0.02}],
        "block_length": None,
    }
    ngrams = {"2-gram, left to right": 4.33}
    return {"evaluation": evaluation, "ngrams": ngrams, "parameters": 1_115_520, "step": steps, "seconds": 62.0}


def sample(step: int, given: str, tokens: list[str], step_map: list[int | None]) -> dict[str, Any]:
    logprobs = [None if forward is None else math.log(0.5) for forward in step_map]
    values = {"given": given, "tokens": tokens, "step_map": step_map, "logprobs": logprobs}
    return {"step": step, "event": "sample", "text": "for people", "values": values}


def make_run(folder: Path, *, steps: int = 60, learning_rate: float = 0.01, merges: str = "t h", **more: Any) -> Path:
    """A complete run: 60 steps, two validations, samples, two skipped steps. ``more`` replaces metrics of each step."""
    rng = random.Random(0)
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"step": 0, "event": "environment", "text": "environment: python 3.12; torch 2.15"}]
    for step in range(1, steps + 1):
        metrics = {
            "loss": 7.0 - math.log(step) + rng.random() / 5,
            "loss_smooth": 7.0 - math.log(step),
            "grad_l2_norm": 1.0 + 9.0 / step,
            "lr": learning_rate,
            "lr/hidden": learning_rate,
            "lr/embed": learning_rate / 2,
            "tokens_seen": 2048 * step,
            "tokens_per_second": 10_000.0,
            "step_seconds": 0.2,
            "skipped_steps": 2,
            "loss_by_masked_fraction/0-0.2": 4.0,
            "loss_by_masked_fraction/0.8-1": 6.0,
            "memory/peak_allocated": 2**30,
            "mfu": 0.4,
            **more,
        }
        lines.append({"step": step, "metrics": metrics})
        if step % 20 == 0:
            validation = {"val_nats_per_token": 5.0 - step / 50, "val_standard_error": 0.05}
            lines.append(
                {"step": step, "metrics": {**validation, "val_bits_per_byte": 2.0, "val_top1_accuracy/0.15": 0.4}}
            )
            lines.append(sample(step, "for i in[MASK:2](10):", ["for i in", "<b", ">", "(10):"], [None, 2, 1, None]))
    lines += [{"step": step, "event": "skipped", "text": f"step {step}: skipped, loss nan"} for step in (7, 9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "config.toml").write_text(
        f'[run]\nseed = 0\ndirectory = "{folder}"\n[training]\nmax_steps = {steps}\n'
        f"[optimizer]\nlearning_rate = {learning_rate}\n",
        encoding="utf-8",
    )
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "merges.txt").write_text(merges, encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary(3.983, steps)), encoding="utf-8")
    return folder


def page_of(*folders: Path) -> tuple[str, Outline]:
    page = render_report(read_runs(list(folders)))
    return page, Outline(page)


def test_the_page_of_a_run(tmp_path: Path) -> None:
    page, outline = page_of(make_run(tmp_path / "quick"))
    assert outline.titles == [
        "Training loss", "Validation", "Validation, by bytes", "Loss by masked share, at the end",
        "Top-1 accuracy", "Loss by masked share, over the run", "Gradient norm", "Learning rate",
        "Throughput", "Time of a step", "Model FLOPs utilisation", "Memory of the device",
    ]  # fmt: skip
    for text in (
        "quick", "complete 60 of 60 steps", "3.983 ± 0.020", "1.328 ± 0.005", "44.0%", "1,115,520", "1:02",
        "skipped steps 2", "2-gram, left to right", "python 3.12 torch 2.15", "learning_rate 0.01",
        "for i in <b 2 > 1 (10):",
    ):  # fmt: skip
        assert text in outline.words, text
    assert "different tokenizers" not in outline.words
    assert len(page) < 200_000


def test_the_page_asks_for_no_other_and_works_without_scripts(tmp_path: Path) -> None:
    page, outline = page_of(make_run(tmp_path / "quick"))
    addresses = [
        attributes.get(name) for _, attributes in outline.tags for name in ("src", "href") if name in attributes
    ]
    assert {address for address in addresses if address and not address.startswith("#")} == {"data:,"}
    assert "url(" not in page and "@import" not in page and "http://" not in page and "https://" not in page
    policy = next(attributes for _, attributes in outline.tags if attributes.get("http-equiv"))
    assert str(policy["content"]).startswith("default-src 'none'")
    static = page[: page.index("<script")]
    assert len(re.findall(r'<path class="raw" d="M', static)) >= 4
    anchors = {attributes["href"] for tag, attributes in outline.tags if tag == "a"}
    assert anchors == {
        f"#{attributes['id']}" for tag, attributes in outline.tags if tag == "section" and "id" in attributes
    }


def test_every_chart_is_named_focusable_and_has_its_values(tmp_path: Path) -> None:
    page, outline = page_of(make_run(tmp_path / "quick"))
    plots = [attributes for _, attributes in outline.tags if attributes.get("class") == "plot"]
    assert all(plot["tabindex"] == "0" and plot["role"] == "img" for plot in plots)
    assert (
        str(plots[9]["aria-label"])
        == "Time of a step, seconds, by step. quick: from 0.2 to 0.2, least 0.2, greatest 0.2"
    )
    data = json.loads(page[page.index('id="data">') + 10 :].partition("</script>")[0])
    assert len(data) == len(plots)
    assert data[1]["lines"][0]["y"] == [4.6, 4.2, 3.8]
    assert data[1]["lines"][0]["error"] == [0.05] * 3
    assert data[1]["lines"][1] == {"name": "final", "color": 0, "x": [60], "y": [3.983], "error": [0.02]}
    assert data[0]["x"] == [0, 60]


def test_several_runs_show_what_differs_and_fold_the_rest(tmp_path: Path) -> None:
    page, outline = page_of(make_run(tmp_path / "a"), make_run(tmp_path / "b", learning_rate=0.02, steps=40))
    different = page[page.index('class="wide different"') : page.index("<details")]
    assert "optimizer.learning_rate" in different and "0.02" in different and "training.max_steps" in different
    assert "run.directory" not in page.replace(str(tmp_path), "")
    assert "seed" not in different and "1 value in common run seed 0" in outline.words
    assert [run.name for run in read_runs([tmp_path / "a", tmp_path / "b"])] == ["a", "b"]


def test_report_notes_that_tokenizers_differ(tmp_path: Path) -> None:
    _, outline = page_of(make_run(tmp_path / "a"), make_run(tmp_path / "b", merges="h e"))
    assert "These runs have different tokenizers." in outline.words
    assert outline.titles[0] == "Validation, by bytes"
    assert outline.words.count("Not comparable: different tokenizers.") == 5
    _, same = page_of(tmp_path / "a", make_run(tmp_path / "c"))
    assert "tokenizers" not in same.words


@pytest.mark.parametrize(
    ("other", "is_noted"),
    [
        ("[validation]\nfinal_rows = 2", True), ("[model]\nmax_position_embeddings = 8", True),
        ('[data]\nrows = "padded"', True), ("[data]\nend_with_eos = false", True), ("[data]\nworkers = 2", False),
        ("[validation]\ndraws = 2", False),
    ],
)  # fmt: skip
def test_report_notes_that_validation_texts_may_differ(other: str, is_noted: bool, tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "a", steps=3), make_run(tmp_path / "b", steps=3)
    with (two / "config.toml").open("a", encoding="utf-8") as file:
        file.write(other + "\n")
    assert ("their validation texts may differ" in page_of(one, two)[1].words) is is_noted


def test_unknown_metrics_have_a_section_of_their_own(tmp_path: Path) -> None:
    metrics: dict[str, Any] = {"temperature/cpu": 40.0, "phase": "<warm>", "void": None}
    folder = make_run(tmp_path / "quick", **metrics)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 60, "metrics": {"temperature/cpu": 44.0, "loss": 2.0}}\n')
    plots, rest = other_metrics([read_run(folder)])
    assert [plot.title for plot in plots] == ["temperature/cpu"]
    assert rest == ["void", "phase"]
    page, outline = page_of(folder)
    assert "Other metrics" in outline.words and "not finite" in outline.words
    assert "<warm>" not in page and "&lt;warm&gt;" in page


def test_a_family_of_hundreds_is_a_table(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "quick", steps=3)
    norms = {f"weight_norms/layers.{index}": float(index) for index in range(300)}
    with (folder / "metrics.jsonl").open("a") as file:
        for step in (1, 2):
            values = {name: value * step for name, value in norms.items()}
            file.write(json.dumps({"step": step, "metrics": {**values, "weight_norms/mean": 1.0 * step}}) + "\n")
    plots, rest = other_metrics([read_run(folder)])
    assert (plots, len(rest)) == ([], 300)
    assert "Norms of weights" in [plot.title for plot in main_plots([read_run(folder)])]


def test_values_that_are_none_leave_gaps_and_are_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "quick", steps=12)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    broken = [
        re.sub(r'"grad_l2_norm": [\d.]+', '"grad_l2_norm": NaN', line) if '"step": 5,' in line else line
        for line in lines
    ]
    (folder / "metrics.jsonl").write_text("\n".join(broken) + "\n")
    page, outline = page_of(folder)
    assert "1 value is not finite." in outline.words
    figure = page[page.index("Gradient norm") :]
    raw = re.search(r'class="raw" d="([^"]+)"', figure)
    assert raw is not None and raw[1].count("M") == 2


def test_text_of_a_run_cannot_become_part_of_the_page(tmp_path: Path) -> None:
    attack = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'"
    metrics: dict[str, Any] = {attack: 1.0, "text/" + attack: attack}
    folder = make_run(tmp_path / "</title><script>", **metrics)
    toml = f"[data]\nsource = {json.dumps(attack)}\n[{json.dumps(attack)}]\nx = 1\n"
    (folder / "config.toml").write_text(toml)
    with (folder / "metrics.jsonl").open("a") as file:
        for kind in ("sample", "failed", "environment", attack):
            file.write(json.dumps({"step": 61, "event": kind, "text": attack}) + "\n")
        file.write(json.dumps(sample(61, f"{attack}[MASK:1]", [attack, attack], [None, 1])) + "\n")
    values = summary(4.0, 3)
    values["ngrams"] = {attack: 1.0}
    (folder / "summary.json").write_text(json.dumps(values))
    page, outline = page_of(folder)
    assert [tag for tag, _ in outline.tags if tag in ("script", "img")] == ["script", "script"]
    assert not [name for _, attributes in outline.tags for name in attributes if name.startswith("on")]
    assert page.count("<script") == 2 and page.count("<title>") == 1
    assert attack in "".join(outline.text)


@pytest.mark.parametrize("ending", ["", '{"step": 4'])
def test_page_shows_whether_a_run_failed_or_continues(tmp_path: Path, ending: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lines = '{"step": 3, "metrics": {"loss": 2.0}}\n{"step": 3, "event": "failed", "text": "failed after step 3: no"}\n'
    (folder / "metrics.jsonl").write_text(lines + ending)
    _, outline = page_of(folder)
    assert "failed 3 steps" in outline.words and "failed after step 3: no" in outline.words
    assert ("ends in the middle of a line" in outline.words) == bool(ending)
    assert outline.titles == ["Training loss"]


def test_tens_of_thousands_of_steps_give_a_small_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "long", steps=3)
    keys = ("loss", "grad_l2_norm", "lr/a", "lr/b", "step_seconds", "mfu", "other/a", "other/b")
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(4, 20_001):
            values = ", ".join(f'"{key}": {(step * 7919 % 10007) / 10007 + 1:.6f}' for key in keys)
            file.write(f'{{"step": {step}, "metrics": {{{values}}}}}\n')
    size = len(render_report([read_run(folder)]).encode())
    assert 200_000 < size < 1_000_000


def test_writing_leaves_the_page_alone_and_keeps_the_old_one_if_it_fails(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "quick", steps=3)
    output = tmp_path / "out" / "page.html"
    output.parent.mkdir()
    assert [run.name for run in write_report([folder], output)] == ["quick"]
    assert list(output.parent.iterdir()) == [output]
    before = output.read_bytes()
    with pytest.raises(ValueError, match="no such directory"):
        write_report([folder, tmp_path / "missing"], output)
    assert output.read_bytes() == before
