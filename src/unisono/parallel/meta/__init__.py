"""Models without memory, and their values where a rank needs them.

meta_tensors  meta tensors and copies of models
filling       what a plan leaves this rank gets its values
shells        parameters without values while an optimizer is made
shadow        running a meta model on real inputs
materialize_on_read  running one with values, tensor by tensor
shapes        shapes of ops on meta tensors, worked out once
"""
