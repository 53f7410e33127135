"""Random numbers that do not depend on the plan.

A number depends on the seed, the step, the call that draws it and the element's index in the full tensor; never on the
rank that holds the element, on how the tensor is sharded, or on what was drawn before.

    state = RandomState(seed=7)
    state.name_modules(model)                     # which call: the module's name, and how often it has drawn
    for state.step in range(steps):
        with state:                               # behind nn.Dropout, F.dropout and attention's dropout_p
            with state.samples(range(8, 16), of=32):   # this rank has samples 8 to 15 of a batch of 32
                loss = model(batch)

`sharded` sets which part of the full tensors this rank holds; scopes nest, and for one dim the inner one is relative to
the outer one:

    data parallel      samples(mine, of=the global batch)
    microbatches       microbatch(samples of my batch, of=my batch), within the one above
    sequence parallel  sharded(1, my positions, of=the sequence, only="dropout")
    tensor parallel    sharded(1, my heads, of=all heads, only="attention"); sharded(-1, my columns, of=all columns)
    context parallel   sharded(1, my positions, of=..., only="dropout"), sharded(2, ..., only="attention")
    a replicated tensor without a batch dim        unsharded()

DTensors need none of this: their part follows from their placements.

Samples are along dim 0 of every tensor, unless `sample_dims` gives their dim for each call (see
parallel/checks/samples.py): noise for a table of positions has none, and the activations of a time-major model have
them along dim 1.

Recomputation: a forward that torch.utils.checkpoint runs again in the backward draws the same numbers again, under
the scopes of the first time. It is recognised by torch's own CPU generator, which checkpoint puts back: each call
takes one number from it as a token, and stores its draw under that token.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from unisono.errors import UsageError
from unisono.mesh.global_index import Part, Positions
from unisono.mesh.random import dropout as dropouts
from unisono.mesh.random import random_functions
from unisono.mesh.random.active import entered_states
from unisono.mesh.random.draw import Draw
from unisono.mesh.random.step_keys import StepKeys
from unisono.torch_compat import MODULE_CALL, SPARE_KEYS, exclude_key, in_backward

KINDS = ("dropout", "attention")
Key = tuple[str, int]  # a call for random numbers in a step: the module's name, and how often it has drawn before
# Set by a strategy that follows the forward pass and knows, from a call's shape, kind and key, which part this rank
# holds: given the parts of the scopes, it returns the actual ones.
Locate = Callable[[Sequence[int], str, dict[int, Part], Key | None], dict[int, Part]]


@dataclass(frozen=True)
class SampleDim:
    """The dim of a tensor of `ndim` dims along which the samples of a batch are; None if there is none.

    A dim that is several times as long as the batch holds all elements of one sample, then those of the next, as after
    (batch, heads) was folded; with `alternates`, one element of every sample, then the next ones: (seq, batch).
    """

    ndim: int
    dim: int | None
    alternates: bool = False


class RandomState:
    """Random numbers for one model under one seed. As a context manager, it replaces torch's random functions."""

    counts_meta = False  # whether calls for tensors on torch's "meta" device count; they give no numbers

    def __init__(self, seed: int, step: int = 0) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise UsageError(f"seed {seed!r}: expected a whole number")
        self.seed = seed
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._scopes: list[_Scope] = []
        self._microbatch_depth = 0
        self.sample_dims: Mapping[Key, SampleDim] | None = None
        # The shapes of calls on one device, where they are known, and of how many samples
        self.full_shapes: Mapping[Key, tuple[int, ...]] | None = None
        self.full_samples = 1
        self.refuses_unfollowed = False  # whether draws from torch's own generator are refused; see random_ops.py
        self.is_new = True  # until it has been entered and left
        self.keys: StepKeys | None = None  # of the streams of a step that is, or will be, a CUDA graph
        self._caller: str | None = None  # the module that draws, where no frame shows it
        self.step = step

    @property
    def step(self) -> int:
        """The training step. Setting it forgets the calls of the step before, so finish its backward first."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise UsageError(f"step {step!r}: expected a whole number of at least 0")
        self._step = step
        self.locate: Locate | None = None
        self._calls: Counter[str] = Counter()
        self._calls_before: Counter[str] | None = None  # before the first of the microbatches that follow each other
        self._remembered: dict[int, Draw] = {}

    def name_modules(self, model: torch.nn.Module, prefix: str = "") -> None:
        """Identify calls by module name, so that a rank that runs only some of the modules draws the same numbers.

        Names are those in the full model, on every rank: name the modules before the model is split or wrapped, or
        pass the prefix of this part of it.
        """
        for name, module in model.named_modules():
            self._names[module] = f"{prefix}.{name}".strip(".")

    # ---- which part of the full tensors ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def sharded(
        self, dim: int, positions: Positions, of: int, *, only: str | None = None, num_samples: int | None = None
    ) -> Iterator[None]:
        """In the block, this rank's tensors hold these positions, of so many, along `dim`.

        A dim that is k times as long as the positions counts k elements a position, as after folding (batch, seq)
        into one dim. only: "dropout" for dropout calls and the state's own methods, "attention" for attention weights
        (batch, heads, queries, keys); by default both. num_samples: the length of dim 0 of tensors that are sharded
        this way; other tensors with a dim that could be the sharded one are refused.
        """
        if only not in (None, *KINDS):
            raise UsageError(f"sharded(only={only!r}): expected one of {', '.join(KINDS)}")
        with self._scope(_Scope(dim, Part(positions, of), only, num_samples)):
            yield

    @contextlib.contextmanager
    def samples(self, positions: Positions, of: int) -> Iterator[None]:
        """In the block, this rank's tensors hold these samples, of so many, along each tensor's sample dim."""
        with self._scope(_Scope(None, Part(positions, of), None)):
            yield

    @contextlib.contextmanager
    def microbatch(self, positions: Positions, of: int) -> Iterator[None]:
        """One of several passes over parts of a batch: each draws what one pass over all of it would."""
        if not self._microbatch_depth:
            if self._calls_before is None:
                self._calls_before = self._calls.copy()
            self._calls = self._calls_before.copy()
            self.locate = None  # a recomputation ends as soon as it can, within a tensor-parallel region
        self._microbatch_depth += 1
        try:
            with self.samples(positions, of):
                yield
        finally:
            self._microbatch_depth -= 1

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        """In the block, this rank holds full tensors, whatever the scopes around it set."""
        with self._scope(_UNSHARDED):
            yield

    @contextlib.contextmanager
    def _scope(self, scope: _Scope) -> Iterator[None]:
        self._scopes = [*self._scopes, scope]
        try:
            yield
        finally:
            self._scopes = self._scopes[:-1]

    def _parts(self, shape: Sequence[int], kind: str, key: Key | None = None) -> dict[int, Part]:
        parts: dict[int, Part] = {}
        if not shape:
            return parts  # one number for all samples and tokens, such as whether a layer is skipped
        samples = self._sample_dim(shape, key)
        for scope in self._scopes:
            if scope is _UNSHARDED:
                parts = {}
            elif scope.only in (None, kind):
                wanted = samples.dim if scope.dim is None else scope.dim
                if wanted is None:
                    continue
                if not -len(shape) <= wanted < len(shape):
                    raise UsageError(f"random numbers of shape {tuple(shape)} have no dim {wanted}, which is sharded")
                dim = wanted % len(shape)
                scope.require_samples(shape, dim)
                parts[dim] = scope.part.within(parts[dim]) if dim in parts else scope.part
        if self.locate is not None:
            parts = self.locate(shape, kind, parts, key)
        return {
            dim: _fitted(part, shape, dim, samples.alternates and dim == samples.dim) for dim, part in parts.items()
        }

    def _sample_dim(self, shape: Sequence[int], key: Key | None) -> SampleDim:
        if self.sample_dims is None or key is None or not any(scope.dim is None for scope in self._scopes):
            return SampleDim(len(shape), 0)
        found = self.sample_dims.get(key) or self._of_call_before(key)
        if found is None or found.ndim != len(shape):
            raise UsageError(
                f"{key[0] or 'the model'} draws random numbers of shape {tuple(shape)} that it did not draw when the "
                "model was tried on a few samples, so it is not known which of them belong to which sample; draw the "
                "same numbers in every forward pass, or use dp=1 and microbatches=1"
            )
        return found

    def full_shape(self, key: Key | None) -> tuple[int, ...] | None:
        """The shape that a call has on one device, for a batch of `full_samples`."""
        if self.full_shapes is None or key is None:
            return None
        if key in self.full_shapes:
            return self.full_shapes[key]
        calls = sum(site == key[0] for site, _ in self.full_shapes)
        return self.full_shapes.get((key[0], key[1] % calls)) if calls else None

    def _of_call_before(self, key: Key) -> SampleDim | None:
        """The sample dim where the model is called several times in a step: each call draws as the first one."""
        assert self.sample_dims is not None
        calls = sum(site == key[0] for site, _ in self.sample_dims)
        return self.sample_dims.get((key[0], key[1] % calls)) if calls else None

    # ---- drawing -------------------------------------------------------------------------------------------------

    def draw(
        self,
        shape: Sequence[int],
        kind: str = "dropout",
        parts: Mapping[int, Part] | None = None,
        *,
        like: torch.Tensor | None = None,
        may_be_full: bool = False,
    ) -> Draw:
        """The next call for random numbers, of that local shape. `parts` are used instead of the scopes' ones.

        like: the tensor that the numbers are for. may_be_full: where the scopes' parts do not fit the shape, the
        numbers are taken to be the same on every rank.
        """
        exclude_key(SPARE_KEYS[0], True)  # this draw is no random op of the model: see random_ops.py
        token = int(torch.empty((), dtype=torch.int64).random_())
        exclude_key(SPARE_KEYS[0], False)
        if in_backward():
            return self._recalled(token, tuple(shape))
        site = self._site()
        if not self._microbatch_depth:
            self._calls_before = None
        key = (site, self._calls[site])
        self._calls[site] += 1
        held = self._held(key, shape, kind, like, may_be_full) if parts is None else parts
        made = Draw((self.seed, self._step, *key), tuple(shape), held, self.keys)
        self._remembered[token] = made
        return made

    def _held(
        self, key: Key, shape: Sequence[int], kind: str, like: torch.Tensor | None, may_be_full: bool
    ) -> dict[int, Part]:
        """The part of the full tensor that a call draws; `like` is for subclasses."""
        try:
            return self._parts(shape, kind, key)
        except _Misplaced:
            raise
        except UsageError:
            if may_be_full and self.sample_dims is None:
                return {}
            raise

    def _recalled(self, token: int, shape: tuple[int, ...]) -> Draw:
        draw = self._remembered.get(token)
        for other in entered_states() if draw is None else ():  # the backward may go through several models
            draw = draw or other._remembered.get(token)
        if draw is None or draw.shape != shape:
            raise UsageError(
                "random numbers were drawn in the backward pass that no forward pass has drawn in this step; "
                "recompute with preserve_rng_state=True, and before the step is advanced"
            )
        return draw

    def name_of(self, module: torch.nn.Module) -> str | None:
        """The name of a module in the full model."""
        return self._names.get(module)

    @contextlib.contextmanager
    def called_by(self, name: str, locate: Locate | None = None) -> Iterator[None]:
        """In the block, numbers are drawn as by the module of that name: for calls of a compiled graph, in which no
        module runs. locate: see `Locate`."""
        before = self._caller, self.locate
        self._caller, self.locate = name, locate or self.locate
        try:
            yield
        finally:
            self._caller, self.locate = before

    def _site(self) -> str:
        """The name of the innermost named module that is running."""
        if self._caller is not None:
            return self._caller
        frame = sys._getframe(2) if len(self._names) else None
        while frame is not None:
            if frame.f_code is MODULE_CALL:
                name = self._names.get(frame.f_locals["self"])
                if name is not None:
                    return name
            frame = frame.f_back
        return ""

    def uniform(
        self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Numbers in [0, 1), of this local shape."""
        return self.draw(shape).uniform(dtype, torch.device(device))

    def normal(
        self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Numbers of the standard normal distribution, of this local shape."""
        return self.draw(shape).normal(dtype, torch.device(device))

    def bernoulli(self, *shape: int, p: float, device: torch.device | str = "cpu") -> torch.Tensor:
        """True with probability p, of this local shape."""
        if not 0 <= p <= 1:
            raise UsageError(f"bernoulli(p={p}): expected a probability from 0 to 1")
        draw = self.draw(shape)
        if p in (0, 1):
            return torch.full(shape, bool(p), device=device)
        return ~draw.keep(p, torch.device(device))

    def dropout(self, x: torch.Tensor, p: float) -> torch.Tensor:
        """x with elements zeroed with probability p and the others divided by 1 - p."""
        return dropouts.apply(self, x, p)

    def __enter__(self) -> RandomState:
        random_functions.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        random_functions.leave(self)


@dataclass(frozen=True, eq=False)
class _Scope:
    dim: int | None  # None: the sample dim
    part: Part
    only: str | None
    num_samples: int | None = None

    def require_samples(self, shape: Sequence[int], dim: int) -> None:
        if self.num_samples is None or shape[0] == self.num_samples:
            return
        if any(length > 1 and length % max(len(self.part), 1) == 0 for length in shape):
            raise _Misplaced(
                f"random numbers of shape {tuple(shape)} are drawn where a rank has {len(self.part)} of "
                f"{self.part.total} tokens, and {self.num_samples} samples; expected samples along dim 0 and "
                f"tokens along dim {dim}: keep that shape, or use cp=1"
            )


class _Misplaced(UsageError):
    """Numbers of which it is not known whether they are sharded."""


_UNSHARDED = _Scope(0, Part(range(0), 0), None)


def _fitted(part: Part, shape: Sequence[int], dim: int, alternates: bool) -> Part:
    length = shape[dim]
    if len(part) == length:
        return part
    if len(part) == 0 or length % len(part):
        raise UsageError(
            f"random numbers of shape {tuple(shape)}: dim {dim} has {length} elements, but the scopes give this rank "
            f"{len(part)} of {part.total} along it; if this tensor is not sharded, draw it under state.unsharded()"
        )
    return part.repeated(length) if alternates else part.stretched(length)
