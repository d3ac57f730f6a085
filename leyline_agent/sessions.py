"""What is remembered from turn to turn: for each served turn, the tokens the server holds and the edits behind them.

A turn is found again by a hash chain over the *original* messages, so nobody has to name a session: agents append to
their history, and the longest known prefix of a history is the turn before it. Forks, interleaved conversations and
retries are the same lookup. A session id, where given, is part of the chain's seed.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from leyline_agent.diff import equal_run_len
from leyline_agent.edits import Message, MessageEdit, Usage, canonical
from leyline_agent.report import Mark

_DIGEST_BYTES = 16
_SEPARATOR = "\x1f"
_MAX_OUTPUTS = 8  # different answers to one prompt that are remembered
_RECENT_MESSAGES = 16  # of a history, looked at for the end of a turn whose beginning was rewritten
_LAST_MESSAGES = 3  # of a turn, by which it is found then: the very last may be rewritten too


@dataclass(frozen=True, slots=True)
class HistoryKeys:
    """A history by content: a digest of each message, and a key of each prefix (the shortest first)."""

    namespace: str
    digests: tuple[bytes, ...]
    prefixes: tuple[bytes, ...]

    @classmethod
    def of(cls, messages: Sequence[Message], namespace: str) -> HistoryKeys:
        digests = tuple(_digest(canonical(message).encode()) for message in messages)
        key = _digest(namespace.encode())
        prefixes = []
        for digest in digests:
            key = _digest(key + digest)
            prefixes.append(key)
        return cls(namespace, digests, tuple(prefixes))

    @property
    def session_id(self) -> str | None:
        """The name of the session, None when it goes by its messages alone."""
        return self.namespace.partition(_SEPARATOR)[2] or None

    @property
    def key(self) -> bytes:
        """The key of the whole history."""
        return self.prefixes[-1] if self.prefixes else b""


def namespace_of(scope: str, session_id: str | None) -> str:
    """What turns are kept under: their scope (model, salt, ...) and the session's name, if it has one."""
    return f"{scope}{_SEPARATOR}{session_id or ''}"


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One served turn.

    `history` is the original history it was made for, `edits` the edits in force. `prompt_ids` is the prompt the server
    holds, empty when it is not known; `outputs` are the token ids sampled after it, one for each answer. `marks` say
    where in the prompt amortized KV begins. `ended_s` is on the clock of the manager. `dp_rank` is the worker of the
    server that holds the tokens, where it has several. `parent` is the key of the turn whose tokens it was made from.
    """

    history: HistoryKeys
    index: int
    edits: tuple[MessageEdit, ...]
    prompt_ids: array[int]
    outputs: tuple[array[int], ...] = ()
    marks: tuple[Mark, ...] = ()
    usage: Usage | None = None
    ended_s: float = 0.0
    dp_rank: int | None = None
    parent: bytes = b""

    @property
    def message_count(self) -> int:
        return len(self.history.digests)

    @property
    def token_count(self) -> int:
        return len(self.prompt_ids) + sum(len(output) for output in self.outputs)

    def base_for(self, edited: array[int]) -> array[int]:
        """The prompt and the one of its answers that `edited` goes on from (the longest common prefix decides)."""
        if not self.outputs:
            return self.prompt_ids
        start = len(self.prompt_ids)

        def shared(output: array[int]) -> int:
            limit = min(len(output), max(0, len(edited) - start))
            return equal_run_len(output, 0, edited, start, limit)

        # The answer may begin elsewhere in `edited` when the prompt was edited; then any of them is as good.
        return self.prompt_ids + max(self.outputs, key=shared)

    def merged_with(self, older: TurnRecord) -> TurnRecord:
        """This record with the answers of an older one for the same prompt (`n` choices, several threads).

        A turn of which no tokens came back (a stream that was closed early) takes nothing away from what is known.
        """
        if not self.prompt_ids and older.prompt_ids and older.edits == self.edits:
            return replace(older, ended_s=self.ended_s)
        if older.prompt_ids != self.prompt_ids:
            return self
        outputs = list(self.outputs)
        outputs.extend(output for output in older.outputs if output not in outputs)
        return replace(self, outputs=tuple(outputs[:_MAX_OUTPUTS]))


class SessionStore:
    """Turn records by key, least recently used first out. All methods may be called from any thread."""

    def __init__(self, max_turns: int, max_tokens: int) -> None:
        self.max_turns, self.max_tokens = max_turns, max_tokens
        self._records: OrderedDict[bytes, TurnRecord] = OrderedDict()
        self._by_message: dict[tuple[str, bytes], bytes] = {}
        self._token_count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def token_count(self) -> int:
        """Token ids held."""
        return self._token_count

    def find(self, history: HistoryKeys) -> TurnRecord | None:
        """The turn of the longest known prefix of `history`, None when no prefix is known."""
        with self._lock:
            for key in reversed(history.prefixes):
                record = self._records.get(key)
                if record is not None:
                    self._records.move_to_end(key)
                    return record
        return None

    def find_rewritten(self, history: HistoryKeys) -> TurnRecord | None:
        """The turn whose last messages are among the recent ones of `history` and most of whose messages are in it.

        This finds the turn before when somebody changed, summarized or dropped messages at the history's begin.
        """
        known = set(history.digests)
        with self._lock:
            for digest in reversed(history.digests[-_RECENT_MESSAGES:]):
                record = self._records.get(self._by_message.get((history.namespace, digest), b""))
                if record is not None:
                    shared = sum(one in known for one in record.history.digests)
                    if 2 * shared >= min(record.message_count, len(history.digests)):
                        return record
        return None

    def put(self, record: TurnRecord) -> None:
        """Remember a turn; a turn of the same history is replaced, its other answers are kept."""
        with self._lock:
            older = self._records.pop(record.history.key, None)
            if older is not None:
                self._token_count -= older.token_count
                record = record.merged_with(older)
            self._records[record.history.key] = record
            for digest in record.history.digests[-_LAST_MESSAGES:]:
                self._by_message[record.history.namespace, digest] = record.history.key
            self._token_count += record.token_count
            while len(self._records) > 1 and (
                len(self._records) > self.max_turns or self._token_count > self.max_tokens
            ):
                self._remove(next(iter(self._records)))

    def drop(self, namespace: str) -> list[TurnRecord]:
        """Forget all turns of `namespace` and return them, the last one last."""
        with self._lock:
            keys = [key for key, record in self._records.items() if record.history.namespace == namespace]
            return [self._remove(key) for key in keys]

    def drop_session(self, session_id: str) -> list[TurnRecord]:
        """Forget all turns of a named session, in every scope, and return them, the last one last."""
        with self._lock:
            keys = [key for key, record in self._records.items() if record.history.session_id == session_id]
            return [self._remove(key) for key in keys]

    def _remove(self, key: bytes) -> TurnRecord:
        record = self._records.pop(key)
        self._token_count -= record.token_count
        for digest in record.history.digests[-_LAST_MESSAGES:]:
            if self._by_message.get((record.history.namespace, digest)) == key:
                del self._by_message[record.history.namespace, digest]
        return record
