"""An SSH server for tests, in a process of its own: one user, one key, commands through a shell with a home of its own.

``python ssh_server.py FOLDER HOME`` writes ``key``, ``known_hosts`` and, once it listens, ``port`` into the folder. A
file ``cut-output`` or ``cut-input`` there with a number N makes it drop the connection, once, after N bytes that one
command wrote or read.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import asyncssh

CHUNK = 1 << 14


class Wire:
    """What may be cut."""

    def __init__(self, cut: Path, client: asyncssh.SSHServerProcess[bytes]) -> None:
        self._cut, self._client, self._passed = cut, client, 0

    def passes(self, data: bytes) -> bytes:
        """As much of the data as comes through."""
        limit = int(self._cut.read_text(encoding="utf-8")) if self._cut.exists() else None
        self._passed += len(data)
        return data if limit is None or self._passed < limit else data[: len(data) + limit - self._passed]

    async def after(self) -> None:
        """Drop the connection, if now is the time: nothing more comes through."""
        if self._cut.exists() and self._passed >= int(self._cut.read_text(encoding="utf-8")):
            self._cut.unlink()
            await asyncio.sleep(0.2)
            self._client.channel.get_connection().abort()
            raise ConnectionAbortedError


async def pump(source: asyncio.StreamReader, target: asyncssh.SSHWriter[bytes], wire: Wire) -> None:
    """Hand on what a command writes."""
    while data := await source.read(CHUNK):
        target.write(wire.passes(data))
        await target.drain()
        await wire.after()


async def feed(client: asyncssh.SSHServerProcess[bytes], target: asyncio.StreamWriter, wire: Wire) -> None:
    """Hand on what a command reads."""
    try:
        while data := await client.stdin.read(CHUNK):
            target.write(wire.passes(data))
            await target.drain()
            await wire.after()
    except (asyncssh.Error, OSError):
        pass
    target.close()


async def serve(folder: Path, home: Path) -> None:
    """Listen on a free port of this machine until the process is ended."""

    async def execute(client: asyncssh.SSHServerProcess[bytes]) -> None:
        words = ["bash", "-c", client.command or "exec bash"]
        environment = dict(os.environ)
        if client.term_type:
            environment["TERM"] = client.term_type
            # script(1) gives it a terminal.
            words = ["script", "--quiet", "--return", "--command", client.command or "bash", "/dev/null"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *words, cwd=home, env=environment, stdin=pipe, stdout=pipe, stderr=pipe
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        feeding = asyncio.create_task(feed(client, process.stdin, Wire(folder / "cut-input", client)))
        try:
            wire = Wire(folder / "cut-output", client)
            await asyncio.gather(pump(process.stdout, client.stdout, wire), pump(process.stderr, client.stderr, wire))
            client.exit(await process.wait())
        except (asyncssh.Error, OSError):
            process.send_signal(signal.SIGHUP)
            await asyncio.gather(process.stdout.read(), process.stderr.read())  # so that it can end
        finally:
            feeding.cancel()

    host_key, key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    (folder / "key").touch(mode=0o600)
    key.write_private_key(str(folder / "key"))
    key.write_public_key(str(folder / "key.pub"))
    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[host_key],
        authorized_client_keys=str(folder / "key.pub"),
        process_factory=execute,
        encoding=None,
    )
    port = server.get_port()
    public_key = host_key.export_public_key().decode()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {public_key}", encoding="utf-8")
    (folder / "port.part").write_text(str(port), encoding="utf-8")
    os.replace(folder / "port.part", folder / "port")
    await server.wait_closed()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2])))
