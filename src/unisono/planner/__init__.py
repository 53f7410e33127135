"""The planner: profiles a job, measures the machine, and chooses a plan. Read in this order:

    planner           Planner: the profile of a task, and which plans it allows
    auto              the best plans for Engine(plan="auto"), and what is predicted of them
    race              ... of which some take real steps, and the fastest is chosen
    measure/          the hardware of this machine
    command           `unisono plan` and `unisono bench hardware`
    activation_table  `unisono plan --activations`

The cost model and the search are in `plan/`, as formulas over data.
"""
