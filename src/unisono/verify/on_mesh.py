"""What verify proves in the place of a plan: a distributed program on a mesh, as words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from unisono.errors import UsageError
from unisono.graph.placement.find import SEARCHES
from unisono.graph.render.sizes import size_of
from unisono.mesh.mesh import Mesh

PREFIX = "program "


@dataclass(frozen=True)
class OnMesh:
    """The axes of a mesh in order, and how placements are searched for: program dp=2,mp=4,search=exact
    zero: what the ranks of the axis dp share out. microbatches: where the model marks stages. memory: bytes that a rank
    may hold, for a search."""

    axes: tuple[tuple[str, int], ...]
    search: str = "propagate"
    fully_use_devices: bool = False
    unpack: bool = False
    zero: int = 0
    microbatches: int = 1
    memory: int | None = None

    @classmethod
    def parse(cls, text: str) -> OnMesh:
        """From words such as dp=2,mp=4; search=... and full may be among them."""
        axes: list[tuple[str, int]] = []
        search, numbers, flags = "propagate", {"zero": 0, "microbatches": 1}, {"full": False, "unpack": False}
        memory = None
        for word in text.removeprefix(PREFIX).replace(" ", "").split(","):
            name, equals, value = word.partition("=")
            if name == "search" and value in SEARCHES:
                search = value
            elif name in numbers and value.isdecimal() and 0 < int(value) <= (3 if name == "zero" else 10**6):
                numbers[name] = int(value)
            elif name == "memory" and size_of(value):
                memory = size_of(value)
            elif word in flags:
                flags[word] = True
            elif (
                equals
                and name.isidentifier()
                and name not in (*numbers, "memory")
                and value.isdecimal()
                and int(value) > 0
            ):
                axes.append((name, int(value)))
            else:
                raise UsageError(
                    f"mesh {text!r}: {word!r} is no axis; expected words such as dp=2,mp=4 "
                    f"(and search={'|'.join(SEARCHES)}, memory=2GiB, zero=1|2|3, microbatches=M, full, unpack)"
                )
        if not axes:
            raise UsageError(f"mesh {text!r} has no axes; expected words such as dp=2,mp=4")
        made = cls(tuple(axes), search, flags["full"], flags["unpack"], **numbers, memory=memory)
        made.described()  # names and sizes are checked there
        return made

    @property
    def world(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def options(self) -> dict[str, Any]:
        """What `to_static` takes."""
        finding: dict[str, Any] = {"search": self.search, "fully_use_devices": self.fully_use_devices}
        finding |= {"unpack": self.unpack, "memory": self.memory}
        return {**finding, "zero": self.zero, "microbatches": self.microbatches}

    def __str__(self) -> str:
        words = [f"{name}={size}" for name, size in self.axes]
        words += [f"search={self.search}"] if self.search != "propagate" else []
        words += [f"memory={self.memory}"] if self.memory else []
        words += ["full"] if self.fully_use_devices else []
        words += ["unpack"] if self.unpack else []
        words += [f"zero={self.zero}"] if self.zero else []
        words += [f"microbatches={self.microbatches}"] if self.microbatches > 1 else []
        return PREFIX + ",".join(words)

    def mesh(self) -> Mesh:
        """Over the ranks that are running."""
        return Mesh([size for _, size in self.axes], [name for name, _ in self.axes])

    def described(self) -> Mesh:
        """Whether or not any rank is running."""
        return Mesh.describe([size for _, size in self.axes], [name for name, _ in self.axes])

    def fit(self, ranks: int) -> OnMesh:
        if self.world != ranks:
            raise UsageError(f"{self} needs {self.world} ranks, but there are {ranks}; use -n {self.world}")
        return self
