"""How a process joins its world.

- launcher_env: this process's rank, from the launcher's environment variables
- rendezvous: all ranks of the world find each other through one key-value store
- world: `init`, `shutdown` and the world's communicator; `simulated`, a world of which only this rank exists
- simulated: the transport of that world
- solo: `with alone()`, a block in which this process is no rank of any job
"""
