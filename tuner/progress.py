"""Progress on stderr: a live bar on a terminal, else a plain heartbeat line.

The pipeline reports :class:`Event` records and knows nothing of how they are shown.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TextIO

HEARTBEAT_S: Final = 10.0
"""A line at least this often where stderr is no terminal."""


@dataclass(frozen=True)
class Event:
    """Where the work stands.

    Args:
        phase: What is being done, e.g. ``compile``; a new phase starts a new estimate.
        done: Units finished in this phase, those replayed from a store included.
        total: Units of this phase; 0 where that is not known yet.
        note: What is in hand, or a result worth a few words.
    """

    phase: str
    done: int = 0
    total: int = 0
    note: str = ""


Report = Callable[[Event], None]
"""What the pipeline is handed: call it as often as you like, from any thread."""


def silent(event: Event) -> None:
    """A :data:`Report` that shows nothing."""


class Estimate:
    """Remaining time of a phase from the units done since its first event.

    What the first event already counts as done (work replayed from a store) says nothing of speed.
    """

    def __init__(self) -> None:
        self._phase = ""
        self._start_s = 0.0
        self._base = 0

    def update(self, event: Event, now_s: float) -> bool:
        """Take note of an event; whether it opens a new phase."""
        if event.phase == self._phase:
            return False
        self._phase, self._start_s, self._base = event.phase, now_s, event.done
        return True

    def remaining_s(self, event: Event, now_s: float) -> float | None:
        """Seconds left in this phase, or None where nothing can be said yet."""
        fresh = event.done - self._base
        if fresh <= 0 or event.total <= 0:
            return None
        return max(0.0, (now_s - self._start_s) * (event.total - event.done) / fresh)


def clock_text(seconds: float) -> str:
    """``mm:ss`` or ``h:mm:ss``."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


class Heartbeat:
    """Plain lines: one at once, one per new phase, and one at least every ten seconds.

    Args:
        stream: Where lines go; each is flushed.
        clock: Monotonic seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._lock = threading.Lock()
        self._estimate = Estimate()
        self._start_s = clock()
        self._last_line_s = float("-inf")
        self._event = Event("start")

    def __call__(self, event: Event) -> None:
        """Take note of an event and print a line when one is due."""
        with self._lock:
            now_s = self._clock()
            self._event = event
            if self._estimate.update(event, now_s) or now_s - self._last_line_s >= HEARTBEAT_S:
                self._print(now_s)

    def tick(self) -> None:
        """Print a line when one is due, event or not: silence looks like a hang."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._last_line_s >= HEARTBEAT_S:
                self._print(now_s)

    def _print(self, now_s: float) -> None:
        event = self._event
        parts = [f"[{clock_text(now_s - self._start_s)}] {event.phase}"]
        if event.total:
            parts.append(f"{event.done}/{event.total}")
        elif event.done:
            parts.append(str(event.done))
        remaining_s = self._estimate.remaining_s(event, now_s)
        if remaining_s is not None and event.done < event.total:
            parts.append(f"ETA {clock_text(remaining_s)}")
        if event.note:
            parts.append(f"- {event.note}")
        self._last_line_s = now_s
        print(" ".join(parts), file=self._stream, flush=True)


@contextlib.contextmanager
def _heartbeat(stream: TextIO) -> Iterator[Report]:
    heartbeat = Heartbeat(stream)
    heartbeat.tick()
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(1.0):
            heartbeat.tick()

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield heartbeat
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def _live(stream: TextIO) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    estimate = Estimate()
    tasks: dict[str, TaskID] = {}
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[eta]}"),
        TextColumn("{task.fields[note]}", style="dim", markup=False),
    )
    lock = threading.Lock()
    with Progress(*columns, console=Console(file=stream, stderr=True)) as bar:

        def report(event: Event) -> None:
            with lock:
                now_s = time.monotonic()
                if estimate.update(event, now_s):
                    if "start" in tasks:  # it has no end to reach, so its row would pulse for ever
                        bar.remove_task(tasks.pop("start"))
                    for task in tasks.values():
                        bar.stop_task(task)
                    tasks[event.phase] = bar.add_task(event.phase, total=event.total or None, eta="", note="")
                remaining_s = estimate.remaining_s(event, now_s)
                bar.update(
                    tasks[event.phase],
                    completed=event.done,
                    total=event.total or None,
                    eta="" if not remaining_s else f"ETA {clock_text(remaining_s)}",
                    note=event.note,
                )

        report(Event("start"))
        yield report


@contextlib.contextmanager
def progress(stream: TextIO | None = None) -> Iterator[Report]:
    """Show progress on ``stream`` (stderr) while the block runs; yields the :data:`Report` to call."""
    stream = sys.stderr if stream is None else stream
    with _live(stream) if stream.isatty() else _heartbeat(stream) as report:
        yield report
