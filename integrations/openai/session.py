"""A named conversation on a client, with what can be done for it between two turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel

from leyline_agent.client_report import parse_report
from leyline_agent.directives import Directive, DirectiveSet, Mode
from leyline_agent.edits import Message
from leyline_agent.integrations.openai.capability import server_root
from leyline_agent.integrations.openai.chat_request import ChatRequest
from leyline_agent.integrations.openai.side_requests import AsyncSideRequests, SideRequests, SyncSideRequests
from leyline_agent.report import TurnReport
from leyline_agent.sessions import TurnRecord
from leyline_agent.wire import KEY, RENDERED_FOR_KEY, SpliceRequest

logger = logging.getLogger("leyline_agent")

if TYPE_CHECKING:
    from openai.resources.chat import AsyncChat, Chat

    from leyline_agent.integrations.openai.client import AsyncOpenAI, OpenAI
    from leyline_agent.integrations.openai.runtime import Leyline


class ClientSession:
    """`client.chat.completions` with every call in one named session. Ends with `close`, or with its `with` block."""

    def __init__(self, client: OpenAI, session_id: str) -> None:
        self.client = client
        self.session_id = session_id

    @property
    def chat(self) -> Chat:
        """The chat resource of the session's client."""
        return self.client.chat

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self, messages: Sequence[Message | BaseModel], **options: Any) -> TurnReport | None:
        """Have the server splice ahead what the next turn will need, while tools run.

        `options` are those of `create`, where they differ from the session's last call. None if there is nothing to
        splice, or the server cannot. The turn itself stays as it is, and is right without.
        """
        return prepare(self.client.leyline, SyncSideRequests(self.client), self.session_id, messages, options)

    def close(self) -> None:
        """Forget the session, here and, as far as it holds amortized KV that nobody else can use, on the server."""
        release(self.client.leyline, SyncSideRequests(self.client), self.session_id)


class AsyncClientSession:
    """`ClientSession` for the async client: `async with`, and awaitable methods."""

    def __init__(self, client: AsyncOpenAI, session_id: str) -> None:
        self.client = client
        self.session_id = session_id

    @property
    def chat(self) -> AsyncChat:
        """The chat resource of the session's client."""
        return self.client.chat

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def prepare(self, messages: Sequence[Message | BaseModel], **options: Any) -> TurnReport | None:
        """See `ClientSession.prepare`."""
        result: TurnReport | None = await self._in_thread(prepare, self.session_id, messages, options)
        return result

    async def close(self) -> None:
        """See `ClientSession.close`."""
        await self._in_thread(release, self.session_id)

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        runtime, side = self.client.leyline, AsyncSideRequests(self.client, asyncio.get_running_loop())
        return await runtime.in_thread(function, runtime, side, *args)


def prepare(
    runtime: Leyline,
    side: SideRequests,
    session_id: str | None,
    messages: Sequence[Message | BaseModel],
    options: Mapping[str, Any],
) -> TurnReport | None:
    """Send the next turn's directives ahead. Nothing is remembered: the turn sends them again and finds them done.

    `messages` end with the model's answer; the results of its tool calls may be missing.
    """
    fields = runtime.last_fields(session_id)
    if not fields or not runtime.capability(side).ready:
        return None  # a first turn has nothing to splice
    given = {**options, **(options.get("extra_body") or {})}
    known = [_on_the_wire(message) for message in messages]
    expected = [*known, *_pending_results(known)]
    request = ChatRequest(None, {**fields, **given, "messages": expected})
    session = runtime.session(request, side, session_id)
    plan = session.plan(
        request.messages,
        tools=request.tools,
        template_kwargs=request.template_kwargs,
        options=request.render_options,
    )
    if plan.input_ids is None or not plan.directives:
        return None
    assert plan.tokens is not None
    ahead = plan.input_ids[: len(plan.input_ids) - len(plan.tokens.new_tokens)]
    if not ahead:
        return None
    answer = _post(runtime, side, ahead, plan.splice_request, request.body)
    return parse_report(answer.get("report"))[0] if isinstance(answer, dict) else None


def _on_the_wire(message: Any) -> Message:
    """A message as the SDK will send it: callers append the very objects that it gave them."""
    if hasattr(message, "model_dump"):
        message = message.model_dump(exclude_unset=True, mode="json")
    return dict(message)


def _pending_results(messages: Sequence[Message]) -> list[Message]:
    """Stand-ins for the results of the tools that run: with them, the policy decides as it will on the turn."""
    calls = (messages[-1].get("tool_calls") or []) if messages else []
    return [{"role": "tool", "tool_call_id": call.get("id"), "content": ""} for call in calls]


def release(runtime: Leyline, side: SideRequests, session_id: str) -> None:
    """Forget a session. Its amortized KV, which only it could use, leaves the server's cache too.

    A server that cannot be reached is no error: eviction does the same, later.
    """
    fields = dict(runtime.last_fields(session_id))
    runtime.forget(session_id)
    address = runtime.address(side)
    records = [
        one for one in runtime.manager.store.drop_session(session_id) if one.history.namespace.startswith(address)
    ]
    # The server follows a base back to what it was made from, so the last turn of each branch says it all.
    continued = {record.parent for record in records if record.marks}
    for record in records:
        try:
            if record.marks and record.history.key not in continued and runtime.capability(side).ready:
                _release_record(runtime, record, side, fields)
        except Exception as err:  # noqa: BLE001 - any SDK error
            logger.info("the server did not release session %r: %s", session_id, err)


def _release_record(runtime: Leyline, record: TurnRecord, side: SideRequests, fields: Mapping[str, Any]) -> None:
    base = record.base_for(record.prompt_ids)
    first = min(mark[0] for mark in record.marks)
    if not first:
        return
    drop = DirectiveSet.of(Directive(first, len(base), (), Mode.FORGET))
    request = SpliceRequest.build(base, drop, record.marks, dp_rank=record.dp_rank)
    _post(runtime, side, base[:first].tolist(), request, fields)


def _post(
    runtime: Leyline, side: SideRequests, input_ids: list[int], request: SpliceRequest, body: Mapping[str, Any]
) -> Any:
    namespace = {key: body[key] for key in ("extra_key", "cache_salt", "lora_path") if body.get(key) is not None}
    rendered_for = {RENDERED_FOR_KEY: runtime.capability(side).rendering}
    url = server_root(side.base_url) + "/leyline/prepare"
    return side.post(url, {"input_ids": input_ids, KEY: request.encode(), **rendered_for, **namespace})
