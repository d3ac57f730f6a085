"""The plan of one turn: what to send, and why. Displays itself in a notebook."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from html import escape
from typing import Any

from leyline_agent.attribution import PlannedDirective
from leyline_agent.diff import TokenPlan
from leyline_agent.directives import DirectiveSet, Mode
from leyline_agent.edits import Message, MessageEdit, View
from leyline_agent.report import Fallback, Mark
from leyline_agent.sessions import HistoryKeys, TurnRecord
from leyline_agent.wire import SpliceRequest


class BaseSource(StrEnum):
    """Where the base of a turn comes from."""

    SERVED = "served"
    """The ids of an earlier turn, as the server holds them."""

    RECOMPUTED = "recomputed"
    """Rendered again from the history, because nobody remembers the ids; the server may hold others."""

    NONE = "none"
    """There is none: the first turn of a session, or no renderer."""


class RenderedBy(StrEnum):
    """Who made the token ids of a plan."""

    CLIENT = "client"
    """A renderer on this side."""

    SERVER = "server"
    """The server, on request; that takes longer."""

    NOBODY = "nobody"
    """No ids were needed, or none could be had: the server renders the messages when it serves the turn."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the turn should cost if the server still holds the base, in tokens of the prompt.

    `exact` are reused as they are, `amortized` reused at or behind a splice, `prefilled` computed.
    """

    prompt_tokens: int
    exact: int
    amortized: int
    prefilled: int


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """What a turn will send. Made by `Session.plan`, handed back to `Session.commit` or `abandon`.

    `view` is what the model sees. `input_ids` are the tokens of that view, None when the server is to render it itself:
    because no directive or mark needs them, or because they could not be had (then `fallbacks` says why).
    """

    history: HistoryKeys = field(repr=False)
    index: int
    view: View
    edits: tuple[MessageEdit, ...] = ()
    input_ids: list[int] | None = None
    base: array[int] = field(default_factory=lambda: array("q"), repr=False)
    base_source: BaseSource = BaseSource.NONE
    rendered_by: RenderedBy = RenderedBy.NOBODY
    tokens: TokenPlan | None = field(default=None, repr=False)
    directives: tuple[PlannedDirective, ...] = ()
    marks: tuple[Mark, ...] = ()
    previous: TurnRecord | None = field(default=None, repr=False)
    fallbacks: tuple[Fallback, ...] = ()
    reuse_replacements: bool = False
    plan_s: float = 0.0
    dry_run: bool = False

    @property
    def messages(self) -> list[Message]:
        """The messages to send: the view."""
        return list(self.view.messages)

    @property
    def mode(self) -> Mode:
        """FORGET as soon as one directive forgets."""
        return DirectiveSet(tuple(one.directive for one in self.directives)).mode

    @property
    def splice_request(self) -> SpliceRequest:
        """What is asked of a server with Leyline beside the prompt."""
        dp_rank = self.previous.dp_rank if self.previous is not None else None
        if self.tokens is None:
            return SpliceRequest(dp_rank=dp_rank)
        base = self.base[: self.tokens.base_len]
        marks = [mark for mark in self.marks if mark[0] < self.tokens.base_len]
        return SpliceRequest.build(
            base, self.tokens.directives, marks, reuse_replacements=self.reuse_replacements, dp_rank=dp_rank
        )

    def request_extras(self) -> dict[str, Any]:
        """Fields to add to a chat completion for a server with Leyline; empty for a dry run."""
        if self.dry_run:
            return {}
        extras: dict[str, Any] = {
            "custom_params": self.splice_request.custom_params(),
            "return_output_ids_in_sglext": True,
        }
        if self.input_ids is None:
            extras["return_input_ids_in_sglext"] = True
        else:
            extras["input_ids"] = self.input_ids
        return extras

    @property
    def predicted(self) -> Prediction | None:
        """The expected cost, None when the tokens are not known on this side."""
        if self.tokens is None or self.input_ids is None:
            return None
        prompt = len(self.input_ids)
        directives = self.tokens.directives
        first_mark = min((mark[0] for mark in self.marks), default=prompt)
        first = directives[0].start if directives else self.tokens.base_len
        exact = min(first, first_mark, self.tokens.base_len)
        kept = self.tokens.base_len - sum(d.removed_len for d in directives)
        reused = first if self.mode is Mode.FORGET else kept
        exact = min(exact, reused)
        return Prediction(prompt, exact, reused - exact, prompt - reused)

    def summary(self) -> Mapping[str, Any]:
        """The plan in a few words and numbers, without prompt text."""
        predicted = self.predicted
        return {
            "turn": self.index,
            "messages": len(self.view.messages),
            "edits": len(self.edits),
            "base": self.base_source.value,
            "directives": [f"{one.directive} ({one.cause})" for one in self.directives],
            "prompt tokens": predicted.prompt_tokens if predicted else None,
            "exact": predicted.exact if predicted else None,
            "amortized": predicted.amortized if predicted else None,
            "prefilled": predicted.prefilled if predicted else None,
            "fallbacks": [fallback.reason.value for fallback in self.fallbacks],
        }

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
            for name, value in self.summary().items()
        )
        return f"<table>{rows}</table>"
