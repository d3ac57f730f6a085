"""`leyline policies`: what there is, and what each would cost on your own traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from leyline_agent.cli.console import err, out
from leyline_agent.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from leyline_agent.policy import Policy
    from leyline_agent.simulate import Encode, PolicyCost
    from leyline_agent.traces import Trace

app = typer.Typer(help="List policies, and compare them on recorded histories.", no_args_is_help=True)


def register(parent: typer.Typer) -> None:
    """Add the commands."""
    parent.add_typer(app, name="policies")


@app.command("list")
def list_policies() -> None:
    """List the policies by the names that specs and configs use."""
    from leyline_agent.policies.factory import available, policy_class, wrappers

    table = Table(box=None, show_header=False)
    for title, names in (("policies", available()), ("wrappers, as in hysteresis(NAME)", wrappers())):
        table.add_row(f"[bold]{title}[/]")
        for name in names:
            summary = (policy_class(name).__doc__ or "").strip().split("\n\n")[0]
            table.add_row(f"  {name}", escape(" ".join(summary.split())))
    out.print(table)


@app.command("compare")
def compare_policies(
    traces: Annotated[list[Path], typer.Argument(help='JSONL files, one {"id": ..., "messages": [...]} a line.')],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="NAME or NAME:parameter=value,... (may be given again). Without it: every policy there is."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot (PNG, SVG, PDF) to this file.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer.json, or a tiktoken encoding. Without it: 4 characters a token.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first N traces of each file.")] = None,
) -> None:
    """Replay traces under each policy, without a server, and say what is removed and what must be prefilled."""
    from leyline_agent.policy_plots import plot_costs
    from leyline_agent.simulate import to_json
    from leyline_agent.traces import read_traces

    found = [trace for path in traces for trace in list(read_traces(path))[:limit]]
    encode, counted_with = _encoder(tokenizer)
    costs = _compare(_chosen(policy), found, encode)
    _print(costs, f"{len(found)} traces; {counted_with}")
    if json_file is not None:
        _write(json_file, to_json(costs) + "\n")
    if plot is not None:
        _save(plot_costs(costs), plot)
        err.print("plot written to", str(plot), markup=False)


PRESETS: Mapping[str, str] = {
    "keep_all": "keep_all",
    "truncate_tool_outputs": "truncate_tool_outputs",
    "hysteresis(truncate_tool_outputs)": "hysteresis(truncate_tool_outputs):min_tokens=1000",
    "clear_tool_uses": "clear_tool_uses:trigger=4000,clear_at_least=1000",
    "clear_tool_uses, unbatched": "clear_tool_uses:trigger=4000,clear_at_least=0",
    "clear_thinking": "clear_thinking",
    "drop_failed_retries": "drop_failed_retries:match=tool",
    "drop_superseded": "drop_superseded",
    "drop_repeats": "drop_repeats",
    "drop_repeats, first": "drop_repeats:keep=first",
    "sliding_window": "sliding_window:keep_turns=6,step=3",
    "redact": r'redact:patterns=["[\\w.]+@[\\w.]+"]',
    "summarize": "summarize:trigger=4000,keep_turns=4",
    "token_budget": "token_budget:high_tokens=5000,low_tokens=3000",
}
"""What `compare` runs when no policy is named: all of them, with triggers that a few thousand tokens reach."""


def _chosen(specs: Sequence[str] | None) -> dict[str, _Choice]:
    if specs:
        return {spec: _Choice(spec) for spec in specs}
    return {name: _Choice(spec) for name, spec in PRESETS.items()}


@dataclass(frozen=True)
class _Choice:
    """A policy spec as a policy for traces of either protocol."""

    spec: str
    for_tools: Policy = field(init=False)
    for_text: Policy = field(init=False)

    def __post_init__(self) -> None:
        from leyline_agent.policies.factory import from_spec, with_text_protocol

        object.__setattr__(self, "for_tools", from_spec(self.spec))
        object.__setattr__(self, "for_text", with_text_protocol(self.for_tools))


def _compare(choices: Mapping[str, _Choice], traces: Sequence[Trace], encode: Encode) -> dict[str, PolicyCost]:
    from leyline_agent.history import speaks_text_protocol
    from leyline_agent.simulate import Renderer, cost_of

    renderer = Renderer(encode)
    text = {id(trace) for trace in traces if speaks_text_protocol(trace.messages)}
    costs = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("comparing", total=len(choices) * len(traces))
        for name, choice in choices.items():
            progress.update(task, description=escape(name))
            cost = None
            for trace in traces:
                one = cost_of(choice.for_text if id(trace) in text else choice.for_tools, [trace], renderer)
                cost = one if cost is None else cost + one
                progress.advance(task)
            if cost is not None:
                costs[name] = cost
    return costs


def _print(costs: Mapping[str, PolicyCost], caption: str) -> None:
    table = Table(caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", min_width=12, overflow="fold")
    for title in ("removed", "edits", "turns", "breaks", "still", "re-prefill", "splice", "saved"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, cost in costs.items():
        saved = 1 - cost.splice_tokens / cost.reprefill_tokens if cost.reprefill_tokens else 0.0
        table.add_row(
            escape(name),
            f"{cost.removed_tokens / max(1, cost.history_tokens):.1%}",
            f"{cost.edits:,}",
            f"{cost.edited_turns:,}",
            f"{cost.prefix_breaks:,}",
            f"{cost.turns_untouched:.1%}",
            f"{cost.reprefill_tokens:,}",
            f"{cost.splice_tokens:,}",
            f"{saved:.1%}",
        )
    out.print(table)
    out.print(
        "removed: share of all prompt tokens not sent. edits: that came into force, on so many turns. breaks: turns "
        "whose prompt does not extend what was served; still: share of the others. re-prefill, splice: tokens "
        "prefilled over all turns; saved: what splicing saves of them.",
        style="dim",
    )


def _encoder(tokenizer: str | None) -> tuple[Encode, str]:
    """How to tokenize, and what to call it."""
    from leyline_agent.simulate import ChunkEncoder

    if tokenizer is None:
        return ChunkEncoder(), "tokens estimated at 4 characters each"
    if Path(tokenizer).suffix == ".json":
        return _file_encoder(Path(tokenizer)), f"tokens of {tokenizer}"
    try:
        import tiktoken

        encoding = tiktoken.get_encoding(tokenizer)
    except ImportError as error:
        raise MissingDependencyError("tiktoken is not installed; pip install 'leyline-agent[tokens]'") from error
    except Exception as error:  # tiktoken raises ValueError for a name, requests' errors for a failed download
        raise ConfigError(f"tiktoken cannot load encoding {tokenizer!r}: {error}") from error
    return lambda text: encoding.encode(text, disallowed_special=()), f"tokens of tiktoken {tokenizer}"


def _file_encoder(path: Path) -> Encode:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingDependencyError("tokenizers is not installed; pip install 'leyline-agent[tokens]'") from error
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise ConfigError(f"cannot read tokenizer {path}: {error}") from error

    def encode(text: str) -> list[int]:
        ids: list[int] = loaded.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot to {path}: {error}") from error
