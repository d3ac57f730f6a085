import pytest
from folders_code import Folder, depth, find, largest, size


@pytest.fixture
def tree():
    tests = Folder("tests", {"main.py": 30})
    src = Folder("src", {"main.py": 100, "util.py": 40}, [Folder("data", {"big.bin": 900})])
    return Folder("root", {"README": 10}, [tests, src, Folder("empty")])


def test_size(tree):
    assert size(tree) == 1080


def test_links_in_a_child_are_followed(tree):
    tree.children[0].links.append(Folder("shared", {"x": 5}))
    assert size(tree) == 1080
    assert size(tree, follow_links=True) == 1085


def test_a_link_to_what_is_counted_anyway_adds_nothing(tree):
    tree.children[0].links.append(tree.children[1])
    assert size(tree, follow_links=True) == 1080


def test_links_in_a_circle(tree):
    tree.children[1].links.append(tree)
    assert size(tree, follow_links=True) == 1080


def test_depth(tree):
    assert depth(tree) == 3
    assert depth(Folder("alone")) == 1


def test_find(tree):
    assert find(tree, "main.py") == ["root/tests/main.py", "root/src/main.py"]
    assert find(tree, "nothing") == []


def test_largest(tree):
    assert largest(tree) == ("big.bin", 900)
    with pytest.raises(ValueError, match="empty"):
        largest(Folder("empty"))
