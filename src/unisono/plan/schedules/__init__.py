"""Pipeline schedules as pure data. Read in this order:

    action       what a rank does to one microbatch at one stage
    schedule     the schedules by name: for each rank, its actions in order
    fill_drain, one_f_one_b, zero_bubble   the orders, one file a family
    timeline     when each action happens, given what actions cost
    transfers    sends and receives between the actions, in an order that cannot deadlock
    activations  what a rank keeps in memory
    picture      drawings, text and SVG

`parallel/pipeline` executes them, `plan/cost` judges them, `report` draws them.
"""
