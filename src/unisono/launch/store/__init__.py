"""The job's key-value store, through which its agents and ranks meet, and the secret that whoever uses it must know.

- secret: 32 random bytes of a job, in a file that its user alone can read
- session: how two ends of a connection prove to each other that they know it, and sign what they then say
- server: the store, served by a thread; client: torch's Store interface to it
- program_rendezvous: programs that call torch.distributed themselves meet there too

`launch/agent` serves the store of a job; `comm/rendezvous` connects its ranks.
"""
