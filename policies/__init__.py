"""Policies: what an agent's model should no longer see, and when. One file each; `make` builds one by name."""

from leyline_agent.policies.clear_thinking import ClearThinking
from leyline_agent.policies.clear_tool_uses import ClearToolUses
from leyline_agent.policies.drop_failed_retries import DropFailedRetries
from leyline_agent.policies.drop_repeats import DropRepeats
from leyline_agent.policies.drop_superseded import DropSuperseded
from leyline_agent.policies.factory import available, from_spec, make
from leyline_agent.policies.preview import Preview, preview
from leyline_agent.policies.redact import SECRETS, Redact
from leyline_agent.policies.repair_history import RepairHistory
from leyline_agent.policies.sliding_window import SlidingWindow
from leyline_agent.policies.summarize import Summarize, chat_summarizer, outline
from leyline_agent.policies.token_budget import TokenBudget
from leyline_agent.policies.truncate_tool_outputs import TruncateToolOutputs
from leyline_agent.policies.wrappers import (
    Chain,
    CostAware,
    DryRun,
    Hysteresis,
    OnlyWhen,
    PerTool,
    Protect,
    Restore,
    WhenCold,
    asked_for,
)

__all__ = [
    "SECRETS",
    "Chain",
    "ClearThinking",
    "ClearToolUses",
    "CostAware",
    "DropFailedRetries",
    "DropRepeats",
    "DropSuperseded",
    "DryRun",
    "Hysteresis",
    "OnlyWhen",
    "PerTool",
    "Preview",
    "Protect",
    "Redact",
    "RepairHistory",
    "Restore",
    "SlidingWindow",
    "Summarize",
    "TokenBudget",
    "TruncateToolOutputs",
    "WhenCold",
    "asked_for",
    "available",
    "chat_summarizer",
    "from_spec",
    "make",
    "outline",
    "preview",
]
