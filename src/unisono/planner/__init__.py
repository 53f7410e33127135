"""The planner: profiles a job, measures the machine, and chooses a plan. Read in this order:

    planner           Planner: the profile of a task, and which plans it allows
    measure/          the hardware of this machine, measured and remembered
    auto              Engine(plan="auto"): search, replay and race; and predictions for a given plan
    auto_recompute    recompute=auto:12GiB: the fastest recomputation that fits
    replay            the time of a step from real steps of every rank with simulated communication
    race              real steps under a few plans
    choice            a job, and a plan with its prediction
    command           `unisono plan` and `unisono bench hardware`
    activation_table  `unisono plan --activations`

The cost model and the search are in `plan/`, as formulas over data.
"""
