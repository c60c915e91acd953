"""A machine to train on, over SSH, and a browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.operate.chromium import Page, chromium
from tests.operate.machine import Remote, machine


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """A machine with nothing but a home."""
    with machine(tmp_path_factory.mktemp("remote")) as remote_machine:
        yield remote_machine


@pytest.fixture(scope="module")
def ready(remote: Remote) -> Remote:
    """With the tree, and without anything installed."""
    assert "tracked files" in remote.works("bootstrap-remote")
    return remote


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("browser")) as page:
        yield page
