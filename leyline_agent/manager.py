"""The context manager: from a history and a policy to what a turn sends, and from its answer to what is remembered."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from leyline_agent.attribution import ModeChooser, always_amortize
from leyline_agent.config import Config
from leyline_agent.directives import Mode
from leyline_agent.edits import Message, Usage
from leyline_agent.policy import MessageFunction, Policy, as_policy
from leyline_agent.renderers import Renderer
from leyline_agent.report import TurnReport
from leyline_agent.retokenize import Retokenizations
from leyline_agent.sessions import SessionStore, TurnRecord, namespace_of
from leyline_agent.turn_plan import TurnPlan
from leyline_agent.turn_planning import Tools, TurnPlanning


class ContextManager:
    """Plans and commits the turns of any number of sessions. May be shared by threads and tasks.

    `policy` decides what the model sees; None keeps everything. `renderer` turns messages into the server's tokens;
    without one, or while it fails, requests go out plain. `choose_mode` decides for edits of mode AUTO.
    """

    def __init__(
        self,
        policy: Policy | MessageFunction | None = None,
        renderer: Renderer | None = None,
        config: Config | None = None,
        *,
        choose_mode: ModeChooser = always_amortize,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = as_policy(policy)
        self.renderer = renderer
        self.config = config or Config()
        self.choose_mode = choose_mode
        self.clock = clock
        self.store = SessionStore(self.config.max_turns, self.config.max_tokens)
        self.retokenizations = Retokenizations()

    def session(
        self,
        session_id: str | None = None,
        *,
        policy: Policy | MessageFunction | None = None,
        renderer: Renderer | None = None,
        scope: str = "",
    ) -> Session:
        """A handle on one session. Handles are cheap: what they know lives in the manager.

        Without an id, a turn finds the one before it by its messages. `scope` keeps apart what must not share a base:
        model, LoRA, cache salt. `policy` and `renderer` replace the manager's for this session.
        """
        chosen = self.policy if policy is None else as_policy(policy)
        return Session(self, session_id, chosen, renderer or self.renderer, scope)


@dataclass(frozen=True, slots=True)
class Session:
    """The turns of one conversation. As a `with` block it forgets a named session at the end."""

    manager: ContextManager = field(repr=False)
    session_id: str | None
    policy: Policy
    renderer: Renderer | None = field(repr=False)
    scope: str = ""

    @property
    def namespace(self) -> str:
        """What the session's turns are kept under."""
        return namespace_of(self.scope, self.session_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> list[TurnRecord]:
        """Forget the turns of a named session and return them, the last one last."""
        return self.manager.store.drop(self.namespace) if self.session_id is not None else []

    def plan(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = None,
        template_kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        use_tokens: bool = True,
        dry_run: bool = False,
    ) -> TurnPlan:
        """What this turn should send for the original history `messages`, which is not changed.

        `options` are other fields of the request that decide the prompt's tokens (`tool_choice`, `reasoning_effort`).
        `use_tokens=False` plans for a server without Leyline: the view only. A `dry_run` is planned whole, adds nothing
        to the request and is not remembered. Never raises for what a policy does.
        """
        planning = TurnPlanning(
            manager=self.manager,
            policy=self.policy,
            renderer=self.renderer,
            namespace=self.namespace,
            messages=tuple(messages),
            tools=tools,
            template_kwargs=template_kwargs,
            options=options or {},
        )
        return planning.run(use_tokens=use_tokens, dry_run=dry_run)

    def commit(
        self,
        plan: TurnPlan,
        *,
        prompt_ids: Sequence[int] | None = None,
        output_ids: Sequence[Sequence[int]] = (),
        report: TurnReport | None = None,
        usage: Usage | None = None,
        partial: bool = False,
    ) -> None:
        """Remember what the server holds after a turn: its prompt, what was sampled (a list a choice), its marks.

        `prompt_ids` are those the server reported, for a plan without `input_ids`. May be called again with more facts.
        `partial`: the answer did not arrive whole. A partial turn that asked for amortized KV leaves the base as it was
        before: where its marks lie is not known, and the old base still is.
        """
        if plan.dry_run:
            return
        asked = bool(plan.marks or plan.directives) and plan.mode is Mode.AMORTIZE
        if partial and asked and plan.previous is not None:
            return
        ids = plan.input_ids if plan.input_ids is not None else prompt_ids
        self.manager.store.put(
            TurnRecord(
                history=plan.history,
                index=plan.index,
                edits=plan.edits,
                prompt_ids=array("q", ids or ()),
                outputs=tuple(array("q", output) for output in output_ids if output) if ids else (),
                marks=report.marks if report is not None and ids else (),
                usage=usage,
                ended_s=self.manager.clock(),
                dp_rank=report.dp_rank if report is not None else None,
                parent=plan.previous.history.key if plan.previous is not None else b"",
            )
        )

    def abandon(self, plan: TurnPlan) -> None:
        """Say that a plan was not served (an error, a cancelled request): the last committed turn stays the base."""
