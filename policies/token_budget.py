"""Keep the prompt inside a budget, in rare and large steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leyline_agent.compose import message_tokens, tokens_saved
from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Part, Turn
from leyline_agent.errors import ConfigError
from leyline_agent.history import blocks, message_ages, newest_user, tool_uses
from leyline_agent.policies.outputs import check_names, clear_output, drop_message, prompt_tokens, touched_before
from leyline_agent.policy import Policy

_REASON = "over_budget"


@dataclass(frozen=True)
class TokenBudget(Policy):
    """Above `high_tokens`, free enough in one batch to be down at `low_tokens`; then leave everything as it is.

    A batch clears the oldest tool outputs first. If that is not enough it drops the oldest turns whole. The newest
    `keep_turns` turns, the system prompt, the task and the newest user message stay. A batch that could free less than
    a tenth of the way down is not made: the cut would creep.

    Cache: one batch of splices each time the prompt has grown from `low_tokens` to `high_tokens`; nothing in between.
    """

    high_tokens: int = 60_000
    low_tokens: int = 30_000
    keep_turns: int = 3
    exclude_tools: tuple[str, ...] = ()
    text_protocol: bool = False
    mode: Mode = Mode.AMORTIZE

    def __post_init__(self) -> None:
        if not 0 <= self.low_tokens < self.high_tokens:
            raise ConfigError(
                f"low_tokens {self.low_tokens}, high_tokens {self.high_tokens}: the low mark must be below the high one"
            )
        if self.keep_turns < 1:
            raise ConfigError(f"keep_turns is {self.keep_turns}; keep at least the 1 newest turn, still to be answered")
        check_names("exclude_tools", self.exclude_tools)

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        cleared = touched_before(turn, _REASON)
        dropped = touched_before(turn, _REASON, Part.MESSAGE)
        held = self._edits(turn, cleared, dropped)
        tokens = prompt_tokens(turn)
        if tokens <= self.high_tokens:
            return held
        saved_before = tokens_saved(turn.messages, held, turn.count_tokens)
        needed = tokens - self.low_tokens + saved_before
        batch = self._batch(turn, cleared, dropped, needed)
        gain = tokens_saved(turn.messages, batch, turn.count_tokens) - saved_before
        return batch if gain * 10 >= self.high_tokens - self.low_tokens else held

    def _batch(self, turn: Turn, cleared: set[int], dropped: set[int], needed: int) -> list[MessageEdit]:
        """Clear, then drop, the oldest first, until `needed` tokens are saved in all or nothing is left to take."""
        cleared, dropped = set(cleared), set(dropped)
        edits = self._edits(turn, cleared, dropped)
        missing = needed - tokens_saved(turn.messages, edits, turn.count_tokens)
        for use in tool_uses(turn.messages, text_protocol=self.text_protocol):
            if missing <= 0:
                break
            taken = use.result_at is None or use.result_at in cleared or use.result_at in dropped
            if taken or use.age < self.keep_turns or use.name in self.exclude_tools or use.result_at is None:
                continue
            edit = clear_output(turn.messages, use, mode=self.mode, reason=_REASON)
            if edit is not None:
                cleared.add(use.result_at)
                missing -= tokens_saved(turn.messages, [edit], turn.count_tokens)
        ages, newest = message_ages(turn.messages), newest_user(turn.messages)
        for block in blocks(turn.messages):
            if missing <= 0 or ages[block.start] < self.keep_turns:
                break
            if newest in block or block.start in dropped:
                continue
            shown = [e for e in self._edits(turn, cleared, dropped) if e.index in block]
            whole = sum(message_tokens(turn.messages[index], turn.count_tokens) for index in block)
            missing -= whole - tokens_saved(turn.messages, shown, turn.count_tokens)
            dropped.update(block)
        return self._edits(turn, cleared, dropped)

    def _edits(self, turn: Turn, cleared: set[int], dropped: set[int]) -> list[MessageEdit]:
        edits: list[MessageEdit] = []
        for use in tool_uses(turn.messages, text_protocol=self.text_protocol):
            if use.result_at in cleared and use.result_at not in dropped:
                edit = clear_output(turn.messages, use, mode=self.mode, reason=_REASON)
                edits.extend([edit] if edit is not None else [])
        for block in blocks(turn.messages):
            group = f"{_REASON}:{block.start}"
            edits.extend(drop_message(i, mode=self.mode, reason=_REASON, group=group) for i in block if i in dropped)
        return edits
