"""Pictures of what policies cost, with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from leyline_agent.bench.arms import Arm
from leyline_agent.bench.plots import COLOURS, pyplot
from leyline_agent.simulate import PolicyCost, SimulatedTurn

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_costs(costs: Mapping[str, PolicyCost]) -> Figure:
    """Tokens to prefill with re-prefill and with splice, two bars a policy; dots: prompt tokens removed."""
    plt = pyplot()
    names = list(costs)[::-1]
    figure, axes = plt.subplots(figsize=(9, 0.45 * len(names) + 1.5), layout="constrained")
    rows = range(len(names))
    pairs = ((0.2, "reprefill_tokens", "re-prefill", Arm.REPREFILL), (-0.2, "splice_tokens", "splice", Arm.AMORTIZE))
    for offset, field, label, arm in pairs:
        lengths = [getattr(costs[name], field) for name in names]
        axes.barh([row + offset for row in rows], lengths, 0.4, label=label, color=COLOURS[arm])
    axes.plot([costs[name].removed_tokens for name in names], rows, "k.", label="prompt tokens removed")
    axes.set_yticks(list(rows), names)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("tokens over all turns")
    figure.legend(loc="outside upper center", ncols=3)
    plt.close(figure)
    made: Figure = figure
    return made


def plot_turns(turns: Sequence[SimulatedTurn], title: str = "") -> Figure:
    """Tokens that each turn of one trace prefills, with re-prefill and with splice, over the length of its prompt."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    numbers = range(len(turns))
    axes.plot(numbers, [turn.history_tokens for turn in turns], color="#8c8c8c", ls=":", label="history")
    axes.plot(numbers, [turn.prompt_tokens for turn in turns], color="#8c8c8c", label="prompt")
    axes.bar([n - 0.2 for n in numbers], [turn.reprefill_tokens for turn in turns], 0.4, color=COLOURS[Arm.REPREFILL],
             label="re-prefill")  # fmt: skip
    axes.bar([n + 0.2 for n in numbers], [turn.splice_tokens for turn in turns], 0.4, color=COLOURS[Arm.AMORTIZE],
             label="splice")  # fmt: skip
    axes.set_xlabel("turn")
    axes.set_ylabel("tokens")
    axes.set_title(title)
    axes.legend()
    plt.close(figure)
    made: Figure = figure
    return made
