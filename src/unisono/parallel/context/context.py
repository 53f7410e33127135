"""Context parallelism: ranks along "cp" share each sequence.

In a transformer only attention lets tokens see each other. So a rank can hold some tokens of every sequence, run norms,
linears, the head and the loss on them alone, and needs the others only within attention, which ring attention or
Ulysses carries over ranks (see `ring_attention`, `ulysses`).

Positions stay global without a change to the model: what stands before the blocks (embeddings, rotary tables, masks)
runs on the full sequence on every rank. At the entry of the first block the hidden states are sliced to this rank's
tokens, and with them every other argument of a block that runs along the sequence. After the last block nothing is
gathered: outputs are of this rank's tokens, and the targets are sliced to match.

Where the targets are of full sequences (a class a sentence, an image), the model looks at all tokens after its blocks.
Then they are gathered there, the rest of the model runs alike on all ranks, and each takes some of the *samples* of
the outcome to the loss. `Context.expect` decides between the two by a batch.

    context = context_parallelize(model, mesh, "ring")
    partial_loss = loss(model(inputs), context.shard_targets(targets))

Each rank then has a part of the loss, and its gradients are a part of the full ones, to be summed over "cp" as over the
data axis. Parameters before the blocks need no care: tokens of other ranks give them no gradient here.

Of an encoder-decoder model the decoder's sequence is sharded. The encoder stands before these blocks: it runs on its
full sequence on every rank, and each rank's queries attend to all of its output.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from unisono.comm.communicator import Communicator
from unisono.errors import UnisonoError, UsageError
from unisono.mesh import autograd_collectives
from unisono.mesh.mesh import Mesh
from unisono.mesh.random.active import active_state
from unisono.parallel.blocks import find_output_blocks, not_called, some_of_the_tokens
from unisono.parallel.context.sharded_attention import ShardedAttention
from unisono.parallel.context.tokens import Tokens
from unisono.parallel.context.views import TokenViews
from unisono.parallel.loss.loss_parts import part_of, shifted
from unisono.parallel.share import share
from unisono.plan.plan import CONTEXT

# Ring attention under a causal mask works as long on every rank only in the zigzag order; without a mask any order is
# balanced. Ulysses sees full sequences and takes the simplest.
_ORDERS: dict[str, Callable[[int, int], Tokens]] = {"ring": Tokens.zigzag, "ulysses": Tokens.consecutive}

Forward = Callable[..., Any]


def attention(comm: Communicator, kind: str, tokens: Tokens) -> ShardedAttention:
    """In `with attention(...)`, F.scaled_dot_product_attention is over the tokens of all ranks."""
    return ShardedAttention(comm, kind, tokens)


NEEDS = (
    "context parallelism (cp) shards the sequences that run through such blocks: the model must take (batch, "
    "sequence, ...) and attend through F.scaled_dot_product_attention; for other models use dp, tp or pp"
)


def context_parallelize(model: nn.Module, mesh: Mesh, kind: str = "ring") -> Context:
    """Shard the model's sequences over the mesh's "cp" ranks, in place. kind: "ring" or "ulysses".

    The model takes (batch, sequence, ...) and gives this rank's tokens of (batch, sequence, ...). Its attention must
    go through F.scaled_dot_product_attention.
    """
    if kind not in CONTEXT:
        raise UsageError(f"context parallelism of kind {kind!r}; expected one of {', '.join(CONTEXT)}")
    context = Context(mesh.comm("cp"), kind)
    if context.comm.size > 1:
        blocks = find_output_blocks(model, NEEDS)
        for number, block in enumerate(blocks.modules):
            name = blocks.name(number)
            use_global_positions(
                block, lambda: (context.tokens(context.length).count(context.comm.rank), context.length)
            )
            # Before the hooks of other strategies: what they see is this rank's sequence.
            enter = partial(context._enter_block, name, number == 0)
            block.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            block.forward = partial(context._run_block, block.forward, name)
        blocks.modules[-1].register_forward_hook(context._leave_blocks)
        model.forward = partial(context._run_model, model.forward)
        context._blocks_not_called = partial(not_called, blocks, model, "cp")
    return context


class Context:
    """How the sequences of a model are sharded; what `context_parallelize` returns."""

    def __init__(self, comm: Communicator, kind: str) -> None:
        self.comm = comm
        self.kind = kind
        self._length = 0
        self._kind_of_inputs: tuple[torch.Size, ...] = ()
        self._lengths: dict[tuple[torch.Size, ...], int] = {}  # of the blocks' sequence, by the kind of inputs
        self._attentions: dict[int, ShardedAttention] = {}
        self._rest_of_model: contextlib.ExitStack | None = None  # open while the model runs
        self._is_sharded = False  # whether the model's run has reached the blocks
        self._is_past_blocks = False
        self._blocks_not_called: Callable[[], UsageError]
        self.is_full = False  # whether the tokens are gathered after the blocks
        self._has_targets = True

    def expect(self, inputs: Any, targets: Any) -> None:
        """Prepare for batches like this one: are its targets of tokens, or of full sequences?

        Without targets (None) it is as before, and all samples of the outputs are given.
        """
        self._has_targets = next(_tensors(targets), None) is not None
        if self._has_targets:
            self.is_full = are_of_sequences(inputs, targets)

    def learn(self, inputs: Any, length: int) -> None:
        """Of such inputs, how long the sequences in the blocks are: a later stage of a pipeline does not see it."""
        self._lengths[_kind_of(inputs)] = length

    @property
    def dims(self) -> tuple[int, ...]:
        """Along which dims ranks have other parts of the model's outputs."""
        return (0,) if self.is_full else (0, 1)

    def num_samples(self, count: int) -> int:
        """The number of samples that this rank has of outputs for `count` samples."""
        return len(self._own_samples(count)) if self.is_full else count

    def _own_samples(self, count: int) -> range:
        return share(torch.empty(count, device="meta"), self.comm.rank, self.comm.size).positions

    def learn_lengths(self, other: Context) -> None:
        """Take over what another has seen of the same model, which ran it from the start."""
        self._lengths |= other._lengths

    @property
    def length(self) -> int:
        """Of the sequences that the model saw last."""
        return self._length

    def tokens(self, length: int) -> Tokens:
        """Which positions of a sequence of that length each rank holds."""
        return self._attention(length).tokens

    def shard(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's tokens of a full tensor."""
        return self.tokens(tensor.shape[dim]).shard(tensor, self.comm.rank, dim)

    def shard_targets(self, targets: Any) -> Any:
        """This rank's part of the targets: of every tensor in them, the tokens along dim 1, or some samples."""
        if self.comm.size == 1:
            return targets
        return mapped(targets, self._shard_samples if self.is_full else self._shard_target)

    def shifted_runs(self, outputs: Any, targets: Any) -> list[tuple[Any, Any]]:
        """This rank's runs of consecutive tokens, with targets of full sequences given, for a loss that compares a
        token's output with the next one's target."""
        length = next(tensor.shape[1] for tensor in _tensors(targets) if tensor.dim() > 1)
        tokens, pairs, first = self.tokens(length), [], 0
        count = tokens.count(self.comm.rank)
        for run in tokens.runs[self.comm.rank]:
            if len(run):
                part = part_of(outputs, 1, range(first, first + len(run)), count), part_of(targets, 1, run, length)
                pairs.append(shifted(part, targets, run, length))
                first += len(run)
        return pairs

    def shown(self, label: torch.Tensor) -> torch.Tensor:
        """Of labels that a model is given, those that it has outputs for: see ModelLoss.record."""
        return label if self.comm.size == 1 or self.is_full else self._shard_target(label)

    def kept(self, leaf: torch.Tensor) -> torch.Tensor:
        """Of what a model has for all samples, what this rank takes to the loss."""
        return self._shard_samples(leaf) if self.comm.size > 1 and self.is_full and self._has_targets else leaf

    def _shard_samples(self, tensor: torch.Tensor) -> torch.Tensor:
        held = self._own_samples(len(tensor))
        return tensor[held.start : held.stop]

    def _shard_target(self, target: torch.Tensor) -> torch.Tensor:
        if target.dim() < 2:
            raise UsageError(
                f"targets of shape {tuple(target.shape)} under context parallelism; expected one a token: "
                "(batch, sequence, ...); use a plan with cp=1 for targets of full sequences"
            )
        return self.shard(target)

    def join(self, shard: torch.Tensor, length: int, dim: int = 1) -> torch.Tensor:
        """The full tensor, from every rank's tokens; no gradients. All "cp" ranks call it."""
        shards = self.comm.all_gather(shard.detach().contiguous(), uneven=True)
        return self.tokens(length).join(shards, dim)

    def _attention(self, length: int) -> ShardedAttention:
        if length not in self._attentions:
            tokens = _ORDERS[self.kind](length, self.comm.size)
            self._attentions[length] = ShardedAttention(self.comm, self.kind, tokens)
        return self._attentions[length]

    # ---- around the model and its blocks -------------------------------------------------------------------------

    def _run_model(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        inputs = [tensor for tensor in _tensors((args, kwargs)) if tensor.dim() > 1]
        # A later stage of a pipeline does not see the first block: it knows the length from the example.
        self._kind_of_inputs = _kind_of((args, kwargs))
        self._length = self._lengths.get(self._kind_of_inputs, inputs[0].shape[1] if inputs else 0)
        batch = inputs[0].shape[0] if inputs else 0
        with contextlib.ExitStack() as self._rest_of_model:
            self._is_sharded = self._is_past_blocks = False
            try:
                outputs = forward(*args, **kwargs)
            except RuntimeError as error:
                if self._is_past_blocks and not isinstance(error, UnisonoError):
                    raise self._needs_full_sequence(error) from error
                raise
            finally:
                self._rest_of_model = None
        if not self._is_past_blocks:
            raise self._blocks_not_called()
        if self.is_full and not self._has_targets:
            return outputs
        if self.is_full:
            return tree_map(lambda leaf: self._shard_samples(leaf) if _has_samples(leaf, batch) else leaf, outputs)
        self._require_tokens(outputs)
        return tree_map(partial(self._shard_output, batch), outputs) if self._is_sharded else outputs

    def _shard_output(self, batch: int, leaf: Any) -> Any:
        """This rank's tokens of an output that is of all of them, such as an encoder's of a sequence as long."""
        is_of_all = _has_samples(leaf, batch) and leaf.dim() > 1 and leaf.shape[1] == self._length
        return self.shard(leaf) if is_of_all else leaf

    def _needs_full_sequence(self, error: RuntimeError) -> UsageError:
        mine = self.tokens(self._length).count(self.comm.rank)
        return UsageError(
            f"after its blocks the model failed on this rank's {mine} of {self._length} tokens ({error}); expected "
            "layers that work token by token, and take any sequence length: use a plan with cp=1"
        )

    def _enter_block(
        self, name: str, is_first: bool, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Shard a block's arguments. The hidden states are sharded once, in the first block: the others get its
        outcome."""
        hidden = hidden_states((args, kwargs))
        if hidden is None:
            raise UsageError(f"block {name} was given no hidden states; expected a tensor (batch, sequence, width)")
        if is_first:
            self._length = self._lengths[self._kind_of_inputs] = hidden.shape[1]
        attention = self._attention(self._length)
        second = of_second_sequence(block, args, kwargs)

        def sharded(x: torch.Tensor) -> torch.Tensor:
            if x is not hidden:
                return self._shard_argument(x, hidden.shape[0], name, attention.tokens, id(x) in second)
            return attention.tokens.shard(x, self.comm.rank, 1) if is_first else x

        self._keep_for_rest_of_model(attention, hidden.shape[0])
        return mapped((args, kwargs), sharded)

    def _run_block(self, forward: Forward, name: str, *args: Any, **kwargs: Any) -> Any:
        # Within the block once more: a backward that runs it again does so without the model around it.
        attention = self._attention(self._length)
        before = attention.calls
        with attention, some_of_the_tokens(f"cp: block {name}", self._length, "use cp=1"):
            outputs = forward(*args, **kwargs)
        if attention.calls == before:
            raise without_attention(name)
        return outputs

    def _leave_blocks(self, block: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
        """After the last block: tokens are gathered, or stay where they are."""
        self._is_past_blocks = True
        if self._rest_of_model is None:
            return outputs
        tokens = self.tokens(self._length)
        if not self.is_full:
            self._rest_of_model.enter_context(TokenViews(tokens.count(self.comm.rank), self._length))
            return outputs
        self._rest_of_model.close()
        hidden = hidden_states(outputs)

        def gathered(x: Any) -> Any:
            if x is not hidden or not isinstance(x, torch.Tensor):
                return x
            return tokens.ordered(autograd_collectives.gather_to_use(x, 1, tokens.counts, self.comm), 1)

        return tree_map(gathered, outputs)

    def _keep_for_rest_of_model(self, attention: ShardedAttention, num_samples: int) -> None:
        """From the first block that runs to the end of the model, tensors are of this rank's tokens."""
        if self._rest_of_model is None or self._is_sharded:
            return
        self._is_sharded = True
        self._rest_of_model.enter_context(attention)
        state = active_state()
        if state is not None:
            tokens = attention.tokens
            held = tokens.held(self.comm.rank)
            scope = state.sharded(1, held, of=tokens.length, only="dropout", num_samples=num_samples)
            self._rest_of_model.enter_context(scope)

    def _shard_argument(self, x: torch.Tensor, batch: int, name: str, tokens: Tokens, is_second: bool) -> torch.Tensor:
        dim = sequence_dim(x, tokens.length, batch, is_second)
        if dim is not None:
            return tokens.shard(x, self.comm.rank, dim)
        if x.dim() == 3 and x.is_floating_point() and x.shape[1] != tokens.length and x.shape[1] in tokens.counts:
            raise UsageError(
                f"block {name} was given a tensor {tuple(x.shape)} beside the hidden states of a sequence of "
                f"{tokens.length}: its length is that of a rank's share, so the two could not be distinguished; "
                "pad it to another length, or use a plan with cp=1"
            )
        return x

    def _require_tokens(self, outputs: Any) -> None:
        first = next((tensor for tensor in _tensors(outputs) if tensor.dim()), None)
        mine = self.tokens(self._length).count(self.comm.rank)
        if first is None or (self._is_sharded and (first.dim() < 2 or first.shape[1] != mine)):
            shown = "no tensor" if first is None else f"a tensor {tuple(first.shape)}"
            raise UsageError(
                f"the model gave {shown} under context parallelism; expected its output for each of this rank's "
                f"{mine} tokens, (batch, {mine}, ...), as the targets are of tokens; else use a plan with cp=1"
            )


def are_of_sequences(inputs: Any, targets: Any) -> bool:
    """Whether targets are of full sequences rather than of tokens."""
    lengths = {tuple(tensor.shape[:2]) for tensor in _tensors(inputs) if tensor.dim() > 1}
    return any(tuple(target.shape[:2]) not in lengths for target in _tensors(targets))


def hidden_states(tree: Any) -> torch.Tensor | None:
    """Of a block's arguments or outcome, the tensor (batch, sequence, width)."""
    found: torch.Tensor | None = next((x for x in _tensors(tree) if x.dim() == 3 and x.is_floating_point()), None)
    return found


def _kind_of(inputs: Any) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape[1:] for tensor in _tensors(inputs) if tensor.dim() > 1)


def _has_samples(leaf: Any, batch: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch


_SECOND = ("encoder", "memory", "cross", "key_value_states")  # in names of arguments


def of_second_sequence(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Ids of the tensors that a block is given of a second sequence, such as an encoder's output, by the arguments'
    names: its length may be that of the hidden states."""
    parameters = list(inspect.signature(type(block).forward).parameters)[1:]
    named = [*zip(parameters, args, strict=False), *kwargs.items()]
    return {id(x) for name, given in named if any(word in name for word in _SECOND) for x in _tensors(given)}


def use_global_positions(block: nn.Module, lengths: Callable[[], tuple[int, int]]) -> None:
    """Attention of Hugging Face's T5 and models like it makes a bias, and a causal mask, of positions that it counts
    from 0; both are to be those of the full sequence. lengths: how many tokens this rank holds, and of how many."""
    for module in block.modules():
        own = getattr(module, "compute_bias", None)
        if own is not None:
            module.compute_bias = partial(_global_bias, own, lengths)  # type: ignore[assignment]
            module.forward = partial(_with_global_mask, module.forward, module, lengths)


def _with_global_mask(
    forward: Forward, module: nn.Module, lengths: Callable[[], tuple[int, int]], *args: Any, **kwargs: Any
) -> Any:
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    mask = "mask" if "mask" in names else "attention_mask"
    is_own = not any(word in name and given[name] is not None for name in given for word in _SECOND)
    hidden = hidden_states(given)
    if not getattr(module, "is_causal", False) or not is_own or given.get(mask) is not None or hidden is None:
        return forward(*args, **kwargs)
    length = lengths()[1]
    return forward(**given | {mask: hidden.new_ones((1, 1, length, length), dtype=torch.bool).tril()})


def _global_bias(own: Forward, lengths: Callable[[], tuple[int, int]], *args: Any, **kwargs: Any) -> Any:
    mine, length = lengths()
    return own(length, length, *args[2:], **kwargs) if args[:2] == (mine, mine) else own(*args, **kwargs)


def sequence_dim(x: torch.Tensor, length: int, batch: int, is_second: bool = False) -> int | None:
    """Along which dim an argument of a block runs with the sequence; None for others, and for masks (see attention).
    is_second: it is of a second sequence; only a mask (batch, heads, queries, keys) of it runs along this one too.

    Known forms: positions (seq) and (batch, seq), tables (seq, width), (batch, seq, width), (batch, heads, seq, width)
    and (batch, seq, heads, width). A mask has the length in its last two dims, or in the last one behind a 1.
    """
    runs = [size == length for size in x.shape]
    if is_second:
        return 2 if x.dim() == 4 and runs[2] else None
    is_table = x.is_floating_point()
    if x.dim() == 1:
        return 0 if runs[0] else None
    if x.dim() == 2:
        if all(runs) and (is_table or x.dtype == torch.bool):
            return None
        if runs[1] and x.shape[0] in (1, batch):
            return 1
        return 0 if runs[0] else None
    if x.dim() == 3:
        return 1 if runs[1] and not runs[2] else None
    if x.dim() == 4 and not runs[3]:
        return 2 if runs[2] else 1 if runs[1] else None
    return None


def _tensors(tree: Any) -> Any:
    """The tensors in nested tuples, lists and dicts, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from _tensors(value)


def mapped(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nested tuples, lists and dicts with every tensor changed."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(value, change) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(mapped(value, change) for value in tree)
    return tree


def without_attention(block: str) -> UsageError:
    return UsageError(
        f"block {block} did not call F.scaled_dot_product_attention, so its tokens would see this rank's only; "
        "under context parallelism use that function (nn.MultiheadAttention does with need_weights=False, "
        "Hugging Face models with attn_implementation='sdpa')"
    )
