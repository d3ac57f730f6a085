"""Keep a policy's hands off some messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leyline_agent.compose import filter_units
from leyline_agent.edits import Message, MessageEdit, Part, Turn
from leyline_agent.history import tool_uses
from leyline_agent.policies.placeholders import looks_failed
from leyline_agent.policies.reads import READ_TOOLS, resource_of
from leyline_agent.policy import Policy


@dataclass(frozen=True)
class Protect(Policy):
    """Let no edit touch pinned messages, the latest read of each file, or an output the model asked for twice.

    `pinned(message)` says which messages are pinned. `latest_reads` protects the newest successful read of everything
    the history reads; `asked_again` the newest output of a call that was made more than once: a model that repeats a
    call because its output was cleared would do so for ever if that were cleared too. All-or-nothing sets that touch a
    protected message are left out whole. Put `Redact` outside of `Protect`: this holds for secrets too.

    Cache: fewer edits, none more.
    """

    policy: Policy
    pinned: Callable[[Message], bool] | None = None
    latest_reads: bool = True
    asked_again: bool = True
    text_protocol: bool = False

    @property
    def name(self) -> str:
        return f"Protect({self.policy.name})"

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        protected = self._protected(turn)

        def is_free(unit: Sequence[MessageEdit]) -> bool:
            return not any(edit.index in protected and edit.part is not Part.INSERT for edit in unit)

        return filter_units(self.policy.decide(turn), turn.edits, is_free)

    def _protected(self, turn: Turn) -> set[int]:
        protected: set[int] = set()
        if self.pinned is not None:
            protected.update(index for index, message in enumerate(turn.messages) if self.pinned(message))
        reads = re.compile(READ_TOOLS)
        seen: set[object] = set()
        newest: dict[tuple[str, str], tuple[int, int]] = {}
        for use in reversed(tool_uses(turn.messages, text_protocol=self.text_protocol)):
            if use.result_at is None or looks_failed(turn.messages[use.result_at]):
                continue
            resource = resource_of(use, reads) if self.latest_reads else None
            if resource is not None and resource not in seen:
                seen.add(resource)
                protected.update((use.call_at, use.result_at))
            if self.asked_again and use.key in newest:
                protected.update(newest[use.key])
            newest.setdefault(use.key, (use.call_at, use.result_at))
        return protected
