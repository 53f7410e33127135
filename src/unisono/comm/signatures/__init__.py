"""Objects are unpickled only if a rank of the job has sent them.

- seal: signs and verifies the objects of one group, for `objects` and whoever else sends pickles
- torch_objects: the same for torch.distributed's own collectives on objects, entered by `rendezvous.world`
"""
