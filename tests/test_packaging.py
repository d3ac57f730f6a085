"""The package as others meet it: what it imports, what it lets leak, and what its wheel holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.client

_ROOT = Path(__file__).resolve().parents[1]


def run_elsewhere(code: str, folder: Path) -> str:
    """Run code in a fresh Python whose current folder is not the repository."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["integrations", "kernels", "policies"])
def test_no_top_level_name_leaks(name: str, tmp_path: Path) -> None:
    """Hugging Face ships a package `kernels`; ours must not stand in its place, and the other two are no better."""
    code = f"import importlib.util as u; spec = u.find_spec({name!r}); print(spec and spec.origin)"
    origin = run_elsewhere(code, tmp_path)
    assert origin == "None" or not Path(origin).resolve().is_relative_to(_ROOT)


@pytest.mark.parametrize(
    "module", ["leyline_agent", "leyline_agent.policies", "leyline_agent.cli", "leyline_agent.integrations.sglang"]
)
def test_importing_it_is_cheap(module: str, tmp_path: Path) -> None:
    heavy = ["torch", "sglang", "transformers", "tokenizers", "langchain_core", "langgraph", "openai"]
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    assert run_elsewhere(code, tmp_path) == "[]"


def test_the_two_plugins_can_be_found(tmp_path: Path) -> None:
    code = (
        "from importlib.metadata import entry_points as e; print(sorted(p.name for p in e(group='sglang.srt.plugins')))"
    )
    assert "'leyline', 'leyline_cpu'" in run_elsewhere(code, tmp_path)


@pytest.mark.slow
def test_a_wheel_holds_all_folders_and_data_files(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, since setuptools leaves its drafts beside the source
    made_things = shutil.ignore_patterns(".git", ".venv*", ".*cache", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(_ROOT, source, symlinks=True, ignore=made_things)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", tmp_path, source], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("leyline_agent-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "py.typed",
        "kernels/rope.py",
        "policies/__init__.py",
        "integrations/sglang/plugin.py",
        "integrations/sglang/launch/chatml_tools.jinja",
    ):
        assert f"leyline_agent/{name}" in names
    top_level = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert top_level == {"leyline_agent"}
