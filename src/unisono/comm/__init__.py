"""Communication: one Communicator over gloo, NCCL or MPI, with the same outcome on each.

Read in this order:

- operation: how every operation runs (validate, log, start on a transport, finish), and the Transport protocol
- collectives, p2p, objects: the methods of a Communicator, one per operation; communicator: the class, and its groups
- c10d: the transport over torch's process groups (gloo, NCCL); mpi/: the one over MPI, and MPI as a torch backend
- reduction, backends: what each reduction means for each dtype, and what each library can do of it by itself
- handle: what asynchronous operations return
- rendezvous/: how ranks find each other; `world.init` joins, `world.simulated` is one rank without the others
- signatures/: objects are unpickled only if a rank of the job has sent them
- watchdog/: finds out why a job hangs, and which rank differs
- traffic: counts the communication of a block; same_data: do all ranks have the same batch; ring: a teaching example
- bench, bench_command, doctor: `unisono bench comm` and `unisono doctor`

Everything above (mesh, parallel, train, quantum) takes a Communicator; `unisono.init` is `rendezvous.world.init`.
"""
