"""Models built on the meta device, and their values on demand.

deferred_model  DeferredModel and defer_init: the model, and the value of each of its tensors
init_recorder   records what a constructor does
weight_files    reads of safetensors files, recorded: Hugging Face's from_pretrained
replay          computes chosen tensors from the record
seeded_init     models and layers with the parameters that one process gets from a seed
"""
