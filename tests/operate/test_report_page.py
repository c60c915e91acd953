"""The report of runs in a real browser: Chromium, without a window. All reports have the same renderer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from cli.report import main
from config.load import load_config
from config.train import TrainConfig
from diffusionlm.training.loop import train
from logger.report import write_report
from tests.operate.chromium import PATIENCE, Page
from tests.tiny_run import write_train_config

pytestmark = pytest.mark.operate

PHONE, DESK = (375, 812), (1280, 900)
HOSTILE = "x\u202eevil\u202d<script>alert(1)</script>" + "W" * 300
"""A long word that would reorder its neighbors."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The report of a tiny run, and one that compares it with a run of another tokenizer."""
    folder = tmp_path_factory.mktemp("runs")
    for name, vocab_size in (("one", 280), ("two", 300)):
        path = write_train_config(
            folder,
            name,
            run={"directory": str(folder / name)},
            tokenizer={"vocab_size": vocab_size},
            training={"max_steps": 40},
            validation={"every_steps": 10, "rows": 8, "ngrams": True},
            samples={"every_steps": 10, "infills": ["the cat[MASK:2] on the mat"]},
            checkpoint={"every_steps": 1000},
            logging={"norms_every_steps": 10, "progress": "none"},
        )
        train(load_config(TrainConfig, path))
    main([str(folder / "one"), str(folder / "two"), "--output", str(folder / "both.html")])
    return folder / "one" / "report.html", folder / "both.html"


OVERLAPPING = """[...document.querySelectorAll('.frame > svg')].flatMap(drawing => {
  const boxes = [...drawing.querySelectorAll('text')].map(each => each.getBoundingClientRect());
  return boxes.flatMap((one, index) => boxes.slice(index + 1).filter(other =>
    one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom)
    .map(() => drawing.textContent)); })"""


@pytest.mark.parametrize(
    ("which", "size", "dark"), [(0, PHONE, False), (0, DESK, True), (1, PHONE, True), (1, DESK, False)]
)
def test_it_is_drawn_quietly_and_fits(
    pages: tuple[Path, Path], browser: Page, which: int, size: tuple[int, int], dark: bool
) -> None:
    """Without scripts too."""
    for scripts in (True, False):
        browser.open(pages[which], *size, dark=dark, scripts=scripts)
        name = f"getComputedStyle(document.documentElement).getPropertyValue('--c{which}')"
        color = bytes.fromhex(browser.evaluate(name).strip().removeprefix("#"))
        curve = browser.screenshot(selector='[data-chart="0"] .frame > svg').colours(every=1)
        assert curve.get(color, 0) > 50
        assert browser.evaluate("document.querySelectorAll('.frame text').length") > 40
        assert browser.evaluate(OVERLAPPING) == []
        assert browser.problems() == []
        assert browser.requests() == [pages[which].resolve().as_uri()]
        assert browser.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [size[0], size[0]]


def visible(page: Page, selector: str) -> list[bool]:
    is_visible: list[bool] = page.evaluate(
        f"[...document.querySelectorAll({selector!r})].map(each => each.getBoundingClientRect().width > 0)"
    )
    return is_visible


def box(page: Page, selector: str) -> dict[str, float]:
    """Where an element is in the window, once it was brought there."""
    rectangle: dict[str, float] = page.evaluate(
        f"(() => {{ const each = document.querySelector({selector!r}); each.scrollIntoView({{ block: 'center' }});"
        "return each.getBoundingClientRect().toJSON(); })()"
    )
    return rectangle


def click(page: Page, selector: str) -> None:
    at = box(page, selector)
    center = {"x": at["x"] + at["width"] / 2, "y": at["y"] + at["height"] / 2}
    for kind in ("mousePressed", "mouseReleased"):
        page.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **center)


def test_values_are_read_out_by_mouse_and_keyboard(pages: tuple[Path, Path], browser: Page) -> None:
    browser.open(pages[1], *DESK)
    at = box(browser, '[data-chart="0"] .plot')
    move: dict[str, Any] = {"type": "mouseMoved", "y": at["y"] + 50}
    browser.call("Input.dispatchMouseEvent", x=at["x"] + 0.5 * at["width"], **move)
    readout = "document.querySelector('.readout')?.innerText"
    assert browser.evaluate(readout).startswith("step 20\n")
    browser.call("Input.dispatchMouseEvent", x=at["x"] - 200, **move)
    assert browser.evaluate(readout) is None
    browser.evaluate("document.querySelector('[data-chart=\"1\"] .plot').focus()")
    for key, expected in (("Home", "step 10"), ("ArrowRight", "step 20"), ("End", "step 30"), ("ArrowLeft", "step 20")):
        for kind in ("keyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key=key)
        lines = browser.evaluate(readout).splitlines()
        assert lines[0] == expected
        assert [line.split()[0].rstrip(",") for line in lines[1:]] == ["one", "two"]
        assert all(" ± " in line for line in lines[1:])
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="Escape")
    assert browser.evaluate(readout) is None
    assert browser.problems() == []


def covered(page: Page) -> dict[int, bool]:
    """Whether the tokens of each forward are covered; all of them are alike."""
    covered_by_forward: list[list[Any]] = page.evaluate(
        """[...document.querySelectorAll('.sample mark')].map(each =>
        [Number(each.dataset.forward), getComputedStyle(each).color === 'rgba(0, 0, 0, 0)'])"""
    )
    by_forward: dict[int, set[bool]] = {}
    for forward, is_covered in covered_by_forward:
        by_forward.setdefault(forward, set()).add(is_covered)
    assert all(len(flags) == 1 for flags in by_forward.values())
    return {forward: flags.pop() for forward, flags in sorted(by_forward.items())}


def test_samples_are_unmasked_forward_by_forward(pages: tuple[Path, Path], browser: Page) -> None:
    browser.open(pages[1], *DESK)
    assert covered(browser) == {1: False, 2: False}
    browser.evaluate("document.querySelector('.replay input').focus()")
    output = "document.querySelector('.replay output').textContent"
    for key, expected in (("Home", [True, True]), ("ArrowRight", [False, True]), ("ArrowRight", [False, False])):
        for kind in ("keyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=ord("$'"[key != "Home"]))
        assert list(covered(browser).values()) == expected
        assert browser.evaluate(output) == f"{expected.count(False)} of 2"
    click(browser, ".replay button")
    assert covered(browser) == {1: True, 2: True}
    deadline = time.monotonic() + PATIENCE
    while browser.evaluate("document.querySelector('.replay button').textContent") == "Pause":
        assert time.monotonic() < deadline
    assert covered(browser) == {1: False, 2: False}
    browser.open(pages[1], *DESK, scripts=False)
    assert covered(browser) == {1: False, 2: False} and visible(browser, ".replay") == [False]
    assert browser.problems() == []


def test_print_view_is_expanded_and_has_no_controls(pages: tuple[Path, Path], browser: Page) -> None:
    browser.open(pages[0], *DESK)
    browser.evaluate("document.querySelector('.replay button').click()")
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    try:
        assert not any(visible(browser, "nav, .replay, footer"))
        assert not any(covered(browser).values())
        assert all(visible(browser, ".config section"))
        assert len(browser.call("Page.printToPDF", printBackground=True)["data"]) > 20_000
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")


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


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of 200 runs with long names, many columns and hostile text."""
    folder = tmp_path_factory.mktemp("hostile")
    name = HOSTILE.replace("/", "")
    runs = [write_run(folder / str(index) / f"{name[: 200 if index == 0 else 20]}{index}") for index in range(200)]
    write_report(runs, folder / "runs.html")
    return folder / "runs.html"


CUT = """[...document.querySelectorAll('body *')].filter(each => {
  if (each.closest('.wide') && !each.matches('.wide') || each.closest('.frame, #tip')) return false;
  const isScrolling = each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).overflowX !== 'visible';
  return each.getBoundingClientRect().right > innerWidth + .5 || isScrolling && !each.matches('.wide, input, select');
}).map(each => each.outerHTML.slice(0, 90))"""


SPILLING = """(() => { const nodes = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  while (nodes.nextNode()) {
    const element = nodes.currentNode.parentElement;
    if (!/[\u202a-\u202e]/.test(nodes.currentNode.data) || element.closest('script')) continue;
    if (getComputedStyle(element).unicodeBidi !== 'isolate') found.push(element.outerHTML.slice(0, 90));
  }
  return found; })()"""


@pytest.mark.parametrize("width", [375, 1280])
def test_hostile_text_is_not_cut_and_neither_reorders_its_neighbors_nor_becomes_html(
    hostile_page: Path, browser: Page, width: int
) -> None:
    browser.open(hostile_page, width, 812)
    browser.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate(CUT) == []
    assert browser.problems() == [] and len(browser.requests()) == 1
    assert browser.evaluate("/\u202e|\\\\u202e/.test(document.body.innerText)"), "shown as it is, or as an escape"
    assert browser.evaluate(SPILLING) == []
    assert browser.evaluate("document.querySelectorAll('script').length") == 2
