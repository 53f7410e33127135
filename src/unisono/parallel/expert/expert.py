"""Experts: a layer of many feed-forward networks, of which each token visits a few; and their sharding over ranks.

A router gives every token a probability for each expert; the token goes to the k experts it likes best, and what they
make of it is added, weighted by those probabilities. `naive_moe` does just that, in a loop. `MoE.forward` does it so
that experts work on dense blocks: the visits (token, expert) are sorted by expert, each expert takes its block, and
the outcomes go back to their tokens. Where the GPU can read how long blocks are, their products are one (grouped.py).

Expert parallelism puts an all-to-all on each side of the experts: rank r of the "ep" axis owns a run of consecutive
experts, so the sorted visits are already in the order of their owners. Every rank sends each owner its visits, works on
those that came, and sends the outcomes back. The owner thus sees the tokens of all "ep" ranks, and its gradients need
to be summed over the other data axes only.

What depends on the full batch stays so under any plan:
- capacity: an expert takes at most ceil(factor * k * tokens / experts) visits of the *global* batch, first choices
  first and then in the order of tokens. Ranks exchange how many visits they have for each expert, so everyone
  knows which of its own come too late.
- the auxiliary loss, experts * sum_e (fraction of visits to e) * (mean probability of e), takes fraction and mean over
  the global batch; `aux_loss` is this rank's part, and the parts of all ranks add up to it.

Experts of Hugging Face models are sharded the same way (`stacked_experts`): their own forward runs on visits that came.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.parallel.expert.all_to_all import all_to_all
from unisono.parallel.expert.grouped import Groups, can_be_grouped
from unisono.parallel.layout import UNSHARDED, Layout, Split, local_of, set_layout
from unisono.plan.plan import DATA, REPLICAS
from unisono.torch_compat import in_backward

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
_EXPERT_PARAMETERS = ("up", "up_bias", "gate", "down", "down_bias")


class MoE(nn.Module):
    """A mixture of experts: (..., width) to (..., width).

    capacity_factor: None for dropless, every visit is made; else visits beyond an expert's capacity are not.
    renormalise: whether a token's k weights are scaled to sum to 1; by default when k > 1 (for k = 1 the router would
    get no gradient). gated: experts are down(activation(gate(x)) * up(x)).
    aux_weight: of the auxiliary loss, which balances the experts' load; `collect_aux` gives it after a forward.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        top_k: int = 2,
        capacity_factor: float | None = None,
        activation: str = "gelu",
        aux_weight: float = 0.0,
        renormalise: bool | None = None,
        gated: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _require_sense(width, hidden, experts, top_k, capacity_factor, activation)
        self.width, self.hidden, self.experts, self.top_k = width, hidden, experts, top_k
        self.capacity_factor = capacity_factor
        self.activation = activation
        self.aux_weight = aux_weight
        self.renormalise = top_k > 1 if renormalise is None else renormalise
        self.router = nn.Linear(width, experts, bias=False, device=device, dtype=dtype)

        def stacked(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(experts, *shape, device=device, dtype=dtype))

        self.up = stacked(hidden, width)
        self.gate = stacked(hidden, width) if gated else None
        self.down = stacked(width, hidden)
        self.up_bias = stacked(hidden) if bias else None
        self.down_bias = stacked(width) if bias else None
        self.reset_parameters()
        self.aux_loss: torch.Tensor | None = None
        self._crowd = _Crowd()

    @property
    def is_tokenwise(self) -> bool:
        """Whether what comes of a token depends on it alone, so that any part of the tokens may be given."""
        return self.capacity_factor is None and not self.aux_weight

    PRODUCTS = ("up", "gate", "down")  # weights of matrix products only: see precision.rounded_weights

    def reset_parameters(self) -> None:
        """Each expert as its linear layers would be."""
        for parameter, inputs in (
            (self.up, self.width),
            (self.gate, self.width),
            (self.down, self.hidden),
            (self.up_bias, self.width),
            (self.down_bias, self.hidden),
        ):
            if parameter is not None:
                nn.init.uniform_(parameter, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs))

    def extra_repr(self) -> str:
        mode = "dropless" if self.capacity_factor is None else f"capacity_factor={self.capacity_factor}"
        return f"{self.width}, {self.hidden}, experts={self.experts}, top_k={self.top_k}, {mode}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, self.width)
        routes = self.route(tokens)
        visits = Visits.of(routes, self.experts)
        outcomes = self._crowd.visit(tokens, visits, self.top_k, self._run)
        order = visits.order[: len(outcomes)]
        weighted = outcomes * routes.weight[order, None].to(outcomes.dtype)
        by_choice = weighted.new_zeros(len(visits.order), self.width).index_copy(0, order, weighted)
        return by_choice.view(-1, self.top_k, self.width).sum(1).view(x.shape)

    def route(self, tokens: torch.Tensor) -> Routes:
        """Where the tokens go; sets `aux_loss`."""
        probability = _softmax(self.router(tokens))
        weight, expert = probability.topk(self.top_k, -1)
        if self.renormalise:
            weight = weight / weight.sum(-1, keepdim=True)
        aux_loss = self._balance(probability, expert) if self.aux_weight else None
        if not in_backward():  # else a backward runs the forward again, and nobody would collect
            self.aux_loss = aux_loss
        fits = None if self.capacity_factor is None else self._fits(expert).reshape(-1)
        return Routes(expert.reshape(-1), weight.reshape(-1), fits)

    def _balance(self, probability: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        visits = _counts(expert.reshape(-1), self.experts)
        visits = self._crowd.sum_of_all(torch.cat([visits, visits.new_full((1,), len(expert))]))
        tokens = visits[-1].clamp(min=1)
        fraction = visits[:-1].to(probability.dtype) / (tokens * self.top_k)
        return self.aux_weight * self.experts * (fraction * probability.sum(0)).sum() / tokens

    def _fits(self, expert: torch.Tensor) -> torch.Tensor:
        """Which of the visits (tokens, choices) come before their expert's capacity is reached."""
        assert self.capacity_factor is not None
        wants = (
            expert[..., None] == torch.arange(self.experts, device=expert.device)
        ).long()  # (tokens, choices, experts)
        mine = wants.sum(0)  # (choices, experts)
        before, everyone, tokens = self._crowd.ahead(mine, len(expert))
        capacity = (self.capacity_factor * self.top_k * tokens.double() / self.experts).ceil()
        earlier_choices = everyone.cumsum(0) - everyone
        position = earlier_choices + before + wants.cumsum(0) - wants
        return (position * wants).sum(-1) < capacity

    def run_experts(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Each expert that this rank holds on its own tokens, which are stored one expert after the other."""
        shards = [self.run_expert(number, shard) for number, shard in enumerate(tokens.split(counts))]
        return torch.cat(shards)

    def _run(self, tokens: torch.Tensor, load: Load) -> torch.Tensor:
        """The same, without waiting for the counts where the GPU can take them. Further tokens may follow: then the
        outcomes end before theirs, or theirs are 0."""
        weights = [each for each in (self.up, self.gate, self.down) if each is not None]
        if not can_be_grouped(tokens, weights):
            counts = load.counts()
            return self.run_experts(tokens[: sum(counts)], counts)
        outcomes = self.run_grouped(tokens, load.on_device)
        if load.is_all:
            return outcomes
        is_left_out = torch.arange(len(tokens), device=tokens.device) >= load.on_device.sum()
        return outcomes.masked_fill(is_left_out[:, None], 0)

    def run_grouped(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """All experts at once, in bfloat16; see grouped.py."""
        groups = Groups.of(counts, len(tokens))
        return groups.run(tokens, lambda x: self._feed_forward(x, groups.linear))

    def run_expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Expert `number` of those that this rank holds."""

        def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return F.linear(x, weight[number], None if bias is None else bias[number])

        return self._feed_forward(x, linear)

    def _feed_forward(self, x: torch.Tensor, linear: Callable[..., torch.Tensor]) -> torch.Tensor:
        activation = ACTIVATIONS[self.activation]
        inner = linear(x, self.up, self.up_bias)
        inner = activation(inner) if self.gate is None else activation(linear(x, self.gate, None)) * inner
        return linear(inner, self.down, self.down_bias)


def naive_moe(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """What a MoE computes, as its definition reads; for one device that holds all experts."""
    tokens = x.reshape(-1, moe.width)
    routes = moe.route(tokens)
    out = torch.zeros_like(tokens)
    for visit in routes.made.tolist():
        token, expert = visit // moe.top_k, int(routes.expert[visit])
        out[token] = out[token] + routes.weight[visit] * moe.run_expert(expert, tokens[token])
    return out.view(x.shape)


@dataclass(frozen=True)
class Routes:
    """All visits that tokens want to make: visit t*k+c is token t's choice c."""

    expert: torch.Tensor
    weight: torch.Tensor
    fits: torch.Tensor | None  # which visits are made; None for all

    @property
    def made(self) -> torch.Tensor:
        """The numbers of the visits that are made. The host waits for how many."""
        return torch.arange(len(self.expert)) if self.fits is None else self.fits.nonzero()[:, 0]


class Visits(NamedTuple):
    """The visits in the order in which experts take them."""

    order: torch.Tensor  # their numbers, sorted by expert; those that are not made are the last
    counts: torch.Tensor  # how many each expert takes
    is_all: bool  # whether all are made

    @classmethod
    def of(cls, routes: Routes, experts: int) -> Visits:
        expert = routes.expert if routes.fits is None else routes.expert.masked_fill(~routes.fits, experts)
        order = expert.argsort(stable=True)
        numbers = torch.arange(experts, device=expert.device)
        ends = torch.searchsorted(expert[order], numbers, right=True)  # unlike bincount, waits for nothing
        return cls(order, ends.diff(prepend=ends.new_zeros(1)), routes.fits is None)


class Load(NamedTuple):
    """How many tokens each expert of this rank takes."""

    on_device: torch.Tensor
    on_host: list[int] | None = None  # where the host knows
    is_all: bool = True  # whether that is all tokens

    def counts(self) -> list[int]:
        """The host waits for them, if it does not know."""
        return self.on_device.tolist() if self.on_host is None else self.on_host


Run = Callable[[torch.Tensor, Load], torch.Tensor]


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _require_sense(
    width: int, hidden: int, experts: int, top_k: int, capacity_factor: float | None, activation: str
) -> None:
    for name, value in (("width", width), ("hidden", hidden), ("experts", experts)):
        if value < 1:
            raise UsageError(f"MoE: {name}={value}; expected at least 1")
    if not 1 <= top_k <= experts:
        raise UsageError(f"MoE: top_k={top_k} of {experts} experts; expected 1 to {experts}")
    if capacity_factor is not None and capacity_factor <= 0:
        raise UsageError(f"MoE: capacity_factor={capacity_factor}; expected a number above 0, or None for dropless")
    if activation not in ACTIVATIONS:
        raise UsageError(f"MoE: activation={activation!r}; expected one of {', '.join(ACTIVATIONS)}")


# ---- over ranks --------------------------------------------------------------------------------------------------


class _Crowd:
    """The ranks that share a MoE's tokens and experts; by itself, one rank that has all."""

    def sum_of_all(self, counts: torch.Tensor) -> torch.Tensor:
        """Counts, summed over all ranks that have other tokens."""
        return counts

    def ahead(self, visits: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of counts of visits: those of the ranks before this one, and of all; and the count of all tokens."""
        return torch.zeros_like(visits), visits, visits.new_full((), tokens)

    def visit(self, tokens: torch.Tensor, visits: Visits, choices: int, run: Run) -> torch.Tensor:
        """The experts' outcomes of the visits in their order, at least of those that are made. choices: of a token."""
        return run(tokens[visits.order // choices], Load(visits.counts, is_all=visits.is_all))


class _Ranks(_Crowd):
    def __init__(self, mesh: Mesh, owned: list[int]) -> None:
        self._owned = owned  # how many experts each "ep" rank has
        self._everyone = _comm(mesh, REPLICAS)
        self._data = _comm(mesh, DATA)
        self._owners = _comm(mesh, ("ep",))

    def sum_of_all(self, counts: torch.Tensor) -> torch.Tensor:
        return counts if self._everyone is None else self._everyone.all_reduce(counts.contiguous())

    def ahead(self, visits: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._data is None:
            return super().ahead(visits, tokens)
        mine = torch.cat([visits.reshape(-1), visits.new_full((1,), tokens)])
        all_ranks = torch.stack(self._data.all_gather(mine))
        before, total = all_ranks[: self._data.rank].sum(0), all_ranks.sum(0)
        return before[:-1].view_as(visits), total[:-1].view_as(visits), total[-1]

    def visit(self, tokens: torch.Tensor, visits: Visits, choices: int, run: Run) -> torch.Tensor:
        comm = self._owners
        if comm is None:
            return super().visit(tokens, visits, choices, run)
        mine, experts = self._owned[comm.rank], len(visits.counts)
        coming = comm.all_to_all(visits.counts, self._owned, [mine] * comm.size)
        known = torch.cat([visits.counts, coming]).tolist()  # the sizes of messages are the host's to know: it waits
        send_sizes = [sum(part) for part in _runs(known[:experts], self._owned)]
        by_rank = list(_runs(known[experts:], [mine] * comm.size))
        recv_sizes = [sum(part) for part in by_rank]
        arrived = all_to_all(tokens[visits.order[: sum(send_sizes)] // choices], send_sizes, recv_sizes, comm)
        coming = coming.view(comm.size, mine)
        by_expert = _by_expert(coming, len(arrived))
        load = Load(coming.sum(0), [sum(counts) for counts in zip(*by_rank, strict=True)])
        outcomes = run(arrived[by_expert], load)
        back = torch.empty_like(by_expert)
        back[by_expert] = torch.arange(len(back), device=back.device)
        return all_to_all(outcomes[back], recv_sizes, send_sizes, comm)


def _runs(values: list[int], lengths: Iterable[int]) -> Iterator[list[int]]:
    given = iter(values)
    return (list(itertools.islice(given, length)) for length in lengths)


def _comm(mesh: Mesh, axes: tuple[str, ...]) -> Communicator | None:
    present = tuple(axis for axis in axes if axis in mesh.names)
    return mesh.comm(*present) if present and mesh.size(*present) > 1 else None


def _by_expert(coming: torch.Tensor, tokens: int) -> torch.Tensor:
    """The order of tokens that sorts them by expert, when counts (ranks, experts) came one rank after the other."""
    expert = torch.arange(coming.shape[1], device=coming.device).repeat(coming.shape[0])
    return expert.repeat_interleave(coming.reshape(-1), output_size=tokens).argsort(stable=True)


def _counts(numbers: torch.Tensor, most: int) -> torch.Tensor:
    """How often each number below `most` is there. torch.bincount would wait for the largest."""
    return numbers.new_zeros(most).index_add(0, numbers, torch.ones_like(numbers))


def expert_parallelize(model: nn.Module, mesh: Mesh) -> None:
    """Shard the experts of the model's MoE layers over the mesh's "ep" axis, in place.

    Needed without an "ep" axis too, wherever ranks share a batch: capacity and auxiliary loss are of the global one.
    """
    require_experts(model, mesh)
    for _, moe in _layers(model):
        _shard_moe(moe, mesh, _owners(mesh))
    for _, experts in stacked_experts(model):
        _shard_stacked_experts(experts, mesh, _owners(mesh))


def require_experts(model: nn.Module, mesh: Mesh) -> None:
    """UsageError where ranks along the mesh's "ep" axis cannot have the model's experts, or its capacity."""
    layers, stacked, ranks = dict(_layers(model)), dict(stacked_experts(model)), _owners(mesh)
    if ranks > 1 and not layers and not stacked:
        raise UsageError(
            f"ep={ranks} shards experts, but {type(model).__name__} has no uni.nn.MoE, and no experts of Hugging Face "
            "whose weights are stacked in one parameter; use ep=1"
        )
    if ranks > 1 and stacked and "tp" in mesh.names and mesh.size("tp") > 1:
        raise UsageError(
            f"ep={ranks} with tp={mesh.size('tp')}: {next(iter(stacked))} would be sharded by both; use ep or tp alone"
        )
    for name, module in (*layers.items(), *stacked.items()):
        count = module.experts if isinstance(module, MoE) else module.num_experts
        if count < ranks:
            raise UsageError(f"{name} has {count} experts for ep={ranks} ranks; use ep={count} or less")
    for name, moe in layers.items():
        if moe.capacity_factor is not None and "cp" in mesh.names and mesh.size("cp") > 1:
            raise UsageError(
                f"{name} has a capacity, which tokens take in the order of the full sequence; under cp a rank does "
                "not know it: use capacity_factor=None (dropless) or a plan with cp=1"
            )


def _owners(mesh: Mesh) -> int:
    """How many ranks share the experts."""
    return mesh.size("ep") if "ep" in mesh.names else 1


def _shard_moe(moe: MoE, mesh: Mesh, ranks: int) -> None:
    split = Split.even(("ep",), 0, moe.experts, ranks)
    moe._crowd = _Ranks(mesh, [len(part) for part in split.held])
    if ranks == 1:
        return
    _shard_experts(moe, _EXPERT_PARAMETERS, split, mesh)


def _shard_experts(module: nn.Module, names: Iterable[str], split: Split, mesh: Mesh) -> None:
    layout = Layout(summed=tuple(axis for axis in UNSHARDED.summed if axis != "ep")).with_split(split)
    for name in names:
        full = getattr(module, name)
        if full is not None:
            mine = nn.Parameter(local_of(full.detach(), layout, mesh), requires_grad=full.requires_grad)
            set_layout(mine, layout)
            setattr(module, name, mine)


# ---- experts of Hugging Face ---------------------------------------------------------------------------------------


def stacked_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules as transformers 5 writes them: experts(hidden_states, top_k_index, top_k_weights) with `num_experts`
    experts, whose parameters have the expert as dim 0. The router is elsewhere, so they are dropless."""
    for name, module in model.named_modules():
        count = getattr(module, "num_experts", None)
        if not hasattr(module, "_is_expert_parallel") or not isinstance(count, int):
            continue
        parameters = list(module.parameters())
        is_stacked = all(each is not None and each.shape[0] == count for each in module._parameters.values())
        takes_routes = len(inspect.signature(module.forward).parameters) == 3
        if is_stacked and takes_routes and parameters and len(parameters) == len(module._parameters):
            yield name or "the model", module


def _shard_stacked_experts(experts: Any, mesh: Mesh, ranks: int) -> None:
    if ranks == 1:
        return
    count = experts.num_experts
    split = Split.even(("ep",), 0, count, ranks)
    owned = [len(part) for part in split.held]
    _shard_experts(experts, list(experts._parameters), split, mesh)
    experts.num_experts = owned[mesh.index("ep")]
    experts.forward = partial(_visit_stacked, experts, experts.forward, _Ranks(mesh, owned), count)


def _visit_stacked(
    module: nn.Module,
    forward: Callable[..., torch.Tensor],
    crowd: _Crowd,
    count: int,
    hidden_states: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Every visit is made at the rank that has its expert, by the module's own forward with one expert a row."""
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    choices = indices.shape[-1]
    visits = Visits.of(Routes(indices.reshape(-1), weights, None), count)

    def run(arrived: torch.Tensor, load: Load) -> torch.Tensor:
        if not len(arrived):  # the backward of other ranks counts on this one
            touched: Any = sum(parameter[:0].sum() for parameter in module.parameters())
            return arrived + touched
        numbers = torch.arange(len(load.on_device), device=arrived.device)
        local = numbers.repeat_interleave(load.on_device, output_size=len(arrived))[:, None]
        return forward(arrived, local, torch.ones_like(local, dtype=weights.dtype))

    outcomes = crowd.visit(tokens, visits, choices, run)
    weighted = outcomes * weights.reshape(-1)[visits.order, None]
    made = torch.zeros_like(tokens).index_add(0, visits.order // choices, weighted.to(tokens.dtype))
    return made.view(hidden_states.shape)


def _layers(model: nn.Module) -> Iterator[tuple[str, MoE]]:
    return ((name or "the model", module) for name, module in model.named_modules() if isinstance(module, MoE))


def has_moe(model: nn.Module) -> bool:
    return next(_layers(model), None) is not None


def collect_aux(model: nn.Module) -> torch.Tensor | None:
    """The auxiliary losses of the last forward, this rank's part; None where the model has none.

    Add it to this rank's part of the loss: the parts of all ranks sum to the auxiliary loss of the global batch.
    Collecting twice gives None the second time.
    """
    losses = []
    for _, moe in _layers(model):
        if moe.aux_loss is not None:
            losses.append(moe.aux_loss)
            moe.aux_loss = None
    return torch.stack(losses).sum() if losses else None


def needs_full_batch(model: nn.Module) -> list[str]:
    """The MoE layers whose outcome depends on the full batch at once, so that microbatches would change it."""
    return [name for name, moe in _layers(model) if not moe.is_tokenwise]
