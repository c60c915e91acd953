"""Files on their way to and from a real SSH server, which drops the connection in the middle."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.operate.machine import Remote, plain_environment, serving

pytestmark = pytest.mark.operate

BIG = bytes(range(256)) * 2000  # longer than what is read at once


@pytest.fixture(scope="module")
def ready(remote: Remote) -> Remote:
    """With the tree, and without anything installed."""
    assert "tracked files" in remote.works("bootstrap-remote")
    return remote


@pytest.fixture
def folder(ready: Remote) -> Iterator[Path]:
    """A new folder there; what was fetched of it here goes afterwards."""
    path = ready.root / "runs" / "a b"
    path.mkdir(parents=True)
    yield path
    shutil.rmtree(path)
    shutil.rmtree(ready.tree / "runs", ignore_errors=True)


def cut(machine: Remote, which: str, size: int) -> Path:
    """Have the connection dropped after so many bytes."""
    path = machine.folder / f"cut-{which}"
    path.write_text(str(size), encoding="utf-8")
    return path


def parts(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.part"))


def test_a_fetch_that_is_cut_leaves_no_half_file_and_goes_on(ready: Remote, folder: Path) -> None:
    (folder / "a small one").write_text("whole", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(BIG)
    there = cut(ready, "output", 300_000)
    line = ready.fails("fetch", "any_file=runs/a b", code=255)
    assert "was lost after 1 of 2 files; the same command goes on where it stopped" in line
    assert not there.exists()
    here = ready.tree / "runs" / "a b"
    assert (here / "a small one").read_text(encoding="utf-8") == "whole"
    assert not (here / "model.safetensors").exists()
    (part,) = parts(here)
    assert part.read_bytes() == BIG[:300_000]

    there = cut(ready, "output", 300_000)  # of 512,000 bytes 212,000 are left
    assert "fetched 2 files" in ready.works("fetch", "any_file=runs/a b")
    assert there.exists()
    there.unlink()
    assert (here / "model.safetensors").read_bytes() == BIG
    assert not parts(here)


def test_what_changed_meanwhile_starts_anew(ready: Remote, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(BIG)
    cut(ready, "output", 300_000)
    ready.fails("fetch", "runs/a b", code=255)
    (folder / "model.safetensors").write_bytes(BIG[::-1])
    ready.works("fetch", "runs/a b")
    here = ready.tree / "runs" / "a b"
    assert (here / "model.safetensors").read_bytes() == BIG[::-1]
    assert not parts(here)


def test_what_is_here_is_not_fetched_again(ready: Remote, folder: Path) -> None:
    (folder / "one").write_text("1", encoding="utf-8")
    (folder / "two").write_text("2", encoding="utf-8")
    ready.works("fetch", "runs/a b")
    here = ready.tree / "runs" / "a b"
    before = {name: (here / name).stat().st_ino for name in ("one", "two")}
    (folder / "two").write_text("3", encoding="utf-8")
    ready.works("fetch", "runs/a b/")
    after = {name: (here / name).stat().st_ino for name in ("one", "two")}
    assert after["one"] == before["one"]
    assert after["two"] != before["two"]
    assert (here / "two").read_text(encoding="utf-8") == "3"


def test_names_links_and_places(ready: Remote, folder: Path) -> None:
    strange = ["-n", "a'b", 'a"b', "a\\b", "$HOME", "ü *", "tab\there", ".hidden"]
    for name in strange:
        (folder / name).write_text(name, encoding="utf-8")
    (folder / "empty").touch()
    (folder / "latest").symlink_to("empty")
    (folder / "away").symlink_to("/etc/hostname")
    done = ready.just("fetch", "runs/a b")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "away -> /etc/hostname is left out: it points elsewhere\n"
    here = ready.tree / "runs" / "a b"
    assert sorted(os.listdir(here)) == sorted([*strange, "empty", "latest"])
    assert all((here / name).read_text(encoding="utf-8") == name for name in strange)
    assert os.readlink(here / "latest") == "empty"

    outside = ready.home / "trace.json"
    outside.write_text("{}", encoding="utf-8")
    ready.works("fetch", f"any_file={outside}")
    assert (ready.tree / "runs" / "fetched" / str(outside).lstrip("/")).read_text(encoding="utf-8") == "{}"
    ready.works("fetch", f"any_file={folder / 'empty'}")  # from / and yet under the root
    ready.works("fetch", "any_file=runs/a b/latest")
    assert not (here / "latest").is_dir()


def test_a_folder_that_cannot_be_written_is_told_in_a_line(ready: Remote, folder: Path) -> None:
    (folder / "one").touch()
    (ready.tree / "runs").mkdir()
    (ready.tree / "runs" / "a b").touch()
    assert "a b" in ready.fails("fetch", "runs/a b")


def test_data_that_is_cut_goes_on_where_it_stopped(ready: Remote) -> None:
    source = ready.tree / "data" / "more" / "tokens.bin"
    source.parent.mkdir()
    source.write_bytes(BIG)
    target = ready.root / "data" / "more" / "tokens.bin"
    there = cut(ready, "input", 300_000)
    assert "was lost after 0 of 1 files" in ready.fails("data-remote", "path=data/more", code=255)
    assert not there.exists()
    assert not target.exists()
    (part,) = parts(ready.root / "data")
    assert part.read_bytes() == BIG[:300_000]

    there = cut(ready, "input", 300_000)
    assert "sent 1 files" in ready.works("data-remote", "data/more")
    assert there.exists()
    there.unlink()
    assert target.read_bytes() == BIG
    assert not parts(ready.root / "data")
    assert "sent 0 files, 0 B" in ready.works("data-remote", "data/more")
    assert "sent 0 files, 0 B" in ready.works("data-remote", "data/more/tokens.bin")


def test_a_tree_that_is_cut_changes_nothing(ready: Remote) -> None:
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
    (kept,) = (ready.root / ".remote" / "edited").glob("*/LICENSE")
    assert kept.read_text(encoding="utf-8") == "edited there"
    assert kept.with_name("CONTRIBUTING.md").read_text(encoding="utf-8") == "edited there too"
    assert text.count("kept as") == 2
    script = ready.root / "scripts" / "train.slurm"
    assert stat.S_IMODE(script.stat().st_mode) == stat.S_IMODE((ready.tree / "scripts" / "train.slurm").stat().st_mode)


def test_settings_are_for_their_owner_only(ready: Remote) -> None:
    local = ready.tree / "env" / "wandb.env"
    local.chmod(0o644)
    done = ready.just("sync-env")
    assert done.returncode == 0
    assert "others may read env/wandb.env: chmod 600" in done.stderr
    assert stat.S_IMODE((ready.root / "env" / "wandb.env").stat().st_mode) == 0o600
    ignored = subprocess.run(["git", "check-ignore", "env/wandb.env"], cwd=ready.tree, capture_output=True, text=True)
    assert ignored.stdout == "env/wandb.env\n"
    aside = local.rename(ready.tree / "wandb.aside")
    assert "cp env/wandb.env.example env/wandb.env" in ready.works("sync-env")
    aside.rename(local)


def test_runs_of_all_kinds_are_listed(ready: Remote) -> None:
    assert "has no runs yet" in ready.works("list-runs")
    runs = {
        "cut": '{"step": 7, "metrics": {"loss": 2.5}}\n{"step": 8, "metr',
        "empty": "",
        "deep/er": '{"step": 1, "event": "data", "text": "x"}\nnull\n7\n',
    }
    for name, metrics in runs.items():
        path = ready.root / "runs" / name / "metrics.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(metrics, encoding="utf-8")
    (ready.root / "runs" / "nothing").mkdir()
    rows = [line.split()[:5] for line in ready.works("list-runs").splitlines()[1:]]
    assert rows == [
        ["runs/cut", "7", "2.5000", "-", "-"],
        ["runs/deep/er", "1", "-", "-", "-"],
        ["runs/empty", "0", "-", "-", "-"],
    ]


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
        said = calls.read_text(encoding="utf-8").splitlines()
        assert f"{home / remote.environment['REMOTE_ROOT']}: uv 1.0, just 1.0, tmux 1.0" in done.stdout, done.stderr
        assert said == [
            "python3 -m pip install --quiet --upgrade --target .tools/uv uv",
            "uv tool install --quiet rust-just",
            "apt-get update -qq",
            "apt-get install -y tmux",
        ]
        (programs / "tmux").unlink()
        (programs / "apt-get").write_text("#!/bin/bash\nexit 100\n", encoding="utf-8")
        line = remote.fails("bootstrap-remote", **names)
        assert "tmux cannot be installed from here: on that machine, run: sudo apt-get install -y tmux" in line
