"""Whether a model works token by token where cp and sp give a rank some of the tokens only. Tried beforehand.

The model is run on two samples of the example, once on all tokens and once as a rank that holds every other token would
run it; then again with the other half of the tokens, and with noise added to what enters the first block, so that a
maximum or a median over tokens, which hangs on one of them, shows too. What that rank is given by others is taken from
the first run: the outcome of attention under cp; under sp, what layers give that tp shards by columns or by rows.
Wherever tokens are looked at in another way (a convolution along the sequence, a shift, a mean, a norm over it), the
second run parts from the first.

Models that are large, or take long sequences, or cannot be run here, are taken to work token by token.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from unisono.errors import UsageError
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.blocks import Blocks, find_blocks, find_output_blocks, not_called
from unisono.parallel.context.context import (
    are_of_sequences,
    hidden_states,
    mapped,
    of_second_sequence,
    sequence_dim,
    use_global_positions,
    without_attention,
)
from unisono.parallel.context.sequence import full_sequence_modules
from unisono.parallel.context.views import TokenViews
from unisono.parallel.inputs import call
from unisono.parallel.loss.model_loss import ModelLoss
from unisono.parallel.meta.meta_tensors import realised_copy
from unisono.parallel.rules.rules import Styles
from unisono.parallel.share import batch_size_of, batch_slice
from unisono.torch_patches import attention, patched, without_fused_attention

_SMALL = 5 * 10**7  # parameters of a model that is tried
_SMALL_HOLLOW = 2 * 10**6  # of one that is not built, since no rank is to have more than its own
_SHORT = 4096  # elements of a sample
_SAMPLES = 2
_OUTPUT = "the model's output"
_ATTENTION = "attention"
_FULL = "full sequence"
_REGIONS = (
    "column",
    "row",
    "experts",
    _FULL,
)  # kinds of layers through which all ranks' tokens come together, or part again

Forward = Callable[..., Any]


def require_tokenwise(
    model: nn.Module,
    example: tuple[Any, Any],
    word: str,
    styles: Styles | None = None,
    model_loss: ModelLoss | None = None,
) -> None:
    """UsageError where the model mixes tokens that would be on several ranks. word: of the plan, "cp" or "sp"; styles:
    how tp shards its layers, between which sp shards the tokens; model_loss: what the model does with its labels."""
    inputs, targets = example
    if model_loss is not None:
        targets = model_loss.labelled(example)
    if not _has_blocks(model):
        return
    samples = batch_slice(inputs, 0, min(_SAMPLES, batch_size_of(inputs)))
    size = max((leaf.numel() // _SAMPLES for leaf in tree_leaves(samples) if isinstance(leaf, torch.Tensor)), default=0)
    real = None
    is_placeholder = any(parameter.is_meta for parameter in model.parameters())
    limit = _SMALL_HOLLOW if is_placeholder else _SMALL
    if size <= _SHORT and sum(map(torch.numel, model.parameters())) <= limit:
        real = realised_copy(model)
    if real is None:
        return
    real = real.double().cpu().eval()
    samples = tree_map(_given, samples)
    gathers = word == "sp" or are_of_sequences(inputs, targets)
    for first_held, noise in ((1, 0.0), (0, 4.0)):
        tried = copy.deepcopy(real)
        blocks = find_output_blocks(tried) if word == "cp" else find_blocks(tried)
        trial = _TokenwiseTrial(blocks, word, gathers, styles or {}, first_held, noise)
        try:
            with no_side_effects(model), torch.no_grad(), trial.recording():
                outputs = trial.run(tried, samples, model_loss)
        except Exception:  # an error of the model itself, which its first step raises too
            return
        if not trial.ran_blocks:
            raise not_called(trial.blocks, model, word)
        if trial.without_attention and word == "cp":
            raise without_attention(trial.without_attention)
        if trial.misplaced:
            raise _misplaced(trial.misplaced)
        if trial.is_conclusive:
            with no_side_effects(model), torch.no_grad(), trial.repeating():
                trial.compare_outputs(trial.run(tried, samples, model_loss), outputs)


def _misplaced(shape: tuple[int, ...]) -> UsageError:
    return UsageError(
        f"a dropout in or after the blocks is given a tensor of shape {shape}, but cp draws its mask for a rank's "
        "tokens along dim 1 of (batch, tokens, ...); keep that shape, leave the dropout out, or use cp=1"
    )


def _has_blocks(model: nn.Module) -> bool:
    try:
        find_blocks(model)
    except UsageError:
        return False
    return True


def _given(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach().cpu()
    return leaf.double() if leaf.is_floating_point() else leaf


class _Over(Exception):
    """All that matters has been compared."""


class _TokenwiseTrial:
    """Two runs of one model; what the first one saw, by module and in order."""

    def __init__(self, blocks: Blocks, word: str, gathers: bool, styles: Styles, first_held: int, noise: float) -> None:
        """first_held: of the tokens that the second run has, every other one. noise: how much of it, relative to what
        enters the first block, is added there."""
        self.blocks = blocks
        self.ran_blocks = False
        self._first_held, self._noise = first_held, noise
        self._word, self._gathers = word, gathers
        self._length, self._batch = 0, 0
        self._held: list[int] = []
        self._is_second = self._is_sharded = False
        self.without_attention = ""  # the first block in which there was none
        self.misplaced: tuple[int, ...] = ()  # the shape of a tensor with dropout that has no tokens along dim 1
        self._last = ""  # the point up to which the two runs agreed
        self._seen: dict[str, list[Any]] = defaultdict(list)
        self._visits: dict[str, int] = defaultdict(int)
        self._rest = ExitStack()
        last = len(blocks.modules) - 1
        full = full_sequence_modules(blocks, styles) if word == "sp" else ()
        for number, block in enumerate(blocks.modules):
            point = (blocks.name(number), number == 0, number == last)
            block.forward = partial(self._run_block, block.forward, block, *point)
            if word == "cp":
                use_global_positions(block, lambda: (len(self._held) if self._is_second else 0, self._length))
            for name, module in block.named_modules(prefix=blocks.name(number)):
                kind = styles[name].kind if word == "sp" and name in styles else ""
                if any(f"{name}.".startswith(f"{each}.") for each in full):
                    kind = _FULL if name in full else ""
                if kind == "heads" and not isinstance(module, nn.MultiheadAttention):
                    module.forward = partial(self._run_heads, module.forward, name)
                elif kind in _REGIONS or kind == "heads":
                    module.forward = partial(self._run_layer, module.forward, name, kind)

    @property
    def is_conclusive(self) -> bool:
        """Whether the blocks ran in order, on tokens of which there are several."""
        return self._length > 1 and (self._word == "sp" or bool(self._seen["attention"]))

    def run(self, model: nn.Module, samples: Any, model_loss: ModelLoss | None) -> Any:
        return call(model, samples) if model_loss is None else model_loss.record(model, samples, self._shown)

    def _shown(self, label: torch.Tensor) -> torch.Tensor:
        is_sharded = self._is_second and self._word == "cp" and not self._gathers
        return self._shard(label) if is_sharded else label

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self._intercepted():
            yield

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """The second run; it raises where some tokens need others."""
        self._is_second = True
        self._held = list(range(self._first_held, self._length, 2))
        try:
            with self._intercepted(), self._rest:
                yield
        except (_Over, UsageError) as error:
            if isinstance(error, UsageError):
                raise
        except Exception as error:
            raise self._refusal(f"on, the model fails where it has some of the tokens ({_line(error)})") from error

    @contextmanager
    def _intercepted(self) -> Iterator[None]:
        with ExitStack() as scope:
            scope.enter_context(without_fused_attention())
            if self._word == "cp":
                scope.enter_context(attention.handled("token check", self._attend))
                drop = partial(self._drop, F.dropout)
                scope.enter_context(patched(F, "dropout", drop, why="cp requires tokens along dim 1 of its argument"))
            yield

    # ---- what is on the way ------------------------------------------------------------------------------------------

    def _run_block(
        self, forward: Forward, block: nn.Module, name: str, is_first: bool, is_last: bool, *args: Any, **kwargs: Any
    ) -> Any:
        hidden = hidden_states((args, kwargs))
        if hidden is None:
            raise _Over
        if is_first and not self._is_second:
            self._batch, self._length = hidden.shape[:2]
        if is_first and self._noise:
            noisy = self._with_noise(hidden)
            args, kwargs = mapped((args, kwargs), partial(_replaced, hidden, noisy))
            hidden = noisy
        if self._is_second:
            self._is_sharded = True
            second = of_second_sequence(block, args, kwargs)
            change = partial(self._shard_argument, hidden if is_first else None, hidden, second)
            args, kwargs = mapped((args, kwargs), change)
        before = len(self._seen["attention"])
        outputs = forward(*args, **kwargs)
        if not self._is_second and len(self._seen["attention"]) == before:
            self.without_attention = self.without_attention or name
        hidden = hidden_states(outputs)
        self._met(name, hidden)
        if not is_last:
            return outputs
        self.ran_blocks = self._length > 0
        if self._gathers:
            return tree_map(lambda x: self._gathered(x) if x is hidden else x, outputs)
        if self._is_second:
            self._rest.enter_context(TokenViews(len(self._held), self._length))
        return outputs

    def _gathered(self, hidden: Any) -> Any:
        """All tokens, for the rest of the model."""
        if not self._is_second:
            self._seen["gathered"].append(hidden)
            return hidden
        self._is_sharded = False
        return self._next("gathered")

    def _with_noise(self, hidden: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0), dtype=hidden.dtype)
        return hidden + drawn * self._noise * hidden.square().mean().sqrt().clamp_min(1e-3)

    def _shard_argument(
        self, first: torch.Tensor | None, hidden: torch.Tensor, second: set[int], x: torch.Tensor
    ) -> torch.Tensor:
        if x is hidden:
            return self._tokens_of_rank(x, 1) if first is not None else x
        dim = sequence_dim(x, self._length, self._batch, id(x) in second) if self._word == "cp" else None
        return x if dim is None else self._tokens_of_rank(x, dim)

    def _run_layer(self, forward: Forward, name: str, kind: str, *args: Any, **kwargs: Any) -> Any:
        """Under sp: into a layer that is sharded by columns come all tokens, and what one that is sharded by rows gives
        is shared out again; torch's attention and experts do both."""
        key = f"{name} out"
        if not self._is_second:
            outputs = forward(*args, **kwargs)
            if kind != "row":
                self._met(name, _first(args, kwargs))
            self._seen[key].append(outputs)
            return outputs
        if kind != "row":
            self._met(name, _first(args, kwargs))
        outputs = self._next(key)
        return outputs if kind == "column" else tree_map(self._shard, outputs)

    def _run_heads(self, forward: Forward, name: str, *args: Any, **kwargs: Any) -> Any:
        """Under sp an attention is shown the shape of all tokens (see Region.stand_in)."""
        given = _first(args, kwargs)
        if not self._is_second:
            self._seen[f"{name} given"].append(given)
        elif given is not None:
            full_value = self._next(f"{name} given")
            self._compare(name, given, self._shard(full_value))
            args, kwargs = mapped((args, kwargs), lambda x: full_value if x is given else x)
        return forward(*args, **kwargs)

    def _attend(
        self, attend: Forward, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """What goes in must be that of the rank's tokens (positions that a block counts from 0 are not), what comes
        out is."""
        given = {"query": query, "key": key, "value": value}
        if not self._is_second:
            outcome: torch.Tensor = attend(query, key, value, *args, **kwargs)
            self._seen["attention"].append(outcome)
            self._seen["attended"].append(given)
            return outcome
        outcome, full_value = self._next("attention"), self._next("attended")
        for name, tensor in given.items() if self._is_sharded else ():
            expected = full_value[name]
            is_second = name != "query" and (tensor.shape == expected.shape or expected.shape[-2] != self._length)
            self._compare(f"{_ATTENTION} ({name})", tensor, expected if is_second else self._shard_of_heads(expected))
        return self._tokens_of_rank(outcome, -2) if self._is_sharded and outcome.shape[-2] == self._length else outcome

    def _drop(self, drop: Forward, x: torch.Tensor, p: float = 0.5, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Under cp masks are drawn by the rank's tokens, along dim 1: there they must be."""
        is_among_tokens = self._length > 1 and not self._is_second and not self._seen["gathered"]
        if p > 0 and is_among_tokens and (x.dim() < 2 or x.shape[1] != self._length):
            self.misplaced = self.misplaced or tuple(x.shape)
        return drop(x, p, *args, **kwargs)

    # ---- held against the first run ----------------------------------------------------------------------------------

    def _met(self, point: str, tensor: torch.Tensor | None) -> None:
        """Notes a tensor in the first run; holds it against that in the second."""
        if not self._is_second:
            self._seen[point].append(tensor)
            return
        full_value = self._next(point)
        if tensor is not None and full_value is not None:
            self._compare(point, tensor, full_value if tensor.shape == full_value.shape else self._shard(full_value))
        self._last = point

    def _next(self, point: str) -> Any:
        visit = self._visits[point]
        self._visits[point] += 1
        if visit >= len(self._seen[point]):
            raise _Over  # the model goes another way: nothing is shown
        return self._seen[point][visit]

    def _shard(self, full_value: Any) -> Any:
        """The held tokens of a tensor of the first run: (batch, tokens, ...), or all samples' tokens in a row."""
        if not isinstance(full_value, torch.Tensor) or full_value.dim() < 2:
            return full_value
        if tuple(full_value.shape[:2]) == (self._batch, self._length):
            return self._tokens_of_rank(full_value, 1)
        if full_value.shape[0] == self._batch * self._length:
            return self._tokens_of_rank(full_value.unflatten(0, (self._batch, self._length)), 1).flatten(0, 1)
        return full_value

    def _shard_of_heads(self, full_value: torch.Tensor) -> torch.Tensor:
        return self._tokens_of_rank(full_value, -2) if full_value.shape[-2] == self._length else full_value

    def _tokens_of_rank(self, full_value: torch.Tensor, dim: int) -> torch.Tensor:
        return full_value.index_select(dim, torch.tensor(self._held))

    def compare_outputs(self, got: Any, expected: Any) -> None:
        pairs = zip(tree_leaves(got), tree_leaves(expected), strict=False)
        for mine, full_value in pairs:
            if isinstance(mine, torch.Tensor) and isinstance(full_value, torch.Tensor) and mine.is_floating_point():
                is_full = self._gathers or mine.shape == full_value.shape
                self._compare(_OUTPUT, mine, full_value if is_full else self._shard(full_value))

    def _compare(self, point: str, mine: torch.Tensor, expected: torch.Tensor) -> None:
        if mine.shape != expected.shape or not torch.allclose(mine, expected, rtol=1e-6, atol=1e-9, equal_nan=True):
            side = "" if point == _OUTPUT else "the input of " if self._is_entered(point) else "the output of "
            raise self._refusal(
                f"to {side}{point} the model mixes tokens, or counts their positions inside its blocks: some of them "
                "alone give other numbers"
            )

    def _is_entered(self, point: str) -> bool:
        return point.startswith(_ATTENTION) or f"{point} out" in self._seen or f"{point} given" in self._seen

    def _refusal(self, what: str) -> UsageError:
        reason = {
            "cp": "cp gives a rank some of the tokens, and only F.scaled_dot_product_attention sees the others",
            "sp": "between the layers that tp shards, sp gives a rank some of the tokens",
        }[self._word]
        fix = {"cp": "use cp=1", "sp": "leave sp out"}[self._word]
        return UsageError(
            f"on the way from {self._last or 'the first block'} {what}. {reason}; expected no convolution, shift, sum, "
            f"norm or softmax along the sequence there, and positions as an argument of the blocks: {fix}"
        )


def _replaced(old: torch.Tensor, new: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return new if x is old else x


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    found = (
        leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    )
    return next(found, None)


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
