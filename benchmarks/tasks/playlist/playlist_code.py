"""Playlists that can be branched, edited and undone."""

from __future__ import annotations

from typing import Any

Track = dict[str, Any]


class Playlist:
    def __init__(self, name: str, tracks: list[Track] | None = None) -> None:
        self.name = name
        self.tracks: list[Track] = tracks if tracks is not None else []
        self._history: list[list[Track]] = []

    def add(self, title: str, *tags: str) -> None:
        self._remember()
        self.tracks.append({"title": title, "tags": list(tags), "plays": 0})

    def play(self, title: str) -> None:
        self._find(title)["plays"] += 1

    def tag(self, title: str, tag: str) -> None:
        self._remember()
        self._find(title)["tags"].append(tag)

    def branch(self, name: str) -> Playlist:
        """A playlist that begins as this one and then goes its own way. Plays start at 0 again."""
        copy = Playlist(name, self.tracks[:])
        for track in copy.tracks:
            track["plays"] = 0
        return copy

    def undo(self) -> None:
        """Take back the last `add` or `tag`."""
        if self._history:
            self.tracks = self._history.pop()

    def titles(self) -> list[str]:
        return [track["title"] for track in self.tracks]

    def _remember(self) -> None:
        self._history.append(list(self.tracks))

    def _find(self, title: str) -> Track:
        for track in self.tracks:
            if track["title"] == title:
                return track
        raise KeyError(title)
