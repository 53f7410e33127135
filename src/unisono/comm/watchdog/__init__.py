"""The watchdog: explains hangs and differences between ranks instead of leaving them silent.

- watchdog: the thread of each rank; how the alarm is raised and the report made
- op_log: the last operations of each group, which every operation writes
- report: one sentence made of the states of all ranks
- consistency: do all ranks run the same operations; before each collective (`--check`), and once a second
- exits: which ranks have left, so that nobody waits for them
- attach: `unisono attach`, the report on a job that runs
- flight_recorder: the same from the dumps that torch leaves of NCCL's collectives
- crash_note: the last operation of a rank that died
"""
