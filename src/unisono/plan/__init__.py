"""Plans: data and formulas, without a process or a message.

    plan         Plan: how a job is split over ranks
    schedules/   the orders in which pipeline ranks work, in time, in memory and drawn
    hardware/    Hardware: the figures of a machine, and its files
    profile/     ModelProfile: a training job as the cost model sees it, from a trace
    cost/        memory and time of a step under a plan
    search/      the fastest plan that fits, and why not its neighbours

`parallel/` runs plans and schedules; `planner/` profiles jobs, measures machines and races plans.
"""
