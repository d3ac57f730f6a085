"""Runs jobs in order: dependencies first, then by priority, then as they came."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass
class Job:
    """A larger priority comes earlier."""

    name: str
    priority: int = 0
    after: tuple[str, ...] = ()


class CycleError(ValueError):
    pass


@dataclass
class Scheduler:
    jobs: dict[str, Job] = field(default_factory=dict)

    def add(self, job: Job) -> None:
        self.jobs[job.name] = job

    def order(self) -> list[str]:
        """Names in the order to run. Raises KeyError for an unknown dependency, CycleError for a circle."""
        waiting = {job.name: set(job.after) for job in self.jobs.values()}
        ready = [(job.priority, job.name) for job in self.jobs.values() if not job.after]
        heapq.heapify(ready)
        order: list[str] = []
        while ready:
            _, name = heapq.heappop(ready)
            order.append(name)
            for other, needs in waiting.items():
                if name in needs:
                    needs.remove(name)
                    heapq.heappush(ready, (self.jobs[other].priority, other))
        if len(order) < len(self.jobs):
            raise CycleError("jobs wait for each other")
        return order
