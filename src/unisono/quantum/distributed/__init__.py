"""One state on many ranks: what each rank runs, and how blocks of amplitudes are exchanged.

Read in this order:

    global_index_map   which bits of the global qubits each rank has, and what an operation becomes on that rank
    local_steps        the steps of a schedule as one rank runs them
    program            all steps of a rank, made once for a schedule
    exchange           blocks exchanged in place through bounded buffers
    shared_memory      the same between ranks of one host, without messages
    rank_groups        how many ranks share one state, and how the others divide a batch
    memory             whether a state fits; arrays in pages of their own

Called by the state, the layer and the outputs.
"""
