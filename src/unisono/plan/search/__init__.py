"""The fastest plan that fits. Read in this order:

search      Search: the space, what is left out, and the judge
neighbours  plans that differ in one decision
partition   stage boundaries of pipelines (balance: the algorithm)
why_not     the neighbours of a plan, and the reason against each
"""
