"""How commands start and end: errors, Ctrl-C, standard streams."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli import commands
from cli.entry import friendly_errors
from files.usage_error import UsageError
from tests.unit.cli.conftest import Fails

ROOT = Path(__file__).parents[3]
TRAIN = ROOT / "config" / "resources" / "train.toml"
PRINT_CONFIG = "from cli.infer import main; main(['--print-config'])"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("bad value"), 1, "dlm-run: error: bad value\n"),
        (UsageError("bad input"), 2, "dlm-run: error: bad input\n"),
        (FileNotFoundError(2, "No such file", "a.bin"), 1, "dlm-run: error: a.bin: No such file\n"),
        (PermissionError(13, "Permission denied", Path("b")), 1, "dlm-run: error: b: Permission denied\n"),
        (OSError(28, "No space left on device"), 1, "dlm-run: error: No space left on device\n"),
        (OSError("odd"), 1, "dlm-run: error: odd\n"),
        (KeyboardInterrupt(), 130, "dlm-run: interrupted\n"),
    ],
)
def test_friendly_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    @friendly_errors("dlm-run")
    def run() -> None:
        raise error

    monkeypatch.delenv("DIFFUSIONLM_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as caught:
        run()
    assert (caught.value.code, capsys.readouterr().err) == (code, message)
    monkeypatch.setenv("DIFFUSIONLM_TRACEBACK", "1")
    with pytest.raises(type(error)):
        run()


@pytest.mark.parametrize(
    ("error", "amount"),
    [
        (MemoryError(), ""),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 80 GiB."), ", 20.00 GiB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."), ", 64 bytes"),
    ],
)
def test_missing_memory_is_one_line(error: Exception, amount: str, capsys: pytest.CaptureFixture[str]) -> None:
    @friendly_errors("dlm-run", "lower run.size")
    def run() -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        run()
    more = f"{amount} more were needed" if amount else ""
    assert (caught.value.code, capsys.readouterr().err) == (1, f"dlm-run: error: out of memory{more}: lower run.size\n")


def test_bugs_keep_their_traceback_and_exit_codes_pass_through() -> None:
    for error in (AssertionError("bug"), RuntimeError("bug"), KeyError("bug")):
        with pytest.raises(type(error)), friendly_errors("dlm-run"):
            raise error
    with pytest.raises(SystemExit) as caught, friendly_errors("dlm-run"):
        sys.exit(3)
    assert caught.value.code == 3


@pytest.mark.parametrize(
    ("own", "added"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "GOMP_SPINCOUNT": "1000"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {"GOMP_SPINCOUNT": "1000"}),
        ({"OMP_WAIT_POLICY": "active", "PYTORCH_ALLOC_CONF": "backend:native"}, {}),
    ],
)
def test_what_torch_reads_is_set_unless_the_user_has_set_it(
    own: dict[str, str], added: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(own))
    with friendly_errors("dlm-run"):
        assert os.environ == own | added


def run_code(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60, check=False, **options
    )


def test_full_disk_of_standard_output() -> None:
    with open("/dev/full", "w") as full:
        result = run_code(PRINT_CONFIG, stdout=full)
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert line.endswith("error: standard output: No space left on device")


def test_broken_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = run_code(PRINT_CONFIG, stdout=writer)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


def close_input_and_error() -> None:
    os.close(0)
    os.close(2)


def test_closed_input_and_error_are_replaced() -> None:
    code = (
        "import os, sys\n"
        "from cli.entry import friendly_errors\n"
        "with friendly_errors('dlm-run'):\n"
        "    print('lost', file=sys.stderr)\n"
        "    print(repr(sys.stdin.read()), os.open('/dev/null', os.O_RDONLY) > 2)\n"
        "    raise ValueError('also lost')"
    )
    result = run_code(code, preexec_fn=close_input_and_error, stdout=subprocess.PIPE)
    assert (result.returncode, result.stdout) == (1, "'' True\n")


IMPORT_THAT_SWALLOWS = """
import os, time
os.write(int(os.environ["GATE"]), b"x")
try:
    time.sleep(60)
except BaseException:
    pass
raise AttributeError("a module that is not whole")
"""


def interrupt_at_gate(code: str, folder: Path, stub: str) -> tuple[int, str]:
    """Run code with a stub of torch, and interrupt it when the stub writes to the gate."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(stub)
    reader, writer = os.pipe()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "GATE": str(writer)}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        pass_fds=[writer],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    os.close(writer)
    assert os.read(reader, 1) == b"x", process.communicate()[1]
    os.close(reader)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def test_interrupted_import(tmp_path: Path) -> None:
    """Even if the import swallows KeyboardInterrupt, as those of compiled packages do."""
    call = f"from cli.train import main; main(['--config', {str(TRAIN)!r}])"
    assert interrupt_at_gate(call, tmp_path, IMPORT_THAT_SWALLOWS) == (130, "diffusionlm-train: interrupted\n")


def test_interrupted_work_is_cleaned_up(tmp_path: Path) -> None:
    """Outside of imports Ctrl-C is an exception."""
    code = (
        "import torch\n"
        "from cli.entry import friendly_errors\n"
        "with friendly_errors('dlm-run'):\n"
        "    try:\n"
        "        torch.wait()\n"
        "    finally:\n"
        "        open('cleaned', 'w').close()"
    )
    stub = "import os, time\ndef wait():\n    os.write(int(os.environ['GATE']), b'x')\n    time.sleep(60)\n"
    assert interrupt_at_gate(code, tmp_path, stub) == (130, "dlm-run: interrupted\n")
    assert (tmp_path / "cleaned").exists()


def test_ignored_interrupts_stay_ignored() -> None:
    """As in the background of a shell without job control."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with friendly_errors("dlm-run"):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_an_empty_path_is_refused(fails: Fails) -> None:
    """It would be the working directory."""
    assert "is empty: name a path" in fails(commands.doctor, "--directory=")


def test_control_characters_are_shown_as_escapes(fails: Fails, tmp_path: Path) -> None:
    """In keys, paths and arguments."""
    config = tmp_path / "config.toml"
    config.write_text('"[red]\\u001b]0;x\\u0007" = 1', encoding="utf-8")
    missing = str(tmp_path / "run\x1b[2J")
    for command, arguments, escaped in (
        (commands.train, ["--config", str(config)], r"[red]\x1b]0;x\x07"),
        (commands.pipeline, ["--config", str(config), "--set", "[red]\x1b]0;x\x07=1"], r"[red]\x1b]0;x\x07"),
        (commands.data, ["--config", str(config), "--\x1b[2J"], r"--\x1b[2J"),
        (commands.report, [missing], r"run\x1b[2J"),
        (commands.infer, ["--model", missing, "--prompt", "a"], r"run\x1b[2J"),
    ):
        error = fails(command, *arguments)
        assert escaped in error and "\x1b" not in error and "\x07" not in error
