"""Ranks that talk: one Communicator over gloo, NCCL or MPI."""
