"""Layers of a user's own class, and hooks on layers, under tensor parallelism: as on one device, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.task import Task
from unisono.parallel.tensor.tensor_parallel import require_shareable
from unisono.plan.plan import Plan
from unisono.verify.verify import verify_here

Pools = Callable[[str, int], RankPool]
RULES = {"table": "vocab", "up": "column", "down": "row", "head": "column_gather"}


class Net(nn.Module):
    """tokens -> table -> up -> act -> down -> head, each of which a case may replace."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        plain: dict[str, Callable[[], nn.Module]] = {
            "table": lambda: nn.Embedding(11, 6),
            "up": lambda: nn.Linear(6, 8),
            "act": nn.Tanh,
            "down": lambda: nn.Linear(8, 6),
            "head": lambda: nn.Linear(6, 11),
        }
        for name, make in plain.items():
            self.add_module(name, layers[name] if name in layers else make())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        return self.head(x + self.down(self.act(self.up(x))))


def tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(11, (4, 5), generator=drawn), torch.randint(11, (4, 5), generator=drawn)


def per_token(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def came(comm: Communicator, build: Callable[[], nn.Module], plan: str, rules: dict[str, str] | None = None) -> str:
    """ "" where the plan is equivalent, else why not."""
    task = Task(build, per_token, partial(torch.optim.AdamW, lr=0.01), tokens, rules=rules or RULES)
    try:
        verdict = verify_here(comm, task, Plan.parse(plan), 2)
    except UsageError as error:
        return str(error)
    return "" if verdict.equivalent else f"not equivalent: {verdict.first_divergence}"


# ---- classes of their own --------------------------------------------------------------------------------------------


class Scaled(nn.Embedding):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale


class Projected(nn.Embedding):
    """A layer behind the table, for every token."""

    def __init__(self) -> None:
        super().__init__(11, 4, padding_idx=7)
        self.project = nn.Linear(4, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.project(super().forward(tokens)).tanh()


class Lora(nn.Linear):
    """The adapter's second matrix begins as zeros, as it does in the field."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.a, self.b = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.zeros(outputs, 2))
        self.register_buffer("gain", torch.rand(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.a), self.b) * 0.5


class Gained(Lora):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


class Standardised(nn.Linear):
    """Over all of its outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y - y.mean(-1, keepdim=True)


class Dropped(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class Counting(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(11, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(tokens)


def patched(make: Callable[[], nn.Linear]) -> nn.Linear:
    layer = make()
    own = layer.forward
    layer.forward = lambda x: own(x) * 2 + 0.5  # type: ignore[method-assign]
    return layer


def pruned(layer: nn.Linear) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", 0.4)


EQUIVALENT: dict[str, Callable[[], nn.Module]] = {
    "scaled table": lambda: Net(table=Scaled(11, 6, padding_idx=2)),
    "table with a layer": lambda: Net(table=Projected()),
    "adapters": lambda: Net(up=Lora(6, 8), down=Lora(8, 6), head=Lora(6, 11)),
    "a buffer of the outputs": lambda: Net(up=Gained(6, 8), head=Gained(6, 11)),
    "weight_norm by columns": lambda: Net(up=parametrizations.weight_norm(nn.Linear(6, 8))),
    "old weight_norm by columns": lambda: Net(up=weight_norm(nn.Linear(6, 8))),
    "pruned": lambda: Net(up=pruned(nn.Linear(6, 8)), down=pruned(nn.Linear(8, 6))),
    "an assigned forward": lambda: Net(up=patched(lambda: nn.Linear(6, 8)), head=patched(lambda: nn.Linear(6, 11))),
    "square layers": lambda: Net(up=Lora(6, 6), down=Lora(6, 6)),
}


def check_equivalent(comm: Communicator, names: list[str]) -> dict[str, str]:
    return {name: came(comm, EQUIVALENT[name], "tp=2") for name in names}


def test_layers_keep_their_class_where_shards_give_the_same(pools: Pools) -> None:
    for outcomes in pools("gloo", 2).run(check_equivalent, list(EQUIVALENT)):
        assert outcomes == dict.fromkeys(EQUIVALENT, "")


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "statistics over outputs": (lambda: Net(up=Standardised(6, 8)), "up is a Standardised"),
    "random numbers": (lambda: Net(up=Dropped(6, 8)), "draws random numbers"),
    "buffers that change": (lambda: Net(table=Counting()), "changes its buffers"),
    "weight_norm by rows": (lambda: Net(down=parametrizations.weight_norm(nn.Linear(8, 6))), "down is a Parametrized"),
    "spectral_norm": (lambda: Net(up=parametrizations.spectral_norm(nn.Linear(6, 8))), "up is a Parametrized"),
    "old spectral_norm": (lambda: Net(up=spectral_norm(nn.Linear(6, 8))), "up is a Linear"),
    "an elementwise forward by rows": (lambda: Net(down=patched(lambda: nn.Linear(8, 6))), "down is a Linear"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_whose_own_forward_needs_all_are_refused_by_name(name: str) -> None:
    build, words = REFUSED[name]
    with pytest.raises(UsageError, match=words) as caught:
        require_shareable(build(), 2, RULES)
    assert '"replicate"' in str(caught.value)
    assert "\n" not in str(caught.value)


class OwnAttention(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y, weights = super().forward(*args, **kwargs)
        return y * 2, weights


def test_attention_of_another_class_is_not_replaced() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer.self_attn = OwnAttention(8, 2, batch_first=True)
    model = nn.Sequential(layer)
    styles = require_shareable(model, 2)
    assert "0.self_attn" not in styles
    assert styles["0.linear1"].kind == "column"
    with pytest.raises(UsageError, match="self_attn is a OwnAttention"):
        require_shareable(model, 2, {"*.self_attn": "heads"})


def test_a_layer_is_left_as_it_was_by_the_trial() -> None:
    layer = weight_norm(Lora(6, 8))
    before, held = {key: value.clone() for key, value in layer.state_dict().items()}, set(vars(layer))
    net = Net(up=layer)
    random = torch.get_rng_state()
    require_shareable(net, 2, RULES)
    assert set(vars(layer)) == held
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[key], value) for key, value in layer.state_dict().items())


# ---- hooks -----------------------------------------------------------------------------------------------------------


def centred(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output - output.mean(-1, keepdim=True)


def centred_in_place(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.sub_(output.detach().mean(-1, keepdim=True))


def centred_before(module: nn.Module, args: Any) -> torch.Tensor:
    return args[0] - args[0].mean(-1, keepdim=True)


def with_input(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + args[0].mean(-1, keepdim=True)


def halved(module: nn.Module, grads: Any, grad_outputs: Any) -> Any:
    return tuple(None if grad is None else grad / 2 for grad in grads)


def hooked(name: str, register: str, hook: Callable[..., Any]) -> nn.Module:
    net = Net()
    getattr(net.get_submodule(name), register)(hook)
    return net


HOOKS = {
    "up": [("register_forward_hook", centred), ("register_forward_hook", centred_in_place),
           ("register_forward_pre_hook", centred_before)],
    "down": [("register_forward_hook", with_input), ("register_forward_pre_hook", centred_before)],
    "head": [("register_forward_hook", centred), ("register_full_backward_hook", halved)],
    "table": [("register_forward_hook", centred)],
}  # fmt: skip


def check_hooks(comm: Communicator) -> dict[tuple[str, str], str]:
    return {
        (name, hook.__name__): came(comm, partial(hooked, name, register, hook), "tp=2")
        for name, hooks in HOOKS.items()
        for register, hook in hooks
    }


def test_hooks_of_sharded_layers_see_full_tensors(pools: Pools) -> None:
    for outcomes in pools("gloo", 2).run(check_hooks):
        assert set(outcomes.values()) == {""}, outcomes


def check_refused_hooks(comm: Communicator) -> list[str]:
    return [
        came(comm, partial(hooked, "up", "register_full_backward_hook", halved), "tp=2"),
        came(comm, partial(hooked, "act", "register_forward_hook", centred), "tp=2"),
    ]


def test_hooks_that_would_see_shards_are_refused(pools: Pools) -> None:
    for backward, between in pools("gloo", 2).run(check_refused_hooks):
        assert "up has a backward hook" in backward
        assert "act has a hook and works between a column and a row layer" in between
    net = Net()
    net.up.weight.register_hook(lambda grad: grad.clamp(-1, 1))  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"up\.weight has a gradient hook"):
        require_shareable(net, 2, RULES)
