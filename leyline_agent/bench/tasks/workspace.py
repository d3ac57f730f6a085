"""The throw-away copy of a task in which one attempt happens."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from leyline_agent.bench.tasks.sandbox import Finished, Sandbox
from leyline_agent.bench.tasks.task import TESTS, Task
from leyline_agent.errors import ConfigError

_PYTEST = ["-m", "pytest", "--tb=short", "-q", "-p", "no:cacheprovider", TESTS]

_STEERING = (
    "conftest.py", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg", "sitecustomize.py",
    "usercustomize.py", "pytest.py", "pytest", "_pytest", "pluggy.py", "pluggy",
)  # fmt: skip
"""Files beside the tests that could make failing tests pass; those that came with the task stay."""


@dataclass(slots=True)
class Workspace:
    """A copy of a task that is gone at the end of the `with` block."""

    task: Task
    sandbox: Sandbox
    folder: Path

    @classmethod
    def of(cls, task: Task, sandbox: Sandbox) -> Self:
        """A fresh copy."""
        folder = Path(tempfile.mkdtemp(prefix=f"leyline-{task.name}-"))
        shutil.copytree(task.folder, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        return cls(task, sandbox, folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, name: str) -> Path:
        """The file called `name`. Raises ConfigError for one outside the copy, hidden, or absent."""
        file = self._inside(name)
        if not file.is_file():
            raise ConfigError(f"no file {name}; there are {', '.join(self.files())}")
        return file

    def files(self) -> list[str]:
        """The files the agent may see now."""
        found = (str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file())
        return sorted(path for path in found if self.task.is_shown(path))

    def replace(self, name: str, old: str, new: str) -> int:
        """Put `new` in the place of `old`, which must occur once; returns the line where it begins."""
        if self.task.is_readonly(name):
            raise ConfigError(f"{name} is read-only")
        file = self.path(name)
        text = file.read_text(encoding="utf-8")
        count = text.count(old) if old else 0
        if count != 1:
            raise ConfigError(f"the old text occurs {count} times in {name}; it must occur once")
        start = text.index(old)
        file.write_text(text[:start] + new + text[start + len(old) :], encoding="utf-8")
        return text.count("\n", 0, start) + 1

    def command(self, command: list[str], *, stdin: str = "") -> Finished:
        """Run a command in the copy."""
        return self.sandbox.run(self.folder, command, stdin=stdin)

    def run_tests(self) -> Finished:
        """Run the task's tests, as they came with it: what the agent did to read-only files is undone first."""
        for name in self.task.files():
            if self.task.is_readonly(name):
                copy = self.folder / name
                for path in (*reversed(copy.relative_to(self.folder).parents[:-1]), Path(name)):
                    if (self.folder / path).is_symlink():  # it could point out of the copy
                        (self.folder / path).unlink()
                _remove(copy)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.task.folder / name, copy)
        for planted in _STEERING:
            if not (self.task.folder / planted).exists():
                _remove(self.folder / planted)
        return self.command([self.sandbox.python(), *_PYTEST])

    def _inside(self, name: str) -> Path:
        file = (self.folder / name).resolve()
        if not file.is_relative_to(self.folder.resolve()):
            raise ConfigError(f"{name} is outside the task")
        if not self.task.is_shown(str(file.relative_to(self.folder.resolve()))):
            raise ConfigError(f"no file {name}; there are {', '.join(self.files())}")
        return file


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
