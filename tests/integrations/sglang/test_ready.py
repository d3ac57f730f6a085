"""What a client asks before its first turn has to be answered also while the schedulers are busy."""

from __future__ import annotations

from contextlib import contextmanager
from signal import SIGCONT, SIGSTOP
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.server, pytest.mark.parametrize("live", ["llama-rust"], indirect=True)]


@contextmanager
def busy_schedulers(live: Any) -> Iterator[None]:
    """Schedulers that answer nobody, as during a long batch."""
    schedulers = [p for p in psutil.Process(live.process.pid).children(recursive=True) if "scheduler" in p.name()]
    assert schedulers
    for scheduler in schedulers:
        scheduler.send_signal(SIGSTOP)
    try:
        yield
    finally:
        for scheduler in schedulers:
            scheduler.send_signal(SIGCONT)


def test_ready_waits_for_no_scheduler(live: Any) -> None:
    expected = {key: httpx.get(f"{live.url}/leyline/status").json()[key] for key in ("ready", "amortize", "reason")}
    with busy_schedulers(live):
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{live.url}/leyline/status", timeout=1.0)
        answer = httpx.get(f"{live.url}/leyline/ready", timeout=30.0)
    assert answer.status_code == 200
    assert expected.items() <= answer.json().items()
    assert httpx.get(f"{live.url}/leyline/status", timeout=60.0).json()["amortize"] is True
