"""How each task of benchmarks/tasks is solved, as edits an agent would make: (old text, new text)."""

from __future__ import annotations

SOLUTIONS: dict[str, list[tuple[str, str]]] = {
    "pager": [
        ("return len(self._items) // self._per_page + 1", "return max(1, -(-len(self._items) // self._per_page))"),
        ("has_next=start + self._per_page <= len", "has_next=start + self._per_page < len"),
    ],
    "playlist": [
        ("from typing import Any\n", "from copy import deepcopy\nfrom typing import Any\n"),
        ("tracks if tracks is not None else []", "deepcopy(tracks or [])"),
        ("self._history.append(list(self.tracks))", "self._history.append(deepcopy(self.tracks))"),
    ],
    "thermostat": [
        (
            (
                "        if hour not in self._cache:\n            self._cache[hour] = self._compute(hour)\n"
                "        return self._cache[hour]"
            ),
            "        return self._compute(hour)",
        ),
        ("                return target_c\n", "                return target_c\n            self._override = None\n"),
    ],
    "settings": [
        ('line = raw.split("#")[0].strip()', "line = uncommented(raw).strip()"),
        ('parts = line.split("=")', 'parts = line.split("=", 1)'),
        (
            "def value_of(",
            (
                'def uncommented(line: str) -> str:\n    return split(line, "#")[0]\n\n\n'
                "def split(text: str, at: str) -> list[str]:\n"
                '    parts, quote = [""], ""\n'
                "    for letter in text:\n"
                "        if letter == at and not quote:\n"
                '            parts.append("")\n'
                "            continue\n"
                '        if letter in "\\"\'" and quote in ("", letter):\n'
                '            quote = "" if quote else letter\n'
                "        parts[-1] += letter\n"
                "    return parts\n\n\ndef value_of("
            ),
        ),
        (
            'return [value_of(part.strip()) for part in text[1:-1].split(",")]',
            'return [value_of(part.strip()) for part in split(text[1:-1], ",")] if text[1:-1].strip() else []',
        ),
        (
            "    if text.isdigit():\n        return int(text)\n",
            '    if text.lstrip("-").isdigit():\n        return int(text)\n',
        ),
    ],
    "invoice": [
        (
            "from dataclasses import dataclass, field\n",
            (
                "from dataclasses import dataclass, field\nfrom decimal import ROUND_HALF_UP, Decimal\n\n\n"
                "def cents(amount: float) -> int:\n"
                "    return int((Decimal(str(amount)) * 100).quantize(Decimal(1), ROUND_HALF_UP))\n"
            ),
        ),
        (
            "return sum(round(line.total, 2) for line in self.lines)",
            "return sum(cents(line.total) for line in self.lines) / 100",
        ),
        ("return sum(self.payments)", "return sum(map(cents, self.payments)) / 100"),
        ("return self.total - self.paid", "return (cents(self.total) - cents(self.paid)) / 100"),
        (
            "        part = round(self.total / count, 2)\n        return [part] * count",
            (
                "        part, more = divmod(cents(self.total), count)\n"
                "        return [(part + (number < more)) / 100 for number in range(count)]"
            ),
        ),
    ],
    "folders": [
        (
            (
                '    """Bytes in a folder and all below it. With links followed, nothing is counted twice."""\n'
                "    total = sum(folder.files.values())\n"
                "    for child in folder.children:\n        total += size(child)\n"
                "    if follow_links:\n        for link in folder.links:\n"
                "            total += size(link, follow_links=True)\n    return total"
            ),
            (
                "    seen: dict[int, int] = {}\n"
                "    waiting = [folder]\n    while waiting:\n        one = waiting.pop()\n"
                "        if id(one) not in seen:\n            seen[id(one)] = sum(one.files.values())\n"
                "            waiting += one.children + (one.links if follow_links else [])\n"
                "    return sum(seen.values())"
            ),
        ),
        ("found += find(child, name)", 'found += [f"{folder.name}/{path}" for path in find(child, name)]'),
        ("return 1 + depth(folder.children[0])", "return 1 + max(map(depth, folder.children))"),
        (
            "        below = largest(child)\n",
            "        try:\n            below = largest(child)\n        except ValueError:\n            continue\n",
        ),
    ],
    "scheduler": [
        (
            "        ready = [(job.priority, job.name) for job in self.jobs.values() if not job.after]",
            (
                "        for need in {need for needs in waiting.values() for need in needs}:\n"
                "            self.jobs[need]\n"
                "        came = {name: number for number, name in enumerate(self.jobs)}\n"
                "        jobs = [job for job in self.jobs.values() if not job.after]\n"
                "        ready = [(-job.priority, came[job.name], job.name) for job in jobs]"
            ),
        ),
        ("_, name = heapq.heappop(ready)", "*_, name = heapq.heappop(ready)"),
        (
            "                    heapq.heappush(ready, (self.jobs[other].priority, other))",
            (
                "                    if not needs:\n"
                "                        heapq.heappush(ready, (-self.jobs[other].priority, came[other], other))"
            ),
        ),
    ],
    "alarm": [
        ("from datetime import date,", "from datetime import UTC, date,"),
        ("today = self.on(now.date())", "today = self.on(now.astimezone(ZoneInfo(self.zone)).date())"),
        ("return today + timedelta(hours=24)", "return self.on(today.date() + timedelta(days=1))"),
        ("moment = self.on(start.date())", "moment = self.on(start.astimezone(ZoneInfo(self.zone)).date())"),
        ("return alarm.next_after(now) - now", "return alarm.next_after(now).astimezone(UTC) - now.astimezone(UTC)"),
    ],
}
