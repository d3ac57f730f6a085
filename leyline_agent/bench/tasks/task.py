"""A debugging task: a folder in the layout of debug-gym's mini_nightmare set.

`<name>_code.py` holds the bug, `test.py` the tests; the task is solved when `python -m pytest test.py` passes. Optional
`.debugignore` and `.debugreadonly` name files, one shell pattern a line: those the agent is not shown, and those it may
not change. `test.py` is never its to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from leyline_agent.errors import ConfigError

TESTS = "test.py"
_IGNORE_FILE, _READONLY_FILE = ".debugignore", ".debugreadonly"
_NEVER_SHOWN = (_IGNORE_FILE, _READONLY_FILE, "__pycache__", ".pytest_cache", "*.pyc", ".DS_Store", ".git")


@dataclass(frozen=True, slots=True)
class Task:
    """One task. Patterns match a path's parts and the path as a whole."""

    name: str
    folder: Path
    ignored: tuple[str, ...] = _NEVER_SHOWN
    readonly: tuple[str, ...] = (TESTS,)

    @classmethod
    def read(cls, folder: Path) -> Task:
        """The task in a folder. Raises ConfigError without `test.py`."""
        if not (folder / TESTS).is_file():
            raise ConfigError(f"{folder} is not a task: it has no {TESTS}")
        ignored = _NEVER_SHOWN + _patterns(folder / _IGNORE_FILE)
        return cls(folder.name, folder, ignored, (TESTS, *_patterns(folder / _READONLY_FILE)))

    def is_shown(self, path: str) -> bool:
        """Whether the agent may be shown this file, named from the task's folder."""
        return not _matches(path, self.ignored)

    def is_readonly(self, path: str) -> bool:
        """Whether the agent may not change it."""
        return _matches(path, self.readonly)

    def files(self) -> list[str]:
        """The files shown at the beginning."""
        found = (str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file())
        return sorted(path for path in found if self.is_shown(path))


def read_tasks(folder: Path, names: Sequence[str] = ()) -> list[Task]:
    """The tasks in a folder, or those named. Raises ConfigError if there are none, or a name is not among them."""
    if not folder.is_dir():
        raise ConfigError(f"no folder of tasks at {folder}; pass --tasks FOLDER")
    tasks = [Task.read(child) for child in sorted(folder.iterdir()) if (child / TESTS).is_file()]
    unknown = set(names) - {task.name for task in tasks}
    if unknown:
        raise ConfigError(
            f"no task {', '.join(sorted(unknown))} in {folder}; it has {', '.join(t.name for t in tasks)}"
        )
    chosen = [task for task in tasks if not names or task.name in names]
    if not chosen:
        raise ConfigError(f"{folder} holds no tasks: no folder in it has a {TESTS}")
    return chosen


def _patterns(file: Path) -> tuple[str, ...]:
    if not file.is_file():
        return ()
    lines = (line.strip().rstrip("/") for line in file.read_text(encoding="utf-8").splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(
        fnmatch(path, pattern) or any(fnmatch(part, pattern) for part in Path(path).parts) for pattern in patterns
    )
