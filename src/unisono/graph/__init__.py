"""The model as a graph of ops, how each op may be placed on a mesh, and the distributed program that comes of it.

    capture/    a model and its loss as one graph of ops on full tensors (trace)
    marks/      the user's marks on the sharding of tensors and ops
    rules/      for each op the ways in which it runs on shards (options)
    placement/  an assignment of options to all ops: by propagation, dynamic or integer programming
    program/    the assignment lowered to local ops and collectives, and run
    render/     a program, or a recorded step, as text, page and drawing

Read in this order. Used by `uni.to_static`, `uni.apply_marks`, the planner's model profile and `unisono explain`.
"""
