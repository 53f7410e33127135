"""`unisono run --encrypt`: ranks on several hosts talk through a tunnel of each host, which encrypts and authenticates.

    rank a -- gloo, loopback --> tunnel of its host == TLS 1.3 ==> tunnel of the other host -- loopback --> rank b

gloo listens on the loopback interface. The addresses that ranks exchange in the job's store are rewritten as they pass:
a rank publishes a port of its node, and a rank on another node reads the address of a listener that leads there.

- certificate: a key that never leaves its tunnel, and the certificate that the others get through the job's store
- relay: bytes between a socket and a TLS connection
- process: the tunnel of a host, a process of its own
- host_tunnel: the agent's side of it
- addresses: the ranks' side: gloo's addresses on their way through the store

Note: who is believed. Each agent writes its tunnel's certificate into the job's store, where every message is signed
with the job's secret, and a tunnel talks to those who prove to have the key of one of these certificates, and to nobody
else. Behind it are the ports that ranks of this job have registered, and the job's store.
"""
