"""The instructions of a tile's program, as integers: what the compiler writes and the kernels read.

Note: rows. A tile holds 2^T rows of W amplitudes each, the W real parts before the W imaginary parts: one cache line.
The T row bits are the axes that the tile's operations mix. The W amplitudes of a row differ in lane bits, which no
operation of the tile mixes, so a row is treated as one. All other bits are outside: they number the tiles, and within a
tile they are known. `outside` words have ONE set as well, so that a parity with ONE in its mask is flipped.

Note: flips. CNOT and X move no amplitude. They change which row stands for which bits, linearly: a turn of a bit pairs
row r with r ^ mask. Where a row's place also depends on outside bits, `FLIPS` lists (outside mask, row mask) pairs: for
each whose parity is odd, all rows of the instruction are shifted by the row mask.

Note: tables. Where a tile's rows lie, in which order they end, and which rows an instruction has, is linear in the
row's number (but for the first), so the CPU kernel has two short tables: entry i is low[i & (LOW - 1)] and
high[i >> LOW_BITS] together; high begins LOW after low. The GPU kernel has them whole.
"""

from __future__ import annotations

ONE = 1 << 62
LOW_BITS = 6
LOW = 1 << LOW_BITS

# kinds of instructions
TURNS, PAIR, PHASE, LANE_PHASE, DENSE = range(5)

# fields of an instruction
(
    KIND,
    COUNT,  # TURNS: how many bits are turned (1 to 3, on a GPU 1 to 4). DENSE: on how many bits the matrix acts
    FORM,  # TURNS: how many of them, the first, are in cotangent form
    MASK0,
    MASK1,
    MASK2,
    MASK3,  # on a GPU, where up to four bits are turned
    ROWS,  # where in `rows` the instruction's rows begin: those whose bits are 0
    ROW_COUNT,
    FLIPS,  # where in `pairs` its flips begin
    FLIP_COUNT,
    CONDITIONS,  # where in `pairs` its conditions (outside mask, value) begin; all must hold, or the tile skips it
    CONDITION_COUNT,
    VALUES,  # where in `values` its numbers are
    SLOT,  # where gradients go: the first turn's number; the phase's place among the rows' sums; or -1
    FIELDS,
) = range(16)

# fields of a sweep
(
    FIRST,  # instruction
    LAST,
    ROW_BITS,
    OUTSIDE_BITS,
    PLACES,  # where in `places` the offsets of the rows begin
    LANES,  # where in `places` the offsets of the lanes begin; -1: lanes are the lowest bits
    OUTSIDE,  # where in `places` the weights of the outside bits begin
    START,  # where in `rows` the first row of each place begins
    ORDER,  # where in `rows` the final row of each place begins
    SWEEP_FLIPS,  # of the final rows
    SWEEP_FLIP_COUNT,
    SWEEP_FIELDS,
) = range(12)
