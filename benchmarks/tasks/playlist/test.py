import pytest
from playlist_code import Playlist


@pytest.fixture
def rainy():
    playlist = Playlist("rainy")
    playlist.add("Blue in Green", "jazz")
    playlist.add("Riders on the Storm", "rock")
    playlist.play("Blue in Green")
    return playlist


def test_branch_begins_as_the_original(rainy):
    assert rainy.branch("night").titles() == rainy.titles()


def test_branch_does_not_reset_the_original_s_plays(rainy):
    night = rainy.branch("night")
    assert night.tracks[0]["plays"] == 0
    assert rainy.tracks[0]["plays"] == 1


def test_tags_of_a_branch_are_its_own(rainy):
    night = rainy.branch("night")
    night.tag("Blue in Green", "late")
    assert rainy.tracks[0]["tags"] == ["jazz"]
    assert night.tracks[0]["tags"] == ["jazz", "late"]


def test_undo_of_add(rainy):
    rainy.add("Pale Blue Eyes")
    rainy.undo()
    assert rainy.titles() == ["Blue in Green", "Riders on the Storm"]


def test_undo_of_tag(rainy):
    rainy.tag("Riders on the Storm", "rain")
    rainy.undo()
    assert rainy.tracks[1]["tags"] == ["rock"]


def test_a_list_given_at_the_start_stays_the_caller_s():
    tracks = [{"title": "Naima", "tags": [], "plays": 3}]
    Playlist("jazz", tracks).add("Nardis")
    assert len(tracks) == 1
