"""Many sessions of one arm at once."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from leyline_agent.bench.arms import Arm
from leyline_agent.bench.conversation import Settings, converse
from leyline_agent.bench.measured import ArmTotals, MeasuredTurn
from leyline_agent.bench.script import Script
from leyline_agent.bench.target import Target

OnArmTurn = Callable[[Arm, MeasuredTurn], None]

_POLL_S = 0.5


def ignore(_arm: Arm, _turn: MeasuredTurn) -> None:
    """Do nothing with a turn that was just measured."""


@dataclass(slots=True)
class ArmRun(ArmTotals):
    """The turns of one arm at one concurrency, with how long all of it took and the most KV slots seen in use."""

    arm: Arm = Arm.NONE
    concurrency: int = 1
    repetition: int = 0
    wall_s: float = 0.0
    pool_peak: int | None = field(default=None)


def run_arm(
    target: Target,
    arm: Arm,
    scripts: Sequence[Script],
    settings: Settings,
    *,
    concurrency: int = 1,
    repetition: int = 0,
    on_turn: OnArmTurn = ignore,
    watch_pool: bool = False,
) -> ArmRun:
    """Play every script, `concurrency` sessions at a time, on an emptied cache.

    A worker plays a session to its end before it takes the next one; between two turns nobody thinks. Every session has
    a cache salt of its own, so that sessions, arms and repetitions cannot help each other.
    """
    target.flush()
    run = ArmRun(arm=arm, concurrency=concurrency, repetition=repetition)
    lock = threading.Lock()

    def play(number: int) -> None:
        salt = f"bench-{time.monotonic_ns():x}-{arm}-{concurrency}-{repetition}-{number}"
        for turn in converse(arm, scripts[number], settings, salt):
            with lock:
                run.turns.append(turn)
                on_turn(arm, turn)

    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(target, run, stop), daemon=True)
    if watch_pool:
        watcher.start()
    started = time.perf_counter()
    try:
        with ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="session") as pool:
            for done in [pool.submit(play, number) for number in range(len(scripts))]:
                done.result()
    finally:
        run.wall_s = time.perf_counter() - started
        stop.set()
        if watch_pool:
            watcher.join()
    order = {script.id: number for number, script in enumerate(scripts)}
    run.turns.sort(key=lambda turn: (order[turn.trace], turn.turn))
    return run


def run_paired(
    target: Target, arms: Sequence[Arm], script: Script, settings: Settings, *, on_turn: OnArmTurn = ignore
) -> dict[Arm, ArmRun]:
    """Play one script in all arms turn by turn: each turn is served once per arm before the next one begins.

    What else the machine does at that moment slows all arms alike. The pool has to hold all sessions at once.
    """
    target.flush()
    tag = f"{time.monotonic_ns():x}"
    runs = {arm: ArmRun(arm=arm) for arm in arms}
    sessions = {arm: converse(arm, script, settings, f"paired-{tag}-{arm}") for arm in arms}
    with contextlib.ExitStack() as stack:
        for session in sessions.values():
            stack.callback(session.close)
        for _ in script.steps:
            for arm, session in sessions.items():
                started = time.perf_counter()
                turn = next(session, None)
                if turn is not None:
                    runs[arm].turns.append(turn)
                    runs[arm].wall_s += time.perf_counter() - started
                    on_turn(arm, turn)
    return runs


def _watch(target: Target, run: ArmRun, stop: threading.Event) -> None:
    while not stop.wait(_POLL_S):
        used = target.pool_used()
        if used is not None:
            run.pool_peak = max(run.pool_peak or 0, used)
