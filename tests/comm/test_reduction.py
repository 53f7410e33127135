"""The meaning of op x dtype, with the wire reduced here, by plain tensor arithmetic."""

from __future__ import annotations

from functools import reduce

import pytest
import torch

from tests.comm import expectation
from unisono.comm.reduction import OPS, op_named, plan_reduction
from unisono.errors import UsageError

WIRE_STEP = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
PAIRS = [(op, dtype) for op in expectation.OPS for dtype in expectation.DTYPES]


def reduce_on_the_wire(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    reduction = plan_reduction(op, tensors[0].dtype)
    factor = expectation.FACTOR if op == "premul_sum" else None
    wires = [reduction.to_wire(tensor, factor).clone() for tensor in tensors]
    assert {wire.dtype for wire in wires} == {reduction.wire_dtype}
    out = torch.empty_like(tensors[0])
    landing = reduction.landing(out)
    assert landing.dtype == reduction.wire_dtype
    landing.copy_(reduce(WIRE_STEP[reduction.wire_op], wires))
    reduction.from_wire(landing, out, len(tensors))
    return out


def test_ops_are_the_nine() -> None:
    assert set(OPS) == set(expectation.OPS)


@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_table(op: str, dtype: torch.dtype) -> None:
    tensors = [expectation.sample(rank, (3, 5), dtype) for rank in range(4)]
    if not expectation.has_meaning(op, dtype):
        with pytest.raises(UsageError, match=f"{op} has no meaning for {dtype}"):
            plan_reduction(op, dtype)
        return
    kept = [tensor.clone() for tensor in tensors]
    torch.testing.assert_close(reduce_on_the_wire(op, tensors), expectation.reduced(op, tensors), rtol=0, atol=0)
    for tensor, before in zip(tensors, kept, strict=True):
        assert torch.equal(tensor, before)


def test_halves_round_once() -> None:
    # In float16, 2048 + 1 rounds back to 2048, four times over.
    tensors = [torch.tensor([value], dtype=torch.float16) for value in (2048.0, 1.0, 1.0, 1.0, 1.0)]
    assert reduce_on_the_wire("sum", tensors).item() == 2052.0


def test_integer_average_neither_overflows_nor_floors() -> None:
    high = [torch.tensor([value], dtype=torch.int8) for value in (127, 126)]
    assert reduce_on_the_wire("avg", high).item() == 126
    low = [torch.tensor([value], dtype=torch.int8) for value in (-3, 0)]
    assert reduce_on_the_wire("avg", low).item() == -1


def test_shares_memory_where_it_can() -> None:
    for dtype in (torch.float32, torch.int16, torch.bool, torch.complex64):
        tensor = expectation.sample(0, (4,), dtype)
        assert plan_reduction("sum", dtype).to_wire(tensor).data_ptr() == tensor.data_ptr()


def test_a_conjugate_view_travels_conjugated() -> None:
    tensors = [expectation.sample(rank, (4,), torch.complex128).conj() for rank in range(2)]
    torch.testing.assert_close(reduce_on_the_wire("sum", tensors), tensors[0] + tensors[1])


def test_premul_factor_may_be_a_tensor_and_must_be_there() -> None:
    reduction = plan_reduction("premul_sum", torch.bfloat16)
    wire = reduction.to_wire(torch.ones(2, dtype=torch.bfloat16), torch.tensor(0.25))
    assert wire.dtype == torch.float32
    assert wire.tolist() == [0.25, 0.25]
    with pytest.raises(UsageError, match="no factor"):
        reduction.to_wire(torch.ones(2, dtype=torch.bfloat16))


def test_unknown_names() -> None:
    assert op_named("prod") == op_named("product") == "product"
    with pytest.raises(UsageError, match="no reduction 'mean'"):
        plan_reduction("mean", torch.float32)
    with pytest.raises(UsageError, match="float8_e5m2 cannot be reduced"):
        plan_reduction("sum", torch.float8_e5m2)
    with pytest.raises(UsageError, match="given one of"):
        plan_reduction("sum", torch.float32).to_wire(torch.ones(1, dtype=torch.float64))
