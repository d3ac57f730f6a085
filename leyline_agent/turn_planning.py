"""One run of `Session.plan`: decide, render, find the base, diff, attribute."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from leyline_agent.attribution import EditChange, attribute, changed_edits, settle
from leyline_agent.directives import Mode
from leyline_agent.edits import Message, MessageEdit, Turn, View, apply_edits, estimate_tokens
from leyline_agent.errors import RenderError
from leyline_agent.planner import EditPlan, plan_edits
from leyline_agent.policy import Policy
from leyline_agent.renderers import Rendered, Renderer
from leyline_agent.report import Fallback, FallbackReason, Mark
from leyline_agent.retokenize import split_at_barrier
from leyline_agent.rewrite import Relocation
from leyline_agent.sessions import HistoryKeys, SessionStore, TurnRecord
from leyline_agent.token_changes import Cause, Change, token_changes
from leyline_agent.turn_plan import BaseSource, RenderedBy, TurnPlan

if TYPE_CHECKING:
    from leyline_agent.manager import ContextManager

Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Previous:
    """The turn before, as seen from this turn's history.

    `edits` are its edits and `served_count` the length of its history, both in coordinates of this turn's messages.
    `rewritten`: its messages are not a prefix of these; the caller changed some.
    """

    record: TurnRecord
    edits: tuple[MessageEdit, ...]
    served_count: int
    rewritten: bool = False

    @classmethod
    def find(cls, store: SessionStore, history: HistoryKeys, messages: Sequence[Message]) -> Previous | None:
        record = store.find(history)
        known = record.message_count if record is not None else 0
        answers = sum(message.get("role") == "assistant" for message in messages[known:])
        rewritten = None
        if answers > (1 if record is not None else 0) and history.session_id is not None:
            # Turns are missing between. Looked for only in a named session: among unnamed ones, a similar history may
            # be that of another agent.
            rewritten = store.find_rewritten(history)
        if rewritten is not None and (record is None or rewritten.index > record.index):
            moved = Relocation(rewritten.history.digests, history.digests)
            return cls(rewritten, moved.moved(rewritten.edits), moved.served_count, rewritten=True)
        return cls(record, record.edits, record.message_count) if record is not None else None


@dataclass(frozen=True, slots=True)
class Base:
    """The tokens that a turn is diffed against, where they come from, and what the policy changed since."""

    token_ids: array[int]
    source: BaseSource
    changes: Sequence[EditChange]
    served_count: int
    """Messages of this turn's history that the base covers."""

    marks: tuple[Mark, ...] = ()


@dataclass(slots=True)
class TurnPlanning:
    """Plans one turn. Used once; nothing in it outlives the plan."""

    manager: ContextManager
    policy: Policy
    renderer: Renderer | None
    namespace: str
    messages: tuple[Message, ...]
    tools: Tools
    template_kwargs: Mapping[str, Any] | None
    options: Mapping[str, Any]
    previous: Previous | None = None
    fallbacks: list[Fallback] = field(default_factory=list)

    def run(self, *, use_tokens: bool, dry_run: bool) -> TurnPlan:
        """The plan. Whatever cannot be done is left out of it and said in its fallbacks."""
        started = time.perf_counter()
        history = HistoryKeys.of(self.messages, self.namespace)
        self.previous = previous = Previous.find(self.manager.store, history, self.messages)
        decided = self._decide(self._turn())
        plan = TurnPlan(
            history=history,
            index=previous.record.index + 1 if previous else 0,
            view=decided.view,
            edits=decided.edits,
            previous=previous.record if previous else None,
            dry_run=dry_run,
        )
        if use_tokens:
            try:
                plan = self._with_tokens(plan)
            except RenderError as err:
                self._fall_back(FallbackReason.RENDERER_UNAVAILABLE, str(err))
        return replace(plan, fallbacks=tuple(self.fallbacks), plan_s=time.perf_counter() - started)

    def _fall_back(self, reason: FallbackReason, detail: str) -> None:
        self.fallbacks.append(Fallback(reason=reason, detail=detail))

    # what the model sees

    def _turn(self) -> Turn:
        previous, config = self.previous, self.manager.config
        idle_s = self.manager.clock() - previous.record.ended_s if previous else 0.0
        return Turn(
            messages=self.messages,
            index=previous.record.index + 1 if previous else 0,
            edits=previous.edits if previous else (),
            usage=previous.record.usage if previous else None,
            idle_s=idle_s,
            cache_is_cold=config.cache_ttl_s is not None and idle_s > config.cache_ttl_s,
            tools=tuple(self.tools or ()),
            count_tokens=self.renderer.count if self.renderer is not None else estimate_tokens,
        )

    def _decide(self, turn: Turn) -> EditPlan:
        """The policy's edits that hold together; where one does not, what was in force there on the turn before."""
        try:
            plan = plan_edits(turn.messages, tuple(self.policy.decide(turn)))
        except Exception as err:  # noqa: BLE001 - a policy is somebody else's code; the turn goes on without it
            self._fall_back(FallbackReason.POLICY_FAILED, f"{self.policy.name}: {type(err).__name__}: {err}")
            return plan_edits(turn.messages, turn.edits)
        for refusal in plan.refused:
            self._fall_back(FallbackReason.HISTORY_REFUSED, refusal.reason)
        held = {_part_of(edit) for edit in plan.edits}
        refused = {_part_of(edit) for refusal in plan.refused for edit in refusal.edits} - held
        last_good = [edit for edit in turn.edits if _part_of(edit) in refused]
        combined = plan_edits(turn.messages, [*plan.edits, *last_good]) if last_good else plan
        return plan if combined.refused else combined

    # what the server gets

    def _with_tokens(self, plan: TurnPlan) -> TurnPlan:
        """The plan with its tokens, if a directive or a mark may need them; else the server renders the view itself."""
        problem = _unrenderable(plan.view.messages)
        if problem is not None:
            self._fall_back(FallbackReason.REQUEST_UNSUPPORTED, problem)
            return plan
        if self.previous is not None and len(self.previous.record.prompt_ids):
            changes = changed_edits(self.previous.edits, plan.edits, self.previous.served_count)
            if not (changes or self.previous.rewritten or self.previous.record.marks):
                template_mode = self._resolved(self.manager.config.template_mode, plan, ())
                if template_mode is Mode.FORGET:
                    return plan
            rendered = self._render(plan.view.messages)
            record = self.previous.record
            covered = self.previous.served_count + (1 if record.outputs else 0)
            base = Base(record.base_for(rendered.token_ids), BaseSource.SERVED, changes, covered, record.marks)
        else:
            recomputed = self._recomputed(plan)
            if recomputed is None:
                return plan
            rendered, base = self._render(plan.view.messages), recomputed
        return self._with_directives(plan, rendered, base)

    def _render(self, messages: Sequence[Message]) -> Rendered:
        if self.renderer is None:
            raise RenderError("no renderer; give the ContextManager one")
        return self.renderer.render(
            messages, tools=self.tools, template_kwargs=self.template_kwargs, options=self.options
        )

    def _recomputed(self, plan: TurnPlan) -> Base | None:
        """The prompt of the turn before as it must have been, when nobody knows its ids.

        What is lost: the sampled answer and the marks, which are prefilled again. None if there was no turn before or
        nothing in it is edited, so that the server's own prefix match does as well.
        """
        if self.previous is not None:
            count, before = self.previous.served_count, self.previous.edits
            if self.previous.rewritten:
                return None
        else:
            answers = [k for k, message in enumerate(self.messages) if message.get("role") == "assistant"]
            if not answers or not plan.edits:
                return None
            count = answers[-1]
            before = self._decide(Turn(messages=self.messages[:count], tools=tuple(self.tools or ()))).edits
        changes = changed_edits(before, plan.edits, count)
        if not changes:
            return None
        if not self.manager.config.recompute_base:
            self._fall_back(FallbackReason.BASE_UNKNOWN, "the tokens of the turn before are not known on this side")
            return None
        rendered = self._render(apply_edits(self.messages[:count], before).messages)
        return Base(rendered.token_ids, BaseSource.RECOMPUTED, changes, count)

    def _with_directives(self, plan: TurnPlan, rendered: Rendered, base: Base) -> TurnPlan:
        config, edited = self.manager.config, rendered.token_ids
        changes = token_changes(base.token_ids, edited, config.min_run, _new_from(plan.view, rendered, base))
        changes = attribute(changes, base.changes, plan.view, rendered, len(base.token_ids), self.manager.choose_mode)
        template_mode = self._resolved(config.template_mode, plan, base.changes)
        if template_mode is Mode.AMORTIZE:
            changes = self._without_retokenizations(changes, base.token_ids, edited)
        cause, mode = Cause.TEMPLATE, template_mode
        if self.previous is not None and self.previous.rewritten:
            cause, mode = Cause.CALLER, self._resolved(config.rewrite_mode, plan, base.changes)
        changes = [one if one.cause is Cause.POLICY else replace(one, cause=cause, mode=mode) for one in changes]
        settled = settle(base.token_ids, edited, changes)
        return replace(
            plan,
            input_ids=settled.input_ids,
            base=base.token_ids,
            base_source=base.source,
            rendered_by=RenderedBy.SERVER if rendered.by_server else RenderedBy.CLIENT,
            tokens=settled.tokens,
            directives=settled.directives,
            marks=base.marks,
            reuse_replacements=config.reuse_replacements,
        )

    def _resolved(self, mode: Mode, plan: TurnPlan, changes: Sequence[EditChange]) -> Mode:
        """AUTO, for edits that no policy asked for: AMORTIZE if the policy amortizes anyway, FORGET if all is exact."""
        if mode is not Mode.AUTO:
            return mode
        marked = self.previous is not None and bool(self.previous.record.marks)
        modes = [*(edit.mode for edit in plan.edits), *(change.mode for change in changes)]
        return Mode.AMORTIZE if marked or any(one is not Mode.FORGET for one in modes) else Mode.FORGET

    def _without_retokenizations(self, changes: list[Change], base: array[int], edited: array[int]) -> list[Change]:
        """Changes less those where the server's own tokens say the same text; of the last, only what is new stays."""
        assert self.renderer is not None, "nothing is rendered without one"
        kept: list[Change] = []
        for change in changes:
            new_end = change.new_end
            if change.end == len(base):
                new_end = split_at_barrier(base, change.start, edited, change.new_start) or new_end
            spans = (change.start, change.end), (change.new_start, new_end)
            if change.mode is Mode.FORGET or not self.manager.retokenizations.same_text(
                base, spans[0], edited, spans[1], self.renderer, self.namespace
            ):
                kept.append(change)
            elif new_end < change.new_end:
                kept.append(replace(change, start=len(base), new_start=new_end))
        return kept


def _new_from(view: View, rendered: Rendered, base: Base) -> int | None:
    """Where the first message behind the base begins in the rendered view; None if the renderer cannot tell."""
    first = next(
        (k for k, source in enumerate(view.sources) if source is not None and source >= base.served_count), None
    )
    if first is None:
        return len(rendered.token_ids)
    try:
        return rendered.span_of(first)[0]
    except RenderError:
        return None


def _part_of(edit: MessageEdit) -> tuple[object, ...]:
    return edit.index, edit.part, edit.call


def _unrenderable(messages: Sequence[Message]) -> str | None:
    """Why these messages cannot be sent as token ids: media travels beside the tokens."""
    for index, message in enumerate(messages):
        content = message.get("content")
        parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
        kinds = {part.get("type") for part in parts if isinstance(part, Mapping)} - {"text"}
        if kinds:
            return f"message {index} has content of type {', '.join(map(str, kinds))}, which token ids cannot carry"
    return None
