"""Placements for every op of a trace: an Assignment of options.

assignment  what is chosen, and what has to be redistributed because of it
find        the entry: by the search that was asked for
propagate   from marks along the graph
problem     the choice as a problem: costs of nodes and edges
dp, ilp     solved by dynamic programming, and exactly by integer programming
recursive   axis by axis, the ops of most work first
cost        bytes and seconds of redistribution
strategy    from marks to placements
carry       an assignment carried over to another trace of the model
"""
