"""The smallest client that speaks the splice protocol over raw HTTP, for tests that must see every field of an answer.

The server is told about edits by a `Conversation`, which keeps base and marks:

    server = SpliceClient("http://127.0.0.1:30000")
    talk = Conversation(server)
    talk.turn([1, 2, 3])
    answer = talk.turn([4, 5], Directive(1, 2, (9,)))     # edits the base, then adds two tokens
    answer.report.marks                                   # goes along with the next turn by itself
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from leyline_agent.directives import Directive, DirectiveSet
from leyline_agent.report import TurnReport
from leyline_agent.wire import KEY, Mark, SpliceRequest, report_of

if TYPE_CHECKING:
    from collections.abc import Sequence

Marks = tuple[Mark, ...]

VOCAB_SIZE = 320
"""Of the tiny models: small enough to ask for every log-prob of every step."""


@dataclass(frozen=True)
class Answer:
    """What the server said to one request."""

    prompt: tuple[int, ...] = field(repr=False)
    output: tuple[int, ...] = field(repr=False)
    cached: int
    report: TurnReport | None
    log_probs: list[list[float]] = field(repr=False)
    """One row of all log-probs for each sampled token; no rows if they were not asked for."""

    body: dict[str, Any] = field(repr=False)

    @property
    def base(self) -> list[int]:
        """What the server has served now: the base for the next turn's directives."""
        return [*self.prompt, *self.output]

    @property
    def reasons(self) -> list[str]:
        """Why directives were not applied; empty when all were."""
        return [fallback.reason.value for fallback in self.the_report.fallbacks]

    @property
    def mark_positions(self) -> list[int]:
        """Where in the prompt moved runs begin (other marks count rotations, or say where a run ended early)."""
        return [position for position, tag, depth in self.the_report.marks if tag and depth]

    @property
    def the_report(self) -> TurnReport:
        assert self.report is not None, f"the answer carries no report: {self.body.keys()}"
        return self.report


@dataclass(frozen=True)
class Pool:
    """The server's KV slots: every one is free, cached (in the tree and unlocked) or in use (locked)."""

    total: int
    free: int
    cached: int
    in_use: int

    @property
    def lost(self) -> int:
        """Slots that belong to nobody (or, when negative, to two at once)."""
        return self.total - self.free - self.cached - self.in_use


class SpliceClient:
    """A server's address and the requests that tests make. Not shared between threads: `again()` gives another."""

    def __init__(self, url: str, *, timeout_s: float = 120.0) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self.http = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False)

    def again(self) -> SpliceClient:
        return SpliceClient(self.url, timeout_s=self.timeout_s)

    def close(self) -> None:
        self.http.close()

    # --- answers ---

    def generate(
        self,
        prompt: Sequence[int],
        leyline: object = None,
        *,
        max_new_tokens: int = 8,
        log_probs: bool = True,
        **fields: Any,
    ) -> Answer:
        """One `/generate`. `leyline` is a SpliceRequest, or whatever a broken client would put in its place."""
        response = self.http.post("/generate", json=generate_body(prompt, leyline, max_new_tokens, log_probs, **fields))
        assert response.status_code == 200, f"HTTP {response.status_code}: {response.text}"
        return generate_answer(prompt, response.json())

    def chat(self, prompt: Sequence[int], leyline: object = None, *, max_new_tokens: int = 8) -> Answer:
        """One chat completion on `input_ids`."""
        response = self.http.post("/v1/chat/completions", json=chat_body(prompt, leyline, max_new_tokens))
        assert response.status_code == 200, f"HTTP {response.status_code}: {response.text}"
        body = response.json()
        return _chat_answer(prompt, body, body["sglext"]["output_ids"][0], body["usage"], report_of(body))

    def chat_stream(self, prompt: Sequence[int], leyline: object = None, *, max_new_tokens: int = 8) -> Answer:
        """The same, streamed; `body` holds the chunks."""
        request = chat_body(prompt, leyline, max_new_tokens)
        request |= {"stream": True, "stream_options": {"include_usage": True}}
        with self.http.stream("POST", "/v1/chat/completions", json=request) as response:
            assert response.status_code == 200, f"HTTP {response.status_code}: {response.read().decode()}"
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        extensions = [chunk["sglext"] for chunk in chunks if chunk.get("sglext")]
        output = next(extension["output_ids"][0] for extension in extensions if "output_ids" in extension)
        usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
        reports = [report for report in map(report_of, chunks) if report is not None]
        assert len(reports) <= 1, "a stream carries its report once"
        return _chat_answer(prompt, {"chunks": chunks}, output, usage, reports[0] if reports else None)

    def prepare(self, prompt: Sequence[int], leyline: object, **fields: Any) -> TurnReport:
        """Helper prefill and splice ahead of the turn that will bring `prompt`."""
        body = {"input_ids": list(prompt), KEY: _encoded(leyline), **fields}
        response = self.http.post("/leyline/prepare", json=body)
        assert response.status_code == 200, f"HTTP {response.status_code}: {response.text}"
        return TurnReport.model_validate(response.json()["report"])

    # --- the server itself ---

    def status(self) -> dict[str, Any]:
        response = self.http.get("/leyline/status")
        assert response.status_code == 200, f"HTTP {response.status_code}: {response.text}"
        return dict(response.json())

    def pool(self) -> Pool:
        counts = self.status()["pool"]
        return Pool(counts["total"], counts["free"], counts["cached"], counts["in_use"])

    def idle_pool(self, *, timeout_s: float = 15.0) -> Pool:
        """The pool once nothing is in use any more, or as it is when that takes too long."""
        deadline = time.monotonic() + timeout_s
        while (pool := self.pool()).in_use and time.monotonic() < deadline:
            time.sleep(0.05)
        return pool

    def flush(self) -> None:
        """Empty the cache. The server refuses while it still has a request."""
        deadline = time.monotonic() + 15.0
        while (response := self.http.post("/flush_cache")).status_code != 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert response.status_code == 200, response.text


def generate_body(
    prompt: Sequence[int], leyline: object = None, max_new_tokens: int = 8, log_probs: bool = True, **fields: Any
) -> dict[str, Any]:
    """The JSON of a greedy `/generate` request."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    if leyline is not None:
        sampling["custom_params"] = {KEY: _encoded(leyline)}
    body: dict[str, Any] = {"input_ids": list(prompt), "sampling_params": sampling}
    if log_probs:
        body |= {"return_logprob": True, "token_ids_logprob": list(range(VOCAB_SIZE))}
    return body | fields


def generate_answer(prompt: Sequence[int], body: dict[str, Any]) -> Answer:
    meta = body["meta_info"]
    rows = [[entry[0] for entry in row] for row in meta.get("output_token_ids_logprobs") or []]
    report = meta.get(KEY)
    return Answer(
        prompt=tuple(prompt),
        output=tuple(body["output_ids"]),
        cached=meta["cached_tokens"],
        report=None if report is None else TurnReport.model_validate(report),
        log_probs=rows,
        body=body,
    )


def chat_body(prompt: Sequence[int], leyline: object = None, max_new_tokens: int = 8) -> dict[str, Any]:
    """The JSON of a greedy chat completion on `input_ids`; the messages are there only because they must be."""
    body: dict[str, Any] = {
        "model": "any",
        "messages": [{"role": "user", "content": "see input_ids"}],
        "input_ids": list(prompt),
        "temperature": 0,
        "max_tokens": max_new_tokens,
        "ignore_eos": True,
        "return_output_ids_in_sglext": True,
    }
    if leyline is not None:
        body["custom_params"] = {KEY: _encoded(leyline)}
    return body


def _chat_answer(
    prompt: Sequence[int],
    body: dict[str, Any],
    output: Sequence[int],
    usage: dict[str, Any],
    report: dict[str, Any] | None,
) -> Answer:
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        prompt=tuple(prompt),
        output=tuple(output),
        cached=details.get("cached_tokens", 0),
        report=None if report is None else TurnReport.model_validate(report),
        log_probs=[],
        body=body,
    )


def _encoded(leyline: object) -> object:
    return leyline.encode() if isinstance(leyline, SpliceRequest) else leyline


class Conversation:
    """A session as an agent leads it: the base grows by each turn, marks and worker travel from report to request.

    `fields` go into every request (`cache_salt`, say).
    """

    def __init__(self, server: SpliceClient, **fields: Any) -> None:
        self.server = server
        self.fields = fields
        self.base: list[int] = []
        self.marks: Marks = ()
        self.dp_rank: int | None = None

    def fork(self) -> Conversation:
        """Another conversation with the same past."""
        other = type(self)(self.server, **self.fields)
        other.base, other.marks, other.dp_rank = list(self.base), self.marks, self.dp_rank
        return other

    def request(self, *directives: Directive) -> SpliceRequest:
        """What the next turn would say about `directives`, which are in coordinates of the base."""
        return SpliceRequest.build(self.base, DirectiveSet(directives), self.marks, dp_rank=self.dp_rank)

    def prompt(self, new_tokens: Sequence[int], *directives: Directive) -> list[int]:
        return [*DirectiveSet(directives).apply(self.base), *new_tokens]

    def turn(self, new_tokens: Sequence[int], *directives: Directive, max_new_tokens: int = 8, **fields: Any) -> Answer:
        """Apply `directives` to the base, add `new_tokens`, take the answer as the next base."""
        prompt = self.prompt(new_tokens, *directives)
        request = self.request(*directives)
        answer = self.server.generate(prompt, request, max_new_tokens=max_new_tokens, **self.fields | fields)
        self.commit(answer)
        return answer

    def commit(self, answer: Answer) -> None:
        """Go on from `answer`."""
        self.base, self.marks, self.dp_rank = answer.base, answer.the_report.marks, answer.the_report.dp_rank
