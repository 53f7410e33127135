"""A thread may look at another's stack at any time, also amid a garbage collection that lets the other go on."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

from unisono.launch.process_threads import await_collectives_threads, frames_of

LOOKED_AT = """
import gc, threading, time
from unisono.launch.process_threads import frames_of

main, end = threading.get_ident(), time.monotonic() + 1.5
rests = []
gc.set_threshold(1, 1000, 1000)  # whoever makes an object collects

class Cycle:
    def __init__(self):
        self.itself = self
    def __del__(self):  # lets go of the GIL, as the end of a tensor does
        if threading.get_ident() != main and rests:
            time.sleep(rests.pop())

def deep(levels):
    if levels:
        deep(levels - 1)
    if levels % 8 == 0:
        Cycle()

def look():
    while time.monotonic() < end:
        rests.append(0.0005)
        frames_of(main)

onlooker = threading.Thread(target=look)
onlooker.start()
turn = 0
while time.monotonic() < end:
    deep(turn * 37 % 400)
    turn += 1
onlooker.join()
print("unharmed")
"""


def test_a_thread_is_not_harmed_by_being_looked_at() -> None:
    reported = subprocess.run(
        [sys.executable, "-c", LOOKED_AT], capture_output=True, text=True, timeout=60, check=False
    )
    assert (reported.stdout, reported.stderr) == ("unharmed\n", ""), reported.returncode


def test_frames_come_innermost_first() -> None:
    names = [frame.f_code.co_name for frame in frames_of(threading.get_ident())]
    assert names[:2] == ["frames_of", "test_frames_come_innermost_first"]
    assert frames_of(None) == []


def test_threads_of_collectives_are_waited_for_while_they_run() -> None:
    is_over, begun = threading.Event(), threading.Event()

    def run() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop")  # PR_SET_NAME
        begun.set()
        while not is_over.is_set():
            pass
        threading.Event().wait(0.2)  # asleep, it is not running

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    assert not await_collectives_threads(0.05)
    is_over.set()
    assert await_collectives_threads(60)
    thread.join()
