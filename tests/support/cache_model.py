"""A naive model of what a prefix cache may hold: every sequence ever served, kept in a list, minus what was forgotten.

It knows nothing of slots, trees or eviction, so it only bounds: a request can never reuse more than the longest prefix
that was served under the same salt and, where KV is amortized, under the same tags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splice_client import Marks

Key = tuple[tuple[int, int], ...]
"""Tokens with the tag that each carries, 0 for none."""


def key(tokens: Sequence[int], marks: Marks = ()) -> Key:
    tags = {position: tag for position, tag, _ in marks}
    return tuple((token, tags.get(position, 0)) for position, token in enumerate(tokens))


def common_prefix_len(one: Key, other: Key) -> int:
    for position, (here, there) in enumerate(zip(one, other, strict=False)):
        if here != there:
            return position
    return min(len(one), len(other))


@dataclass
class Served:
    """One sequence that may be cached, who had it served, and whether what was sampled after it is unknown."""

    owner: object
    salt: str | None
    key: Key
    open_ended: bool = False


class CacheModel:
    """What may be cached, by what was served since the last flush."""

    def __init__(self) -> None:
        self.served: list[Served] = []
        self.tokens_served = 0
        """At most so many slots were filled since the last flush; below the pool's size nothing was evicted."""
        self.only_plain = True
        """Whether all that was served since the last flush is surely cached, barring eviction."""

    def flush(self) -> None:
        self.__init__()  # type: ignore[misc]  # an empty cache is a new one

    def serve(
        self, owner: object, salt: str | None, tokens: Sequence[int], marks: Marks = (), *, slots: int | None = None
    ) -> None:
        """`tokens` were served: a prompt and all that was sampled but the last, whose KV nobody computed."""
        self.served.append(Served(owner, salt, key(tokens, marks)))
        self.tokens_served += len(tokens) if slots is None else slots

    def serve_unfinished(self, owner: object, salt: str | None, tokens: Sequence[int]) -> None:
        """A request whose end nobody saw: all, a part or nothing of it may be cached, and any continuation."""
        self.served.append(Served(owner, salt, key(tokens), open_ended=True))
        self.tokens_served += 3 * len(tokens)
        self.only_plain = False

    def forget(self, owner: object, salt: str | None, base: Sequence[int], marks: Marks, start: int) -> None:
        """`owner` forgot a span of its base: nothing past its start is left, unless somebody else was served it too."""
        self.only_plain = False
        base_key = key(base, marks)
        holders = [
            served for served in self.served if served.salt == salt and common_prefix_len(served.key, base_key) > start
        ]
        if all(served.owner is owner and not served.open_ended for served in holders):
            for served in holders:
                served.key = served.key[:start]

    def bound(self, salt: str | None, tokens: Sequence[int], marks: Marks = ()) -> int:
        """The most tokens that a request for `tokens` may find cached."""
        wanted = key(tokens, marks)
        longest = 0
        for served in self.served:
            if served.salt == salt:
                common = common_prefix_len(served.key, wanted)
                if served.open_ended and common == len(served.key):
                    common = len(wanted)
                longest = max(longest, common)
        return min(longest, len(tokens) - 1)  # the last token is always computed, for its log-probs
