"""`leyline policies`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from histories import says, session
from leyline_agent.cli import main
from leyline_agent.cli.policies import PRESETS
from leyline_agent.policies.factory import available


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    file = tmp_path / "traces.jsonl"
    lines = [json.dumps({"id": k, "messages": [*session(k), says("done")]}) for k in (8, 12)]
    file.write_text("\n".join(lines))
    return file


def run(*words: str) -> int:
    try:
        main(words)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_list_names_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("policies", "list") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in available())


def test_compare_prints_a_table_and_writes_json(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "costs.json"
    assert run("policies", "compare", str(traces), "--json", str(target)) == 0
    written = json.loads(target.read_text())["policies"]
    assert set(written) == set(PRESETS)
    cut = written["truncate_tool_outputs"]
    assert cut["turns"] == 8 + 12 + 2
    assert cut["splice_tokens"] < cut["reprefill_tokens"]
    assert written["keep_all"]["turns_untouched"] == 1.0
    assert all(cost["refused"] == 0 for cost in written.values())
    assert "estimated at 4 characters" in capsys.readouterr().out


def test_presets_cover_every_policy() -> None:
    assert {spec.partition(":")[0] for spec in PRESETS.values()} >= set(available()) - {"repair_history"}


def test_compare_takes_specs(traces: Path, tmp_path: Path) -> None:
    target = tmp_path / "costs.json"
    spec = "hysteresis(truncate_tool_outputs:keep_turns=3):min_tokens=100"
    assert run("policies", "compare", str(traces), "--policy", spec, "--json", str(target), "--limit", "1") == 0
    (cost,) = json.loads(target.read_text())["policies"].values()
    assert cost["traces"] == 1


@pytest.mark.parametrize(
    ("words", "says_what"),
    [
        (["no-such-file.jsonl"], "no-such-file.jsonl"),
        (["TRACES", "--policy", "no_such"], "no policy is called"),
        (["TRACES", "--policy", "drop_repeats:keep=both"], "keep is"),
        (["TRACES", "--policy", "drop_repeats", "--json", "/no/such/folder/x.json"], "cannot write"),
        (["TRACES", "--policy", "drop_repeats", "--tokenizer", "missing.json"], "missing.json"),
    ],
)
def test_bad_input_is_one_line(
    traces: Path, words: list[str], says_what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run("policies", "compare", *(str(traces) if word == "TRACES" else word for word in words))
    printed = capsys.readouterr()
    assert code == 2
    assert says_what in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == "" or "policy" in printed.out


def test_plot(traces: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    target = tmp_path / "costs.png"
    assert run("policies", "compare", str(traces), "--plot", str(target), "--policy", "drop_repeats") == 0
    assert target.read_bytes().startswith(b"\x89PNG")
