"""The PennyLane device `unisono.qubit`: QNodes on unisono's circuit simulator.

    import pennylane as qml
    dev = qml.device("unisono.qubit", wires=24)               # one process
    dev = qml.device("unisono.qubit", wires=30, ranks=4)      # in a job of `unisono run -n 4`

Read in this order:

    device         the class that PennyLane calls: what it accepts, execution, derivatives
    operators      PennyLane's operators as gates of unisono.quantum
    simulator      a tape as a program with angles, and the state that it makes; programs are kept
    measurement    measurement processes on a state, analytic and with shots
    jacobian       vector-Jacobian products and Jacobians by the adjoint method
"""

from __future__ import annotations

import importlib.util

from unisono.errors import MissingPackageError

if importlib.util.find_spec("pennylane") is None:
    raise MissingPackageError("pennylane", "the device unisono.qubit", "pennylane")

from unisono.integrations.pennylane.device import UnisonoQubit

__all__ = ["UnisonoQubit"]
