"""The page of a real run in a real browser: Chromium, without a window."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cli.report import main
from config.load import load_config
from config.train import TrainConfig
from diffusionlm.training.loop import train
from tests.operate.chromium import PATIENCE, Page, Picture
from tests.tiny_run import write_train_config

pytestmark = pytest.mark.operate

PHONE, DESK = (375, 812), (1280, 900)


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


def hexadecimal(page: Page, name: str) -> bytes:
    """A colour of the page by its name."""
    value = page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}')")
    return bytes.fromhex(value.strip().removeprefix("#"))


def assert_drawn(page: Page, picture: Picture) -> None:
    """Text, curves and cards are there, and none of them is everything."""
    counts = picture.colours()
    total = sum(counts.values())
    assert len(counts) > 50
    assert max(counts.values()) < 0.9 * total
    for name, least in (("page", 0.02), ("card", 0.2), ("c0", 5e-5), ("text", 2e-4)):
        assert counts.get(hexadecimal(page, name), 0) > least * total, name


@pytest.mark.parametrize("which", [0, 1], ids=["one run", "two runs"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_it_is_drawn_quietly_and_fits(
    pages: tuple[Path, Path], browser: Page, which: int, dark: bool, size: tuple[int, int]
) -> None:
    browser.open(pages[which], *size, dark=dark)
    browser.evaluate("document.querySelector('#curves').scrollIntoView()")
    assert_drawn(browser, browser.screenshot())
    curve = browser.screenshot(selector='[data-chart="0"] .frame > svg').colours(every=1)
    assert curve.get(hexadecimal(browser, "c0" if which == 0 else "c1"), 0) > 50
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


def test_curves_are_drawn_without_scripts(pages: tuple[Path, Path], browser: Page) -> None:
    browser.open(pages[0], *DESK, scripts=False)
    for curve in ("raw", "smooth"):
        assert visible(browser, f'[data-chart="0"] svg .{curve}') == [True]
    browser.evaluate("document.querySelector('#curves').scrollIntoView()")
    assert_drawn(browser, browser.screenshot())


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


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_labels_stand_at_their_lines_and_apart(pages: tuple[Path, Path], browser: Page, size: tuple[int, int]) -> None:
    browser.open(pages[0], *size)
    aside = """[...document.querySelectorAll('.chart')].filter(chart => {
      const plot = chart.querySelector('.plot').getBoundingClientRect();
      const grid = chart.querySelector('.grid').getBoundingClientRect();
      return grid.width && (Math.abs(grid.left - plot.left) > 2 || Math.abs(grid.right - plot.right) > 2); }).length"""
    assert browser.evaluate(aside) == 0, "the cursor is at the curves"
    overlapping = """[...document.querySelectorAll('.frame > svg')].flatMap(drawing => {
      const boxes = [...drawing.querySelectorAll('text')].map(each => each.getBoundingClientRect());
      return boxes.flatMap((one, index) => boxes.slice(index + 1).filter(other =>
        one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom)
        .map(() => drawing.textContent)); })"""
    assert browser.evaluate("document.querySelectorAll('.frame text').length") > 40
    assert browser.evaluate(overlapping) == []
