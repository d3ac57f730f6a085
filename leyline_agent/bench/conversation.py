"""One session of one arm against a server: each step of a script is sent, streamed and measured."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import openai

from leyline_agent.bench.arms import Arm, InMode
from leyline_agent.bench.measured import MeasuredTurn
from leyline_agent.bench.script import Script, Scripted, Step
from leyline_agent.integrations.openai import Leyline, OpenAI
from leyline_agent.integrations.openai.capability import CapabilityCache
from leyline_agent.integrations.openai.served_tokenizer import ServedTokenizers

if TYPE_CHECKING:
    from leyline_agent.client_report import ClientReport
    from leyline_agent.integrations.openai import ClientSession


@dataclass(frozen=True, slots=True)
class Settings:
    """How requests are made: the same for every arm.

    `output_tokens` is the exact length of each answer if `ignore_eos`, otherwise the most it can have. A step that
    takes longer than `timeout_s` is an error of that step.
    """

    base_url: str
    model: str = "default"
    output_tokens: int = 16
    ignore_eos: bool = True
    timeout_s: float = 600.0
    api_key: str = "none"
    tokenizers: ServedTokenizers = field(default_factory=ServedTokenizers, repr=False, compare=False)
    capabilities: CapabilityCache = field(default_factory=CapabilityCache, repr=False, compare=False)
    """Shared by all sessions, as in an application: each of them has a client, because each has edits of its own."""

    def client_options(self) -> dict[str, Any]:
        """Arguments for an OpenAI client. Retries would hide errors and spoil times."""
        return {"base_url": self.base_url, "api_key": self.api_key, "max_retries": 0, "timeout": self.timeout_s}


def converse(arm: Arm, script: Script, settings: Settings, salt: str) -> Generator[MeasuredTurn, None, None]:
    """Play a script; yields each turn as it is measured. `salt` keeps its cache apart from that of other sessions.

    A turn that fails is yielded with its error, and the session ends there: what follows would not be comparable.
    """
    conversation = _LeylineConversation if arm.has_leyline else _PlainConversation
    with conversation(arm, script, settings, salt) as session:
        for step in script.steps:
            turn = session.play(step)
            yield turn
            if turn.error:
                return


@dataclass(slots=True)
class _Stream:
    """What a streamed answer said, and when."""

    first_ms: float = 0.0
    total_ms: float = 0.0
    text: str = ""
    output_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    report: ClientReport | None = None


@dataclass(slots=True)
class _PlainConversation:
    """The stock client: the whole history, or the policy's view of it."""

    arm: Arm
    script: Script
    settings: Settings
    salt: str
    client: openai.OpenAI = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.client = openai.OpenAI(**self.settings.client_options())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def play(self, step: Step) -> MeasuredTurn:
        messages = step.messages if self.arm is Arm.NONE else step.view
        try:
            answer = _read(self.client, self._request(messages))
        except openai.OpenAIError as err:
            return MeasuredTurn(self.script.id, step.index, step.edited, error=f"{type(err).__name__}: {err}")
        return MeasuredTurn(
            self.script.id,
            step.index,
            step.edited,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            prefilled_tokens=answer.prompt_tokens - answer.cached_tokens,
            ttft_ms=answer.first_ms,
            e2e_ms=answer.total_ms,
            output_ids=answer.output_ids,
            output_text=answer.text,
        )

    def _request(self, messages: Any) -> dict[str, Any]:
        return _request(self.settings, self.script, messages, self.salt)


@dataclass(slots=True)
class _LeylineConversation:
    """The drop-in client: the original history, with the policy behind the client."""

    arm: Arm
    script: Script
    settings: Settings
    salt: str
    client: OpenAI = field(init=False, repr=False)
    session: ClientSession = field(init=False, repr=False)
    last_prompt: int = 0

    def __post_init__(self) -> None:
        policy = InMode(Scripted.of(self.script), self.arm.mode)
        leyline = Leyline(policy, tokenizers=self.settings.tokenizers, capabilities=self.settings.capabilities)
        self.client = OpenAI(leyline=leyline, **self.settings.client_options())
        self.session = self.client.session(self.salt)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()
        self.client.close()

    def play(self, step: Step) -> MeasuredTurn:
        try:
            prepared = self._prepare(step) if self.arm is Arm.PREPARE else 0
            answer = _read(self.session, _request(self.settings, self.script, step.messages, self.salt))
        except openai.OpenAIError as err:
            return MeasuredTurn(self.script.id, step.index, step.edited, error=f"{type(err).__name__}: {err}")
        report = answer.report
        if report is None or not report.served:
            reasons = ", ".join(fallback.detail for fallback in report.fallbacks) if report else "no report"
            return MeasuredTurn(self.script.id, step.index, step.edited, error=f"not served by Leyline: {reasons}")
        replaced = sum(d.replacement_len for d in report.directives)
        delta = replaced - sum(d.end - d.start for d in report.directives)
        new_tokens = report.prompt_tokens - self.last_prompt - delta
        self.last_prompt = report.prompt_tokens
        return MeasuredTurn(
            self.script.id,
            step.index,
            step.edited,
            prompt_tokens=report.prompt_tokens,
            cached_tokens=report.exact,
            amortized_tokens=report.amortized,
            prefilled_tokens=report.prefilled,
            rotated_tokens=report.rotated,
            prepared_tokens=prepared,
            replacement_tokens=replaced,
            new_tokens=new_tokens,
            ttft_ms=answer.first_ms,
            e2e_ms=answer.total_ms,
            plan_ms=report.plan_s * 1000,
            splice_ms=report.splice_s * 1000,
            helper_ms=report.helper_s * 1000,
            output_ids=answer.output_ids,
            output_text=answer.text,
            fallbacks=tuple(fallback.reason.value for fallback in report.fallbacks),
        )

    def _prepare(self, step: Step) -> int:
        """Send the edits ahead, as an agent does while its tools run; returns the tokens that this prefilled."""
        if not step.ahead_len:
            return 0
        options: dict[str, Any] = {"model": self.settings.model, "extra_body": {"cache_salt": self.salt}}
        if self.script.tools:
            options["tools"] = list(self.script.tools)
        report = self.session.prepare(list(step.messages[: step.ahead_len]), **options)
        return report.prefilled if report is not None else 0


def _request(settings: Settings, script: Script, messages: Any, salt: str) -> dict[str, Any]:
    request: dict[str, Any] = {
        "model": settings.model,
        "messages": list(messages),
        "max_tokens": settings.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {
            "cache_salt": salt,
            "ignore_eos": settings.ignore_eos,
            "return_output_ids_in_sglext": True,
        },
    }
    if script.tools:
        request["tools"] = list(script.tools)
    return request


def _read(client: Any, request: Mapping[str, Any]) -> _Stream:
    """Send a request and read its stream to the end, timed from before the client begins to work on it."""
    answer = _Stream()
    started = time.perf_counter()
    stream = client.chat.completions.create(**request)
    for chunk in stream:
        if chunk.choices and not answer.first_ms:
            answer.first_ms = (time.perf_counter() - started) * 1000
        for choice in chunk.choices:
            answer.text += choice.delta.content or ""
        if chunk.usage is not None:
            answer.prompt_tokens = chunk.usage.prompt_tokens
            answer.cached_tokens = getattr(chunk.usage.prompt_tokens_details, "cached_tokens", None) or 0
        extension = (chunk.model_extra or {}).get("sglext")
        if extension and extension.get("output_ids"):
            answer.output_ids = tuple(extension["output_ids"][0])
    answer.total_ms = (time.perf_counter() - started) * 1000
    answer.report = getattr(stream, "leyline", None)
    return answer
