"""The words that stand where something was removed.

They are constant: a counter or a date in them would change bytes the server has already cached. They say what became
of the step, because a model that takes a placeholder for a failure calls the tool again: a step that worked is said to
have completed, a step that failed is said to have failed.
"""

from __future__ import annotations

import json
import re

from leyline_agent.edits import Message
from leyline_agent.history import text_of
from leyline_agent.planner import INTERRUPTED

REMOVED_OUTPUT = "[This tool call completed. Its output was removed to save context.]"
REMOVED_FAILURE = "[This tool call failed. Its error output was removed to save context.]"
CUT_OUTPUT = "\n[This tool call completed. The rest of its output was removed to save context.]"
CUT_FAILURE = "\n[This tool call failed. The rest of its error output was removed to save context.]"
SUPERSEDED = "[This tool call completed. Its output was removed; a later call read the same thing again.]"
REPEATED_BELOW = "[This tool call completed. Its output was removed; a later identical call gave the same output.]"
REPEATED_ABOVE = "[This tool call completed. Its output was removed; it is that of an earlier identical call, above.]"
RETRIED = "[This tool call failed. Its error output was removed; a later attempt succeeded.]"
REDACTED = "[redacted]"

OF_OUTPUTS = (
    REMOVED_OUTPUT, REMOVED_FAILURE, CUT_OUTPUT, CUT_FAILURE, SUPERSEDED, REPEATED_BELOW, REPEATED_ABOVE, RETRIED,
    INTERRUPTED,
)  # fmt: skip
"""Those that stand for a tool output, or for the rest of one."""

_FAILURE = re.compile(
    r"\s*(?:<[^>]*>\s*)?"  # an opening tag
    r"(?:\w*(?:error|exception)\b(?!\s*[=:]?\s*(?:0|none|null|false)\b)"  # "ValueError: ...", not "error: none"
    r"|traceback \(most recent call last\)"
    r"|fatal:|panic:|failed\b|failure\b|command failed|permission denied|no such file"
    r"|[^\n]{0,80}: (?:command not found|no such file or directory|permission denied))"
    r"|\s*(?:process )?(?:exit(?:ed)?(?: with)?(?: code| status)?[:= ]+)(?!0\b)\d+",
    re.IGNORECASE,
)
_FAILED_STATUS = ("error", "failed", "failure")
_FAILURE_PLACEHOLDERS = (REMOVED_FAILURE, CUT_FAILURE, RETRIED, INTERRUPTED)


def looks_failed(message: Message) -> bool:
    """Whether a tool result reports a failure: by its fields, by its JSON, or by how its text begins."""
    if message.get("is_error") is True or message.get("status") in _FAILED_STATUS:
        return True
    text = text_of(message.get("content"))
    if text is None:
        return False
    if is_placeholder(text):
        return text.endswith(_FAILURE_PLACEHOLDERS)
    return _json_failed(text) if text.lstrip().startswith("{") else _FAILURE.match(text) is not None


def _json_failed(text: str) -> bool:
    try:
        answer = json.loads(text)
    except ValueError:
        return False
    if not isinstance(answer, dict):
        return False
    return bool(
        answer.get("error")
        or answer.get("isError") is True
        or answer.get("success") is False
        or answer.get("ok") is False
        or str(answer.get("status", "")).lower() in _FAILED_STATUS
        or answer.get("exit_code") not in (None, 0)
    )


def is_placeholder(text: str) -> bool:
    """Whether an output is, or ends with, one of ours: there is nothing left to remove."""
    return text.endswith(OF_OUTPUTS)
