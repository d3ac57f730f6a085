"""`leyline serve`: SGLang with the plugin, in the foreground."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from leyline_agent.cli.console import err
from leyline_agent.errors import ServerError

if TYPE_CHECKING:
    from leyline_agent.integrations.sglang.launch import ServerProcess, ServerSpec


def register(app: typer.Typer) -> None:
    """Add the command. Whatever options it does not know belong to SGLang."""
    app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)


def serve(
    context: typer.Context,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Run without a GPU; with no model named, serve SmolLM2-135M.")
    ] = False,
    stock: Annotated[bool, typer.Option("--stock", help="Leave Leyline out: the same server as a baseline.")] = False,
    log_file: Annotated[Path | None, typer.Option(help="Write SGLang's output here and show only progress.")] = None,
) -> None:
    """Start SGLang with Leyline; any further option goes to SGLang as it is.

    leyline serve --model-path FOLDER_OR_HUB_NAME --port 30000 --tp 2

    leyline serve --cpu
    """
    from leyline_agent.integrations.sglang.launch import ServerArgs, ServerProcess, ServerSpec, check_launch
    from leyline_agent.integrations.sglang.models import smollm2

    signal.signal(signal.SIGTERM, _end)
    spec = ServerSpec(ServerArgs(tuple(context.args)), cpu=cpu, leyline=not stock)
    check_launch(spec)
    if spec.needs_model:
        spec = spec.with_model(smollm2())
    with ServerProcess(spec, log=log_file) as server:
        status = _wait_ready(server)
        if reason := status.get("reason"):
            err.print(f"[yellow]AMORTIZE is off[/]: {escape(str(reason))}", soft_wrap=True)
        err.print(f"[green]ready[/] at {spec.url}/v1 {escape(_describe(spec))}", soft_wrap=True)
        exit_code = server.wait()
    if exit_code:
        raise ServerError(f"SGLang ended with code {exit_code}")


def _wait_ready(server: ServerProcess) -> dict[str, Any]:
    if server.log is None:  # SGLang's own log is the progress
        return server.wait_ready()
    with err.status(f"starting SGLang (log: {escape(str(server.log))})"):
        return server.wait_ready()


def _describe(spec: ServerSpec) -> str:
    return f"({spec.model_path or 'model from the config file'}, {'with' if spec.leyline else 'without'} Leyline)"


def _end(signal_number: int, _frame: FrameType | None) -> None:
    """Leave through every `with`, so that the server is stopped and no draft of a model stays behind."""
    raise SystemExit(128 + signal_number)
