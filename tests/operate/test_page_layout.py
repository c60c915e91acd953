"""Pages of hostile content in a real browser: long words, many columns, text that would reorder its neighbors."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from cli.eval.report import build_page, read_evaluations
from cli.sweep import report as sweep_report
from cli.sweep.definition import Setting, Sweep
from cli.sweep.results import Status, SweepRun
from diffusionlm.evaluation.tasks.results import (
    EvaluationResults,
    ItemResult,
    MetricValue,
    OutcomeShares,
    VariantResult,
    format_item_line,
    write_results,
)
from logger.pages.html import write_page
from logger.report import write_report
from tests.operate.chromium import Page, Picture

pytestmark = pytest.mark.operate

HOSTILE = "x\u202eevil\u202d<script>alert(1)</script>" + "W" * 300
NUM_RUNS = 200
NAMES = ("runs", "sweep", "evaluation")


def write_run(folder: Path) -> Path:
    """A run whose names, values, events and samples are hostile."""
    folder.mkdir(parents=True)
    values = {
        "given": f"{HOSTILE}[MASK:2]{HOSTILE}",
        "tokens": [HOSTILE, HOSTILE, "b", HOSTILE],
        "step_map": [None, 1, 2, None],
        "logprobs": [None, -1.0, -1.0, None],
    }
    metrics = {"loss": 2.0, "loss_by_masked_fraction/0-0.5": 2.0, f"other/{HOSTILE}": 1.0, "text": HOSTILE}
    records = [
        {"step": 0, "event": "environment", "text": f"environment: {HOSTILE} {HOSTILE}"},
        {"step": 1, "metrics": metrics},
        {"step": 2, "metrics": {**metrics, "loss": 1.0, f"other/{HOSTILE}": 2.0, "loss_by_masked_fraction/0.5-1": 1.0}},
        {"step": 2, "event": "sample", "text": HOSTILE, "values": values},
        {"step": 2, "event": "sample", "text": HOSTILE},
        {"step": 2, "event": "failed", "text": HOSTILE},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    text = json.dumps(HOSTILE)
    config = f"[data]\n{text} = {text}\nname = {json.dumps(folder.name)}\n"
    (folder / "config.toml").write_text(config, encoding="utf-8")
    return folder


def write_sweep(path: Path, directory: Path) -> None:
    """A sweep of hostile keys, values and errors."""
    keys = ["samples.infills", "run.seed", *(f"logging.{HOSTILE}{number}" for number in range(8))]
    statuses: list[Status] = ["done", "pruned", "failed", "done", "waiting"] * 4
    runs = []
    for number, status in enumerate(statuses):
        values = dict.fromkeys(keys, f"{HOSTILE}{number % 3}")
        runs.append(SweepRun(f"{number}", values, status, error=(HOSTILE, HOSTILE), value=1 / (number + 1)))
    sweep = Sweep(None, [Setting(key, ("a", "b")) for key in keys], directory)
    for run in runs:
        write_run(sweep.run_path(run.name))
    results = sweep_report.read_results(sweep, runs)
    write_page(sweep_report.build_page(sweep, results), path)


def write_evaluation(folder: Path) -> None:
    """An evaluation whose tasks, variants, rules, answers and settings are hostile."""
    (folder / "items").mkdir(parents=True)
    results, lines = [], []
    for index, variant in enumerate((HOSTILE, "x", "y")):
        metrics = {HOSTILE: MetricValue(0.5, 0.1), "strict": MetricValue(0.25)}
        result = VariantResult(
            task=HOSTILE, kind="gsm8k", variant=variant, model=HOSTILE, num_items=2, num_repeats=1, metrics=metrics,
            shares=OutcomeShares(0.5, 0.5, 0.0, 0.0), num_tokens=10 * index, num_forwards=10,
            protocol={HOSTILE: HOSTILE, "number": index},
        )  # fmt: skip
        results.append(result)
        for name in ("0", HOSTILE):
            item = ItemResult(
                task=HOSTILE, variant=variant, id=name, repeat=0, prompt_sha256="", gold=HOSTILE, output=HOSTILE,
                is_correct={HOSTILE: name == "0" and index == 1}, extracted={HOSTILE: HOSTILE}, finish_reason="stop",
                detail=HOSTILE, error=HOSTILE,
            )  # fmt: skip
            lines.append(format_item_line(item) + "\n")
    (folder / "items" / "all.jsonl").write_text("".join(lines), encoding="utf-8")
    contents = EvaluationResults(
        results=tuple(results), command=HOSTILE, software={HOSTILE: HOSTILE}, notes=(HOSTILE,),
        item_ids={HOSTILE: ("0", HOSTILE)},
    )  # fmt: skip
    write_results(folder, contents)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages by name."""
    folder = tmp_path_factory.mktemp("pages")
    paths = {name: folder / f"{name}.html" for name in NAMES}
    name = HOSTILE.replace("/", "")
    runs = [write_run(folder / str(index) / f"{name[: 200 if index == 0 else 20]}{index}") for index in range(NUM_RUNS)]
    write_report(runs, paths["runs"])
    write_sweep(paths["sweep"], folder / "sweep")
    write_evaluation(folder / "evaluation")
    write_page(build_page(read_evaluations([folder / "evaluation"])), paths["evaluation"])
    return paths


OPEN_ALL = "document.querySelectorAll('details').forEach(each => { each.open = true; })"

CUT = """[...document.querySelectorAll('body *')].filter(each => {
  if (each.closest('.wide') && !each.matches('.wide') || each.closest('.frame, #tip')) return false;
  const isScrolling = each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).overflowX !== 'visible';
  return each.getBoundingClientRect().right > innerWidth + .5 || isScrolling && !each.matches('.wide, input, select');
}).map(each => each.outerHTML.slice(0, 90))"""

WIDE = "[...document.querySelectorAll('.wide')].filter(each => each.scrollWidth > each.clientWidth + 1)"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [375, 1280])
def test_nothing_is_cut_without_a_hint(pages: dict[str, Path], browser: Page, name: str, width: int) -> None:
    browser.open(pages[name], width, 812)
    browser.evaluate(OPEN_ALL)
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate(CUT) == []
    assert browser.problems() == [] and len(browser.requests()) == 1
    number = browser.evaluate(f"{WIDE}.length")
    assert number > 0 or name == "evaluation"
    for index in range(min(number, 5)):
        colors = [edge_color(browser, index, scroll_left) for scroll_left in (0, 10**9)]
        assert max(abs(start - end) for start, end in zip(*colors, strict=True)) > 20, "a shadow, until the end"


def edge_color(page: Page, index: int, scroll_left: int) -> bytes:
    """The most frequent color at the right edge of a scrolling frame; text is less frequent."""
    clip = page.evaluate(
        f"(() => {{ const each = {WIDE}[{index}]; each.scrollIntoView(); each.scrollLeft = {scroll_left};"
        "const box = each.getBoundingClientRect(); return { x: box.right + scrollX - 4, y: box.top + scrollY + 12,"
        "width: 1, height: Math.min(innerHeight - box.top, box.height) - 24, scale: 1 }; })()"
    )
    answer = page.call("Page.captureScreenshot", format="png", clip=clip)
    colors = Picture(base64.b64decode(answer["data"])).colours(every=1)
    return max(colors, key=lambda color: colors[color])


@pytest.mark.parametrize("name", NAMES)
def test_text_does_not_reorder_its_neighbors_or_become_html(pages: dict[str, Path], browser: Page, name: str) -> None:
    browser.open(pages[name], 375, 812)
    spilling = """(() => { const nodes = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
      while (nodes.nextNode()) {
        const element = nodes.currentNode.parentElement;
        if (!/[\u202a-\u202e]/.test(nodes.currentNode.data) || element.closest('script')) continue;
        if (getComputedStyle(element).unicodeBidi !== 'isolate') found.push(element.outerHTML.slice(0, 90));
      }
      return found; })()"""
    assert browser.evaluate("/\u202e|\\\\u202e/.test(document.body.innerText)"), "shown as it is, or as an escape"
    assert browser.evaluate(spilling) == []
    assert browser.evaluate("document.querySelectorAll('script').length") == 2
