"""What a plan does to a task, shown op by op: `unisono explain`.

Read in this order:
    record        torch functions and collectives of one step of a rank
    align         the record of a rank beside that of one device, as lines of a listing
    plan_program  records a task on one device and on a simulated rank of a plan
    command       `unisono explain`

The listing is rendered by graph (show, page, drawing). Engine's run folder and the report use the recorder too.
"""
