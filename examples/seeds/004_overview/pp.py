"""Pipelines: naive, GPipe and PipeDream's 1F1B.

Document 004, "PP".

unisono run -n 4 examples/seeds/004_overview/pp.py

Each rank has a quarter of the layers. Naive: one batch, one stage at work at a time. GPipe ("f-then-b"): the batch in
microbatches, all forwards before all backwards. 1F1B: as little bubble as GPipe, but a rank keeps the activations of
no more microbatches than there are stages behind it. Printed for each: the picture of the schedule, which is the very
list that the ranks execute, and the worst deviation from one device.
"""

from __future__ import annotations

from transformer import deviation, under

import unisono as uni
from unisono.plan.schedules.picture import draw_text
from unisono.plan.schedules.schedule import schedule
from unisono.plan.schedules.timeline import timeline


def main() -> None:
    comm = uni.init()
    for name, microbatches in (("naive", 1), ("f-then-b", 8), ("1f1b", 8)):
        worst = deviation(under(f"pp={comm.size},microbatches={microbatches},schedule={name}"))
        if comm.rank == 0:
            print(draw_text(timeline(schedule(name, comm.size, microbatches))))
            print(f"deviation {worst:.1e}")
    uni.shutdown()


if __name__ == "__main__":
    main()
