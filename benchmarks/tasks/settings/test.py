import pytest
from settings_code import SettingsError, parse, value_of


def test_sections():
    assert parse("a = 1\n[net]\nhost = box\n") == {"": {"a": 1}, "net": {"host": "box"}}


def test_comments():
    assert parse("# all\na = 1 # one\n") == {"": {"a": 1}}


def test_a_hash_in_quotes_is_no_comment():
    assert parse('colour = "#ff8800" # orange\n')[""] == {"colour": "#ff8800"}


def test_an_equals_sign_in_the_value():
    assert parse("query = a=b=c\n")[""] == {"query": "a=b=c"}


def test_a_header_after_which_a_comment_stands():
    assert parse("[net] # local\nport = 80\n")["net"] == {"port": 80}


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("-3", -3), ("2.5", 2.5), ("yes", True), ("'yes'", "yes"), ("007x", "007x"), ("", "")],
)
def test_values(text, value):
    found = value_of(text)
    assert found == value
    assert type(found) is type(value)


def test_lists():
    assert value_of("[1, two, 'three, four']") == [1, "two", "three, four"]
    assert value_of("[]") == []


def test_errors_name_the_line():
    with pytest.raises(SettingsError, match="line 2"):
        parse("a = 1\nb\n")
