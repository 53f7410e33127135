"""The loss of the global batch, from losses of its parts.

loss         any loss of the user, normalised over the global batch
loss_parts   its outputs and targets in parts, for the proof that it may be split
normalizers  means inside it that must be over all samples
counts       what it counts
batch_loss   losses that compare the samples of a batch with each other
model_loss   losses that the model computes itself; loss_recorder: their part of a forward, recorded and replayed
loss_scale   the scale of a float16 loss, and steps that are skipped
"""
