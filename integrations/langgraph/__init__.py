"""Leyline for LangChain and LangGraph: a middleware for `create_agent`, a chat model, and helpers for plain graphs."""

from leyline_agent.errors import MissingDependencyError

try:
    import langchain_openai as _langchain_openai
    import langgraph as _langgraph
except ImportError as err:
    raise MissingDependencyError(
        "the LangGraph integration needs langchain, langchain-openai and langgraph; "
        "pip install 'leyline-agent[langgraph]'"
    ) from err

from leyline_agent.integrations.langgraph.chat_model import ChatLeyline, leyline_chat
from leyline_agent.integrations.langgraph.middleware import LeylineMiddleware
from leyline_agent.integrations.langgraph.nodes import model_node, policy_hook
from leyline_agent.integrations.langgraph.reports import ReportCallback, reports_of

__all__ = [
    "ChatLeyline",
    "LeylineMiddleware",
    "ReportCallback",
    "leyline_chat",
    "model_node",
    "policy_hook",
    "reports_of",
]

del _langchain_openai, _langgraph
