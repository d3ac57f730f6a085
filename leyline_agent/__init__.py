"""Leyline: edit an agent's history without paying for it again.

A policy says what the model should no longer see; the context manager turns that into directives on tokens; a SGLang
server with the Leyline plugin splices its KV cache instead of prefilling again. The names below are what a policy or a
client needs; policies live in `leyline_agent.policies`, clients and the server in `leyline_agent.integrations`.
"""

from leyline_agent.config import Config
from leyline_agent.diff import diff, plan_tokens
from leyline_agent.directives import Directive, DirectiveSet, Mode
from leyline_agent.edits import MessageEdit, Part, Turn
from leyline_agent.errors import LeylineError
from leyline_agent.manager import ContextManager, Session
from leyline_agent.policy import FunctionPolicy, KeepAll, Policy
from leyline_agent.report import FallbackReason, TurnReport

__all__ = [
    "Config",
    "ContextManager",
    "Directive",
    "DirectiveSet",
    "FallbackReason",
    "FunctionPolicy",
    "KeepAll",
    "LeylineError",
    "MessageEdit",
    "Mode",
    "Part",
    "Policy",
    "Session",
    "Turn",
    "TurnReport",
    "diff",
    "plan_tokens",
]
