"""The table through which every policy goes, bare and in each wrapper. A new policy gets a row here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyline_agent import policies
from leyline_agent.directives import Mode
from leyline_agent.policy import KeepAll, Policy

POLICIES: dict[str, Policy] = {
    "keep_all": KeepAll(),
    "truncate": policies.TruncateToolOutputs(),
    "truncate to nothing": policies.TruncateToolOutputs(keep_turns=1, max_chars=0, text_protocol=True),
    "clear tool uses": policies.ClearToolUses(trigger=500, keep=2, clear_at_least=100),
    "clear all tool uses": policies.ClearToolUses(trigger=0, keep=0, clear_at_least=0, clear_tool_inputs=True),
    "clear thinking": policies.ClearThinking(),
    "clear all thinking": policies.ClearThinking(keep=0),
    "failed retries": policies.DropFailedRetries(),
    "failed retries of a tool": policies.DropFailedRetries(match="tool", text_protocol=True),
    "superseded": policies.DropSuperseded(text_protocol=True),
    "repeats": policies.DropRepeats(text_protocol=True),
    "repeats, first": policies.DropRepeats(keep="first"),
    "window": policies.SlidingWindow(keep_turns=3, step=2),
    "narrow window": policies.SlidingWindow(keep_turns=1, step=1, head_turns=1),
    "redact": policies.Redact(),
    "summarize": policies.Summarize(trigger=400, keep_turns=2, batch_turns=2),
    "budget": policies.TokenBudget(high_tokens=600, low_tokens=200, keep_turns=2, text_protocol=True),
    "repair": policies.RepairHistory(),
}

WRAPPERS: dict[str, Callable[[Policy], Policy]] = {
    "chain": lambda p: policies.Chain(policies.RepairHistory(), policies.DropRepeats(), p, policies.ClearThinking()),
    "only when": lambda p: policies.OnlyWhen(p, lambda turn: turn.index % 3 == 0),
    "per tool": lambda p: policies.PerTool({"read_file": p}, default=p),
    "hysteresis": lambda p: policies.Hysteresis(p, min_tokens=200),
    "when cold": policies.WhenCold,
    "protect": lambda p: policies.Protect(p, pinned=lambda message: "custom" in message),
    "cost aware": policies.CostAware,
    "dry run": policies.DryRun,
    "restore": lambda p: policies.Restore(p, policies.asked_for()),
}

DEFAULT_MODES: dict[type[Policy], Mode] = {
    policies.Redact: Mode.FORGET,
    policies.RepairHistory: Mode.FORGET,
}
"""Policies whose edits correct something or take out a secret. All others amortize unless told otherwise."""


def trace_files() -> list[Path]:
    """The recorded traces, from the folder LEYLINE_TRACES or one beside the repository."""
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "traces"
    return sorted(Path(os.environ.get("LEYLINE_TRACES") or beside).glob("*.jsonl"))


def recorded_histories(every: int = 1) -> list[list[dict[str, Any]]]:
    """Every n-th recorded history; skips the test if there are none."""
    files = trace_files()
    if not files:
        pytest.skip("no recorded traces; point LEYLINE_TRACES to a folder of JSONL files")
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [json.loads(line)["messages"] for line in lines[::every]]
