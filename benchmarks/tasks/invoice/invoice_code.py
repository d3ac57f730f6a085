"""Invoices: lines with tax, discounts, and payments in parts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Line:
    """An amount before tax, in euros; `tax` is a share such as 0.19."""

    name: str
    amount: float
    tax: float = 0.19

    @property
    def total(self) -> float:
        return self.amount * (1 + self.tax)


@dataclass
class Invoice:
    lines: list[Line] = field(default_factory=list)
    payments: list[float] = field(default_factory=list)

    @property
    def total(self) -> float:
        """What is to be paid, in euros and whole cents. Every line is rounded by itself, half a cent upwards."""
        return sum(round(line.total, 2) for line in self.lines)

    @property
    def paid(self) -> float:
        return sum(self.payments)

    @property
    def open(self) -> float:
        """What is still to be paid."""
        return self.total - self.paid

    @property
    def is_settled(self) -> bool:
        return self.paid == self.total

    def pay(self, amount: float) -> None:
        """Take a payment. Raises ValueError for one that is more than what is open."""
        if amount > self.open:
            raise ValueError(f"{amount} is more than the {self.open} that are open")
        self.payments.append(amount)

    def instalments(self, count: int) -> list[float]:
        """`count` payments in whole cents that settle the invoice; the first ones are a cent higher if need be."""
        part = round(self.total / count, 2)
        return [part] * count
