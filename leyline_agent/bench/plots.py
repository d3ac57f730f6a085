"""Pictures of results, with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leyline_agent.bench.arms import Arm
from leyline_agent.bench.measured import ArmTotals
from leyline_agent.errors import ConfigError, MissingDependencyError

COLOURS = {
    Arm.NONE: "#8c8c8c",
    Arm.REPREFILL: "#d1495b",
    Arm.AMORTIZE: "#00798c",
    Arm.PREPARE: "#30638e",
    Arm.FORGET: "#edae49",
}
LABELS = {
    Arm.NONE: "no policy",
    Arm.REPREFILL: "re-prefill (stock)",
    Arm.AMORTIZE: "AMORTIZE",
    Arm.PREPARE: "AMORTIZE + prepare",
    Arm.FORGET: "FORGET",
}
_DPI = 130


def pyplot() -> Any:
    """Pyplot of matplotlib, drawing into files only. Raises MissingDependencyError that names the extra."""
    try:
        import matplotlib as mpl
    except ImportError as err:
        raise MissingDependencyError("no plot without matplotlib; pip install 'leyline-agent[bench]'") from err
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "grid.alpha": 0.25,
            "axes.axisbelow": True,
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "font.size": 9.5,
            "legend.frameon": False,
        }
    )
    return plt


def save(figure: Any, file: Path) -> Path:
    """Write a figure as PNG and close it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=_DPI, bbox_inches="tight", facecolor="white")
    pyplot().close(figure)
    return file


def plot_demo(runs: Mapping[Arm, ArmTotals], title: str, file: Path) -> Path:
    """Tokens prefilled on each turn, their running total, and the time to first token."""
    plt = pyplot()
    figure, (tokens, total, ttft) = plt.subplots(1, 3, figsize=(13.5, 4.0), constrained_layout=True)
    turns = range(1, 1 + max(len(run.turns) for run in runs.values()))
    edited = [turn.turn + 1 for turn in next(iter(runs.values())).turns if turn.edited]
    for axes in (tokens, total, ttft):
        _shade(axes, edited)
        axes.set_xlabel("turn")
        axes.set_xlim(0.5, len(turns) + 0.5)
        axes.set_xticks([turn for turn in turns if turn % 2 or len(turns) < _MANY_TURNS])
    for number, (arm, run) in enumerate(runs.items()):
        style: dict[str, Any] = {"color": COLOURS[arm], "label": LABELS[arm], "zorder": 3 + number * 0.1}
        numbers = [turn.turn + 1 for turn in run.turns]
        prefilled = [turn.all_prefilled for turn in run.turns]
        width = 0.8 / len(runs)
        shifts = [x + (number - (len(runs) - 1) / 2) * width for x in numbers]
        tokens.bar(shifts, prefilled, width, **style)
        dashed = "--" if arm is Arm.FORGET else "-"
        total.plot(numbers, _running(prefilled), dashed, linewidth=2.2, **style)
        total.annotate(
            f"{sum(prefilled):,}",
            (numbers[-1], sum(prefilled)),
            xytext=(-6, -14 if arm is Arm.FORGET else 5),  # it lies on the line of re-prefill
            textcoords="offset points",
            ha="left" if arm is Arm.FORGET else "right",
            color=COLOURS[arm],
            fontweight="bold",
        )
        ttft.plot(numbers, [turn.ttft_ms / 1000 for turn in run.turns], dashed, marker="o", markersize=3.5, **style)
    tokens.set_title("Tokens prefilled on each turn")
    total.set_title("Tokens prefilled so far")
    ttft.set_title("Time to first token, seconds")
    for axes in (tokens, total, ttft):
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    handles, labels = tokens.get_legend_handles_labels()
    handles.append(plt.Rectangle((0, 0), 1, 1, color=_SHADE))
    figure.legend(handles, [*labels, "turns with an edit"], loc="outside lower center", ncols=len(labels) + 1)
    figure.suptitle(title, x=0.01, ha="left")
    return save(figure, file)


def plot_result(result: Mapping[str, Any], file: Path) -> Path:
    """The picture of a result by its kind. Raises ConfigError for a kind without one."""
    drawers = {"replay": plot_replay, "breakeven": plot_breakeven}
    if result["kind"] not in drawers:
        raise ConfigError(f"there is no picture of a {result['kind']!r} result")
    return drawers[result["kind"]](result, file)


def plot_replay(result: Mapping[str, Any], file: Path) -> Path:
    """Hit rate, time to first token of edited turns, and end-to-end time, over concurrency."""
    plt = pyplot()
    figure, (hit, ttft, e2e) = plt.subplots(1, 3, figsize=(13.5, 4.0), constrained_layout=True)
    rows = result["rows"]
    concurrencies = sorted({row["concurrency"] for row in rows})
    places = {c: number for number, c in enumerate(concurrencies)}
    for arm in (arm for arm in Arm if any(row["arm"] == arm for row in rows)):
        ours = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["concurrency"])
        x = [places[row["concurrency"]] for row in ours]
        style: dict[str, Any] = {"color": COLOURS[arm], "label": LABELS[arm], "marker": "o", "linewidth": 2}
        style["linestyle"] = "--" if arm in (Arm.FORGET, Arm.NONE) else "-"
        hit.plot(x, [100 * row["hit_rate"][0] for row in ours], **style)
        for axes, name in ((ttft, "ttft_ms_edited"), (e2e, "e2e_ms")):
            middle = [(row[name] or {}).get("p50", float("nan")) for row in ours]
            high = [(row[name] or {}).get("p90", float("nan")) - low for row, low in zip(ours, middle, strict=True)]
            shifted = [place + 0.04 * (list(Arm).index(arm) - 2) for place in x]
            axes.errorbar(shifted, middle, yerr=([0] * len(high), high), elinewidth=1, capsize=2, **style)
    for axes, title in (
        (hit, "Prompt tokens reused, %"),
        (ttft, "Time to first token after an edit, ms"),
        (e2e, "End to end, ms"),
    ):
        axes.set_title(title)
        axes.set_xlabel("sessions at once")
        axes.set_xticks(range(len(concurrencies)), [str(c) for c in concurrencies])
        axes.set_ylim(0, 100 if axes is hit else None)
    figure.legend(*hit.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.suptitle(f"{_caption(result)}; medians, bars up to p90", x=0.01, ha="left")
    return save(figure, file)


def plot_breakeven(result: Mapping[str, Any], file: Path) -> Path:
    """Times lower than re-prefill over the tokens behind the edit; above 1 the splice wins."""
    plt = pyplot()
    rows = [row for row in result["rows"] if row["times_lower"]]
    replacements = sorted({row["replacement_tokens"] for row in rows})
    figure, panels = plt.subplots(
        1, len(replacements), figsize=(1.5 + 4.5 * len(replacements), 4.0), sharey=True, squeeze=False,
        constrained_layout=True,
    )  # fmt: skip
    lengths = sorted({row["prefix_tokens"] + row["downstream_tokens"] for row in rows})
    shades = plt.get_cmap("viridis")
    for axes, replacement in zip(panels[0], replacements, strict=True):
        for number, length in enumerate(lengths):
            ours = [
                row
                for row in rows
                if row["replacement_tokens"] == replacement
                and row["prefix_tokens"] + row["downstream_tokens"] == length
            ]
            ours.sort(key=lambda row: row["downstream_tokens"])
            colour = shades(0.1 + 0.8 * number / max(1, len(lengths) - 1))
            x, y = [row["downstream_tokens"] for row in ours], [row["times_lower"] for row in ours]
            axes.plot(x, y, marker="o", color=colour, label=f"{length + _REMOVED:,} tokens")
            wrong = [row for row in ours if row["auto"] != row["faster"]]
            axes.scatter(
                [row["downstream_tokens"] for row in wrong], [row["times_lower"] for row in wrong],
                s=90, facecolors="none", edgecolors="#d1495b", zorder=4,
            )  # fmt: skip
        axes.axhline(1, color="#555555", linewidth=1)
        axes.set_xscale("symlog", linthresh=256)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(plt.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_title(f"R of {replacement} tokens")
        axes.set_xlabel("cached tokens behind the edit")
    panels[0][0].set_ylabel("re-prefill TTFT / AMORTIZE TTFT")
    panels[0][0].legend(title="cached prompt")
    figure.suptitle(
        f"{_caption(result)}; above 1 the splice is faster, circled where AUTO disagrees", x=0.01, ha="left"
    )
    return save(figure, file)


def _caption(result: Mapping[str, Any]) -> str:
    """Model, GPU and attention backend, which no ratio should be without."""
    server = result.get("server") or {}
    machine = result.get("machine") or {}
    gpu = (machine.get("gpu") or "").split(",")[0] or "CPU"
    return f"{Path(server.get('model', '?')).name}, {gpu}, {server.get('attention_backend', '?')} attention"


_REMOVED = 512  # tokens of every break-even edit
_MANY_TURNS = 13
_SHADE = "#f1f1ec"


def _shade(axes: Any, edited: Sequence[int]) -> None:
    for turn in edited:
        axes.axvspan(turn - 0.5, turn + 0.5, color=_SHADE, zorder=0, linewidth=0)


def _running(values: Sequence[int]) -> list[int]:
    out: list[int] = []
    for value in values:
        out.append(value + (out[-1] if out else 0))
    return out
