"""Helpers for graphs made by hand and for `create_react_agent`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from leyline_agent.integrations.langgraph.messages import plan_view
from leyline_agent.manager import ContextManager
from leyline_agent.policy import MessageFunction, Policy


def model_node(model: Runnable[Any, Any], *, key: str = "messages") -> Runnable[Any, Any]:
    """A graph node that calls `model` (a `ChatLeyline`, with its tools bound) on the state's messages.

        graph.add_node("model", model_node(ChatLeyline(policy=...).bind_tools(tools)))

    The session is the checkpointer's thread. The state keeps the whole history.
    """

    def node(state: Any, config: RunnableConfig) -> dict[str, Any]:
        return {key: [model.invoke(state[key], config)]}

    async def async_node(state: Any, config: RunnableConfig) -> dict[str, Any]:
        return {key: [await model.ainvoke(state[key], config)]}

    return RunnableLambda(node, async_node)


def policy_hook(policy: Policy | MessageFunction, *, key: str = "messages") -> Callable[[Any], dict[str, Any]]:
    """A `pre_model_hook` for `create_react_agent` with any model: the policy applies, nothing is spliced.

    With a `ChatLeyline` no hook is needed: `create_react_agent(ChatLeyline(policy=...), tools)`.
    """
    session = ContextManager(policy).session()

    def hook(state: Any) -> dict[str, Any]:
        shown, plan = plan_view(session, state[key])
        session.commit(plan)
        return {"llm_input_messages": shown}

    return hook
