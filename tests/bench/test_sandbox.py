"""What an agent's commands cannot do, tried with the real thing."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from leyline_agent.bench.tasks.sandbox import Isolation, Limits, Sandbox
from leyline_agent.errors import UnsupportedError

SANDBOX = Sandbox()


def _refusal() -> str:
    try:
        SANDBOX.check()
    except UnsupportedError as err:
        return str(err)
    return ""


isolated = pytest.mark.skipif(bool(_refusal()), reason=_refusal())


def bash(folder: Path, command: str, sandbox: Sandbox = SANDBOX) -> str:
    return str(sandbox.run(folder, ["bash", "-c", command]))


@isolated
def test_the_work_folder_is_there_and_writable(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    assert "hello" in bash(tmp_path, "pwd && cat a.txt && echo more > b.txt")
    assert (tmp_path / "b.txt").read_text() == "more\n"


@isolated
def test_no_network(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        said = bash(tmp_path, f"python -c \"import socket; socket.create_connection(('127.0.0.1', {port}), 2)\"")
    assert "unreachable" in said
    assert "exit code 1" in said


@isolated
def test_files_elsewhere_are_not_there(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    secret = tmp_path_factory.mktemp("other") / "secret"
    secret.write_text("hunter2")
    said = bash(tmp_path, f"cat {secret}; cat {Path.home()}/.bashrc; cat /etc/shadow; cat {Path(__file__)}")
    assert "hunter2" not in said
    assert said.count("No such file") == 4


@isolated
def test_nothing_else_can_be_written(tmp_path: Path) -> None:
    said = bash(tmp_path, "touch /usr/x; touch /x; touch /etc/x; echo 1 > /proc/sys/kernel/core_pattern")
    assert said.count("Read-only file system") == 4


@isolated
def test_the_walls_cannot_be_taken_down(tmp_path: Path) -> None:
    tries = ("mount -o remount,bind,rw /usr", "umount /proc", "unshare --user --map-root-user true")
    for command in (*tries, "python -c 'import os; os.chroot(\".\")'"):
        assert "exit code 0" not in bash(tmp_path, command)


@isolated
def test_our_environment_is_not_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hunter2")
    assert "hunter2" not in bash(tmp_path, "env")


@isolated
def test_processes_of_others_are_not_seen_and_none_survives(tmp_path: Path) -> None:
    assert f"\n{os.getpid()}\n" not in bash(tmp_path, "ls /proc")
    bash(tmp_path, "(setsid sh -c 'sleep 1; touch late' > /dev/null 2>&1 &)")
    time.sleep(1.5)
    assert not (tmp_path / "late").exists()


@pytest.mark.parametrize("isolation", [Isolation.NONE, pytest.param(Isolation.NAMESPACES, marks=isolated)])
class TestLimits:
    def test_time(self, tmp_path: Path, isolation: Isolation) -> None:
        sandbox = Sandbox(isolation, Limits(timeout_s=1.0))
        started = time.monotonic()
        done = sandbox.run(tmp_path, ["bash", "-c", "sleep 60 & wait"])
        assert done.exit_code is None
        assert "too long" in str(done)
        assert time.monotonic() - started < 10

    def test_output(self, tmp_path: Path, isolation: Isolation) -> None:
        done = Sandbox(isolation, Limits(output_bytes=1 << 20)).run(tmp_path, ["bash", "-c", "yes; echo end"])
        assert len(done.output) < 9000
        assert "characters left out" in done.output

    def test_files(self, tmp_path: Path, isolation: Isolation) -> None:
        sandbox = Sandbox(isolation, Limits(output_bytes=1 << 20))
        sandbox.run(tmp_path, ["bash", "-c", "head -c 9000000 /dev/zero > big"])
        assert (tmp_path / "big").stat().st_size <= 1 << 20

    def test_memory(self, tmp_path: Path, isolation: Isolation) -> None:
        done = Sandbox(isolation).run(tmp_path, ["python", "-c", "bytearray(8 << 30)"])
        assert "MemoryError" in done.output


def test_without_namespaces_nothing_runs_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "unshare"
    fake.write_text("#!/bin/sh\necho 'unshare: Operation not permitted' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr("leyline_agent.bench.tasks.sandbox.UNSHARE", str(fake))
    with pytest.raises(UnsupportedError, match=r"not permitted.*--isolation none"):
        SANDBOX.check()
    Sandbox(Isolation.NONE).check()
