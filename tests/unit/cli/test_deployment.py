"""``deploy/``: what the image and the unit name exists, and the server that they start answers."""

from __future__ import annotations

import configparser
import json
import os
import shlex
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cli.serve import main
from config.serving.server import ServeSection
from diffusionlm.checkpoints.huggingface import save_model_directory
from tests.conftest import MakeModel
from tests.unit.cli.conftest import Fails
from tokenizer import CHAT_TEMPLATES, train_bpe

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "deploy" / "diffusionlm-serve.service"


def read_instructions() -> list[tuple[str, str]]:
    """Name and arguments of each instruction of the Dockerfile."""
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest.strip()) for name, rest in lines]


def read_command() -> list[str]:
    values = dict(read_instructions())
    command: list[str] = json.loads(values["ENTRYPOINT"]) + json.loads(values["CMD"])
    return command


def read_unit() -> configparser.RawConfigParser:
    unit = configparser.RawConfigParser(strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT, encoding="utf-8")
    return unit


def parse(command: list[str], fails: Fails) -> dict[str, Any]:
    """The config that the server has with a command line."""
    assert Path(command[0]).name == "diffusionlm-serve"
    return tomllib.loads(fails(main, *command[1:], "--print-config", code=0))


def test_the_image_has_the_source_and_no_privileges(fails: Fails) -> None:
    instructions, project = read_instructions(), tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    sources = {source for name, rest in instructions if name == "COPY" for source in rest.split()[:-1]}
    needed = {*project["tool"]["uv"]["build-backend"]["module-name"], "LICENSE", "README.md", "pyproject.toml"}
    assert sources == needed | {"--from=build", "/app/.venv"}
    assert all((ROOT / source).exists() for source in needed)
    assert {rest.split()[0] for name, rest in instructions if name == "FROM"} == {"python:3.12-slim"}
    values = dict(instructions)
    assert values["USER"].isdigit() and values["VOLUME"] == "/models"
    config = parse(read_command(), fails)
    assert (config["serve"]["host"], str(config["serve"]["port"])) == ("0.0.0.0", values["EXPOSE"])
    assert f"http://127.0.0.1:{values['EXPOSE']}/health" in values["HEALTHCHECK"]


def test_the_unit_starts_the_server_with_a_config(monkeypatch: pytest.MonkeyPatch, fails: Fails) -> None:
    service = read_unit()["Service"]
    command = service["ExecStart"].split()
    assert command[-1] == "/etc/diffusionlm.toml"  # as the text above it says, of:
    monkeypatch.chdir(ROOT)
    config = parse([*command[:-1], "config/resources/serve.toml"], fails)
    assert float(service["TimeoutStopSec"]) > config["serve"]["drain_timeout_seconds"]
    assert config["serve"]["drain_timeout_seconds"] == ServeSection().drain_timeout_seconds
    assert service["RestartPreventExitStatus"] == "2" and service["Restart"] == "on-failure"
    # Each would take its devices from CUDA; ProtectClock does so before systemd 253.
    assert not {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock"} & service.keys()
    assert f"/run/credentials/{UNIT.name}/keys" in UNIT.read_text(), "where systemd puts LoadCredential=keys:FILE"


@pytest.mark.operate
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(read_unit()["Service"]["ExecStart"].split()[0], "/bin/true"))
    program = shutil.which("systemd-analyze")
    assert program is not None, "systemd-analyze is not installed: apt-get install systemd"
    verified = subprocess.run([program, "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert (verified.returncode, verified.stderr) == (0, "")
    # 0: as safe as systemd can make it; 10: not at all.
    subprocess.run([program, "security", "--offline=true", "--threshold=40", str(unit)], check=True, timeout=60)


@pytest.mark.operate  # installs the dependencies
@pytest.mark.timeout(900)
def test_what_the_image_builds_answers_and_ends(tmp_path: Path, tiny_model: MakeModel) -> None:
    """Its instructions in a folder, in place of a container."""
    app, models = tmp_path / "app", tmp_path / "models"
    app.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    for name, rest in read_instructions():
        if name == "COPY" and not rest.startswith("--from"):
            *sources, target = rest.split()
            for source in sources:
                is_folder = (ROOT / source).is_dir()
                (shutil.copytree if is_folder else shutil.copy)(ROOT / source, app / target)
        elif name == "RUN" and rest.startswith("uv "):
            subprocess.run(shlex.split(rest), cwd=app, env=environment, check=True, timeout=600)
    words = train_bpe(["def __init__(self): import os\n"], vocab_size=280).with_chat_template(CHAT_TEMPLATES["chatml"])
    model = tiny_model(vocab_size=words.vocab_size, mask_token_id=words.mask_token_id, eos_token_id=words.eos_token_id)
    save_model_directory(model, words, models)
    command = [str(models) if part == "/models" else part for part in read_command()]
    command = [str(app / ".venv" / "bin" / command[0]), *command[1:], "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1].removesuffix("/v1").replace("0.0.0.0", "127.0.0.1")
        check = json.loads(dict(read_instructions())["HEALTHCHECK"].partition("CMD")[2])
        check = [str(app / ".venv" / "bin" / check[0]), *check[1:-1], check[-1].replace("http://127.0.0.1:8000", url)]
        try:
            assert subprocess.run(check, timeout=60).returncode == 0
            page = subprocess.run(["curl", "-s", "-m", "30", f"{url}/"], capture_output=True, text=True, timeout=60)
            assert "<title>diffusionlm</title>" in page.stdout
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
            assert subprocess.run(check, timeout=60, stderr=subprocess.DEVNULL).returncode == 1
        finally:
            server.kill()
