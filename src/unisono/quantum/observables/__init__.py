"""Observables, and their values on a state that is sharded over ranks.

Read in this order:

    observable         Pauli sums, Hermitian matrices, projectors
    expectation        expectation values of many observables
    measurement_plan   how many Pauli strings are evaluated with few exchanges
    application        an observable applied to a state

Called by the outputs, the layer and gradients/.
"""
