"""One chat completion under way: from the plan through the answer, whole or streamed, to the commit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from leyline_agent.client_report import ClientReport, parse_report
from leyline_agent.edits import Usage
from leyline_agent.integrations.openai.answer import Answer
from leyline_agent.integrations.openai.capability import Capability
from leyline_agent.integrations.openai.chat_request import ChatRequest
from leyline_agent.manager import Session
from leyline_agent.report import Fallback, FallbackReason
from leyline_agent.turn_plan import TurnPlan
from leyline_agent.wire import KEY, RENDERED_FOR_KEY

if TYPE_CHECKING:
    from leyline_agent.integrations.openai.runtime import Leyline


@dataclass(slots=True)
class ChatTurn:
    """A planned request. `options` is what goes out; `observe` is called on what comes back."""

    runtime: Leyline
    session: Session
    request: ChatRequest
    plan: TurnPlan
    capability: Capability
    root: str
    answer: Answer = field(init=False)
    committed: bool = False

    def __post_init__(self) -> None:
        self.answer = Answer.for_request(self.request.body)

    @property
    def plain(self) -> bool:
        """Whether the request goes to a server without Leyline."""
        return not self.capability.ready

    @property
    def body(self) -> dict[str, Any]:
        """The body to send."""
        extras = {} if self.plain else self.plan.request_extras()
        if "input_ids" in extras and self.capability.rendering:
            extras["custom_params"][RENDERED_FOR_KEY] = self.capability.rendering
        return self.request.with_view(self.plan.messages, extras)

    @property
    def options(self) -> Any:
        """The SDK's options to send."""
        return self.request.options_with(self.body, self.observe)

    def without_leyline(self, status_code: int) -> ChatTurn:
        """The same turn for a server that turned out to have no Leyline: the view, and no extra fields."""
        lost = Capability(ready=False, detail=f"it answered {status_code}, and no longer has Leyline")
        return ChatTurn(self.runtime, self.session, self.request, self.plan, lost, self.root)

    def unanswered(self) -> None:
        """There was no connection: whoever answers next at this address may be another server."""
        self.runtime.capabilities.forget(self.root)

    def observe(self, parsed: Any) -> Any:
        """Take in a parsed response, a completion at once, a stream while it is read; returns what it was given."""
        iterator = getattr(parsed, "_iterator", None)
        if iterator is not None:  # openai.Stream or AsyncStream, which stay what they are
            asynchronous = hasattr(iterator, "__anext__")
            tapped = self._tapped_async(parsed, iterator) if asynchronous else self._tapped(parsed, iterator)
            parsed._iterator = tapped  # noqa: SLF001 - private, and the same in every SDK since 1.0; CI watches it
        elif hasattr(parsed, "choices") and hasattr(parsed, "usage"):
            self.answer.take(parsed)
            self.finish(parsed)
        return parsed

    def observe_json(self, body: Any) -> None:
        """Take in a whole answer that is still JSON, and take out what only Leyline asked for."""
        if isinstance(body, dict) and "choices" in body:
            self.answer.take_json(body)
            self.finish()

    def sent(self) -> None:
        """The server accepted the request. If nobody parses its answer, this is all that will be known."""
        if not self.committed:
            self.session.commit(self.plan, partial=True)

    def _tapped(self, stream: Any, chunks: Iterator[Any]) -> Iterator[Any]:
        for chunk in chunks:
            if self.answer.take(chunk):
                yield chunk
        self.finish(stream)

    async def _tapped_async(self, stream: Any, chunks: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for chunk in chunks:
            if self.answer.take(chunk):
                yield chunk
        self.finish(stream)

    def finish(self, holder: Any = None) -> None:
        """Commit a whole answer and put the report on the object the caller holds, if there is one."""
        report, problems = parse_report(self.answer.raw_report)
        problems = (*self.capability.fallbacks, *problems, *self._changes_of_server())
        usage = self.answer.usage
        if usage is None and report is not None:  # a stream whose caller asked for none; policies go by it
            usage = Usage(report.prompt_tokens, report.reused, max(map(len, self.answer.output_ids), default=0))
        self.session.commit(
            self.plan,
            prompt_ids=self.answer.prompt_ids,
            output_ids=self.answer.output_ids,
            report=report,
            usage=usage,
        )
        self.committed = True
        merged = ClientReport.of(
            self.plan,
            report,
            session=self.session.session_id,
            usage=usage,
            fallbacks=problems,
        )
        # Past pydantic: an attribute, but no field, so that dumps are those of the stock client.
        if holder is not None:
            object.__setattr__(holder, KEY, merged)
        self.runtime.publish(merged, self.request.on_report)

    def _changes_of_server(self) -> tuple[Fallback, ...]:
        """What the answer shows of a server that is another than was known at this address; it is asked again then."""
        raw = self.answer.raw_report
        if raw is not None:
            given = raw.get("fallbacks") or ()
            if any(one.get("reason") == FallbackReason.RENDERING_CHANGED for one in given if isinstance(one, dict)):
                self.runtime.capabilities.forget(self.root)
            return ()
        if self.plain:
            return ()
        self.runtime.capabilities.forget(self.root)
        return Capability(ready=False, detail="its answer came without a report").fallbacks
