"""Results as tables for a terminal, narrow enough for eighty columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from leyline_agent.bench.arms import Arm
from leyline_agent.bench.measured import ArmTotals, MeasuredTurn
from leyline_agent.errors import ConfigError

NAMES = {
    Arm.NONE: "no policy",
    Arm.REPREFILL: "re-prefill",
    Arm.AMORTIZE: "AMORTIZE",
    Arm.PREPARE: "+ prepare",
    Arm.FORGET: "FORGET",
}
STYLES = {Arm.NONE: "dim", Arm.REPREFILL: "red", Arm.AMORTIZE: "cyan", Arm.PREPARE: "blue", Arm.FORGET: "yellow"}
_SHORT = {Arm.REPREFILL: "re-pre", Arm.AMORTIZE: "AMORT", Arm.PREPARE: "prepare"}


def turns_table(runs: Mapping[Arm, ArmTotals]) -> Table:
    """A row a turn; for each arm what was prefilled and the time to first token, for AMORTIZE also what was reused."""
    table = Table(
        title="Turn by turn: tokens, and time to first token. • marks a turn on which the policy edited old messages",
        box=SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("\nturn", justify="right")
    table.add_column("\nprompt", justify="right")
    for arm in runs:
        reused = ("cached", "amortz") if arm is Arm.AMORTIZE else ()
        for name in (*reused, "prefill", "ms"):
            style = STYLES[arm] + (" bold" if name == "prefill" else "")
            table.add_column(f"{_SHORT.get(arm, arm.upper())}\n{name}", justify="right", style=style, no_wrap=True)
    for row in zip(*(run.turns for run in runs.values()), strict=False):
        first = row[0]
        cells = [f"{'• ' if first.edited else ''}{first.turn + 1}", f"{first.prompt_tokens:,}"]
        for arm, turn in zip(runs, row, strict=True):
            cells += _cells(arm, turn)
        table.add_row(*cells)
    return table


def _cells(arm: Arm, turn: MeasuredTurn) -> list[str]:
    reused = [f"{turn.cached_tokens:,}", f"{turn.amortized_tokens:,}"] if arm is Arm.AMORTIZE else []
    served = [*reused, f"{turn.all_prefilled:,}", f"{turn.ttft_ms:,.0f}"]
    return ["error"] + [""] * (len(served) - 1) if turn.error else served


def totals_table(runs: Mapping[Arm, ArmTotals]) -> Table:
    """A row an arm: prompt = cached + amortized + prefilled."""
    table = Table(title="In total: prompt = cached + amortized + prefilled", box=SIMPLE_HEAD, padding=0)
    table.add_column("arm\n")
    for name in ("prompt", "cached", "amortized", "prefilled", "hit\nrate", "TTFT\nms", "TTFT of\nedited"):
        table.add_column(name, justify="right", style="bold" if name == "prefilled" else "")
    for arm, run in runs.items():
        counts = ("prompt_tokens", "cached_tokens", "amortized_tokens", "all_prefilled")
        table.add_row(
            f"[{STYLES[arm]}]{NAMES[arm]}[/]",
            *(f"{run.total(name):,}" for name in counts),
            f"{run.hit_rate:.1%}",
            _ms(run.median("ttft_ms")),
            _ms(run.median("ttft_ms", lambda turn: turn.edited)),
        )
    table.caption = "times are medians; hit rate = (cached + amortized) / prompt"
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def sweep_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Table 1: a row an arm and concurrency, with what is paired against re-prefill."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=0)
    for name in ("C", "arm"):
        table.add_column(name, justify="right" if name == "C" else "left", no_wrap=True)
    for name in (
        "hit %",
        "points",
        "prefill",
        "TTFT p50\nedited",
        "p99",
        "times\nlower",
        "e2e p50",
        "diff",
        "errors",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        arm, paired = Arm(row["arm"]), row.get("against_reprefill") or {}
        edited = row["ttft_ms_edited"] or {}
        table.add_row(
            str(row["concurrency"]),
            f"[{STYLES[arm]}]{NAMES[arm]}[/]",
            f"{100 * row['hit_rate'][0]:.1f}",
            _number(paired.get("hit_rate_points"), "+.1f"),
            f"{row['prefilled_tokens'] + row['prepared_tokens']:,}",
            _ms(edited.get("p50")),
            _ms(edited.get("p99")),
            _number(paired.get("ttft_edited_times_lower"), ".2f"),
            _ms((row["e2e_ms"] or {}).get("p50")),
            _number(paired.get("e2e_ms_difference"), "+,.0f"),
            str(row["errors"]),
        )
    table.caption = "times in ms; points, times, diff: paired against re-prefill; intervals: `bench show --markdown`"
    return table


def wide_sweep_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Table 1 with all that was measured, for a page rather than a terminal."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, justify in (("C", "right"), ("arm", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    counts = ("exact", "amortized", "rotated", "prefilled", "prepared")
    times = ("TTFT of edited, p50 / p90 / p99", "times lower", "e2e, p50 / p90 / p99", "e2e p50, difference")
    for name in ("sessions", "hit %", "points", *counts, *times, "turns/s", "pool peak", "errors"):
        table.add_column(name, justify="right")
    for row in rows:
        arm, paired = Arm(row["arm"]), row.get("against_reprefill") or {}
        tokens = ("cached_tokens", "amortized_tokens", "rotated_tokens", "prefilled_tokens", "prepared_tokens")
        table.add_row(
            str(row["concurrency"]),
            f"[{STYLES[arm]}]{NAMES[arm]}[/]",
            f"{row['repetitions']} x {row['sessions']}",
            _interval([100 * number for number in row["hit_rate"]], ".1f"),
            _interval(paired.get("hit_rate_points"), "+.1f"),
            *(f"{row[name]:,}" for name in tokens),
            _percentiles(row["ttft_ms_edited"]),
            _interval(paired.get("ttft_edited_times_lower"), ".2f"),
            _percentiles(row["e2e_ms"]),
            _interval(paired.get("e2e_ms_difference"), "+,.0f"),
            f"{row['turns_per_s']:.2f}",
            "-" if row["pool_peak"] is None else f"{row['pool_peak']:,}",
            str(row["errors"]),
        )
    table.caption = "tokens are those of one repetition; times in ms; intervals of 95 %; pairs are with re-prefill"
    return table


def _interval(interval: Sequence[float] | None, form: str) -> str:
    if interval is None:
        return "-"
    value, low, high = (format(number, form) for number in interval)
    return f"{value} \\[{low}, {high}]"  # a bracket would be markup


def _percentiles(spread: Mapping[str, float] | None) -> str:
    return " / ".join(_ms(spread[name]) for name in ("p50", "p90", "p99")) if spread else "-"


def _number(interval: Sequence[float] | None, form: str) -> str:
    return "-" if interval is None else format(interval[0], form)


def breakeven_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Table 2: a row a case."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=0)
    names = ("prompt", "edit at", "behind", "R", "re-prefill", "AMORTIZE", "times\nlower", "splice", "AUTO")
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        times = row["ttft_ms"]
        won = "green" if row["faster"] == row["auto"] else "yellow"
        table.add_row(
            "error" if row["prompt_tokens"] is None else f"{row['prompt_tokens']:,}",
            f"{row['position']:.0%}",
            f"{row['downstream_tokens']:,}",
            f"{row['replacement_tokens']:,}",
            *(_ms(times[arm]) for arm in ("reprefill", "amortize")),
            "-" if row["times_lower"] is None else f"{row['times_lower']:.2f}",
            "-" if row["splice_ms"] is None else f"{row['splice_ms']:.1f}",
            f"[{won}]{row['auto']}[/]" + ("*" if row["fallbacks"] else ""),
        )
    judged = [row for row in rows if row["faster"]]
    right = sum(row["faster"] == row["auto"] for row in judged)
    table.caption = (
        f"AUTO: what the cost model chooses with this server's speed, green where it is the faster way: {right} of "
        f"{len(judged)}; * the server fell back on some turn"
    )
    return table


def tasks_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Table 3: a row a policy."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=0)
    table.add_column("policy", overflow="fold")
    for name in ("solved", "rate, 95 %", "against\nfirst", "p", "steps", "prompt", "prefilled"):
        table.add_column(name, justify="right")
    for row in rows:
        rate, low, high = (100 * number for number in row["solve_rate"])
        against = row.get("against")
        table.add_row(
            row["policy"],
            f"{row['solved']}/{row['attempts']}",
            f"{rate:.0f} % [{low:.0f}, {high:.0f}]",
            f"+{against['wins']} -{against['losses']}" if against else "-",
            f"{against['mcnemar_p']:.2f}" if against else "-",
            f"{row['steps']:.1f}",
            f"{row['prompt_tokens']:,.0f}",
            f"{row['prefilled_tokens']:,.0f}",
        )
    table.caption = (
        "against first: attempts at the same task and seed won and lost, with McNemar's exact p; means an attempt"
    )
    return table


def peers_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Table 4: a row for each edit, engine and way to serve it."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("edit", "engine", "served by"):
        table.add_column(name, overflow="fold")
    for name in ("prompt", "reused", "prefilled", "hit %", "TTFT of\nedited", "same\nanswers"):
        table.add_column(name, justify="right")
    for row in rows:
        same = row["same_answers"]
        table.add_row(
            row["policy"],
            row["engine"],
            row["way"],
            *(f"{row[name]:,}" for name in ("prompt_tokens", "reused_tokens", "prefilled_tokens")),
            f"{100 * row['hit_rate']:.1f}",
            "error" if row["errors"] else _ms((row["ttft_ms_edited"] or {}).get("p50")),
            "-" if same is None else f"{same}/{row['edited_turns']}",
        )
    table.caption = (
        "TTFT in ms, comparable only within an engine; same answers: on edited turns, as the engine's own re-prefill"
    )
    return table


def traces_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Table 5: a row a set of traces."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=0)
    table.add_column("set", overflow="fold")
    names = ("histories", "turns", "edited", "prompt\nremoved", "prefilled by\nre-prefill", "by splice", "saved")
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        counts = ("traces", "turns", "edited_turns")
        table.add_row(
            row["set"],
            *(f"{row[name]:,}" for name in counts),
            f"{row['removed']:.1%}",
            *(f"{row[name]:,}" for name in ("reprefill_tokens", "splice_tokens")),
            f"{row['saved']:.1%}",
        )
    return table


def result_table(result: Mapping[str, Any], *, wide: bool = False) -> Table:
    """The table of a result by its kind, `wide` for a page. Raises ConfigError for a kind without one."""
    makers = {
        "replay": wide_sweep_table if wide else sweep_table,
        "breakeven": breakeven_table,
        "tasks": tasks_table,
        "peers": peers_table,
        "traces": traces_table,
    }
    kind = result["kind"]
    if kind not in makers:
        raise ConfigError(f"there is no table of a {kind!r} result")
    return makers[kind](result["rows"], f"{_measured_on(result)}, commit {result.get('commit')}")


def _measured_on(result: Mapping[str, Any]) -> str:
    server, machine = result.get("server") or {}, result.get("machine") or {}
    if result["kind"] == "traces":
        return f"{result['config']['policy']}, tokens of {result['config']['tokenizer']}"
    if not server:  # an endpoint that is not ours to look into
        return str(result["config"].get("model", "?"))
    gpu = (machine.get("gpu") or "").partition(",")[0] or "CPU"
    attention = f", {server['attention_backend']} attention" if server.get("attention_backend") else ""
    return f"{server.get('model', '?')}, {gpu}{attention}"


def markdown(table: Table) -> str:
    """A table for a page of the docs."""
    heads = [" ".join(str(column.header).split()) for column in table.columns]
    rules = ["---:" if column.justify == "right" else "---" for column in table.columns]
    rows = zip(*([Text.from_markup(str(cell)).plain for cell in column.cells] for column in table.columns), strict=True)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rules, *rows))
