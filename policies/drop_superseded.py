"""Drop the output of a read that a later read of the same thing replaced."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Turn
from leyline_agent.errors import ConfigError
from leyline_agent.history import tool_uses
from leyline_agent.policies.outputs import clear_output
from leyline_agent.policies.placeholders import SUPERSEDED, looks_failed
from leyline_agent.policies.reads import READ_TOOLS, resource_of
from leyline_agent.policy import Policy


@dataclass(frozen=True)
class DropSuperseded(Policy):
    """Drop the output of an older read of the same file, URL or query with the same arguments.

    Only tools whose name matches `reads` count as reading; the default knows the usual words. Other arguments (a line
    range, a page) must agree, and a later read that failed replaces nothing.

    Cache: one splice when a thing is read again. The later read stays where it is. Under AMORTIZE what came between
    the two reads still knows the older content, as it would without the edit.
    """

    reads: str = READ_TOOLS
    text_protocol: bool = False
    mode: Mode = Mode.AMORTIZE

    def __post_init__(self) -> None:
        try:
            re.compile(self.reads)
        except re.error as err:
            raise ConfigError(f"reads is {self.reads!r}, which is not a regular expression: {err}") from err

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        reads = re.compile(self.reads)
        newest: set[tuple[str, str]] = set()
        edits: list[MessageEdit] = []
        for use in reversed(tool_uses(turn.messages, text_protocol=self.text_protocol)):
            resource = resource_of(use, reads)
            if resource is None or use.result_at is None or looks_failed(turn.messages[use.result_at]):
                continue
            if resource in newest and use.age > 0:
                edit = clear_output(turn.messages, use, mode=self.mode, reason="superseded", placeholder=SUPERSEDED)
                edits.extend([edit] if edit is not None else [])
            newest.add(resource)
        return edits[::-1]
