"""Products of tensors, as contractions of letters: "...k,nk->...n".

On one axis a contraction can be sharded along any letter: tensors that have it are sharded there, the others are
replicated. The result is sharded where it has the letter too, and otherwise every rank holds a part of the sum. It is
also linear in each tensor: where one is Partial and the others are replicated, the result is Partial.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence

from torch.distributed.tensor import Shard

from unisono.graph.rules.call import OpCall
from unisono.graph.rules.option import REPLICATE, SUM, Option
from unisono.graph.rules.registry import rule
from unisono.mesh.placement import Placement


def contraction(terms: Sequence[str], result: str) -> Iterator[tuple[list[Placement], Placement]]:
    """The ways to shard a contraction: the tensors' placements and the result's. A letter may occur once a term."""
    for letter in dict.fromkeys("".join(terms)):
        if letter != "1":
            yield [_sharded(term, letter) for term in terms], _sharded(result, letter, SUM)
    for i in range(len(terms)):
        yield [SUM if i == j else REPLICATE for j in range(len(terms))], SUM


def _sharded(term: str, letter: str, otherwise: Placement = REPLICATE) -> Placement:
    return Shard(term.index(letter)) if letter in term else otherwise


def product(
    call: OpCall, first: str, second: str, terms: tuple[str, str], result: str, bias: str = ""
) -> Iterator[Option]:
    """The options of `first @ second (+ bias)`. A bias is added once, so to a sum in parts it comes as a part."""
    shape = call.shape(bias) if bias else ()
    for (left, right), made in contraction(terms, result):
        given = {first: left, second: right}
        if bias:
            given[bias] = _of_bias(shape, call.result, made)
        yield call.option(made, **given)


def _of_bias(shape: tuple[int, ...], result: tuple[int, ...], made: Placement) -> Placement:
    if not isinstance(made, Shard):
        return made
    dim = made.dim - (len(result) - len(shape))
    return Shard(dim) if dim >= 0 and shape[dim] == result[made.dim] else REPLICATE


@rule("aten.linear")
def linear(call: OpCall) -> Iterator[Option]:
    batch = string.ascii_lowercase[: len(call.shape("input")) - 1]
    yield from product(
        call, "input", "weight", (f"{batch}y", "zy"), f"{batch}z", "bias" if "bias" in call.names else ""
    )


@rule("aten.matmul")
def matmul(call: OpCall) -> Iterator[Option]:
    left, right, result = matmul_letters(call.shape("self"), call.shape("other"))
    yield from product(call, "self", "other", (left, right), result)


def matmul_letters(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[str, str, str]:
    """torch.matmul as a contraction; "1" stands for a dim that is broadcast."""
    rows = "x" if len(left) > 1 else ""
    columns = "z" if len(right) > 1 else ""
    ndim = max(len(left), len(right)) - 2
    names = string.ascii_lowercase[:ndim] if ndim > 0 else ""
    first = _batch_letters(names, left[:-2], right[:-2])
    second = _batch_letters(names, right[:-2], left[:-2])
    return f"{first}{rows}y", f"{second}y{columns}", f"{names}{rows}{columns}"


def _batch_letters(names: str, own: tuple[int, ...], other: tuple[int, ...]) -> str:
    letters = names[len(names) - len(own) :]
    return "".join("1" if size == 1 else letter for size, letter in zip(own, letters, strict=True))


@rule("aten.mm")
def mm(call: OpCall) -> Iterator[Option]:
    yield from product(call, "self", "mat2", ("xy", "yz"), "xz")


@rule("aten.bmm")
def bmm(call: OpCall) -> Iterator[Option]:
    yield from product(call, "self", "mat2", ("axy", "ayz"), "axz")


@rule("aten.addmm")
def addmm(call: OpCall) -> Iterator[Option]:
    yield from product(call, "mat1", "mat2", ("xy", "yz"), "xz", "self")


@rule("aten.baddbmm")
def baddbmm(call: OpCall) -> Iterator[Option]:
    yield from product(call, "batch1", "batch2", ("axy", "ayz"), "axz", "self")


@rule("aten.einsum")
def einsum(call: OpCall) -> Iterator[Option]:
    equation = call["equation"].replace(" ", "")
    terms, arrow, result = equation.partition("->")
    listed = terms.split(",")
    if not arrow or "." in equation or any(len(set(term)) < len(term) for term in (*listed, result)):
        return
    for placements, made in contraction(listed, result):
        yield call.option(made, tensors=placements)
