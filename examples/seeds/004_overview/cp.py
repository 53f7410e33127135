"""Context parallelism: the ranks share each sequence.

Document 004, "CP".

unisono run -n 4 examples/seeds/004_overview/cp.py

Every rank has a quarter of the tokens of each sample. Only attention needs those of the others: in "ring", keys and
values go round; in "ulysses", ranks trade tokens for heads and back. Printed for each: the worst deviation from one
device.
"""

from __future__ import annotations

from transformer import deviation, under

import unisono as uni


def main() -> None:
    comm = uni.init()
    for kind in ("ring", "ulysses"):
        worst = deviation(under(f"cp={comm.size},context={kind}"))
        if comm.rank == 0:
            print(f"{kind}: deviation {worst:.1e}")
    uni.shutdown()


if __name__ == "__main__":
    main()
