"""The tree on its way to the other machine, and what it meets there."""

from __future__ import annotations

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


def edited_there(machine: Remote, name: str) -> list[str]:
    """What was kept of a file that was edited there."""
    saved_copies = sorted((machine.root / ".remote" / "edited").glob(f"*/{name}"))
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in saved_copies)
    return [path.read_text(encoding="utf-8") for path in saved_copies]


def test_remote_edits_are_preserved_by_every_command(ready: Remote) -> None:
    name = "config/resources/shidoku.toml"
    (ready.tree / name).write_text("first", encoding="utf-8")
    assert ready.just("data-remote", name).stderr == ""
    (ready.tree / name).write_text("second", encoding="utf-8")
    assert ready.just("data-remote", name).stderr == ""  # what is there came from here
    (ready.root / name).write_text("edited there", encoding="utf-8")
    done = ready.just("data-remote", name)
    assert done.stderr.startswith("edited on ")
    assert len(done.stderr.splitlines()) == 1
    assert edited_there(ready, name) == ["edited there"]
    assert (ready.root / name).read_text(encoding="utf-8") == "second"

    secret = ready.root / "env" / "wandb.env"
    ready.works("sync-env")
    assert edited_there(ready, "env/wandb.env") == []
    secret.write_text("WANDB_API_KEY=typed_there", encoding="utf-8")
    ready.works("sync-env")
    assert edited_there(ready, "env/wandb.env") == ["WANDB_API_KEY=typed_there"]

    (ready.root / "notes.md").write_text("of theirs", encoding="utf-8")
    (ready.tree / "notes.md").write_text("of mine", encoding="utf-8")
    subprocess.run(["git", "add", "notes.md"], cwd=ready.tree, check=True)
    text = ready.works("bootstrap-remote")
    assert text.count("edited on") == 1
    assert re.search(r"/\.remote/edited/[\d-]+: notes\.md\n", text)  # the config was sent, and so not edited
    assert edited_there(ready, "notes.md") == ["of theirs"]
    assert (ready.root / "notes.md").read_text(encoding="utf-8") == "of mine"


def test_blocked_upload_leaves_the_remote_tree_unchanged(ready: Remote) -> None:
    (ready.tree / "placed").write_text("a file", encoding="utf-8")
    (ready.tree / "below").mkdir()
    (ready.tree / "below" / "it").write_text("below a folder", encoding="utf-8")
    subprocess.run(["git", "add", "placed", "below"], cwd=ready.tree, check=True)
    (ready.root / "placed").mkdir()
    (ready.root / "placed" / "theirs").touch()
    before = (ready.root / ".remote" / "manifest").read_bytes()
    for way in ("placed/theirs", "below"):
        done = ready.just("bootstrap-remote")
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert f"/{way} is in the way of the tree" in line
        assert "nothing was changed" in line
        assert (ready.root / ".remote" / "manifest").read_bytes() == before
        (ready.root / "placed" / "theirs").unlink(missing_ok=True)
        (ready.root / "below").touch()
    (ready.root / "below").unlink()
    ready.works("bootstrap-remote")
    assert (ready.root / "placed").read_text(encoding="utf-8") == "a file"

    # A file of the project that becomes a folder, and a folder that becomes a file.
    subprocess.run(["git", "rm", "--quiet", "--cached", "-r", "placed", "below"], cwd=ready.tree, check=True)
    (ready.tree / "placed").unlink()
    shutil.rmtree(ready.tree / "below")
    (ready.tree / "placed").mkdir()
    (ready.tree / "placed" / "it").touch()
    (ready.tree / "below").touch()
    subprocess.run(["git", "add", "placed", "below"], cwd=ready.tree, check=True)
    ready.works("bootstrap-remote")
    assert (ready.root / "placed" / "it").is_file()
    assert (ready.root / "below").is_file()


def test_interrupted_upload_leaves_the_remote_tree_unchanged(ready: Remote) -> None:
    (ready.tree / "README.md").write_text("another", encoding="utf-8")
    before = (ready.root / "README.md").read_bytes()
    cut(ready, "input", 200_000)
    assert ready.just("bootstrap-remote").returncode == 255
    assert (ready.root / "README.md").read_bytes() == before
    assert "changed since" in ready.works("bootstrap-remote")
    assert (ready.root / "README.md").read_text(encoding="utf-8") == "another"


def test_the_tree_there_becomes_that_from_here(ready: Remote) -> None:
    (ready.root / "LICENSE").write_text("edited there", encoding="utf-8")
    (ready.root / "CONTRIBUTING.md").write_text("edited there too", encoding="utf-8")
    (ready.root / "notes").write_text("of theirs", encoding="utf-8")
    (ready.tree / "CHANGELOG.md").unlink()
    (ready.tree / "new.py").write_text("", encoding="utf-8")
    text = ready.works("bootstrap-remote")
    assert not (ready.root / "CHANGELOG.md").exists()
    assert (ready.root / "LICENSE").read_bytes() == (ready.tree / "LICENSE").read_bytes()
    assert (ready.root / "notes").read_text(encoding="utf-8") == "of theirs"
    assert not (ready.root / "new.py").exists()
    assert "not sent, since git does not track them: new.py" in text
    (saved_copy,) = (ready.root / ".remote" / "edited").glob("*/LICENSE")
    assert saved_copy.read_text(encoding="utf-8") == "edited there"
    assert saved_copy.with_name("CONTRIBUTING.md").read_text(encoding="utf-8") == "edited there too"
    assert text.count("edited on") == 1
    assert f"{saved_copy.parent}: CONTRIBUTING.md, LICENSE\n" in text
    assert stat.S_IMODE(saved_copy.stat().st_mode) == 0o600
    script = ready.root / "scripts" / "train.slurm"
    assert stat.S_IMODE(script.stat().st_mode) == stat.S_IMODE((ready.tree / "scripts" / "train.slurm").stat().st_mode)


def test_tools_that_are_missing_are_installed(remote: Remote, tmp_path: Path) -> None:
    """uv by pip into the root, just by uv, tmux by the package manager: stand-ins write down how they are called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in (
        "bash",
        "cat",
        "chmod",
        "date",
        "dirname",
        "find",
        "flock",
        "grep",
        "id",
        "ls",
        "mkdir",
        "sha256sum",
        "stat",
        "tail",
        "tar",
    ):
        (programs / name).symlink_to(str(shutil.which(name)))
    make = 'printf "#!/bin/bash\\necho %s 1.0\\n" "$1" > "$2"; chmod 755 "$2"\n'
    stand_ins = {
        "python3": f'echo "python3 $*" >> "$CALLS"; mkdir -p .tools/uv/bin\nmake() {{ {make} }}\n'
        'make "uv" .tools/uv/bin/uv; echo \'[[ $1 != tool ]] || { echo "uv $*" >> "$CALLS"; '
        'printf "#!/bin/bash\\necho just 1.0\\n" > "$UV_TOOL_BIN_DIR/just"; chmod 755 "$UV_TOOL_BIN_DIR/just"; }\' '
        ">> .tools/uv/bin/uv\n",
        "apt-get": f'echo "apt-get $*" >> "$CALLS"\nmake() {{ {make} }}\nmake tmux "{programs}/tmux"\n',
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
        assert f"{home / remote.environment['REMOTE_ROOT']}: uv 1.0, just 1.0, tmux 1.0" in done.stdout, done.stderr
        assert calls_made == [
            "python3 -m pip install --quiet --upgrade --target .tools/uv uv",
            "uv tool install --quiet rust-just",
            "apt-get update -qq",
            "apt-get install -y tmux",
        ]
        (programs / "tmux").unlink()
        (programs / "apt-get").write_text("#!/bin/bash\nexit 100\n", encoding="utf-8")
        line = remote.fails("bootstrap-remote", **names)
        assert "tmux cannot be installed from here: on that machine, run: sudo apt-get install -y tmux" in line
