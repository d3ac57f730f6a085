"""`leyline status URL`: what a running server says of itself."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from leyline_agent.cli.console import out, print_json
from leyline_agent.errors import ServerError

_TIMEOUT_S = 10.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("status")(status)


def status(
    url: Annotated[str, typer.Argument(help="The server, with or without /v1.")] = "http://127.0.0.1:30000",
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's own answer.")] = False,
) -> None:
    """Ask a running server whether it splices, and the facts behind the answer."""
    answer = fetch_status(url)
    if as_json:
        print_json(answer)
        return
    table = Table(show_header=False, box=None)
    for name, text in _rows(answer):
        table.add_row(f"[dim]{name}[/]", text)
    out.print(table)


def fetch_status(url: str) -> dict[str, Any]:
    """Return what GET /leyline/status answers. Raises ServerError where no Leyline server is at `url`."""
    import httpx

    root = url.rstrip("/").removesuffix("/v1")
    root = root if "://" in root else f"http://{root}"
    try:
        response = httpx.get(f"{root}/leyline/status", timeout=_TIMEOUT_S)
        answer = response.json() if response.status_code != httpx.codes.NOT_FOUND else None
    except (httpx.TransportError, httpx.InvalidURL) as err:
        raise ServerError(f"no server at {root}: {err}; start one with `leyline serve`, or name its URL") from err
    except ValueError:  # not JSON
        answer = None
    if not isinstance(answer, dict) or "ready" not in answer:
        raise ServerError(f"the server at {root} is not one with Leyline; start it with `leyline serve`")
    return answer


def _rows(answer: dict[str, Any]) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {value}" for name, value in answer.get("versions", {}).items())
    pool = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in answer.get("pool", {}).items())
    kernel = answer.get("kernel") or {}
    return [
        ("server", "[green]ready[/]" if answer["ready"] else "[red]not ready[/]"),
        (
            "AMORTIZE",
            "[green]on[/]" if answer.get("amortize") else f"[yellow]off[/]: {escape(answer.get('reason', ''))}",
        ),
        ("model", escape(str(answer.get("model", "?")))),
        ("versions", escape(versions)),
        ("KV slots", escape(pool)),
        ("rotation", escape(f"{kernel.get('form', 'none')} ({kernel.get('reason') or 'the fastest form'})")),
        ("probe", escape((answer.get("probe") or {}).get("detail", "not run"))),
    ]
