"""A policy for each tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from leyline_agent.compose import filter_units
from leyline_agent.edits import MessageEdit, Part, Turn
from leyline_agent.history import tool_uses
from leyline_agent.policy import Policy


@dataclass(frozen=True)
class PerTool(Policy):
    """Let each policy edit the calls and results of its own tool only; `default` has the tools that are not named.

    Every policy sees the whole history, so counts such as "the newest three" count all tools. Edits of anything else
    (what the user or the assistant said) and all-or-nothing sets that reach into another tool are left out.

    Cache: what the policies cost for what is left of their edits.
    """

    policies: Mapping[str, Policy] = field(default_factory=dict)
    default: Policy | None = None
    text_protocol: bool = False

    @property
    def name(self) -> str:
        rest = [f"default: {self.default.name}"] if self.default is not None else []
        return f"PerTool({', '.join([f'{tool}: {p.name}' for tool, p in self.policies.items()] + rest)})"

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        tools = self._tools(turn)
        named = set(self.policies)
        edits = self._of_tools(turn, tools, self.default, {tool for of in tools.values() for tool in of} - named)
        for tool, policy in self.policies.items():
            edits.extend(self._of_tools(turn, tools, policy, {tool}))
        return sorted(edits, key=lambda edit: edit.index)

    def _tools(self, turn: Turn) -> dict[tuple[int, int | None], set[str]]:
        """The tools that a message, and that a call in it, belong to."""
        tools: dict[tuple[int, int | None], set[str]] = {}
        for use in tool_uses(turn.messages, text_protocol=self.text_protocol):
            places = [(use.call_at, None), (use.call_at, use.call), (use.result_at, None)]
            for index, call in places:
                if index is not None:
                    tools.setdefault((index, call), set()).add(use.name)
        return tools

    def _of_tools(
        self, turn: Turn, tools: Mapping[tuple[int, int | None], set[str]], policy: Policy | None, mine: set[str]
    ) -> list[MessageEdit]:
        def is_mine(edit: MessageEdit) -> bool:
            owners = tools.get((edit.index, edit.call))
            said = turn.messages[edit.index : edit.index + 1]
            part_of_speech = bool(said) and said[0].get("role") == "assistant" and edit.part in _SPEECH
            return edit.part is not Part.INSERT and owners is not None and owners <= mine and not part_of_speech

        if policy is None or not mine:
            return []
        return filter_units(policy.decide(turn), turn.edits, lambda unit: all(is_mine(edit) for edit in unit))


_SPEECH = (Part.CONTENT, Part.REASONING)
