"""What an agent tells its launcher while ranks run."""

from __future__ import annotations

import base64

from unisono.launch.crew import Crew
from unisono.launch.wire import Wire, text_of


class Reporter:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def output(self, rank: int, stream: str, data: bytes) -> None:
        text = base64.b64encode(data).decode() if stream == "result" else text_of(data)
        self._wire.send({"event": "output", "rank": rank, "stream": stream, "data": text})

    def started(self, attempt: int) -> None:
        self._wire.send({"event": "started", "attempt": attempt})

    def failed(self, crew: Crew, attempt: int, restarting: bool) -> None:
        """At once which ranks failed, so that the others' last words are not shown; then, settled, why."""
        last = crew.last_words()
        crew.pump(0)
        guilty = [each.rank for each in crew.failures() if not each.is_debris]
        if guilty:
            self._wire.send({"event": "failing", "ranks": guilty})
        failures = [each.to_json() for each in crew.settled_failures()]
        told = {"failures": failures, "attempt": attempt, "restarting": restarting, "last": list(last.items())}
        self._wire.send({"event": "failed", **told})

    def ended(self, codes: dict[int, int | None], problem: str | None) -> None:
        self._wire.send({"event": "ended", "codes": list(codes.items()), "problem": problem})
