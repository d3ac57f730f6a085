"""Renderers: from messages to token ids, with the span of each message."""

from leyline_agent.renderers.base import Rendered, Renderer, Span
from leyline_agent.renderers.counting import token_counter
from leyline_agent.renderers.server import ServerRenderer
from leyline_agent.renderers.template import TemplateRenderer
from leyline_agent.renderers.verified import VerifiedRenderer

__all__ = [
    "Rendered",
    "Renderer",
    "ServerRenderer",
    "Span",
    "TemplateRenderer",
    "VerifiedRenderer",
    "token_counter",
]
