"""A simple noise model: channels after the gates of a circuit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.errors import UsageError
from unisono.quantum.circuit.channels import Channel
from unisono.quantum.circuit.circuit import Circuit, require_circuit


def with_noise(circuit: Circuit, noise: Mapping[str | int, Channel | Sequence[Channel]]) -> Circuit:
    """A new circuit with channels after its gates.

    Keys are names of gates as `circuit.counts()` has them ("rx", "cx"), or numbers of wires: 1 for all gates on one
    wire, 2 for all on two. A name goes before a number. A channel on one wire is added on each wire of the gate."""
    require_circuit(circuit, "with_noise")
    if not isinstance(noise, Mapping):
        raise UsageError(f'with_noise({noise!r}): expected a mapping such as {{"cx": uq.depolarizing(0.01, wires=2)}}')
    channels: dict[str | int, tuple[Channel, ...]] = {}
    for key, given in noise.items():
        several = (given,) if isinstance(given, Channel) else tuple(given) if isinstance(given, Sequence) else ()
        if not isinstance(key, str | int) or not several or not all(isinstance(each, Channel) for each in several):
            raise UsageError(f"with_noise: {key!r}: {given!r}: expected a gate's name or number of wires: a Channel")
        channels[key] = several
    made = Circuit(circuit.wires, circuit.bits)
    for each in circuit.operations:
        made.append(each)
        if not each.gate.unitary or not each.wires:
            continue
        name = "c" * len(each.controls) + each.name
        for channel in channels.get(name, channels.get(len(each.wires), ())):
            if channel.targets == len(each.wires):
                made.channel(channel, each.wires)
            elif channel.targets == 1:
                for wire in each.wires:
                    made.channel(channel, wire)
            else:
                raise UsageError(f"with_noise: {channel.name} acts on {channel.targets} wires, but stands after {each}")
    return made
