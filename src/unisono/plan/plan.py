"""The Plan: how a job is split over ranks, in one frozen value.

plan = Plan(dp=2, tp=2, pp=2, zero=1, sequence=True, microbatches=8, schedule="1f1b")
plan = Plan.parse("dp=2,tp=2,pp=2,zero=1,sp,microbatches=8,schedule=1f1b")     # the same; str(plan) writes it back
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from unisono.amounts import parse_bytes
from unisono.comm.signatures.records import plain_record
from unisono.errors import UsageError, did_you_mean
from unisono.plan.schedules import schedule as schedules

# The axes of a plan's mesh, the slowest first: neighbours in the world are neighbours in tp. The data axis is three of
# them, "replica" times "dp" times "ep": experts may be sharded over a part of it ("ep"), and ZeRO may shard over a part
# of it only, of which "replica" counts the copies.
AXES = ("pp", "replica", "dp", "ep", "cp", "tp")
COPIES = "replica"
DATA = (COPIES, "dp", "ep")  # together the data axis: every rank along it has other samples
REPLICAS = (COPIES, "dp", "ep", "cp")  # ranks along these hold the same dense parameters

RECOMPUTE = ("none", "selective", "attention", "full")
RUN_ONCE = ("none", "selective", "attention")  # of these, those under which the code of every module runs once
_AUTO = "auto:"  # recompute=auto:12GiB: the fastest of RECOMPUTE with which a rank needs no more than that
CONTEXT = ("ring", "ulysses")

_LONGEST = 500  # characters of a plan in words

# Words of a plan string that differ from the field's name.
_SHORT = {"sequence": "sp"}


@plain_record
@dataclass(frozen=True)
class Plan:
    """How a job is split. Every field has the value that changes nothing, so Plan() is one device.

    Args:
        dp: Ranks that share the batch.
        tp: Ranks that share each layer.
        pp: Ranks that share the layers: stages of the pipeline.
        cp: Ranks that share each sequence.
        ep: Ranks of the data axis that share the experts; divides dp.
        zero: What the data axis shards: 1 optimizer state, 2 gradients too, 3 parameters too.
        shard: Over how many data ranks ZeRO shards, each such group having all (HSDP); 0: over all of them.
        sequence: Between tensor-parallel layers, activations are sharded along the sequence ("sp" in a text).
        context: How attention crosses cp: "ring" or "ulysses".
        recompute: "none", "selective", "attention", "full", "auto:12GiB", or module patterns.
        microbatches: The batch is split into this many, one after the other.
        schedule: Of the pipeline.
        chunks: Stages a rank holds (interleaved, zbv).
        offload: Optimizer state in host memory.
        compile: Blocks, the rest of the model and the loss are compiled, one by one.
        boundaries: The first block of each stage; default: stages are balanced by parameters.

    Raises:
        UsageError: A value is not allowed, or two contradict each other.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    shard: int = 0
    sequence: bool = False
    context: str = "ring"
    recompute: str | tuple[str, ...] = "none"
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    offload: bool = False
    compile: bool = False
    boundaries: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "zero", _stage_named(self.zero))
        object.__setattr__(self, "schedule", schedules.named(self.schedule))
        for name in ("dp", "tp", "pp", "cp", "ep", "microbatches", "chunks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"plan: {name}={value!r}; expected a whole number of at least 1")
        if self.zero not in (0, 1, 2, 3) or isinstance(self.zero, bool):
            raise UsageError(f"plan: zero={self.zero!r}; expected 0, 1, 2 or 3")
        self._check_shard()
        for name in ("sequence", "offload", "compile"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"plan: {name}={getattr(self, name)!r}; expected True or False")
        _one_of("context", self.context, CONTEXT)
        self._check_recompute()
        if self.dp % self.ep:
            raise UsageError(
                f"plan: ep={self.ep} does not divide dp={self.dp}; experts are sharded over a part of the data ranks"
            )
        if self.sequence and self.tp == 1:
            raise UsageError("plan: sp shards activations over the tp ranks, but tp=1; give tp or leave sp out")
        if self.offload and not self.zero:
            raise UsageError("plan: offload moves the sharded optimizer state; give zero=1, 2 or 3")
        self._check_boundaries()
        if self.chunks > 1 and self.schedule not in ("interleaved", "zbv"):
            raise UsageError(
                f"plan: schedule={self.schedule} holds one stage a rank; chunks is for interleaved and zbv"
            )

    def _check_shard(self) -> None:
        if self.shard == 0 and not isinstance(self.shard, bool):
            return
        if not isinstance(self.shard, int) or isinstance(self.shard, bool) or self.shard < 2 or self.dp % self.shard:
            raise UsageError(
                f"plan: shard={self.shard!r}; expected over how many of the dp={self.dp} data ranks ZeRO shards: a "
                "divisor of dp, at least 2"
            )
        if not self.zero:
            raise UsageError("plan: shard is over how many data ranks ZeRO shards, but zero=0; give zero=1, 2 or 3")
        if self.ep > 1:
            raise UsageError(
                "plan: shard with ep: ZeRO over a part of the data ranks does not combine with experts; leave one out"
            )

    def _check_recompute(self) -> None:
        if isinstance(self.recompute, str):
            if self.memory_limit is None:
                _one_of("recompute", self.recompute, (*RECOMPUTE, "auto:12GiB"))
            return
        self._as_tuple("recompute", "none, selective, attention, full, auto:12GiB, or a list of module patterns")
        if not self.recompute or not all(isinstance(each, str) and each for each in self.recompute):
            raise UsageError(f"plan: recompute={self.recompute!r}; expected a list of module patterns: ['*.mlp']")

    def _as_tuple(self, name: str, expected: str) -> None:
        """Lists are welcome, but a plan is a value: it is hashed, and written as words."""
        value = getattr(self, name)
        if not isinstance(value, list | tuple):
            raise UsageError(f"plan: {name}={value!r}; expected {expected}")
        object.__setattr__(self, name, tuple(value))

    def _check_boundaries(self) -> None:
        self._as_tuple("boundaries", "a list of the first block of each stage: [0, 6, 12]")
        given = self.boundaries
        if not given:
            return
        whole = all(isinstance(each, int) and not isinstance(each, bool) for each in given)
        if not whole or given[0] != 0 or any(low >= high for low, high in pairwise(given)):
            raise UsageError(
                f"plan: boundaries={'+'.join(map(str, given))}; expected the first block of each stage, rising from 0: "
                "boundaries=0+6+12"
            )
        if self.pp == 1:
            raise UsageError("plan: boundaries are those of a pipeline, but pp=1; give pp or leave them out")

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read a plan from `key=value` words and flags, separated by commas.

        Args:
            text: As "dp=2,tp=2,zero=1,sp".
        """
        if len(text) > _LONGEST:
            raise UsageError(f"plan {text[:40]!r} ...: a text of {len(text)} characters; expected at most {_LONGEST}")
        known = {_SHORT.get(field.name, field.name): field for field in fields(cls)}
        given: dict[str, Any] = {}
        for word in filter(None, (word.strip() for word in text.split(","))):
            key, equals, value = word.partition("=")
            if key not in known:
                near = did_you_mean(key, known)
                raise UsageError(f"plan {text!r}: unknown key {key!r}{near}; known are {', '.join(known)}")
            name = known[key].name
            if name in given:
                raise UsageError(f"plan {text!r}: {key} is given twice")
            given[name] = _value(text, key, value, bool(equals), getattr(cls, name))
        return cls(**given)

    def __str__(self) -> str:
        return ",".join(self._words()) or "dp=1"

    def _words(self) -> Iterator[str]:
        for field in fields(self):
            value, word = getattr(self, field.name), _SHORT.get(field.name, field.name)
            if value == field.default:
                continue
            if isinstance(value, bool):
                yield word
            else:
                yield f"{word}={'+'.join(map(str, value)) if isinstance(value, tuple) else value}"

    @property
    def world(self) -> int:
        """How many ranks the plan needs."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def memory_limit(self) -> float | None:
        """Bytes that a rank may need, where recompute=auto:... is to be chosen by them."""
        if not isinstance(self.recompute, str) or not self.recompute.startswith(_AUTO[:-1]):
            return None
        found = parse_bytes(self.recompute.removeprefix(_AUTO))
        if found is None:
            raise UsageError(
                f"plan: recompute={self.recompute}; expected the memory that a rank may need: recompute=auto:12GiB"
            )
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of `AXES`."""
        return (self.pp, self.copies, self.dp // self.copies // self.ep, self.ep, self.cp, self.tp)

    @property
    def copies(self) -> int:
        """How many groups of data ranks hold all that ZeRO shards within each of them."""
        return self.dp // self.shard if self.shard else 1

    def fit(self, world: int) -> Plan:
        """The plan itself, if `world` ranks are what it needs; else UsageError with a plan that would fit."""
        if self.world == world:
            return self
        product = "·".join(
            f"{name}={getattr(self, name)}" for name in ("dp", "tp", "pp", "cp") if getattr(self, name) > 1
        )
        others = self.tp * self.pp * self.cp
        fits = world % others == 0 and (world // others) % (self.shard or self.ep) == 0
        hint = f"use dp={world // others} or start {self.world}" if fits else f"start {self.world}"
        raise UsageError(f"plan {self} needs {self.world} ranks ({product or 'one'}), but {world} are running; {hint}")

    def but(self, **changes: Any) -> Plan:
        """The same plan with some fields changed."""
        return replace(self, **changes)


# What others call ZeRO's stages: group_sharded_parallel's levels, and FSDP's sharding strategies.
_STAGES = {"os": 1, "os_g": 2, "p_g_os": 3, "no_shard": 0, "shard_grad_op": 2, "full_shard": 3}


def _stage_named(given: Any) -> Any:
    return _STAGES.get(given.lower(), given) if isinstance(given, str) else given


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"plan: {name}={value}; expected one of {', '.join(known)}")


def _value(text: str, key: str, value: str, has_value: bool, default: Any) -> Any:
    if isinstance(default, bool):
        if not has_value:
            return True
        if value.lower() in ("true", "false", "1", "0"):
            return value.lower() in ("true", "1")
        raise UsageError(f"plan {text!r}: {key}={value}; {key} is a flag: write it alone")
    if not has_value or not value:
        raise UsageError(f"plan {text!r}: {key} needs a value: {key}={default}")
    if key == "zero" and value.lower() in _STAGES:
        return _STAGES[value.lower()]
    if isinstance(default, int):
        try:
            return int(value)
        except ValueError:
            raise UsageError(f"plan {text!r}: {key}={value}; expected a whole number") from None
    if key == "boundaries":
        words = value.split("+")
        if not all(word.isascii() and word.isdigit() for word in words):
            raise UsageError(f"plan {text!r}: boundaries={value}; expected the first block of each stage: 0+6+12")
        return tuple(map(int, words))
    if key == "recompute" and value not in RECOMPUTE and not value.startswith(_AUTO) and value != _AUTO[:-1]:
        return tuple(value.split("+"))
    return value
