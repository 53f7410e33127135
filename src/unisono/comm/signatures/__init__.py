"""What is read of the objects that ranks send each other: data, and pickles that a rank of the job has sent.

- seal: signs and verifies the objects of one group, for `objects` and whoever else sends them
- plain_data: plain values, and records of unisono, as bytes that are read without running code
- records: which classes of unisono are plain data
- object_bytes: an object as plain data or, where it is none, as a pickle
- torch_objects: signs torch.distributed's own collectives on objects, entered by `rendezvous.world`
"""
