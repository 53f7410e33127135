"""The strategies, one folder each; `apply` composes them, and `trainer` runs what it has composed.

apply, compose        `uni.parallelize`: checks, then the strategies in their order; trainer: one training step
layout                which shard of a parameter a rank holds, and along which axes gradients are summed
share, inputs, outputs  batches to ranks and microbatches, and outputs back together
data/                 data parallelism: buckets, reducer, batch norm over the global batch, clipping
zero/                 ZeRO 1 to 3
tensor/               tensor parallelism, layer by layer; rules/: which layers, and how
context/              sequence and context parallelism: sharded tokens, ring and Ulysses attention
expert/               expert parallelism
pipeline/             pipeline parallelism
loss/                 the loss of the global batch, from losses of its parts
recomputation/        activation recomputation: of modules and attention; of single ops
compile/              torch.compile of blocks, the modules around them and the loss; a step as a CUDA graph
precision             half precision
float8                linear layers in float8
master_weights        bfloat16 parameters: float32 copies, or steps that are rounded without them
checks/               what cannot be right, refused before ranks communicate
meta/                 models without memory, and their values where a rank needs them
loop                  a training loop of the user's own
static/               marks and to_static
full_state            state as one process would have it
blocks                the repeated layers of a model
task                  what it takes to rebuild a job on any rank
"""
