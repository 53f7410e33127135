"""Talking: one Communicator over gloo, NCCL and MPI."""
