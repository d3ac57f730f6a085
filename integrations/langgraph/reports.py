"""Reports from where LangChain keeps them: in messages, and in callbacks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from leyline_agent.client_report import ClientReport
from leyline_agent.run_report import RunReport
from leyline_agent.wire import KEY


def as_metadata(report: ClientReport) -> dict[str, Any]:
    """A report as it stands in `response_metadata`."""
    return {KEY: report.model_dump(mode="json")}


def annotate(message: AIMessage, report: ClientReport) -> None:
    """Put a report on the message it is about, and the reused tokens into its usage."""
    message.response_metadata.update(as_metadata(report))
    if message.usage_metadata is not None and report.served:
        details = {**(message.usage_metadata.get("input_token_details") or {}), "cache_read": report.reused}
        message.usage_metadata["input_token_details"] = details  # type: ignore[typeddict-item]


def reports_of(messages: Iterable[BaseMessage]) -> RunReport:
    """The reports of the model calls behind `messages`: of a final state, say."""
    raw = (message.response_metadata.get(KEY) for message in messages)
    return RunReport(ClientReport.model_validate(one) for one in raw if one)


class ReportCallback(BaseCallbackHandler):
    """Collects the reports of everything that runs under it: `agent.invoke(..., {"callbacks": [callback]})`."""

    def __init__(self) -> None:
        self.run = RunReport()

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        """Take in the reports of one model call."""
        for generations in response.generations:
            for generation in generations:
                if isinstance(generation, ChatGeneration):
                    for report in reports_of([generation.message]).reports:
                        self.run(report)
