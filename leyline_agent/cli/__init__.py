"""The command line `leyline`. Each command is a module of this folder, imported only when it is asked for."""

from leyline_agent.cli.main import main

__all__ = ["main"]
