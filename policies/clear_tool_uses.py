"""Clear old tool outputs once the prompt grows past a trigger: Anthropic's and LangChain's rule, made to hold still."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from leyline_agent.compose import tokens_saved
from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Part, Turn
from leyline_agent.errors import ConfigError
from leyline_agent.history import ToolUse, tool_uses
from leyline_agent.policies.outputs import check_names, check_placeholder, clear_output, prompt_tokens, touched_before
from leyline_agent.policies.placeholders import REMOVED_OUTPUT
from leyline_agent.policy import Policy

_REASON = "cleared_tool_use"


@dataclass(frozen=True)
class ClearToolUses(Policy):
    """When the prompt passes `trigger` tokens, clear all tool outputs but those of the `keep` newest uses.

    A batch happens only if it frees `clear_at_least` tokens, and what was cleared stays cleared: between batches the
    view only grows at its end. The parameters are those of Anthropic's `clear_tool_uses` and LangChain's
    `ClearToolUsesEdit`; their `clear_at_least` is off by default, which moves the cut on every turn past the trigger.

    Cache: one splice per output in a batch, one batch per `clear_at_least` tokens or more; nothing in between.
    """

    trigger: int = 100_000
    keep: int = 3
    clear_at_least: int = 5_000
    exclude_tools: tuple[str, ...] = ()
    clear_tool_inputs: bool = False
    """Also replace the arguments of cleared calls by `{}`."""
    placeholder: str = REMOVED_OUTPUT
    text_protocol: bool = False
    mode: Mode = Mode.AMORTIZE

    def __post_init__(self) -> None:
        for name in ("trigger", "keep", "clear_at_least"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        check_names("exclude_tools", self.exclude_tools)
        check_placeholder(self.placeholder)

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        answered = [u for u in tool_uses(turn.messages, text_protocol=self.text_protocol) if u.result_at is not None]
        outputs = touched_before(turn, _REASON)
        inputs = {(e.index, e.call) for e in turn.edits if e.reason == _REASON and e.part is Part.ARGUMENTS}
        cleared = [use for use in answered if use.result_at in outputs or (use.call_at, use.call) in inputs]
        held = self._clear(turn, cleared, inputs)
        if prompt_tokens(turn) <= self.trigger:
            return held
        old = answered[: max(0, len(answered) - self.keep)]
        fresh = self._clear(turn, [use for use in old if use.age > 0 and use not in cleared], inputs)
        if not fresh or tokens_saved(turn.messages, fresh, turn.count_tokens) < self.clear_at_least:
            return held
        return [*held, *fresh]

    def _clear(
        self, turn: Turn, uses: Sequence[ToolUse], inputs_before: Collection[tuple[int, int | None]]
    ) -> list[MessageEdit]:
        edits: list[MessageEdit] = []
        for use in uses:
            if use.name in self.exclude_tools:
                continue
            with_inputs = self.clear_tool_inputs and use.call is not None and len(use.arguments) > len("{}")
            group = f"{_REASON}:{use.result_at}" if with_inputs else None
            output = clear_output(
                turn.messages, use, mode=self.mode, reason=_REASON, placeholder=self.placeholder, group=group
            )
            if output is not None:
                edits.append(output)
            if with_inputs and (output is not None or (use.call_at, use.call) in inputs_before):
                edits.append(MessageEdit(use.call_at, "{}", Part.ARGUMENTS, self.mode, _REASON, use.call, group))
        return edits
