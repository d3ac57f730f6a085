"""The eight tasks, the tools, and whole attempts by an agent whose moves are written down."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leyline_agent.bench.tasks import tools
from leyline_agent.bench.tasks.agent import Episode
from leyline_agent.bench.tasks.run import Endpoint, Matrix, rows, run
from leyline_agent.bench.tasks.sandbox import Isolation, Sandbox
from leyline_agent.bench.tasks.task import Task, read_tasks
from leyline_agent.bench.tasks.workspace import Workspace
from leyline_agent.errors import ConfigError, UnsupportedError
from leyline_agent.policies import TruncateToolOutputs
from leyline_agent.policy import KeepAll
from scripted_model import ScriptedModel, say, use
from task_solutions import SOLUTIONS

TASKS = Path(__file__).resolve().parents[2] / "benchmarks" / "tasks"


def _sandbox() -> Sandbox:
    try:
        Sandbox().check()
    except UnsupportedError:  # the isolation has tests of its own, which say that they were skipped
        return Sandbox(Isolation.NONE)
    return Sandbox()


SANDBOX = _sandbox()


@pytest.fixture
def workspace() -> Iterator[Workspace]:
    with Workspace.of(Task.read(TASKS / "pager"), SANDBOX) as workspace:
        yield workspace


# ---- tasks -----------------------------------------------------------------------------------------------------------


def test_there_are_eight_tasks_and_a_solution_for_each() -> None:
    assert {task.name for task in read_tasks(TASKS)} == set(SOLUTIONS)
    assert len(SOLUTIONS) == 8


@pytest.mark.parametrize("name", sorted(SOLUTIONS))
def test_a_task_fails_as_it_is_and_passes_once_solved(name: str) -> None:
    task = Task.read(TASKS / name)
    with Workspace.of(task, SANDBOX) as workspace:
        assert workspace.run_tests().exit_code == 1
        for old, new in SOLUTIONS[name]:
            assert "Edited" in tools.edit(workspace, f"{name}_code.py", old, new)
        done = workspace.run_tests()
        assert done.exit_code == 0, done.output


def test_tasks_are_read_in_the_layout_of_mini_nightmare(tmp_path: Path) -> None:
    task = tmp_path / "cart"
    (task / "data").mkdir(parents=True)
    for file in ("cart_code.py", "test.py", "helper.py", "data/notes.txt"):
        (task / file).write_text("pass\n")
    (task / ".debugignore").write_text("# hidden\ndata/\n")
    (task / ".debugreadonly").write_text("helper.py\n")
    (read,) = read_tasks(tmp_path)
    assert read.files() == ["cart_code.py", "helper.py", "test.py"]
    assert [path for path in read.files() if read.is_readonly(path)] == ["helper.py", "test.py"]


def test_bad_folders_of_tasks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no tasks"):
        read_tasks(tmp_path)
    with pytest.raises(ConfigError, match="--tasks"):
        read_tasks(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="pagr"):
        read_tasks(TASKS, ["pagr"])


# ---- tools -----------------------------------------------------------------------------------------------------------


def call(workspace: Workspace, name: str, **arguments: Any) -> str:
    return tools.call(workspace, name, json.dumps(arguments))


def test_view(workspace: Workspace) -> None:
    shown = call(workspace, "view", path="pager_code.py", start=18, end=20)
    assert shown.splitlines()[0].startswith("pager_code.py, lines 18 to 20 of")
    assert "  18     def __init__" in shown


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "nowhere.py", ".debugignore"])
def test_view_of_what_is_not_the_agent_s(workspace: Workspace, path: str) -> None:
    assert call(workspace, "view", path=path).startswith("Error:")


def test_links_out_of_the_folder_are_not_followed(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2")
    (workspace.folder / "link").symlink_to(tmp_path / "secret")
    assert "outside" in call(workspace, "view", path="link")
    assert "outside" in call(workspace, "edit", path="link", old="hunter2", new="x")


def test_edit_of_what_may_not_be_changed(workspace: Workspace) -> None:
    assert "read-only" in call(workspace, "edit", path="test.py", old="import pytest", new="")
    assert "0 times" in call(workspace, "edit", path="pager_code.py", old="no such text", new="")
    assert "times" in call(workspace, "edit", path="pager_code.py", old="self", new="this")


def test_wrong_calls_come_back_as_text(workspace: Workspace) -> None:
    assert "no tool" in call(workspace, "rm")
    assert "missing ['path']" in call(workspace, "view")
    assert "unknown ['line']" in call(workspace, "view", path="test.py", line=3)
    assert "not JSON" in tools.call(workspace, "view", "{")
    assert "JSON object" in tools.call(workspace, "view", "[]")
    assert call(workspace, "view", path="test.py", start="first").startswith("Error:")


def test_bash_and_pdb(workspace: Workspace) -> None:
    assert "exit code 0" in call(workspace, "bash", command="ls *.py")
    said = call(
        workspace, "pdb", commands="b pager_code.py:31\nc\np len(self._items), self._per_page", test="partial_last"
    )
    assert "(10, 4)" in said


@pytest.mark.parametrize(
    "trick",
    [
        "echo > test.py",
        "rm test.py && mkdir test.py",
        "ln -sf /dev/null test.py",
        "printf 'def pytest_collection_modifyitems(items): items.clear()' > conftest.py",
        "printf 'raise SystemExit(0)' > pytest.py",
        "printf '[pytest]\\naddopts = --co' > pytest.ini",
    ],
)
def test_tests_cannot_be_talked_round(workspace: Workspace, trick: str) -> None:
    workspace.command(["bash", "-c", trick])
    assert workspace.run_tests().exit_code == 1


def test_the_copy_is_thrown_away() -> None:
    with Workspace.of(Task.read(TASKS / "pager"), SANDBOX) as workspace:
        workspace.command(["bash", "-c", "echo broken > pager_code.py"])
    assert not workspace.folder.exists()
    assert "class Pager" in (TASKS / "pager" / "pager_code.py").read_text()


# ---- attempts --------------------------------------------------------------------------------------------------------


def moves(task: str) -> list[dict[str, Any]]:
    """What the scripted agent does: it solves two tasks, one of them by a shell command, and gives up on a third."""
    edits = [use("edit", path=f"{task}_code.py", old=old, new=new) for old, new in SOLUTIONS[task]]
    if task == "pager":
        return [use("run_tests"), use("view", path="pager_code.py"), *edits, use("run_tests")]
    if task == "scheduler":
        return [use("bash", command="cat scheduler_code.py"), say("I think it is the heap."), *edits]
    return [use("view", path=f"{task}_code.py"), use("bash", command="false"), *[say("I give up.")] * 9]


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    with ScriptedModel({task: moves(task) for task in SOLUTIONS}) as model:
        yield model


def test_attempts_of_a_scripted_agent(model: ScriptedModel, tmp_path: Path) -> None:
    tasks = read_tasks(TASKS, ["pager", "scheduler", "invoice"])
    policies = {"keep_all": KeepAll(), "cut": TruncateToolOutputs(keep_turns=1, max_chars=40)}
    matrix = Matrix(tasks, policies, seeds=(7,), max_steps=20, parallel=2, sandbox=SANDBOX, histories=tmp_path)
    episodes = run(matrix, Endpoint(model.base_url, "scripted"))

    assert {(e.task, e.solved) for e in episodes} == {("pager", True), ("scheduler", True), ("invoice", False)}
    keep, cut = rows(episodes)
    assert (keep["attempts"], keep["solved"]) == (cut["attempts"], cut["solved"]) == (3, 2)
    assert keep["by_task"] == {"pager": [1, 1], "scheduler": [1, 1], "invoice": [0, 1]}
    assert cut["against"]["ties"] == 3
    assert cut["against"]["mcnemar_p"] == 1.0
    assert keep["ended"]["it stopped calling tools"] == 1
    assert cut["prompt_tokens"] < keep["prompt_tokens"]
    assert len(list(tmp_path.glob("*.jsonl"))) == 3


def test_the_policy_shapes_what_the_model_sees_and_nothing_else(model: ScriptedModel) -> None:
    policies = {"cut": TruncateToolOutputs(keep_turns=1, max_chars=40)}
    run(Matrix(read_tasks(TASKS, ["pager"]), policies, (0,), sandbox=SANDBOX), Endpoint(model.base_url, "scripted"))
    last = model.requests[-1]["messages"]
    outputs = [message["content"] for message in last if message["role"] == "tool"]
    assert all("removed to save context" in output for output in outputs[:-1])
    assert "removed to save context" not in outputs[-1]


def test_steps_run_out(model: ScriptedModel) -> None:
    matrix = Matrix(read_tasks(TASKS, ["pager"]), {"keep_all": KeepAll()}, (0,), max_steps=2, sandbox=SANDBOX)
    (episode,) = run(matrix, Endpoint(model.base_url, "scripted"))
    assert (episode.solved, episode.steps, episode.ended) == (False, 2, "2 steps")


def test_a_model_that_fails_is_an_attempt_that_failed() -> None:
    matrix = Matrix(read_tasks(TASKS, ["pager"]), {"keep_all": KeepAll()}, (0,), sandbox=SANDBOX)
    (episode,) = run(matrix, Endpoint("http://127.0.0.1:9/v1", "none"))
    assert not episode.solved
    assert "APIConnectionError" in episode.ended


def test_rows_compare_policies_pair_by_pair() -> None:
    solved = {"a": [1, 1, 0, 1], "b": [0, 0, 0, 1]}
    episodes = [
        Episode(f"task-{number % 2}", policy, number, solved=bool(wins[number]))
        for policy, wins in solved.items()
        for number in range(4)
    ]
    against = rows(episodes)[1]["against"]
    assert (against["wins"], against["losses"], against["ties"], against["mcnemar_p"]) == (0, 2, 2, 0.5)
    assert against["solve_rate_points"][0] == -50.0


def test_the_command(model: ScriptedModel, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "leyline_agent.cli", "bench", "tasks", "--base-url", model.base_url]
    command += [
        "--model",
        "scripted",
        "--tasks",
        str(TASKS),
        "--task",
        "scheduler",
        "--task",
        "invoice",
        "--seeds",
        "1",
    ]
    command += ["--json", str(tmp_path / "tasks.json"), "--isolation", SANDBOX.isolation]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "1/2" in done.stdout
    result = json.loads((tmp_path / "tasks.json").read_text())
    assert [row["solved"] for row in result["rows"]] == [1, 1]
    assert result["machine"]["cores"]
    assert len(result["episodes"]) == 4
