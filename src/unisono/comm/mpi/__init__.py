"""MPI for stock PyTorch. All but `library` import mpi4py: import them late.

- library: loads mpi4py, registers the c10d backend "mpi4py"
- buffers: tensors as MPI sees them; calls: each operation as the MPI calls it takes
- work: requests behind torch's Work, and the thread that completes those nobody waits for
- process_group: the c10d process group, for torch's own calls (DDP, FSDP, user code)
- transport: the same calls for a Communicator, without c10d; fast_path: its blocking calls on small plain tensors
"""
