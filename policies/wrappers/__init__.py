"""Policies that hold a policy: when, where and how much it may edit."""

from leyline_agent.policies.wrappers.chain import Chain
from leyline_agent.policies.wrappers.cost_aware import CostAware
from leyline_agent.policies.wrappers.dry_run import DryRun
from leyline_agent.policies.wrappers.hysteresis import Hysteresis
from leyline_agent.policies.wrappers.only_when import OnlyWhen
from leyline_agent.policies.wrappers.per_tool import PerTool
from leyline_agent.policies.wrappers.protect import Protect
from leyline_agent.policies.wrappers.restore import Restore, asked_for
from leyline_agent.policies.wrappers.when_cold import WhenCold

__all__ = [
    "Chain",
    "CostAware",
    "DryRun",
    "Hysteresis",
    "OnlyWhen",
    "PerTool",
    "Protect",
    "Restore",
    "WhenCold",
    "asked_for",
]
