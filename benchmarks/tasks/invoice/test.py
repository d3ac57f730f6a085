import pytest
from invoice_code import Invoice, Line


def test_three_dimes_make_thirty_cents():
    invoice = Invoice([Line("a", 0.3, tax=0.0)])
    for _ in range(3):
        invoice.pay(0.1)
    assert invoice.is_settled
    assert invoice.open == 0


def test_half_a_cent_is_rounded_upwards():
    assert Invoice([Line("stamp", 2.675, tax=0.0)]).total == 2.68
    assert Invoice([Line("pin", 0.125, tax=0.0)]).total == 0.13


def test_every_line_is_rounded():
    assert Invoice([Line("nail", 0.02), Line("nail", 0.02), Line("nail", 0.02)]).total == 0.06


def test_the_last_payment_fits():
    invoice = Invoice([Line("chair", 49.90), Line("table", 199.99)])
    assert invoice.total == 297.37
    invoice.pay(100.10)
    invoice.pay(97.17)
    assert invoice.open == 100.10
    invoice.pay(100.10)
    assert invoice.is_settled


def test_too_much():
    invoice = Invoice([Line("a", 10.0, tax=0.0)])
    with pytest.raises(ValueError, match="more than"):
        invoice.pay(10.01)


@pytest.mark.parametrize(("total", "count", "parts"), [(10.0, 3, [3.34, 3.33, 3.33]), (0.05, 2, [0.03, 0.02])])
def test_instalments(total, count, parts):
    invoice = Invoice([Line("a", total, tax=0.0)])
    assert invoice.instalments(count) == parts
    for part in parts:
        invoice.pay(part)
    assert invoice.is_settled
