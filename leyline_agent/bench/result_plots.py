"""Pictures of tables 1 and 2. A cell that was not measured stays empty."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leyline_agent.bench.arms import Arm
from leyline_agent.bench.plots import COLOURS, LABELS, pyplot, save
from leyline_agent.errors import ConfigError

Row = Mapping[str, Any]
Bar = tuple[float, float, float]
"""A value with the ends of its interval; NaN where nothing was measured."""

_NOTHING: Bar = (math.nan, math.nan, math.nan)
_WARNING = "#d1495b"
_WIDEST_BAR = 0.22


def plot_result(result: Mapping[str, Any], file: Path) -> Path:
    """The picture of a result by its kind. Raises ConfigError for a kind without one, or a result without rows."""
    drawers = {"replay": plot_replay, "breakeven": plot_breakeven}
    if result["kind"] not in drawers:
        raise ConfigError(f"there is no picture of a {result['kind']!r} result")
    if not result["rows"]:
        raise ConfigError("the result has no rows; there is nothing to draw")
    return drawers[result["kind"]](result, file)


# ---- table 1 ---------------------------------------------------------------------------------------------------------


def plot_replay(result: Mapping[str, Any], file: Path) -> Path:
    """Hit rate, time to first token after an edit, how many times lower that is, and end to end, by concurrency."""
    plt = pyplot()
    rows = {(Arm(row["arm"]), row["concurrency"]): row for row in result["rows"]}
    arms = [arm for arm in Arm if any(arm is drawn for drawn, _ in rows)]
    concurrencies = sorted({concurrency for _, concurrency in rows})
    figure, panels = plt.subplots(2, 2, figsize=(12.5, 7.4), constrained_layout=True)
    (hit, times), (ttft, e2e) = panels
    drawn: list[tuple[Any, str, Sequence[Arm], Callable[[Row], Bar], str]] = [
        (hit, "Prompt tokens that nobody computed again, %", arms, _hit_rate, "{:.0f}"),
        (times, "Time to first token after an edit: times lower than re-prefill", arms, _times_lower, "{:.2f}"),
        (ttft, "Time to first token after an edit, ms", [a for a in arms if a is not Arm.NONE], _ttft, ""),
        (e2e, "End to end, all turns, ms", arms, _e2e, ""),
    ]
    for axes, title, wanted, measure, form in drawn:
        _grouped_bars(axes, wanted, concurrencies, rows, measure, form)
        axes.set_title(title)
        axes.set_xlabel("sessions at once")
        axes.yaxis.set_major_formatter(plt.FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.set_xticks(range(len(concurrencies)), [str(c) for c in concurrencies])
    hit.set_ylim(0, 100)
    times.axhline(1, color=COLOURS[Arm.REPREFILL], linewidth=1.2, zorder=2)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[arm]) for arm in arms]
    figure.legend(handles, [LABELS[arm] for arm in arms], loc="outside lower center", ncols=len(arms))
    figure.suptitle(f"{_caption(result)}\n{_how_often(result['rows'])}", x=0.01, ha="left", fontsize=10)
    return save(figure, file)


def _grouped_bars(
    axes: Any,
    arms: Sequence[Arm],
    concurrencies: Sequence[int],
    rows: Mapping[tuple[Arm, int], Row],
    measure: Callable[[Row], Bar],
    form: str,
) -> None:
    """A group a concurrency, a bar an arm, with its interval; its value in `form`, unless that is empty."""
    bars = {arm: [measure(rows[arm, c]) if (arm, c) in rows else _NOTHING for c in concurrencies] for arm in arms}
    bars = {arm: some for arm, some in bars.items() if not all(math.isnan(value) for value, _, _ in some)}
    width = min(_WIDEST_BAR, 0.84 / max(1, len(bars)))
    for number, (arm, some) in enumerate(bars.items()):
        x = [place + (number - (len(bars) - 1) / 2) * width for place in range(len(some))]
        values = [value for value, _, _ in some]
        axes.bar(x, values, 0.94 * width, color=COLOURS[arm], zorder=2.5)
        ends = [[value - low for value, low, _ in some], [high - value for value, _, high in some]]
        axes.errorbar(x, values, yerr=ends, fmt="none", ecolor="#333333", elinewidth=1, capsize=2, zorder=3)
        for place, (value, _, high) in zip(x, some, strict=True):
            if form and not math.isnan(value):
                axes.annotate(
                    form.format(value), (place, high), xytext=(0, 2.5), textcoords="offset points",
                    ha="center", va="bottom", fontsize=7.5, color="#333333", zorder=4,
                )  # fmt: skip
    axes.set_xlim(-0.55, len(concurrencies) - 0.45)
    axes.margins(y=0.12)


def _hit_rate(row: Row) -> Bar:
    value, low, high = row["hit_rate"]
    return 100 * value, 100 * low, 100 * high


def _times_lower(row: Row) -> Bar:
    paired = (row.get("against_reprefill") or {}).get("ttft_edited_times_lower")
    if paired is None or row["arm"] == Arm.NONE:
        return _NOTHING
    value, low, high = paired
    return value, low, high


def _ttft(row: Row) -> Bar:
    return _up_to_p90(row["ttft_ms_edited"])


def _e2e(row: Row) -> Bar:
    return _up_to_p90(row["e2e_ms"])


def _up_to_p90(spread: Mapping[str, float] | None) -> Bar:
    return (spread["p50"], spread["p50"], spread["p90"]) if spread else _NOTHING


def _how_often(rows: Sequence[Row]) -> str:
    """What the bars stand on, for the reader who does not open the JSON."""
    repetitions = sorted({row["repetitions"] for row in rows})
    often = f"{repetitions[0]}" if len(repetitions) == 1 else f"{repetitions[0]} to {repetitions[-1]}"
    unit = "repetition" if repetitions == [1] else "repetitions"
    return f"{often} {unit}; above: 95 % intervals over sessions; below: medians, whiskers up to the 90th percentile"


# ---- table 2 ---------------------------------------------------------------------------------------------------------

_DARK = 0.3  # of a colour scale's 0.5 to either side, past which text on it is white
_TWO_DIGITS = 10
_SHARE_STEP = 0.05
"""Edit positions nearer than this are one line of a map: at its ends, a few tokens have to stay on both sides."""


def plot_breakeven(result: Mapping[str, Any], file: Path) -> Path:
    """How many times lower than re-prefill: over the tokens behind the edit, and as a map of length and position."""
    plt = pyplot()
    from matplotlib.colors import TwoSlopeNorm

    rows = [row for row in result["rows"] if row["times_lower"]]
    if not rows:
        raise ConfigError("no case was measured without an error; there is nothing to draw")
    replacements = sorted({row["replacement_tokens"] for row in rows})
    lengths = sorted({_length(row) for row in rows})
    columns = len(replacements)
    figure, panels = plt.subplots(
        2, columns, figsize=(2.2 + 5.4 * columns, 8.0), squeeze=False, constrained_layout=True, sharey="row"
    )
    logs = [math.log2(row["times_lower"]) for row in rows]
    least, most = min(-2.0, *logs), max(2.0, *logs)
    norm = TwoSlopeNorm(0.0, least, most)
    shades = {length: plt.get_cmap("viridis")(0.9 * n / max(1, len(lengths) - 1)) for n, length in enumerate(lengths)}
    image = None
    for column, replacement in enumerate(replacements):
        ours = [row for row in rows if row["replacement_tokens"] == replacement]
        _lines(plt, panels[0][column], ours, shades)
        image = _map(plt, panels[1][column], ours, lengths, norm)
        panels[0][column].set_title(f"R of {replacement:,} tokens")
    panels[0][0].set_ylabel("times lower than re-prefill")
    panels[1][0].set_ylabel("where the edit is")
    panels[0][0].legend(title="cached prompt", fontsize=8)
    bar = figure.colorbar(image, ax=panels[1].tolist(), shrink=0.9, pad=0.01)
    ticks = range(math.ceil(least), math.floor(most) + 1)
    bar.set_ticks(list(ticks), labels=[f"{2.0**tick:g}" for tick in ticks])
    bar.outline.set_visible(False)
    figure.suptitle(
        f"{_caption(result)}: time to first token of the edited turn, re-prefill / AMORTIZE\n"
        f"above 1 the splice is faster; red: AUTO's cost model chose the slower way ({_auto(rows)})",
        x=0.01, ha="left", fontsize=10,
    )  # fmt: skip
    return save(figure, file)


def _lines(plt: Any, axes: Any, rows: Sequence[Row], shades: Mapping[int, Any]) -> None:
    """A line a prompt length, with the lowest and the highest ratio of a repetition."""
    for length, shade in shades.items():
        ours = sorted((row for row in rows if _length(row) == length), key=lambda row: row["downstream_tokens"])
        if not ours:
            continue
        x, y = [row["downstream_tokens"] for row in ours], [row["times_lower"] for row in ours]
        spread = [row.get("times_lower_spread") or [row["times_lower"]] * 2 for row in ours]
        ends = [[v - low for v, (low, _) in zip(y, spread, strict=True)],
                [high - v for v, (_, high) in zip(y, spread, strict=True)]]  # fmt: skip
        axes.errorbar(
            x, y, yerr=ends, marker="o", markersize=4.5, linewidth=1.8, elinewidth=1, capsize=2, color=shade,
            label=f"{length:,} tokens",
        )  # fmt: skip
    wrong = [row for row in rows if row["auto"] != row["faster"]]
    axes.scatter(
        [row["downstream_tokens"] for row in wrong], [row["times_lower"] for row in wrong],
        s=110, facecolors="none", edgecolors=_WARNING, linewidths=1.5, zorder=4,
    )  # fmt: skip
    axes.axhline(1, color="#555555", linewidth=1)
    axes.set_xscale("symlog", base=2, linthresh=256, linscale=0.5)
    axes.set_yscale("log", base=2)
    most = max(row["downstream_tokens"] for row in rows)
    marks = [0, *(2**n for n in range(9, 25) if 2**n <= 1.2 * most)]
    axes.set_xticks(marks, [_short(mark) for mark in marks])
    axes.set_xlim(left=-64)
    axes.xaxis.set_minor_locator(plt.NullLocator())
    axes.yaxis.set_major_formatter(plt.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("cached tokens behind the edit")


def _map(plt: Any, axes: Any, rows: Sequence[Row], lengths: Sequence[int], norm: Any) -> Any:
    """A field a case; what was not measured is grey."""
    cells = {(_share(row), _length(row)): row for row in rows}
    shares = sorted({share for share, _ in cells})
    values = [
        [math.log2(cells[share, length]["times_lower"]) if (share, length) in cells else math.nan for length in lengths]
        for share in shares
    ]
    colours = plt.get_cmap("BrBG").with_extremes(bad="#dddddd")
    image = axes.imshow(values, cmap=colours, norm=norm, aspect="auto", origin="lower")
    for (share, length), row in cells.items():
        value, x, y = row["times_lower"], lengths.index(length), shares.index(share)
        dark = abs(norm(math.log2(value)) - 0.5) > _DARK
        axes.text(
            x,
            y,
            f"{value:.0f}" if value >= _TWO_DIGITS else f"{value:.2f}",
            ha="center",
            va="center",
            color="white" if dark else "#222222",
            fontsize=9,
        )
        if row["auto"] != row["faster"]:
            frame = plt.Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, fill=False, edgecolor=_WARNING, linewidth=2)
            axes.add_patch(frame)
    axes.set_xticks(range(len(lengths)), [_short(length) for length in lengths])
    axes.set_yticks(range(len(shares)), [f"{share:.0%}" for share in shares])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)
    axes.set_xlabel("cached prompt, tokens")
    return image


def _length(row: Row) -> int:
    """Tokens of the cached prompt, what the edit removes included."""
    return int(row["prefix_tokens"] + row["removed_tokens"] + row["downstream_tokens"])


def _share(row: Row) -> float:
    share = row["prefix_tokens"] / (row["prefix_tokens"] + row["downstream_tokens"])
    return _SHARE_STEP * int(share / _SHARE_STEP + 0.5)


def _short(tokens: int) -> str:
    return f"{tokens / 1024:g}k" if tokens >= 1024 and tokens % 512 == 0 else f"{tokens:,}"


def _auto(rows: Sequence[Row]) -> str:
    right = sum(row["auto"] == row["faster"] for row in rows)
    return f"right in {right} of {len(rows)}"


def _caption(result: Mapping[str, Any]) -> str:
    """Model, GPU and attention backend, which no ratio should be without."""
    server = result.get("server") or {}
    machine = result.get("machine") or {}
    gpu = (machine.get("gpu") or "").split(",")[0] or "CPU"
    return f"{Path(server.get('model', '?')).name}, {gpu}, {server.get('attention_backend', '?')} attention"
