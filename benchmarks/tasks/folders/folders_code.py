"""Sizes in a tree of folders, with links between them, as a disk usage tool counts them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Folder:
    """`files` by name with their sizes; `children` are folders in it, `links` folders elsewhere that it points to."""

    name: str
    files: dict[str, int] = field(default_factory=dict)
    children: list[Folder] = field(default_factory=list)
    links: list[Folder] = field(default_factory=list)


def size(folder: Folder, *, follow_links: bool = False) -> int:
    """Bytes in a folder and all below it. With links followed, nothing is counted twice."""
    total = sum(folder.files.values())
    for child in folder.children:
        total += size(child)
    if follow_links:
        for link in folder.links:
            total += size(link, follow_links=True)
    return total


def depth(folder: Folder) -> int:
    """Levels of folders: 1 for one without children."""
    if not folder.children:
        return 1
    return 1 + depth(folder.children[0])


def find(folder: Folder, name: str) -> list[str]:
    """Paths of all files called `name`, parents first, such as `root/src/main.py`."""
    found = [f"{folder.name}/{name}"] if name in folder.files else []
    for child in folder.children:
        found += find(child, name)
    return found


def largest(folder: Folder) -> tuple[str, int]:
    """The largest file below a folder, by name and size. Raises ValueError if there is no file."""
    best = max(folder.files.items(), key=lambda item: item[1], default=None)
    for child in folder.children:
        below = largest(child)
        if best is None or below[1] > best[1]:
            best = below
    if best is None:
        raise ValueError(f"no file in {folder.name}")
    return best
