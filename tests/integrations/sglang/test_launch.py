"""What `leyline serve` starts: SGLang's arguments pass through, ours are defaults, no process outlives the launcher."""

from __future__ import annotations

import os
import signal
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import httpx
import pytest

from leyline_agent.errors import ServerError
from leyline_agent.integrations.sglang.launch import ServerArgs, ServerProcess, ServerSpec, command
from servers import free_port, start_server
from tiny_models import tiny_model


def spec(*args: str, cpu: bool = False, leyline: bool = True) -> ServerSpec:
    return ServerSpec(ServerArgs(args), cpu=cpu, leyline=leyline)


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "value"),
    [
        (("--port", "1"), "1"),
        (("--port=1",), "1"),
        (("--port", "1", "--port=2"), "2"),  # as in argparse, the last one counts
        (("--model-path", "m"), None),
        (("--port",), ""),
    ],
)
def test_arguments_are_found_in_either_spelling(args: tuple[str, ...], value: str | None) -> None:
    assert ServerArgs(args).get("--port") == value


def test_the_users_arguments_come_first_and_win() -> None:
    words = spec("--model-path", "m", "--dtype=bfloat16", "--tp", "2", cpu=True).command()
    assert words[1:3] == ["-P", "-m"]  # -P: never Hugging Face's `kernels` from our own folder
    assert words[4:9] == ["--model-path", "m", "--dtype=bfloat16", "--tp", "2"]
    assert "--dtype" not in words
    assert words[words.index("--device") + 1] == "cpu"
    assert words[words.index("--radix-cache-backend") + 1] == "leyline"
    assert "--enable-cache-report" in words


def test_a_stock_server_has_none_of_our_arguments() -> None:
    assert spec("--model-path", "m", leyline=False).command()[4:] == ["--model-path", "m"]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        (None, "http://127.0.0.1:30000"),
        ("0.0.0.0", "http://127.0.0.1:30000"),
        ("::", "http://[::1]:30000"),
        ("::1", "http://[::1]:30000"),
        ("gpu-box", "http://gpu-box:30000"),
    ],
)
def test_url(host: str | None, url: str) -> None:
    assert spec(*(["--host", host] if host else [])).url == url


# --- the environment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allowed", "options", "expected"),
    [
        ("", {}, "other,leyline"),  # nothing said: SGLang would load all that are installed
        ("", {"cpu": True}, "other,leyline,leyline_cpu"),
        ("", {"leyline": False}, "other"),
        ("mine", {}, "mine,leyline"),
        ("mine, leyline", {"leyline": False}, "mine"),
        ("leyline", {"leyline": False}, "none"),  # an empty list would mean all
    ],
)
def test_plugins(monkeypatch: pytest.MonkeyPatch, allowed: str, options: dict[str, bool], expected: str) -> None:
    installed = [
        EntryPoint(name, "module:function", "sglang.srt.plugins") for name in ("other", "leyline", "leyline_cpu")
    ]
    monkeypatch.setattr(command, "entry_points", lambda group: installed if group == "sglang.srt.plugins" else [])
    assert spec(**options).environment({"SGLANG_PLUGINS": allowed})["SGLANG_PLUGINS"] == expected


def test_cpu_settings_of_the_user_are_kept() -> None:
    env = spec(cpu=True).environment({"OMP_NUM_THREADS": "8"})
    assert env["OMP_NUM_THREADS"] == "8"
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in spec().environment({})


# --- the process -----------------------------------------------------------------------------------------------------


@pytest.mark.server
@pytest.mark.slow
def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    wrong = spec("--model-path", str(tiny_model("llama")), "--port", str(free_port()), "--no-such-argument", cpu=True)
    with ServerProcess(wrong, log) as server, pytest.raises(ServerError, match="--no-such-argument") as caught:
        server.wait_ready(timeout_s=120)
    assert "\n" not in str(caught.value)


@pytest.mark.server
@pytest.mark.slow
def test_no_process_outlives_a_launcher_that_is_killed() -> None:
    server = start_server("llama", leyline=False)
    family = processes_of(server.process.pid)
    assert len(family) >= 4  # the launcher, the HTTP server, the scheduler, the detokenizer
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(timeout=30)
    deadline = time.monotonic() + 30
    while (alive := [pid for pid in family if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not alive
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health", trust_env=False)


def processes_of(root: int) -> list[int]:
    """The process and all its descendants."""
    family = [root]
    for pid in family:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            family += [int(child) for child in children.read_text().split()]
    return family


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
