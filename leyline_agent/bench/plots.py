"""What all pictures share, with matplotlib, and that of the demo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leyline_agent.bench.arms import Arm
from leyline_agent.bench.measured import ArmTotals
from leyline_agent.errors import MissingDependencyError

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
