"""LangGraph agents with Leyline on the real server: same state, spliced tokens, forks, interrupts, other middleware."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

pytest.importorskip("langchain_openai", reason="LangChain is in .venv-client only")

from langchain.agents import create_agent
from langchain.agents.middleware import ClearToolUsesEdit, ContextEditingMiddleware, SummarizationMiddleware
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition

from leyline_agent.directives import Mode
from leyline_agent.errors import ConfigError
from leyline_agent.integrations.langgraph import (
    ChatLeyline,
    LeylineMiddleware,
    ReportCallback,
    model_node,
    policy_hook,
    reports_of,
)
from leyline_agent.integrations.langgraph.messages import edited_messages
from leyline_agent.manager import ContextManager
from leyline_agent.report import FallbackReason
from leyline_agent.run_report import RunReport
from tool_agent import CallToolsFirst, CutOld, Part, chat, look, make_agent, plain, settings

pytestmark = [pytest.mark.client, pytest.mark.server]


def thread(name: str) -> dict[str, Any]:
    return {"configurable": {"thread_id": name}, "recursion_limit": 100}


class StockWithPolicy(LeylineMiddleware):
    """The policy on LangChain's messages, with the stock client: what an agent without Leyline does."""

    def _bound(self, request: Any) -> Any:
        return request.override(messages=edited_messages(self.leyline.manager, request.messages))


def test_fifteen_turns_under_forget_end_in_the_same_state(server: Any, task: str) -> None:
    policy = CutOld(Mode.FORGET)
    states = []
    for number, middleware in enumerate((StockWithPolicy(policy), LeylineMiddleware(policy))):
        agent = make_agent(chat(server), middleware, calls=14, checkpointer=InMemorySaver())
        config = thread(f"{task} {number}")
        for _ in agent.stream({"messages": [("user", task)]}, config, stream_mode="messages"):
            pass
        states.append(agent.get_state(config).values["messages"])
    stock, ours = states
    assert plain(ours) == plain(stock)
    assert sum(isinstance(message, AIMessage) for message in ours) >= 15
    assert all("[cut]" not in message.content for message in ours)
    run = reports_of(ours)
    assert run.totals.turns >= 15
    assert run.totals.amortized == 0


def test_amortized_tokens_are_in_the_reports(server: Any, task: str) -> None:
    run, callback = RunReport(), ReportCallback()
    agent = make_agent(chat(server), LeylineMiddleware(CutOld(), on_report=run), checkpointer=InMemorySaver())
    config = {**thread(task), "callbacks": [callback]}
    out = agent.invoke({"messages": [("user", task)]}, config)
    answers = [message for message in out["messages"] if isinstance(message, AIMessage)]
    assert len(answers) == 5
    assert run.totals.amortized > 0
    assert run.totals.spliced_turns == 2
    assert set(run.fallbacks) <= {FallbackReason.NOTHING_DOWNSTREAM.value}
    assert reports_of(out["messages"]).totals == run.totals == callback.run.totals
    last = run.reports[-1]
    assert last.session == task
    assert answers[-1].usage_metadata["input_token_details"]["cache_read"] == last.reused
    assert "amortized" in run._repr_html_()
    tools = [message for message in out["messages"] if isinstance(message, ToolMessage)]
    assert all(message.content.startswith("part ") for message in tools)


def test_async_streaming_does_the_same_as_sync(server: Any, task: str) -> None:
    async def run() -> Any:
        agent = make_agent(chat(server), LeylineMiddleware(CutOld()), checkpointer=InMemorySaver())
        async for _ in agent.astream({"messages": [("user", task)]}, thread(task), stream_mode="messages"):
            pass
        return (await agent.aget_state(thread(task))).values["messages"]

    messages = asyncio.run(run())
    assert reports_of(messages).totals.amortized > 0
    assert reports_of(messages).totals.turns == 5


def test_a_fork_from_an_earlier_checkpoint(server: Any, task: str) -> None:
    agent = make_agent(chat(server), LeylineMiddleware(CutOld()), checkpointer=InMemorySaver())
    agent.invoke({"messages": [("user", task)]}, thread(task))
    earlier = next(
        state for state in agent.get_state_history(thread(task)) if len(state.values.get("messages", ())) == 7
    )
    before = plain(agent.get_state(thread(task)).values["messages"])
    out = agent.invoke(None, earlier.config)
    assert plain(out["messages"])[:7] == before[:7]
    assert reports_of(out["messages"]).totals.turns == 5
    reasons = {fallback.reason for report in reports_of(out["messages"]).reports for fallback in report.fallbacks}
    assert FallbackReason.INTERNAL not in reasons


def test_an_interrupt_before_tools_goes_on_where_it_was(server: Any, task: str) -> None:
    agent = make_agent(
        chat(server), LeylineMiddleware(CutOld()), calls=4, checkpointer=InMemorySaver(), interrupt_before=["tools"]
    )
    out = agent.invoke({"messages": [("user", task)]}, thread(task))
    while agent.get_state(thread(task)).next:
        out = agent.invoke(None, thread(task))
    run = reports_of(out["messages"])
    assert [report.turn for report in run.reports] == [0, 1, 2, 3, 4]
    assert run.totals.amortized > 0


def test_what_other_middleware_edits_becomes_directives(server: Any, task: str) -> None:
    editing = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=1, keep=2, placeholder="[cleared]")])
    agent = make_agent(chat(server), editing, LeylineMiddleware(), checkpointer=InMemorySaver())
    out = agent.invoke({"messages": [("user", task)]}, thread(task))
    run = reports_of(out["messages"])
    assert run.totals.spliced_turns >= 2
    assert all(message.content != "[cleared]" for message in out["messages"])


def test_a_summary_in_the_state_is_no_trouble(server: Any, task: str) -> None:
    summary = SummarizationMiddleware(model=chat(server, max_tokens=5), trigger=("messages", 6), keep=("messages", 4))
    agent = make_agent(chat(server), summary, LeylineMiddleware(CutOld()), checkpointer=InMemorySaver())
    out = agent.invoke({"messages": [("user", task)]}, thread(task))
    assert isinstance(out["messages"][-1], AIMessage)
    reasons = {fallback.reason for report in reports_of(out["messages"]).reports for fallback in report.fallbacks}
    assert FallbackReason.INTERNAL not in reasons
    assert FallbackReason.MALFORMED not in reasons


def test_the_next_turns_splice_is_made_while_tools_run(server: Any, task: str) -> None:
    @tool("look")
    def slow_look(part: Part) -> str:
        """Look at a part."""
        time.sleep(1.0)
        return look.func(part)

    run = RunReport()
    middleware = [CallToolsFirst(4), LeylineMiddleware(CutOld(), on_report=run)]
    create_agent(chat(server), [slow_look], middleware=middleware).invoke({"messages": [("user", task)]})
    later = [report for report in run.reports if report.directives]
    assert later
    hits = [report for report in later if all(outcome.status == "already" for outcome in report.directives)]
    assert hits  # not each of them: a slow machine may still prepare when the tool is done
    assert sum(report.rotated for report in hits) == 0


def test_a_state_graph_of_ones_own(server: Any, task: str) -> None:
    model = ChatLeyline(policy=CutOld(), **settings(server))
    forced = model.bind_tools([look], tool_choice="required", strict=True)
    graph = StateGraph(MessagesState)
    graph.add_node("model", model_node(forced))
    graph.add_node("tools", ToolNode([look]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    app = graph.compile(checkpointer=InMemorySaver())
    config = thread(task)
    with pytest.raises(GraphRecursionError):  # it calls tools for ever, as it is told to
        app.invoke({"messages": [("user", task)]}, {**config, "recursion_limit": 11})
    messages = app.get_state(config).values["messages"]
    run = reports_of(messages)
    assert run.totals.amortized > 0
    assert {report.session for report in run.reports} == {task}


def test_create_react_agent_with_the_model_alone(server: Any, task: str) -> None:
    model = ChatLeyline(policy=CutOld(), **settings(server, max_tokens=20))
    out = create_react_agent(model, [look]).invoke({"messages": [("user", task)]})
    assert reports_of(out["messages"]).totals.turns >= 1


HISTORY = [
    HumanMessage("look", id="m1"),
    AIMessage("", tool_calls=[{"name": "look", "args": {"part": "a"}, "id": "c1"}]),
    ToolMessage("a long output", tool_call_id="c1"),
    AIMessage("", tool_calls=[{"name": "look", "args": {"part": "b"}, "id": "c2"}]),
    ToolMessage("another", tool_call_id="c2"),
    AIMessage("", tool_calls=[{"name": "look", "args": {"part": "c"}, "id": "c3"}]),
    ToolMessage("a third", tool_call_id="c3"),
]


def test_a_model_of_another_protocol_gets_the_view() -> None:
    seen = []

    class Model(GenericFakeChatModel):
        def bind_tools(self, *_: Any, **__: Any) -> Any:
            return self

        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(messages)
            return super()._generate(messages, *args, **kwargs)

    model = Model(messages=iter([AIMessage("done")]))
    agent = create_agent(model, [look], middleware=[LeylineMiddleware(CutOld())])
    out = agent.invoke({"messages": HISTORY})
    assert [m.content for m in seen[0] if isinstance(m, ToolMessage)] == ["[cut]", "another", "a third"]
    assert [m.content for m in out["messages"] if isinstance(m, ToolMessage)] == ["a long output", "another", "a third"]


def test_untouched_messages_are_the_same_objects() -> None:
    edited = edited_messages(ContextManager(CutOld()), HISTORY)
    assert edited[0] is HISTORY[0]
    assert edited[2].content == "[cut]"
    assert edited[2].tool_call_id == "c1"
    assert policy_hook(CutOld())({"messages": HISTORY})["llm_input_messages"][2].content == "[cut]"


def test_two_policies_for_one_model_are_an_error() -> None:
    model = ChatLeyline(policy=CutOld(), model="tiny", api_key="none", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match="one of them"):
        make_agent(model, LeylineMiddleware(CutOld())).invoke({"messages": [("user", "x")]})


def test_the_models_own_extra_body_is_kept() -> None:
    model = ChatLeyline(model="tiny", api_key="none", base_url="http://127.0.0.1:9/v1", extra_body={"top_k": 1})
    body = model._with_session({"extra_body": {"min_p": 0.1}}, None)["extra_body"]
    assert body == {"top_k": 1, "min_p": 0.1, "leyline": {"session": None}}
