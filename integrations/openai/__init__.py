"""The OpenAI client with Leyline in it: change the import, keep the code.

from leyline_agent.integrations.openai import OpenAI
client = OpenAI(base_url="http://127.0.0.1:30000/v1", api_key="none", policy=TruncateToolOutputs())
"""

from leyline_agent.integrations.openai.answer import report_of
from leyline_agent.integrations.openai.client import AsyncOpenAI, OpenAI
from leyline_agent.integrations.openai.runtime import Leyline
from leyline_agent.integrations.openai.session import AsyncClientSession, ClientSession
from leyline_agent.integrations.openai.transport import async_http_client, http_client

__all__ = [
    "AsyncClientSession",
    "AsyncOpenAI",
    "ClientSession",
    "Leyline",
    "OpenAI",
    "async_http_client",
    "http_client",
    "report_of",
]
