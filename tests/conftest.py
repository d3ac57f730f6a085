"""Fixtures for all tests: real CPU servers, shared by the session, and their logs beside a failure."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from leyline_agent.integrations.sglang import cpu
from servers import CpuServer, ServerPool, server_python

if not Path("/dev/nvidiactl").exists():
    cpu.enable()  # transformers, too, imports torchvision, which needs help beside a CPU build of torch

_POOL = ServerPool()
_LOG_STARTS = pytest.StashKey[dict[Path, int]]()


@pytest.fixture(scope="session")
def cpu_server() -> Iterator[Callable[..., CpuServer]]:
    """Give a function that returns a running CPU server: `cpu_server("deepseek_v2", "--page-size", "16")`."""
    if server_python() is None:
        pytest.skip("SGLang is not installed; `make env` creates an environment that has it")
    yield _POOL.get
    _POOL.close()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """In `.venv-client`, leave out files and folders without client tests: they import what is not installed there."""
    if importlib.util.find_spec("sglang"):
        return None
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return None if any("pytest.mark.client" in file.read_text() for file in files) else True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Remember where the servers' logs end before the test."""
    item.stash[_LOG_STARTS] = {server.log: server.log.stat().st_size for server in _POOL.running()}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show beside a failure what the servers logged during the test."""
    report = yield
    if report.failed:
        for server in _POOL.running():
            written = server.log_tail(start=item.stash[_LOG_STARTS].get(server.log, 0))
            if written:
                report.sections.append((f"Server log of {server.model_path.name}", written))
    return report
