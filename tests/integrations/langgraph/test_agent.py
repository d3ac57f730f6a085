"""LangGraph agents with Leyline on the real server: same state, spliced tokens, forks, interrupts, other middleware."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import openai
import pytest

pytest.importorskip("langchain_openai", reason="LangChain is in .venv-client only")

from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    SummarizationMiddleware,
)
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition
from langgraph.types import Command, interrupt

from leyline_agent.config import Config
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
from leyline_agent.integrations.openai import Leyline
from leyline_agent.report import FallbackReason
from leyline_agent.run_report import RunReport
from loopback import loopback
from tool_agent import CallToolsFirst, CutOld, Part, chat, look, make_agent, plain, settings

pytestmark = [pytest.mark.client, pytest.mark.server]


def thread(name: str) -> dict[str, Any]:
    return {"configurable": {"thread_id": name}, "recursion_limit": 100}


class StockWithPolicy(AgentMiddleware):
    """The policy on LangChain's messages, with the stock client: what an agent without Leyline does."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.hook = policy_hook(policy)

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request.override(messages=self.hook(request.state)["llm_input_messages"]))


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
        model = chat(server, stream_usage=True)
        agent = make_agent(model, LeylineMiddleware(CutOld()), checkpointer=InMemorySaver())
        async for _ in agent.astream({"messages": [("user", task)]}, thread(task), stream_mode="messages"):
            pass
        return (await agent.aget_state(thread(task))).values["messages"]

    messages = asyncio.run(run())
    assert reports_of(messages).totals.amortized > 0
    assert reports_of(messages).totals.turns == 5
    assert all(reused_of(message) for message in messages[3:] if isinstance(message, AIMessage))


def test_a_fork_from_an_earlier_checkpoint(server: Any, task: str) -> None:
    agent = make_agent(chat(server), LeylineMiddleware(CutOld()), checkpointer=InMemorySaver())
    agent.invoke({"messages": [("user", task)]}, thread(task))
    earlier = next(
        state for state in agent.get_state_history(thread(task)) if len(state.values.get("messages", ())) == 7
    )
    before = plain(agent.get_state(thread(task)).values["messages"])
    out = agent.invoke(None, earlier.config)
    assert plain(out["messages"])[:7] == before[:7]
    forked = reports_of(out["messages"])
    assert forked.totals.turns == 5
    assert forked.reports[3].amortized > 0  # the first turn of the fork goes on from the splices before it
    assert set(forked.fallbacks) <= {FallbackReason.NOTHING_DOWNSTREAM.value}


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


def test_a_tool_that_asks_a_person_goes_on_with_the_answer(server: Any, task: str) -> None:
    @tool("look")
    def look_if_allowed(part: Part) -> str:
        """Look at a part."""
        return look.func(part) if interrupt(f"May I look at {part}?") else "not allowed"

    middleware = [CallToolsFirst(4), LeylineMiddleware(CutOld())]
    agent = create_agent(chat(server), [look_if_allowed], middleware=middleware, checkpointer=InMemorySaver())
    out = agent.invoke({"messages": [("user", task)]}, thread(task))
    while "__interrupt__" in out:
        out = agent.invoke(Command(resume=True), thread(task))
    run = reports_of(out["messages"])
    assert [report.turn for report in run.reports] == [0, 1, 2, 3, 4]
    assert run.totals.amortized > 0
    assert all(message.content.startswith("part") for message in out["messages"] if message.type == "tool")


def test_what_other_middleware_edits_becomes_directives(server: Any, task: str) -> None:
    editing = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=1, keep=2, placeholder="[cleared]")])
    agent = make_agent(chat(server), editing, LeylineMiddleware(), checkpointer=InMemorySaver())
    out = agent.invoke({"messages": [("user", task)]}, thread(task))
    run = reports_of(out["messages"])
    assert run.totals.spliced_turns >= 2
    assert all(message.content != "[cleared]" for message in out["messages"])


@pytest.mark.parametrize("policy", [None, CutOld()])
def test_a_summary_in_the_state_becomes_directives(server: Any, task: str, policy: Any) -> None:
    run = RunReport()
    summary = SummarizationMiddleware(model=chat(server, max_tokens=5), trigger=("messages", 6), keep=("messages", 4))
    middleware = LeylineMiddleware(policy, on_report=run)
    agent = make_agent(chat(server), summary, middleware, checkpointer=InMemorySaver())
    out = agent.invoke({"messages": [("user", task)]}, thread(task))
    assert isinstance(out["messages"][-1], AIMessage)
    # the summary takes the place of the task and of the messages up to the kept tail, whose KV is moved
    shortened = [r for r in run.reports for d in r.directives if d.end - d.start > d.replacement_len > 5]
    assert shortened
    assert all(report.amortized > 0 for report in shortened)
    assert set(run.fallbacks) <= {FallbackReason.NOTHING_DOWNSTREAM.value}


@tool("look")
def slow_look(part: Part) -> str:
    """Look at a part."""
    time.sleep(1.0)
    return look.func(part)


def slow_agent(server: Any, run: RunReport) -> Any:
    middleware = [CallToolsFirst(4), LeylineMiddleware(CutOld(), on_report=run)]
    return create_agent(chat(server), [slow_look], middleware=middleware)


def slow_graph(server: Any, run: RunReport) -> Any:
    model = ChatLeyline(leyline=Leyline(CutOld(), on_report=run), **settings(server))
    return graph_of(model.bind_tools([slow_look], tool_choice="required", strict=True), slow_look)


def graph_of(model: Any, *tools: Any) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("model", model_node(model))
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile(checkpointer=InMemorySaver())


def invoke(agent: Any, task: str, config: Any) -> None:
    agent.invoke({"messages": [("user", task)]}, config)


def stream(agent: Any, task: str, config: Any) -> None:
    list(agent.stream({"messages": [("user", task)]}, config, stream_mode="messages"))


def ainvoke(agent: Any, task: str, config: Any) -> None:
    asyncio.run(agent.ainvoke({"messages": [("user", task)]}, config))


def astream(agent: Any, task: str, config: Any) -> None:
    async def read() -> None:
        async for _ in agent.astream({"messages": [("user", task)]}, config, stream_mode="messages"):
            pass

    asyncio.run(read())


@pytest.mark.parametrize(
    ("make", "call"), [(slow_agent, invoke), (slow_agent, astream), (slow_graph, stream), (slow_graph, ainvoke)]
)
def test_the_next_turns_splice_is_made_while_tools_run(server: Any, task: str, make: Any, call: Any) -> None:
    run = RunReport()
    with contextlib.suppress(GraphRecursionError):  # the graph calls tools for ever, as it is told to
        call(make(server, run), task, {**thread(task), "recursion_limit": 11})
    later = [report for report in run.reports if report.directives]
    assert later
    hits = [report for report in later if all(outcome.status == "already" for outcome in report.directives)]
    assert hits  # not each of them: a slow machine may still prepare when the tool is done
    assert sum(report.rotated for report in hits) == 0


def test_a_stream_counts_reused_tokens_in_its_usage(server: Any, task: str) -> None:
    model = ChatLeyline(stream_usage=True, **settings(server, max_tokens=5))
    model.invoke(task)
    chunks = list(model.stream(task))
    assert reused_of(sum(chunks[1:], chunks[0])) > 0


def reused_of(message: Any) -> int:
    """The reused tokens of an answer, once its usage was compared with its report."""
    report = message.response_metadata["leyline"]
    usage = message.usage_metadata
    assert usage["input_tokens"] == report["prompt_tokens"]
    assert usage["input_token_details"]["cache_read"] == report["exact"] + report["amortized"]
    return int(usage["input_token_details"]["cache_read"])


def test_a_state_graph_of_ones_own(server: Any, task: str) -> None:
    model = ChatLeyline(policy=CutOld(), **settings(server))
    app = graph_of(model.bind_tools([look], tool_choice="required", strict=True), look)
    config = thread(task)
    with pytest.raises(GraphRecursionError):  # it calls tools for ever, as it is told to
        app.invoke({"messages": [("user", task)]}, {**config, "recursion_limit": 11})
    messages = app.get_state(config).values["messages"]
    run = reports_of(messages)
    assert run.totals.amortized > 0
    assert {report.session for report in run.reports} == {task}


def test_the_thread_is_the_session_of_a_streaming_graph(server: Any, task: str) -> None:
    """LangChain gives a model that streams inside `invoke` no run manager to ask."""
    app = graph_of(ChatLeyline(**settings(server, max_tokens=5)))
    list(app.stream({"messages": [("user", task)]}, thread(task), stream_mode="messages"))
    messages = app.get_state(thread(task)).values["messages"]
    assert [report.session for report in reports_of(messages).reports] == [task]


@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
def test_create_react_agent_with_the_model_alone(server: Any, task: str) -> None:
    model = ChatLeyline(policy=CutOld(), **settings(server))
    agent = create_react_agent(
        model.bind_tools([look], tool_choice="required", strict=True), [look], checkpointer=InMemorySaver()
    )
    with pytest.raises(GraphRecursionError):  # it calls tools for ever, as it is told to
        agent.invoke({"messages": [("user", task)]}, {**thread(task), "recursion_limit": 11})
    messages = agent.get_state(thread(task)).values["messages"]
    run = reports_of(messages)
    assert run.totals.amortized > 0
    assert {report.session for report in run.reports} == {task}
    assert all(message.content.startswith("part ") for message in messages if isinstance(message, ToolMessage))


@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
def test_a_policy_hook_shows_the_view_to_any_model() -> None:
    seen = []

    class Model(GenericFakeChatModel):
        def bind_tools(self, *_: Any, **__: Any) -> Any:
            return self

        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append([message.content for message in messages if isinstance(message, ToolMessage)])
            return super()._generate(messages, *args, **kwargs)

    agent = create_react_agent(Model(messages=iter([AIMessage("done")])), [look], pre_model_hook=policy_hook(CutOld()))
    out = agent.invoke({"messages": HISTORY})
    assert seen == [["[cut]", "another", "a third"]]
    assert [m.content for m in out["messages"] if isinstance(m, ToolMessage)] == ["a long output", "another", "a third"]


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

    usage = {"input_tokens": 9, "output_tokens": 1, "total_tokens": 10, "input_token_details": {"cache_read": 4}}
    model = Model(messages=iter([AIMessage("done", usage_metadata=usage)]))
    run = RunReport()
    agent = create_agent(model, [look], middleware=[LeylineMiddleware(CutOld(), on_report=run)])
    out = agent.invoke({"messages": HISTORY})
    (report,) = run.reports
    assert (report.prompt_tokens, report.exact, report.edits, report.spliced) == (9, 4, 1, False)
    assert [f.reason for f in report.fallbacks] == [FallbackReason.SERVER_WITHOUT_LEYLINE]
    assert reports_of(out["messages"]).totals == run.totals
    assert [m.content for m in seen[0] if isinstance(m, ToolMessage)] == ["[cut]", "another", "a third"]
    assert [m.content for m in out["messages"] if isinstance(m, ToolMessage)] == ["a long output", "another", "a third"]


def test_untouched_messages_are_the_same_objects() -> None:
    edited = policy_hook(CutOld())({"messages": HISTORY})["llm_input_messages"]
    assert edited[0] is HISTORY[0]
    assert edited[2].content == "[cut]"
    assert edited[2].tool_call_id == "c1"


def test_results_inside_a_user_message_are_left_to_their_provider() -> None:
    results = [{"type": "tool_result", "tool_use_id": "c1", "content": "a long output"}]
    history = [HISTORY[0], HISTORY[1], HumanMessage(results), *HISTORY[3:]]
    edited = policy_hook(CutOld(keep=0))({"messages": history})["llm_input_messages"]
    untouched = [one is other for one, other in zip(edited, history, strict=True)]
    assert untouched == [True, True, True, True, False, True, False]


NOWHERE: dict[str, Any] = {"model": "tiny", "api_key": "none", "base_url": "http://127.0.0.1:9/v1"}


def test_two_policies_for_one_model_are_an_error() -> None:
    model = ChatLeyline(policy=CutOld(), **NOWHERE)
    for middleware in (LeylineMiddleware(CutOld()), LeylineMiddleware(on_report=RunReport())):
        with pytest.raises(ConfigError, match="one of them"):
            make_agent(model, middleware).invoke({"messages": [("user", "x")]})
    with pytest.raises(ConfigError, match="either"):
        LeylineMiddleware(CutOld(), leyline=Leyline())
    with pytest.raises(ValueError, match="either"):  # pydantic's, which says it in our words
        ChatLeyline(policy=CutOld(), leyline=Leyline(), **NOWHERE)


def test_what_other_middleware_rewrites_is_amortized_unless_the_config_says_otherwise() -> None:
    modes = [LeylineMiddleware(config=Config(rewrite_mode=mode)).leyline.config.rewrite_mode for mode in Mode]
    assert modes == [Mode.AMORTIZE if mode is Mode.AUTO else mode for mode in Mode]


def test_a_model_class_of_ones_own_keeps_its_methods() -> None:
    class Mine(ChatOpenAI):
        def _get_request_payload(self, *args: Any, **kwargs: Any) -> Any:
            return {**super()._get_request_payload(*args, **kwargs), "user": "mine"}

    with loopback() as server:
        model = Mine(model="m", api_key="none", base_url=server.base_url)
        agent = create_agent(model, [], middleware=[LeylineMiddleware(CutOld())])
        out = agent.invoke({"messages": [("user", "x")]})
        assert server.chats[0]["user"] == "mine"
    assert reports_of(out["messages"]).totals.turns == 1


def test_the_responses_api_gets_what_it_knows() -> None:
    with loopback() as server:
        model = ChatLeyline(policy=CutOld(), use_responses_api=True, **{**NOWHERE, "base_url": server.base_url})
        with pytest.raises(openai.NotFoundError):  # this server knows chat alone
            list(model.stream("x"))
        path, body = server.requests[-1]
    assert path == "/v1/responses"
    assert "leyline" not in body


def test_the_models_own_extra_body_is_kept() -> None:
    model = ChatLeyline(extra_body={"top_k": 1}, **NOWHERE)
    body = model._with_session({"extra_body": {"min_p": 0.1}}, None)["extra_body"]
    assert body == {"top_k": 1, "min_p": 0.1, "leyline": {"session": None}}
