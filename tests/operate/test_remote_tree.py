"""The tree on its way to the other machine, and what it meets there."""

from __future__ import annotations

import random
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.operate.machine import Remote, cut, plain_environment, serving

pytestmark = pytest.mark.operate


@pytest.fixture(scope="module")
def ready(remote: Remote) -> Remote:
    """With a tree of fewer files, which is soon sent."""
    subprocess.run(["git", "rm", "-r", "--quiet", "tests", "diffusionlm", "benchmarking"], cwd=remote.tree, check=True)
    remote.works("bootstrap-remote")
    return remote


def replaced_there(machine: Remote, name: str) -> list[str]:
    """What was kept of a file that was replaced there."""
    saved_copies = sorted((machine.root / ".remote" / "replaced").glob(f"*/{name}"))
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in saved_copies)
    return [path.read_text(encoding="utf-8") for path in saved_copies]


def test_remote_edits_are_preserved_by_every_command(ready: Remote) -> None:
    name = "config/resources/shidoku.toml"
    (ready.root / name).write_text("edited there", encoding="utf-8")
    done = ready.just("data-remote", name)
    assert re.fullmatch(rf"[^\n]+/\.remote/replaced/[\d-]+: {name}\n", done.stderr)
    assert replaced_there(ready, name) == ["edited there"]
    assert (ready.root / name).read_bytes() == (ready.tree / name).read_bytes()
    assert ready.just("data-remote", name).stderr == ""

    secret = ready.root / "env" / "wandb.env"
    ready.works("sync-env")
    assert replaced_there(ready, "env/wandb.env") == []
    secret.write_text("WANDB_API_KEY=typed_there", encoding="utf-8")
    ready.works("sync-env")
    assert replaced_there(ready, "env/wandb.env") == ["WANDB_API_KEY=typed_there"]

    (ready.root / "notes.md").write_text("of theirs", encoding="utf-8")
    (ready.tree / "notes.md").write_text("of mine", encoding="utf-8")
    subprocess.run(["git", "add", "notes.md"], cwd=ready.tree, check=True)
    text = ready.just("bootstrap-remote").stderr
    assert re.fullmatch(r"[^\n]+/\.remote/replaced/[\d-]+: notes\.md\n", text)
    assert replaced_there(ready, "notes.md") == ["of theirs"]
    assert (ready.root / "notes.md").read_text(encoding="utf-8") == "of mine"


def test_what_is_in_the_way_of_the_tree_is_named(ready: Remote) -> None:
    (ready.tree / "placed").write_text("a file", encoding="utf-8")
    subprocess.run(["git", "add", "placed"], cwd=ready.tree, check=True)
    (ready.root / "placed").mkdir()
    (ready.root / "placed" / "theirs").touch()
    line = ready.fails("bootstrap-remote")
    assert "placed" in line and "run the same again" in line
    assert (ready.root / "placed" / "theirs").exists()
    (ready.root / "placed" / "theirs").unlink()
    ready.works("bootstrap-remote")
    assert (ready.root / "placed").read_text(encoding="utf-8") == "a file"


def test_interrupted_upload_leaves_the_remote_tree_unchanged(ready: Remote) -> None:
    for name in ("README.md", "LICENSE"):
        (ready.tree / name).write_bytes(random.Random(name).randbytes(300_000))
    before = {name: (ready.root / name).read_bytes() for name in ("README.md", "LICENSE")}
    cut(ready, "input", 400_000)
    assert ready.just("bootstrap-remote").returncode == 255
    assert {name: (ready.root / name).read_bytes() for name in before} == before
    assert "-dirty" in ready.works("bootstrap-remote")
    for name in before:
        assert (ready.root / name).read_bytes() == (ready.tree / name).read_bytes()


def test_the_tree_there_becomes_that_from_here(ready: Remote) -> None:
    (ready.root / "LICENSE").write_text("edited there", encoding="utf-8")
    (ready.root / "CONTRIBUTING.md").write_text("edited there too", encoding="utf-8")
    (ready.root / "notes").write_text("of theirs", encoding="utf-8")
    (ready.tree / "CHANGELOG.md").unlink()
    (ready.tree / "new.py").write_text("", encoding="utf-8")
    done = ready.just("bootstrap-remote")
    assert done.returncode == 0, done.stderr
    assert not (ready.root / "CHANGELOG.md").exists()
    assert (ready.root / "LICENSE").read_bytes() == (ready.tree / "LICENSE").read_bytes()
    assert (ready.root / "notes").read_text(encoding="utf-8") == "of theirs"
    assert not (ready.root / "new.py").exists()
    assert "git does not track them: new.py" in done.stdout
    assert "edited there" in replaced_there(ready, "LICENSE")
    assert "edited there too" in replaced_there(ready, "CONTRIBUTING.md")
    assert len(done.stderr.splitlines()) == 1
    assert ": CHANGELOG.md, CONTRIBUTING.md, LICENSE\n" in done.stderr
    script = ready.root / "scripts" / "train.slurm"
    assert stat.S_IMODE(script.stat().st_mode) == stat.S_IMODE((ready.tree / "scripts" / "train.slurm").stat().st_mode)


def test_tools_that_are_missing_are_installed(remote: Remote, tmp_path: Path) -> None:
    """uv by pip into the root, tmux by the package manager: stand-ins write down how they are called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    needed = "bash cat chmod date dirname find flock grep id ls mkdir sort stat tail touch"
    for name in needed.split():
        (programs / name).symlink_to(str(shutil.which(name)))
    make = 'printf "#!/bin/bash\\necho %s 1.0\\n" "$1" > "$2"; chmod 755 "$2"\n'
    stand_ins = {
        "python3": f'echo "python3 $*" >> "$CALLS"; mkdir -p .tools/uv/bin\nmake() {{ {make} }}\n'
        "make uv .tools/uv/bin/uv\n",
        "apt-get": f'echo "apt-get $*" >> "$CALLS"\nmake() {{ {make} }}\nmake ${{@: -1}} "{programs}/${{@: -1}}"\n',
        "sudo": 'shift; "$@"',
    }
    for name, body in stand_ins.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    calls = tmp_path / "calls"
    there = {"PATH": str(programs), "CALLS": str(calls), "LANG": plain_environment().get("LANG", "C.UTF-8")}
    with serving(tmp_path / "server", home, there) as names:
        done = remote.just("bootstrap-remote", **names)
        calls_made = calls.read_text(encoding="utf-8").splitlines()
        assert f"{home / remote.environment['REMOTE_ROOT']}: uv 1.0, tmux 1.0" in done.stdout, done.stderr
        assert calls_made == [
            "python3 -m pip install --quiet --upgrade --target .tools/uv uv",
            "apt-get update -qq",
            "apt-get install -y tmux",
            "apt-get update -qq",
            "apt-get install -y rsync",
        ]
        (programs / "rsync").unlink()
        line = remote.fails("data-remote", "tiny.toml", **names)
        assert "rsync" in line
        assert "just bootstrap-remote" in line
        (programs / "tmux").unlink()
        (programs / "apt-get").write_text("#!/bin/bash\nexit 100\n", encoding="utf-8")
        line = remote.fails("bootstrap-remote", **names)
        assert "tmux cannot be installed from here: on that machine, run: sudo apt-get install -y tmux" in line
