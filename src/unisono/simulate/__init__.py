"""One rank of any plan, run in this process with simulated communication.

Read in this order:
    sketch        models built with little or no memory
    upstream      shapes of the messages that earlier pipeline stages would send
    rank          the trainer of one rank of a plan, on a simulated communicator
    without_values  a step of such a trainer without memory
    memory_meter  peak memory of a block of code
    dry_run       peak memory and time of a step (`plan --dry-run`)

Used by explain, by `plan --dry-run` and by the planner.
"""
