"""The loss of the global batch, from losses of its parts.

loss         any loss of the user, normalised over the global batch
normalizers  means inside it that must be over all samples
counts       what it counts
batch_loss   losses that compare the samples of a batch with each other
model_loss   losses that the model computes itself
"""
