"""Gradients of a layer's outputs with respect to weights and features.

    adjoint           the adjoint method: one backward walk for all angles
    parameter_shift   the parameter-shift rule and finite differences
    shot_estimates    outputs estimated from shots
    layer_outputs     the outputs of a layer for one sample, and the co-state that the adjoint method starts from

Called by the layer.
"""
