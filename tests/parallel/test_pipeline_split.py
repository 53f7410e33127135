"""Cutting models into stages: who holds what, where the cuts lie, and what is refused."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.parallel import models
from tests.parallel.cases import CASES, SEED, batch, build, called
from unisono.errors import UsageError
from unisono.parallel.pipeline.layers import LayerSpec, build_full, split_layers
from unisono.parallel.pipeline.split import StageSplit, split
from unisono.plan.schedules.schedule import Schedule, schedule
from unisono.plan.search.balance import balanced


def _cuts(name: str, made: Schedule, **options: object) -> list[StageSplit]:
    return [split(build(CASES[name]), made, rank, **options) for rank in range(made.ranks)]  # type: ignore[arg-type]


def _in_a_row(splits: list[StageSplit], inputs: object) -> object:
    """All stages after each other, in one process."""
    stages = sorted((stage for sharded in splits for stage in sharded.stages), key=lambda stage: stage.number)
    outcome = stages[0].forward(inputs)
    for stage in stages[1:]:
        outcome = stage.forward(inputs, outcome.tensors, outcome.form)
    return outcome.output


def _names(sharded: StageSplit) -> set[str]:
    return {name for name, _ in sharded.model.named_parameters()}


# ---- what a stage computes and holds -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "structured", "gpt", "relay"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("grad", [True, False])
def test_stages_in_a_row_compute_what_the_model_computes(name: str, stages: int, grad: bool) -> None:
    case = CASES[name]
    example = batch(case, 2, 9)[0]
    splits = _cuts(name, schedule("1f1b", stages, 1), example=example)
    model = build(case)
    for samples in (4, 1, 3, 4):
        inputs = batch(case, samples, 0)[0]
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(_in_a_row(splits, inputs), called(model, inputs), rtol=0, atol=0)


def test_of_a_hugging_face_model_only_hidden_states_travel() -> None:
    pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")
    inputs = batch(CASES["llama"], 3, 0)[0]
    splits = _cuts("llama", schedule("1f1b", 3, 1), example=inputs)
    output = _in_a_row(splits, inputs)
    torch.testing.assert_close(output.logits, build(CASES["llama"])(**inputs).logits, rtol=0, atol=0)  # type: ignore[attr-defined]
    assert [tensor.shape for tensor in splits[0].stages[0].forward(inputs).tensors] == [(3, 7, 8)]


def test_parameters_lie_where_they_are_used_and_keep_their_names_and_values() -> None:
    plain = dict(build(CASES["gpt"]).named_parameters())
    for example in (None, batch(CASES["gpt"], 2, 0)[0]):
        first, middle, last = _cuts("gpt", schedule("1f1b", 3, 2), example=example, boundaries=(0, 3, 5))
        assert _names(first) - _names(middle) - _names(last) >= {"positions.weight", "blocks.0.fc1.weight"}
        assert all(name.startswith(("blocks.3.", "blocks.4.")) for name in _names(middle))
        assert {"norm.weight", "norm.bias", "blocks.7.fc2.bias"} <= _names(last)
        assert _names(first) & _names(last) == {"tokens.weight"}
        assert _names(first) | _names(middle) | _names(last) == set(plain)
        for sharded in (first, middle, last):
            for name, parameter in sharded.model.named_parameters():
                assert torch.equal(parameter, plain[name])
            assert set(sharded.model.state_dict()) <= set(build(CASES["gpt"]).state_dict())


def test_what_is_foreign_takes_no_memory() -> None:
    full = sum(p.numel() * p.element_size() for p in build(CASES["gpt"]).parameters())
    sharded = _cuts("gpt", schedule("1f1b", 4, 2), boundaries=(0, 2, 4, 6))[1]
    own = sum(p.numel() * p.element_size() for p in sharded.model.parameters())
    everything = {
        value.untyped_storage()._cdata: value.untyped_storage().nbytes()
        for module in sharded.model.modules()
        for value in (*vars(module).values(), *module._parameters.values())
        if isinstance(value, torch.Tensor)
    }
    assert own < 0.3 * full
    assert sum(everything.values()) < own + 8 * 200


def test_a_split_model_can_still_be_moved_to_another_dtype() -> None:
    splits = _cuts("gpt", schedule("1f1b", 2, 2))
    for sharded in splits:
        sharded.model.float()
    inputs = batch(CASES["gpt"], 2, 0)[0]
    output = _in_a_row(splits, inputs)
    assert isinstance(output, torch.Tensor)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, build(CASES["gpt"]).float()(inputs))


def test_only_what_depends_on_layers_travels() -> None:
    """Of Relay's arguments the two states, the first embedding and the counts; not the mask, the power or the mode."""
    case = CASES["relay"]
    first = _cuts("relay", schedule("1f1b", 2, 1), example=batch(case, 2, 0)[0])[0].stages[0]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            outcome = first.forward(batch(case, 3, 0)[0])
        assert outcome.form is not None
        assert [tensor.shape for tensor in outcome.tensors] == [(3, 2, 5), (3, 2, 1), (3, 2, 5), (3, 2)]
        assert [form.differentiable for form in outcome.form.tensors] == [grad, grad, grad, False]


def test_buffers_of_other_stages_are_not_reported() -> None:
    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.BatchNorm1d(3)
            self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
            self.end = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.end(x)

    x = torch.randn(6, 3)
    torch.manual_seed(0)
    plain = Stem()
    splits = []
    for rank in range(2):
        torch.manual_seed(0)
        splits.append(split(Stem(), schedule("1f1b", 2, 1), rank, example=x))
    assert all(
        torch.equal(buffer, dict(plain.named_buffers())[name]) for name, buffer in splits[0].model.named_buffers()
    )
    torch.testing.assert_close(_in_a_row(splits, x), plain(x))
    found = [dict(sharded.model.named_buffers()) for sharded in splits]
    assert [{name.split(".")[0] for name in each} for each in found] == [{"stem"}, {"end"}]
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close((found[0] | found[1])[name], buffer)


# ---- layers that are built where they are needed -----------------------------------------------------------------


def test_a_rank_builds_only_its_layers_with_the_parameters_of_the_full() -> None:
    full = build_full(models.tied_layers(), SEED)
    made = schedule("1f1b", 3, 2)
    splits = [split_layers(models.tied_layers(), made, rank, SEED) for rank in range(3)]
    found: set[str] = set()
    for sharded in splits:
        found |= _names(sharded)
        for name, parameter in sharded.model.named_parameters():
            assert torch.equal(parameter, full.get_parameter(name)), name
    assert found == {name for name, _ in full.named_parameters()}
    assert [len(_names(sharded)) for sharded in splits] != [len(found)] * 3
    tokens = torch.randint(11, (2, 5))
    torch.testing.assert_close(_in_a_row(splits, tokens), full(tokens), rtol=0, atol=0)


def test_a_layer_spec_says_what_it_is() -> None:
    assert repr(LayerSpec(nn.Linear, 3, 4, bias=False)) == "Linear(3, 4, bias=False)"
    with pytest.raises(UsageError, match="expected a module class"):
        LayerSpec(nn.Linear(2, 2).weight)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected a module"):
        build_full([LayerSpec(dict)], 0)  # type: ignore[arg-type]


# ---- where the cuts lie ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_no_split_is_better_balanced(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    starts = balanced(costs, stages)

    def loads(sharded: tuple[int, ...]) -> tuple[int, int]:
        sums = [sum(costs[low:high]) for low, high in zip(sharded, (*sharded[1:], len(costs)), strict=True)]
        return max(sums), sum(load**2 for load in sums)

    assert starts[0] == 0
    assert len(starts) == stages
    assert list(starts) == sorted(set(starts))
    assert loads(starts) == min(loads((0, *rest)) for rest in combinations(range(1, len(costs)), stages - 1))


def test_embedding_and_head_count() -> None:
    made = schedule("1f1b", 2, 2)
    assert _cuts("gpt", made)[0].boundaries == (0, 4)
    heavy = models.gpt(layers=8)
    heavy.tokens.weight = nn.Parameter(torch.zeros(500, 8))  # on the first stage only, for the head is not tied now
    assert split(heavy, made, 0).boundaries[1] < 4
    example = batch(CASES["gpt"], 2, 0)[0]
    head = models.gpt(layers=8)
    head.head = nn.Linear(8, 3000)
    assert split(head, made, 0, example=example, cost="operations").boundaries[1] > 5
    assert split(models.gpt(layers=8), made, 0, cost=[1, 1, 1, 1, 1, 1, 1, 9]).boundaries == (0, 7)


def test_stages_lie_as_the_schedule_places_them() -> None:
    interleaved = _cuts("gpt", schedule("interleaved", 2, 4, 2))
    assert [[stage.number for stage in sharded.stages] for sharded in interleaved] == [[0, 2], [1, 3]]
    folded = _cuts("gpt", schedule("zbv", 2, 4))
    assert [[stage.number for stage in sharded.stages] for sharded in folded] == [[0, 3], [1, 2]]


def test_the_finest_list_is_split() -> None:
    nested = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), nn.Linear(4, 2))
    assert len(split(nested, schedule("1f1b", 4, 1), 0).boundaries) == 4
    by_path = split(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), schedule("1f1b", 2, 1), 1, blocks="")
    assert by_path.boundaries == (0, 1)


# ---- what is refused ---------------------------------------------------------------------------------------------


def test_bad_requests_are_refused_before_anything_is_sent() -> None:
    made = schedule("1f1b", 4, 2)
    with pytest.raises(UsageError, match=r"4 stages .* but GPT \(blocks\) has only 3 blocks"):
        split(models.gpt(layers=3), made, 0)
    with pytest.raises(UsageError, match="the list of layers has only 2"):
        split_layers([LayerSpec(nn.ReLU), LayerSpec(nn.ReLU)], made, 0, 0)
    with pytest.raises(UsageError, match="no list of repeated blocks"):
        split(nn.Linear(2, 2), made, 0)
    for boundaries in [(0, 2, 1, 3), (1, 2, 3, 4), (0, 1, 2), (0, 1, 2, 8)]:
        with pytest.raises(UsageError, match="the first block of each of 4 stages, rising from 0 to at most 7"):
            split(models.gpt(layers=8), made, 0, boundaries=boundaries)
    with pytest.raises(UsageError, match="pass an example"):
        split(models.gpt(), made, 0, cost="operations")
    with pytest.raises(UsageError, match="3 costs are given for 4 blocks"):
        split(models.gpt(), made, 0, cost=[1, 2, 3])
    with pytest.raises(UsageError, match="cost='time'"):
        split(models.gpt(), made, 0, cost="time")
    with pytest.raises(UsageError, match="at 'layers'"):
        split(models.gpt(), made, 0, blocks="layers")


def test_a_model_that_leads_round_its_blocks_is_refused_and_not_run_wrong() -> None:
    made = schedule("1f1b", 2, 1)
    x = torch.randn(2, 3)
    for grad in (True, False):
        splits = [split(models.AroundBlocks(), made, rank) for rank in range(2)]  # no example shows it
        with torch.set_grad_enabled(grad), pytest.raises(UsageError, match=r"blocks\.3 .* leads round the blocks"):
            _in_a_row(splits, x)


def test_blocks_that_do_not_run_once_in_order_are_refused() -> None:
    class Twice(nn.Module):
        def __init__(self, order: tuple[int, ...]) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
            self.order = order

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number in self.order:
                x = self.blocks[number](x)
            return x

    for order, message in [((0, 0, 1, 2), r"blocks\.0 after blocks\.0"), ((0, 1), r"did not run blocks\.2")]:
        with pytest.raises(UsageError, match=message):
            split(Twice(order), schedule("1f1b", 2, 1), 0, example=torch.randn(2, 3))
