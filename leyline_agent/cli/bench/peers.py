"""`leyline bench peers`: table 4."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import Progress, TaskID

from leyline_agent.cli.bench.options import BaseUrl, JsonFile, ModelPath
from leyline_agent.cli.console import err, out
from leyline_agent.cli.progress import progress_bar
from leyline_agent.cli.target import target_of
from leyline_agent.errors import MissingDependencyError

if TYPE_CHECKING:
    from leyline_agent.bench.target import Target
    from leyline_agent.policy import Policy


def peers(
    base_url: BaseUrl = None,
    model_path: ModelPath = None,
    llama: Annotated[str, typer.Option("--llama-server", help="llama.cpp's server, a program's name or path.")] = (
        "llama-server"
    ),
    gguf: Annotated[Path | None, typer.Option(help="The same model as a GGUF file, for llama.cpp.")] = None,
    cache_reuse: Annotated[int, typer.Option(min=1, help="The smallest chunk llama.cpp moves, in tokens.")] = 32,
    trace: Annotated[
        Path | None, typer.Option(help="Another history than the demo's; its first one is played.")
    ] = None,
    max_turns: Annotated[int | None, typer.Option(min=2)] = None,
    json_file: JsonFile = None,
) -> None:
    """Table 4: the same edited history through SGLang's prefix cache, Leyline, llama.cpp, and with LangChain's edits.

    What is not installed is left out, and said.
    """
    from leyline_agent.bench import peers as table4
    from leyline_agent.bench.demo import history_from, shipped_history
    from leyline_agent.bench.results import check_writable, document, write_json
    from leyline_agent.bench.tables import peers_table

    check_writable(json_file)
    history = history_from(trace) if trace else shipped_history()
    edits = table4.policies()
    played: list[table4.Played] = []
    with progress_bar() as progress:
        bar = progress.add_task(table4.SGLANG, total=None)

        def play(target: Target, ways: Sequence[table4.Way], some: Mapping[str, Policy]) -> None:
            progress.update(bar, description=ways[0].engine)
            count = partial(_count, progress, bar)
            played.extend(table4.play(target, ways, history, some, max_turns=max_turns, on_turn=count))

        with target_of(base_url, model_path) as target:
            ours = (table4.AMORTIZE, table4.FORGET) if target.has_leyline else ()
            play(target, (table4.STOCK, *ours), edits)
            with _left_out():
                play(target, (table4.STOCK, *ours[:1]), {f"{table4.LANGCHAIN}'s": table4.langchain_policy()})
        for reuse in (0, cache_reuse):
            with _left_out(), table4.llama_server(llama, gguf, cache_reuse=reuse) as peer:
                play(peer, [table4.llama_way(reuse)], edits)
    rows = table4.rows(played)
    out.print(peers_table(rows, f"{history.id}, {rows[0]['turns']} turns"))
    if json_file is not None:
        config = {
            "trace": history.id,
            "policies": [policy.name for policy in edits.values()],
            "cache_reuse": cache_reuse,
            "max_turns": max_turns,
            "output_tokens": table4.OUTPUT_TOKENS,
        }
        peers = table4.engine_versions(llama, gguf)
        write_json(json_file, document("peers", config, rows, target, peers=peers))
    if any(row["errors"] for row in rows):
        raise typer.Exit(1)


@contextmanager
def _left_out() -> Iterator[None]:
    """Say what is not installed, and go on without it."""
    try:
        yield
    except MissingDependencyError as error:
        err.print(f"[yellow]left out:[/] {escape(str(error))}", soft_wrap=True)


def _count(progress: Progress, task: TaskID, *_: object) -> None:
    progress.advance(task)
