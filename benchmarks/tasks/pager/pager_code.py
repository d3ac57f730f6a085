"""Pages of a list, as a web view shows them: page 1 is the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    number: int
    items: list[str]
    has_previous: bool
    has_next: bool


class Pager:
    def __init__(self, items: Sequence[str], per_page: int) -> None:
        if per_page < 1:
            raise ValueError("per_page must be at least 1")
        self._items = list(items)
        self._per_page = per_page

    @property
    def page_count(self) -> int:
        return len(self._items) // self._per_page + 1

    def page(self, number: int) -> Page:
        if not 1 <= number <= self.page_count:
            raise IndexError(f"no page {number}")
        start = (number - 1) * self._per_page
        return Page(
            number=number,
            items=self._items[start : start + self._per_page],
            has_previous=number > 1,
            has_next=start + self._per_page <= len(self._items),
        )

    def page_of(self, item: str) -> int:
        """The page an item is on."""
        return self._items.index(item) // self._per_page + 1

    def labels(self) -> list[str]:
        """Labels such as `1-10`, `11-20`, the last one ending with the last item."""
        labels = []
        for number in range(1, self.page_count + 1):
            start = (number - 1) * self._per_page
            labels.append(f"{start + 1}-{start + len(self.page(number).items)}")
        return labels
