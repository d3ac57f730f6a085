"""Commands of an agent nobody trusts: without network, without the rest of the file system, with limits.

Linux namespaces do it (`unshare` of util-linux, without root): a network of its own with nothing in it; a root that
holds the system's programs and this Python, read-only, the work folder, writable, as `/task`, and an empty `/tmp`; its
own process ids, so that nothing outlives the command. No home folder, no environment variables of ours. What remains
shared is the kernel: for a model that might attack it, run the whole benchmark in a virtual machine.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from leyline_agent.errors import UnsupportedError

UNSHARE = "unshare"

TASK = "/task"
"""Where the work folder is inside."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt")
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "passwd", "group", "localtime", "alternatives", "mime.types")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_ENVIRONMENT = {"HOME": "/tmp", "LANG": "C.UTF-8", "TERM": "dumb", "TMPDIR": "/tmp"}  # noqa: S108 - inside, its own


class Isolation(StrEnum):
    """How commands are kept apart from this machine."""

    NAMESPACES = "namespaces"
    """As this module says."""

    NONE = "none"
    """Not at all, limits aside: only where the whole run is inside a container or virtual machine of its own."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one command may use.

    `output_bytes` bounds every file it writes, and its output, of which the middle is left out past `output_chars`.
    """

    timeout_s: float = 30.0
    cpu_s: int = 30
    memory_bytes: int = 2 << 30
    output_bytes: int = 16 << 20
    output_chars: int = 8000


@dataclass(frozen=True, slots=True)
class Finished:
    """What a command did. `exit_code` is None if it was ended for taking too long."""

    exit_code: int | None
    output: str

    def __str__(self) -> str:
        end = "ended: it took too long" if self.exit_code is None else f"exit code {self.exit_code}"
        return f"{self.output.rstrip()}\n[{end}]".lstrip("\n")


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Runs commands in a folder."""

    isolation: Isolation = Isolation.NAMESPACES
    limits: Limits = Limits()

    def check(self) -> None:
        """Raise UnsupportedError if this machine does not allow the isolation asked for."""
        if self.isolation is Isolation.NONE:
            return
        with tempfile.TemporaryDirectory() as folder:
            done = self.run(Path(folder), ["true"])
        if done.exit_code != 0:
            raise UnsupportedError(
                f"commands cannot be isolated on this machine ({' '.join(done.output.split())[:200]}); run in a "
                "container or virtual machine made for this and pass --isolation none"
            )

    def python(self) -> str:
        """The Python to run tests with: this one."""
        return sys.executable

    def run(self, folder: Path, command: list[str], *, stdin: str = "") -> Finished:
        """Run a command in `folder`; output and errors come as one text."""
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                self._command(folder, command),
                cwd=folder,
                env=_ENVIRONMENT
                | {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.communicate(stdin.encode(), timeout=self.limits.timeout_s)
                exit_code: int | None = process.returncode
            except subprocess.TimeoutExpired:
                exit_code = None
            finally:
                _end(process)
            output.seek(0)
            return Finished(exit_code, _shortened(output.read(), self.limits.output_chars))

    def _command(self, folder: Path, command: list[str]) -> list[str]:
        limits = self.limits
        limited = ["prlimit", f"--cpu={limits.cpu_s}", f"--as={limits.memory_bytes}", f"--fsize={limits.output_bytes}"]
        limited += ["--core=0", "--", *command]
        if self.isolation is Isolation.NONE:
            return limited
        apart = [UNSHARE, "--user", "--map-root-user", "--net", "--ipc", "--uts", "--mount", "--pid", "--fork"]
        return [*apart, "--kill-child", "sh", "-c", _script(folder), "sh", *limited]


def _script(folder: Path) -> str:
    """The shell text that builds the root inside the namespaces, enters it, and becomes the command given to it."""
    prefixes = {str(Path(prefix).resolve()) for prefix in (sys.prefix, sys.base_prefix)}
    prefixes |= {str(Path(prefix)) for prefix in (sys.prefix, sys.base_prefix)}
    outside = [path for path in sorted(prefixes) if not path.startswith(_SYSTEM)]
    lines = [
        "set -e",
        "mount --make-rprivate /",
        "root=$(mktemp -d)",
        "mount -t tmpfs -o size=64m,mode=755 none $root",
        # Before anything is shown inside it: this Python may itself live below /tmp.
        "mkdir -p $root/tmp && mount -t tmpfs -o size=64m none $root/tmp",
        "show() { mount --rbind $1 $root$1 && mount -o remount,bind,ro,nosuid $root$1; }",
    ]
    for path in _SYSTEM:
        link = f"cp -P {path} $root{path}"
        lines.append(f"if [ -L {path} ]; then {link}; elif [ -d {path} ]; then mkdir -p $root{path}; show {path}; fi")
    lines += [f"mkdir -p $root{shlex.quote(path)}; show {shlex.quote(path)}" for path in outside]
    lines.append("mkdir -p $root/etc $root/dev $root/proc $root/task")
    lines += [f"[ ! -e /etc/{name} ] || cp -rP /etc/{name} $root/etc/" for name in _ETC]
    lines += [f"touch $root/dev/{name}; mount --bind /dev/{name} $root/dev/{name}" for name in _DEVICES]
    lines += [
        f"mount --bind {shlex.quote(str(folder.resolve()))} $root/task",
        "mount -t proc none $root/proc && mount -o remount,bind,ro $root/proc",
        "mount -o remount,bind,ro $root",
        # Without capabilities the command can undo none of this, and in a chroot it cannot get new ones.
        "drop='setpriv --bounding-set=-all --inh-caps=-all --no-new-privs --'",
        f'cd $root/task && exec chroot $root $drop sh -c \'cd {TASK} && exec "$@"\' sh "$@"',
    ]
    return "\n".join(lines)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command and everything in its process group; in namespaces, the rest dies with its first process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _shortened(output: bytes, chars: int) -> str:
    text = output.decode(errors="replace")
    if len(text) <= chars:
        return text
    half = chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
