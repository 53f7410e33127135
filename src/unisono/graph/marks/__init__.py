"""Marks: the user's placements of tensors and ops on a mesh.

api         mark, shard_tensor and similar functions
spec        the placement that a mark asks for, and for which node
sharded     functions whose tensors are marked (shard_op)
recorder    marks that a model makes while it is traced
marker_ops  the ops by which they come into the graph
recording   recording the marks of a model that runs
"""
