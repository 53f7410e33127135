"""The planner: profiles a job, measures the machine, and chooses a plan. Read in this order:

    planner           Planner: the profile of a task, and which plans it allows
    auto              the plan of Engine(plan="auto"), and what is predicted of a plan
    measure/          the hardware of this machine
    command           `unisono plan` and `unisono bench hardware`
    activation_table  `unisono plan --activations`

The cost model and the search are in `plan/`, as formulas over data.
"""
