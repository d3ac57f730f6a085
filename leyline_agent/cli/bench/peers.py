"""`leyline bench peers`: table 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress, TaskID

from leyline_agent.cli.bench.options import BaseUrl, JsonFile, ModelPath
from leyline_agent.cli.console import err, out
from leyline_agent.cli.progress import progress_bar
from leyline_agent.cli.target import target_of
from leyline_agent.errors import MissingDependencyError

if TYPE_CHECKING:
    from leyline_agent.bench.arms import Arm
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
    """Table 4: the same edited history on stock SGLang, Leyline, llama.cpp and with LangChain's context editing.

    What is not installed is left out, and said.
    """
    from leyline_agent.bench import peers as table4
    from leyline_agent.bench.arms import Arm
    from leyline_agent.bench.demo import history_from, shipped_history
    from leyline_agent.bench.results import check_writable, document, write_json
    from leyline_agent.bench.tables import peers_table

    check_writable(json_file)
    history = history_from(trace) if trace else shipped_history()
    chosen = table4.policies()
    rows: list[dict[str, Any]] = []
    with progress_bar() as progress:
        bar = progress.add_task("SGLang", total=None)

        def play(target: Target, engine: str, arms: Sequence[Arm], some: Mapping[str, Policy]) -> None:
            progress.update(bar, description=engine)
            count = partial(_count, progress, bar)
            rows.extend(table4.compare(target, engine, arms, history, some, max_turns=max_turns, on_turn=count))

        with target_of(base_url, model_path) as target:
            play(target, "SGLang", [Arm.REPREFILL], chosen)
            if target.has_leyline:
                play(target, "SGLang + Leyline", [Arm.AMORTIZE], chosen)
            try:
                langchain = {"LangChain ContextEditing": table4.langchain_policy()}
                play(target, "SGLang", [Arm.REPREFILL], langchain)
            except MissingDependencyError as error:
                err.print(f"[yellow]left out:[/] {escape(str(error))}", soft_wrap=True)
        try:
            for reuse in (0, cache_reuse):
                with table4.llama_server(llama, gguf, cache_reuse=reuse) as peer:
                    play(peer, f"llama.cpp, cache-reuse {reuse}", [Arm.REPREFILL], chosen)
        except MissingDependencyError as error:
            err.print(f"[yellow]left out:[/] {escape(str(error))}", soft_wrap=True)
    out.print(peers_table(rows, f"{history.id}, {rows[0]['turns']} turns"))
    if json_file is not None:
        config = {"trace": history.id, "cache_reuse": cache_reuse, "max_turns": max_turns}
        write_json(json_file, document("peers", config, rows, target))


def _count(progress: Progress, task: TaskID, *_: object) -> None:
    progress.advance(task)
