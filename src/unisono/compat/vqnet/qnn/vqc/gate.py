"""VQNet's functional gates: each adds itself to what a machine has recorded.

    rx(q_machine=machine, wires=0, params=angle)
    cnot(q_machine=machine, wires=[0, 1])

params: a number or tensor for all samples, or one row for each; its gradient is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from unisono.compat.language import say
from unisono.errors import UsageError

Wires = int | Sequence[int]


class GateTarget(Protocol):
    """What a gate needs of a machine."""

    def record(self, kind: str, wires: Wires, params: Any, use_dagger: bool) -> None: ...


class FunctionalGate:
    """A gate as a function. `kind` is its name in unisono.quantum; `angle` is set where the gate has a fixed one."""

    def __init__(self, kind: str, angle: float | None = None) -> None:
        self.kind, self.angle = kind, angle

    def __call__(self, q_machine: GateTarget, wires: Wires, params: Any = None, use_dagger: bool = False) -> None:
        if not hasattr(q_machine, "record"):
            raise UsageError(
                say(
                    f"{self.kind}: q_machine is a {type(q_machine).__name__}; expected a DistributeQMachine",
                    f"{self.kind}：q_machine 是 {type(q_machine).__name__}；应为 DistributeQMachine",
                )
            )
        if self.angle is not None and params is not None:
            raise UsageError(
                say(
                    f"{self.kind} by {self.angle:g} is fixed: it takes no params",
                    f"{self.kind} 的角度固定为 {self.angle:g}：它不接受 params",
                )
            )
        q_machine.record(self.kind, wires, params if self.angle is None else self.angle, use_dagger)

    def __repr__(self) -> str:
        return f"FunctionalGate({self.kind!r})"


i = FunctionalGate("id")
x = paulix = FunctionalGate("x")
y = pauliy = FunctionalGate("y")
z = pauliz = FunctionalGate("z")
h = hadamard = FunctionalGate("h")
s = FunctionalGate("s")
sdg = FunctionalGate("sdg")
t = FunctionalGate("t")
tdg = FunctionalGate("tdg")
x1 = FunctionalGate("rx", math.pi / 2)
y1 = FunctionalGate("ry", math.pi / 2)
z1 = FunctionalGate("rz", math.pi / 2)
rx = FunctionalGate("rx")
ry = FunctionalGate("ry")
rz = FunctionalGate("rz")
p = u1 = phaseshift = FunctionalGate("p")
u2 = FunctionalGate("u2")
u3 = FunctionalGate("u3")
rot = FunctionalGate("rot")
cnot = FunctionalGate("cx")
cy = FunctionalGate("cy")
cz = FunctionalGate("cz")
ch = FunctionalGate("ch")
crx = FunctionalGate("crx")
cry = FunctionalGate("cry")
crz = FunctionalGate("crz")
cr = cu1 = controlledphaseshift = FunctionalGate("cp")
cu3 = FunctionalGate("cu3")
swap = FunctionalGate("swap")
iswap = FunctionalGate("iswap")
cswap = FunctionalGate("cswap")
toffoli = FunctionalGate("ccx")
ccz = FunctionalGate("ccz")
rxx = isingxx = FunctionalGate("rxx")
ryy = isingyy = FunctionalGate("ryy")
rzz = isingzz = FunctionalGate("rzz")
rzx = FunctionalGate("rzx")
