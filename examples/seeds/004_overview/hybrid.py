"""Strategies together: two replicas of two stages, each shared by two ranks.

Document 004, "Hybrid Parallel".

unisono run -n 8 examples/seeds/004_overview/hybrid.py

Another plan may be given: --plan dp=2,cp=2,tp=2. Printed: the ranks of each axis that rank 0 is in, and the worst
deviation from one device.
"""

from __future__ import annotations

import argparse

from transformer import deviation, under

import unisono as uni


def main(plan: str) -> None:
    comm = uni.init()
    trainer = under(plan)
    worst = deviation(trainer)
    if comm.rank == 0:
        for axis in ("pp", "dp", "cp", "tp"):
            if trainer.mesh.size(axis) > 1:
                print(f"{axis}: ranks {', '.join(map(str, trainer.mesh.comm(axis).ranks))}")
        print(f"{trainer.plan}: deviation {worst:.1e}")
    uni.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", default="dp=2,tp=2,pp=2,zero=1,sp,microbatches=4,schedule=1f1b")
    main(parser.parse_args().plan)
