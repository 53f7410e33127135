"""From a circuit to steps: which operations run in which segment, and when ranks exchange qubits. No data moves here.

Read in this order:

    step             the steps: pure data
    schedule         Schedule.of(circuit, ranks), the algorithm
    logical_qubits   SWAPs become renamings; identities and barriers are removed
    partition        operations partitioned into segments that mix few qubits
    paging           which qubits are local in each segment (Belady's rule)
    postpone         operations moved past an exchange, where they fill sweeps
    sweeps           the cost model in sweeps over memory; tiles of one rank
    forecast         time, bytes and memory of a schedule before it runs

Called by distributed/program.py, the state and the layer; compile/ uses `sweeps.tiles`.
"""
