"""Clear the reasoning of old assistant messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from leyline_agent.directives import Mode
from leyline_agent.edits import Message, MessageEdit, Part, Turn
from leyline_agent.errors import ConfigError
from leyline_agent.history import tool_calls
from leyline_agent.policies.outputs import touched_before
from leyline_agent.policy import Policy

_REASON = "old_thinking"
_THINK = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class ClearThinking(Policy):
    """Keep the reasoning of the `keep` newest assistant messages that have some ("all" keeps everything).

    Reasoning is the field `reasoning_content`, and `<think>` blocks inside the content. Most templates strip it from
    old turns anyway, on their own terms; doing it here makes it an edit like any other. What the model answered was
    computed with its reasoning in view and stays so under AMORTIZE, which is why that is safe here.

    Cache: one small splice each turn, `keep` assistant messages from the end: little lies after it.
    """

    keep: int | Literal["all"] = 1
    mode: Mode = Mode.AMORTIZE

    def __post_init__(self) -> None:
        if self.keep != "all" and self.keep < 0:
            raise ConfigError(f'keep is {self.keep!r}; it must be a number of messages, 0 or more, or "all"')

    def decide(self, turn: Turn) -> Sequence[MessageEdit]:
        if self.keep == "all":
            return ()
        thinking = [i for i, m in enumerate(turn.messages) if m.get("role") == "assistant" and _thinks(m)]
        newest = thinking[max(0, len(thinking) - self.keep) :]
        cleared = touched_before(turn, _REASON) | touched_before(turn, _REASON, Part.REASONING)
        old = [index for index in thinking if index not in newest or index in cleared]
        return [edit for index in old for edit in self._clear(index, turn.messages[index])]

    def _clear(self, index: int, message: Message) -> list[MessageEdit]:
        edits = []
        if message.get("reasoning_content"):
            edits.append(MessageEdit(index, None, Part.REASONING, self.mode, _REASON))
        content = message.get("content")
        if isinstance(content, str):
            rest = _THINK.sub("", content)
            if rest != content and (rest.strip() or tool_calls(message)):
                edits.append(MessageEdit(index, rest, mode=self.mode, reason=_REASON))
        return edits


def _thinks(message: Message) -> bool:
    content = message.get("content")
    return bool(message.get("reasoning_content")) or (isinstance(content, str) and _THINK.search(content) is not None)
