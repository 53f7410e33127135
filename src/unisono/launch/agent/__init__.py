"""The process that runs one node's ranks: node_agent (main program), connection (events to the launcher, stop requests
from it), elastic (torch's elastic agent: rendezvous and restarts), preloaded (forks the agents of a host's MPI ranks).
Started by `launcher` and `mpi_launcher`."""
