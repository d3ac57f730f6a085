"""The demonstration behind `leyline demo`: three ways to serve one edited history, and what has to hold."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from leyline_agent.bench.arms import Arm
from leyline_agent.bench.conversation import Settings
from leyline_agent.bench.measured import MeasuredTurn
from leyline_agent.bench.run import ArmRun, OnArmTurn, ignore, run_arm, run_paired
from leyline_agent.bench.script import Script, write_script
from leyline_agent.bench.target import Target
from leyline_agent.errors import HistoryError, ServerError
from leyline_agent.policies import TruncateToolOutputs
from leyline_agent.policy import Policy
from leyline_agent.traces import Trace, read_traces

ARMS = (Arm.REPREFILL, Arm.AMORTIZE, Arm.FORGET)
SLACK_TOKENS = 16
"""What a splice may prefill beyond R and the new tokens: where the template joins them."""

DEMO_POLICY = TruncateToolOutputs(keep_turns=3, max_chars=200)
_WARM_UP_TURNS = 2


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that has to hold, with the numbers behind the verdict."""

    passed: bool
    detail: str


@dataclass(slots=True)
class Demo:
    """A finished demonstration."""

    trace: str
    policy: str
    runs: Mapping[Arm, ArmRun] = field(default_factory=dict)

    @property
    def checks(self) -> dict[str, Check]:
        """What has to hold, by name."""
        reprefill, amortize, forget = (self.runs[arm] for arm in ARMS)
        checks = {"every_turn_served": _served(self.runs)}
        if checks["every_turn_served"].passed:
            checks |= {
                "amortize_prefills_at_most_half": _half(reprefill, amortize),
                "edited_turns_prefill_only_the_edit": _only_the_edit(amortize),
                "ttft_on_edited_turns_is_lower": _faster(reprefill, amortize),
                "forget_answers_as_reprefill": _same_tokens(reprefill, forget),
            }
        return checks

    @property
    def passed(self) -> bool:
        """Whether all of them hold."""
        return all(check.passed for check in self.checks.values())

    def to_json(self) -> dict[str, Any]:
        """`{"arms": {name: totals and turns}, "checks": {name: passed}, "check_details": ...}` and what was played."""
        checks = self.checks
        return {
            "trace": self.trace,
            "policy": self.policy,
            "arms": {arm.value: run.to_json() for arm, run in self.runs.items()},
            "checks": {name: check.passed for name, check in checks.items()},
            "check_details": {name: check.detail for name, check in checks.items()},
        }


def shipped_history() -> Trace:
    """The history that comes with the package: thirteen calls of a coding agent that finds two bugs."""
    with as_file(files("leyline_agent") / "data" / "demo_history.jsonl") as file:
        return next(read_traces(file))


def history_from(file: Path, trace_id: str | None = None) -> Trace:
    """A trace of a file: the one named, or the first. Raises HistoryError if there is no such trace."""
    traces = list(read_traces(file))
    found = next((trace for trace in traces if trace_id in (None, trace.id)), None)
    if found is None:
        raise HistoryError(f"{file} holds no trace {trace_id!r}; it has {', '.join(t.id for t in traces[:5])}, ...")
    return found


def write_demo_script(policy: Policy, trace: Trace, *, max_turns: int | None = None) -> Script:
    """The turns to play. Raises HistoryError for a history in which the policy changes nothing."""
    script = write_script(policy, trace, max_turns=max_turns)
    if not any(step.edited for step in script.steps):
        raise HistoryError(
            f"{policy.name} changes nothing in the {len(script.steps)} turns of {trace.id}, so there is nothing to "
            "show; give a longer history with tool calls, or another --policy"
        )
    return script


def play_demo(
    target: Target,
    policy: Policy,
    script: Script,
    settings: Settings,
    *,
    on_turn: OnArmTurn = ignore,
) -> Demo:
    """Play the script in all arms, after a warm-up on its first turns. Raises ServerError for a server that cannot."""
    if not target.has_leyline:
        reason = target.status.get("reason") or "it has no Leyline"
        raise ServerError(f"the server at {target.url} does not splice: {reason}; start one with `leyline serve`")
    start = Script("warm-up", script.steps[:_WARM_UP_TURNS], script.tools)
    run_arm(target, Arm.AMORTIZE, [start], settings)
    return Demo(script.id, policy.name, run_paired(target, ARMS, script, settings, on_turn=on_turn))


def _served(runs: Mapping[Arm, ArmRun]) -> Check:
    played = [(arm, turn) for arm, run in runs.items() for turn in run.turns]
    errors = [f"{arm}, turn {turn.turn + 1}: {turn.error}" for arm, turn in played if turn.error]
    return Check(not errors, "; ".join(errors) or f"{len(played)} turns, no error")


def _half(reprefill: ArmRun, amortize: ArmRun) -> Check:
    plain, spliced = reprefill.total("all_prefilled"), amortize.total("all_prefilled")
    return Check(2 * spliced <= plain, f"{spliced:,} tokens prefilled instead of {plain:,}")


def _only_the_edit(amortize: ArmRun) -> Check:
    """On every edited turn: prefilled <= len(R) + new tokens + slack."""
    edited = [turn for turn in amortize.turns if turn.edited]
    over = [turn.prefilled_tokens - turn.replacement_tokens - turn.new_tokens for turn in edited]
    worst = max(over, default=0)
    amortized = all(turn.amortized_tokens for turn in edited)
    detail = f"{len(edited)} edited turns, at most {worst} tokens beyond R and the new ones ({SLACK_TOKENS} allowed)"
    return Check(worst <= SLACK_TOKENS and amortized, detail)


def _faster(reprefill: ArmRun, amortize: ArmRun) -> Check:
    plain, spliced = (_edited_ttft(run.turns) for run in (reprefill, amortize))
    return Check(spliced < plain, f"median {spliced:.0f} ms instead of {plain:.0f} ms")


def _edited_ttft(turns: Sequence[MeasuredTurn]) -> float:
    return statistics.median(turn.ttft_ms for turn in turns if turn.edited)


def _same_tokens(reprefill: ArmRun, forget: ArmRun) -> Check:
    """The same prompt lengths and the same sampled ids, turn by turn."""
    pairs = list(zip(reprefill.turns, forget.turns, strict=True))
    unlike = [plain.turn + 1 for plain, other in pairs if _answer(plain) != _answer(other)]
    detail = f"turns {unlike} differ" if unlike else f"{len(pairs)} answers, token for token"
    return Check(not unlike, detail)


def _answer(turn: MeasuredTurn) -> tuple[Any, ...]:
    return turn.prompt_tokens, turn.output_ids, turn.output_text
