"""The recipe of a chat, small: its stages, its server, and its page in a browser."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.operate.chromium import Page
from tests.unit.serving.http.test_served_page_in_browser import click, run, set_value, wait_for

pytestmark = pytest.mark.operate

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "config" / "resources" / "chat_pipeline.toml"


def write_small_recipe(folder: Path) -> None:
    """The recipe with a model of a few steps and a port of its own."""
    values: dict[str, Any] = tomllib.loads(RECIPE.read_text(encoding="utf-8"))
    chat, exam = (stage["settings"] for stage in values["stages"])
    chat["model"] |= {"hidden_size": 16, "num_hidden_layers": 1, "head_dim": 4, "intermediate_size": 16}
    chat["training"]["max_steps"] = exam["tasks"][0]["limit"] = 2
    chat["data"]["mixture"][0]["source"]["paths"] = [str(ROOT / "config" / "resources" / "small_talk.jsonl")]
    values["common"] = {"serve": {"serve": {"port": 0}}}
    (folder / "pipeline.toml").write_text(tomli_w.dumps(values), encoding="utf-8")


@pytest.mark.timeout(300)
def test_its_end_is_a_chat_in_the_browser(browser: Page, tmp_path: Path) -> None:
    write_small_recipe(tmp_path)
    command = [sys.executable, "-P", "-m", "cli", "pipeline", "--config", "pipeline.toml", "--serve"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            while not (lines and lines[-1].startswith("serving chat (")):
                lines.append(process.stdout.readline())
                assert lines[-1], "".join(lines)
            [line] = [line for line in lines if line.startswith("open http")]
            assert line.endswith("/#chat in a browser; Ctrl-C ends the server\n")
            browser.open(line.split()[1], 1280, 900)
            wait_for(browser, "document.getElementById('model').value === 'chat'")
            assert not browser.evaluate("document.getElementById('panel-chat').hidden")
            for count in (1, 2):
                set_value(browser, "message", "hello")
                set_value(browser, "set-max_tokens", "8")
                run(browser)
                messages = "[...document.querySelectorAll('#messages .message')].map(x => x.lastChild.textContent)"
                assert browser.evaluate(messages)[::2] == ["hello"] * count
            click(browser, "clear")
            assert browser.problems() == []
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, process.stdout.read()
        finally:
            process.kill()
    assert {path.parent.name for path in tmp_path.glob("runs/chat/*/done.json")} == {"chat", "exam"}
