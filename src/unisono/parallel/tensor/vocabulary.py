"""The vocabulary shared by several ranks: embeddings and the loss on logits that are never gathered.

Rank r knows the r-th shard of the tokens (sizes differ by one at most). Looking up, it gives zeros for all other
tokens, and the ranks' answers are summed. The loss is that of mesh/sharded_cross_entropy.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world as worlds
from unisono.errors import UsageError
from unisono.mesh import autograd_collectives
from unisono.mesh.sharded_cross_entropy import sharded_cross_entropy
from unisono.parallel.layout import Split
from unisono.parallel.pipeline.off_stage import is_off_stage
from unisono.parallel.tensor.linear import Initialiser
from unisono.parallel.tensor.parameter_shards import TP, ParameterSharder, lengths_of


class VocabParallelEmbedding(nn.Module):
    """nn.Embedding whose rows are shared out; input and output are full on every rank.

    From the same torch seed the parameters are the shards of those nn.Embedding would have; `init` is given the full
    weight. Without `comm` all ranks of the world share it.
    """

    weight: nn.Parameter  # this rank's rows

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        init: Initialiser | None = None,
        *,
        comm: Communicator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        full = nn.Embedding(num_embeddings, embedding_dim, padding_idx, dtype=dtype, device=device)
        if init is not None:
            with torch.no_grad():
                init(full.weight)
        self._take_shard(full, comm or worlds.world())

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, comm: Communicator | None = None, *, shards: ParameterSharder | None = None
    ) -> VocabParallelEmbedding:
        """The same embedding, sharded. Layers that share parameters are given the same `shards`."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take_shard(embedding, comm or worlds.world(), shards)
        return layer

    def _take_shard(self, embedding: nn.Embedding, comm: Communicator, shards: ParameterSharder | None = None) -> None:
        require_plain(embedding)
        self.comm = comm
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        split = Split.even(TP, 0, self.num_embeddings, comm.size)
        held = split.held[comm.rank]
        self.first, self.last = (held[0], held[-1]) if held else (0, -1)
        self.padding_idx = embedding.padding_idx
        self.weight = (shards or ParameterSharder(comm.rank, comm.size)).shard(embedding.weight, split)  # type: ignore[arg-type]
        self.train(embedding.training)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if not len(self.weight):
            mine = self.weight.sum() + self.weight.new_zeros(*tokens.shape, self.embedding_dim)
            return self._summed(mine)
        autograd_collectives.require_eager(tokens, "a sharded embedding runs")
        self._require_known(tokens)
        elsewhere = (tokens < self.first) | (tokens > self.last)
        padding = self.padding_idx
        padding = padding - self.first if padding is not None and self.first <= padding <= self.last else None
        mine = F.embedding((tokens - self.first).masked_fill(elsewhere, 0), self.weight, padding)
        return self._summed(mine.masked_fill(elsewhere.unsqueeze(-1), 0.0))

    def _summed(self, mine: torch.Tensor) -> torch.Tensor:
        return mine if is_off_stage(self) else autograd_collectives.reduce(mine, self.comm)

    def _require_known(self, tokens: torch.Tensor) -> None:
        # On a GPU this would wait for the device; there an unknown token gives zeros.
        if tokens.is_cpu and tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.num_embeddings:
            raise UsageError(
                f"tokens from {int(tokens.min())} to {int(tokens.max())} in an embedding of {self.num_embeddings}; "
                f"expected 0 to {self.num_embeddings - 1}"
            )

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={self.comm.size}"


def option_beyond_lookup(embedding: nn.Embedding) -> str:
    """An option that changes or reads the weight beyond looking rows up, which has no parallel form here; or ""."""
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(embedding, option):
            return f"{option}={getattr(embedding, option)}"
    return ""


def require_plain(embedding: nn.Embedding) -> None:
    option = option_beyond_lookup(embedding)
    if option:
        raise UsageError(
            f"an nn.Embedding with {option} cannot be shared by ranks; leave {option.partition('=')[0]} out, or leave "
            "the embedding replicated"
        )


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    comm: Communicator | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    *,
    vocabulary: int | None = None,
) -> torch.Tensor:
    """F.cross_entropy of logits whose last dim is this rank's shard of the vocabulary; targets are full.

    Unlike there, classes are along the last dim also where there are more than two. The result is the same on all
    ranks of `comm` (by default the world). `vocabulary` is the number of all classes; where it is not given, the ranks
    exchange how many they have.
    """
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f"vocab_parallel_cross_entropy(reduction={reduction!r}): expected mean, sum or none")
    if not 0 <= label_smoothing <= 1:
        raise UsageError(f"vocab_parallel_cross_entropy(label_smoothing={label_smoothing}): expected 0 to 1")
    if logits.shape[:-1] != targets.shape:
        raise UsageError(
            f"vocab_parallel_cross_entropy: logits {tuple(logits.shape)} and targets {tuple(targets.shape)}; "
            "expected targets in the shape of the logits without their last dim"
        )
    comm = comm or worlds.world()
    lengths = _lengths(logits.shape[-1], vocabulary, comm)
    losses = sharded_cross_entropy(
        logits, targets, comm.all_reduce, sum(lengths[: comm.rank]), sum(lengths), ignore_index, label_smoothing
    )
    if reduction == "none":
        return losses
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))  # those of ignored targets are 0
    if reduction == "mean":
        total = total / (targets != ignore_index).sum()
    return total.to(losses.dtype)


def _lengths(mine: int, vocabulary: int | None, comm: Communicator) -> list[int]:
    """How many classes each rank has."""
    if vocabulary is None:
        return [int(length) for length in comm.all_gather(torch.tensor([mine], device=comm.device))]
    lengths = lengths_of(Split.even(TP, 0, vocabulary, comm.size))
    if lengths[comm.rank] != mine:
        raise UsageError(
            f"vocab_parallel_cross_entropy(vocabulary={vocabulary}) on {comm.size} ranks: rank {comm.rank} has {mine} "
            f"logits a token; expected {lengths[comm.rank]}"
        )
    return lengths
