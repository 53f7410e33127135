"""The launcher's connections to its agents: wire (messages), link (processes and their wires), ssh, mpiexec, job_folder
(of MPI jobs), network (addresses and interfaces), preflight (checks before the start). Called by `launcher` and
`mpi_launcher`."""
