import pytest
from pager_code import Pager

LETTERS = list("abcdefghij")


def test_partial_last_page():
    pager = Pager(LETTERS, 4)
    assert pager.page_count == 3
    assert pager.page(3).items == ["i", "j"]


def test_full_last_page():
    pager = Pager(LETTERS, 5)
    assert pager.page_count == 2
    assert not pager.page(2).has_next
    with pytest.raises(IndexError):
        pager.page(3)


def test_neighbours():
    pager = Pager(LETTERS, 4)
    assert [pager.page(n).has_next for n in (1, 2, 3)] == [True, True, False]
    assert [pager.page(n).has_previous for n in (1, 2, 3)] == [False, True, True]


def test_page_of():
    pager = Pager(LETTERS, 5)
    assert (pager.page_of("a"), pager.page_of("e"), pager.page_of("f")) == (1, 1, 2)


def test_labels():
    assert Pager(LETTERS, 4).labels() == ["1-4", "5-8", "9-10"]
    assert Pager(LETTERS, 5).labels() == ["1-5", "6-10"]


def test_one_empty_page_for_an_empty_list():
    pager = Pager([], 5)
    assert pager.page_count == 1
    assert pager.page(1).items == []
