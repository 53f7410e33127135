"""The partial losses of ranks and microbatches sum to the user's loss on the full batch, whatever it counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks import RankPool
from unisono.comm import traffic
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.loss.counts import PendingFlag
from unisono.parallel.loss.loss import GlobalLoss

Pools = Callable[[str, int], RankPool]
CLASSES = 5
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0], dtype=torch.float64)


def masked(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    mask = targets != 0
    each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return (each * mask.flatten()).sum() / mask.sum().clamp(min=1)


def two_means(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return flat(F.cross_entropy)(outputs, targets) + 0.1 * outputs.pow(2).mean() + outputs.mean(-1).abs().mean()


def features_after_batch(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.mean(dim=(0, 1)) * WEIGHT).mean() + outputs.sum(0).mean() * 1e-3


def only_sums(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.square().sum(-1) * (targets + 1)).sum()


def nothing_but_weights(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    mask = (targets % 2).double()
    return (outputs.logsumexp(-1) * mask / mask.sum()).sum()


def flat(loss: Callable[..., torch.Tensor], **options: Any) -> Callable[..., torch.Tensor]:
    def call(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss(outputs.flatten(0, 1), targets.flatten(), **options)

    return call


def dense(loss: Callable[..., torch.Tensor], **options: Any) -> Callable[..., torch.Tensor]:
    """A loss whose targets are like the outputs."""

    def call(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        wanted = (F.one_hot(targets.clamp(min=0), CLASSES).double() + 0.3) / (1 + 0.3 * CLASSES)
        return loss(outputs, wanted, **options)

    return call


def probability(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda outputs, targets: dense(loss)(outputs.sigmoid(), targets)


def log_nll(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    scores = outputs.log_softmax(-1).flatten(0, 1)
    return F.nll_loss(scores, targets.flatten(), weight=WEIGHT, ignore_index=-100)


def ctc(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    count = len(outputs)
    words = targets.clamp(min=1)[:, :2]
    lengths = torch.full((count,), outputs.shape[1]), 1 + targets.clamp(min=0)[:, 0] % 2
    return F.ctc_loss(outputs.log_softmax(-1).transpose(0, 1), words, *lengths)


LOSSES = {
    "cross_entropy": flat(F.cross_entropy),
    "cross_entropy_module": flat(nn.CrossEntropyLoss(ignore_index=-100)),
    "weights": flat(F.cross_entropy, weight=WEIGHT),
    "smoothing": flat(F.cross_entropy, label_smoothing=0.1),
    "weights_and_smoothing": flat(F.cross_entropy, weight=WEIGHT, label_smoothing=0.2),
    "old_words": flat(F.cross_entropy, size_average=True),
    "summed": flat(F.cross_entropy, reduction="sum"),
    "probabilities": dense(lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(0, 1), weight=WEIGHT)),
    "images": lambda o, t: F.cross_entropy(o.transpose(1, 2), t),
    "nll": log_nll,
    "mse": dense(F.mse_loss),
    "l1": dense(nn.L1Loss()),
    "smooth_l1": dense(F.smooth_l1_loss),
    "huber": dense(F.huber_loss),
    "bce": probability(F.binary_cross_entropy),
    "bce_with_logits": dense(F.binary_cross_entropy_with_logits),
    "kl": dense(F.kl_div, reduction="mean"),
    "kl_batchmean": dense(F.kl_div, reduction="batchmean"),
    "poisson": dense(F.poisson_nll_loss),
    "multilabel": dense(lambda o, t: F.multilabel_soft_margin_loss(o.flatten(0, 1), t.flatten(0, 1).round())),
    "ctc": ctc,
    "by_hand": lambda o, t: ((o - t.unsqueeze(-1)) ** 2).mean(),
    "masked": masked,
    "two_means": two_means,
    "features_after_batch": features_after_batch,
    "only_sums": only_sums,
    "a_term_without_samples": lambda o, t: o.square().mean() + WEIGHT.square().sum(),
    "nothing_but_weights": nothing_but_weights,
    "sum_by_samples": lambda o, t: o.square().sum() / len(o),
    "sum_by_tokens": lambda o, t: flat(F.cross_entropy, reduction="sum")(o, t) / t.numel(),
    "sums_by_sizes_and_constants": lambda o, t: -0.5 * (o.sum() + o.exp().sum()) / o.shape[0] + o.abs().mean() / 2,
}


def batch(rows: int = 7, length: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    outputs = torch.randn(rows, length, CLASSES, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, CLASSES, (rows, length), generator=generator)
    targets[1, 2:] = -100
    targets[5] = -100  # a row, and so perhaps a part, of which nothing counts
    return outputs, targets


def full_value(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    outputs, targets = batch()
    if name not in ("cross_entropy", "weights", "smoothing", "weights_and_smoothing", "cross_entropy_module", "nll"):
        targets = targets.clamp(min=0)
    return outputs.requires_grad_(), targets


def parted(name: str, splits: list[list[int]], comm: Communicator | None, rank: int) -> tuple[float, torch.Tensor]:
    """The total and the gradient, where rank r takes microbatches of cuts[r] rows, in the order of the ranks."""
    outputs, targets = full_value(name)
    sizes = [size for row in splits for size in row]
    first = sum(len(row) for row in splits[:rank])
    shards = list(zip(outputs.split(sizes), targets.split(sizes), strict=True))[first : first + len(splits[rank])]
    loss = GlobalLoss(LOSSES[name], comm)
    loss.prepare(shards)
    partials = [loss(*shard) for shard in shards]
    sum(partials).backward()
    return float(loss.total(partials)), outputs.grad


def expected(name: str) -> tuple[float, torch.Tensor]:
    outputs, targets = full_value(name)
    value = LOSSES[name](outputs, targets)
    value.backward()
    return float(value.detach()), outputs.grad


@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_of_one_rank(name: str) -> None:
    value, gradient = expected(name)
    for sharded in ([[7]], [[3, 2, 2]], [[5, 1, 1]], [[1] * 7]):
        total, parts = parted(name, sharded, None, 0)
        assert total == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(parts, gradient, rtol=1e-11, atol=1e-14)


def on_ranks(comm: Communicator, name: str, splits: list[list[int]]) -> tuple[float, torch.Tensor]:
    return parted(name, splits, comm, comm.rank)


def test_ranks_with_unequal_and_empty_shares(pools: Pools) -> None:
    for name in LOSSES:
        value, gradient = expected(name)
        for splits in ([[2, 2], [2, 1]], [[5, 1], [1]], [[7], [0]] if name != "ctc" else [[6], [1]]):
            answers = pools("gloo", 2).run(on_ranks, name, splits)
            assert all(total == pytest.approx(value, rel=1e-12) for total, _ in answers), name
            torch.testing.assert_close(sum(part for _, part in answers), gradient, rtol=1e-11, atol=1e-14)


def test_a_floor_holds_for_the_count_of_the_full() -> None:
    outputs, targets = batch()
    nobody = torch.zeros_like(targets)
    loss = GlobalLoss(masked)
    shards = list(zip(outputs.split([3, 4]), nobody.split([3, 4]), strict=True))
    loss.prepare(shards)
    assert loss.total([loss(*shard) for shard in shards]) == masked(outputs, nobody) == 0


def test_half_precision_sums_do_not_overflow() -> None:
    outputs = torch.full((4, 4000), 8.0, dtype=torch.float16)
    loss = GlobalLoss(F.mse_loss)
    shards = [(part, torch.zeros_like(part)) for part in outputs.split(2)]
    loss.prepare(shards)
    assert float(loss.total([loss(*shard) for shard in shards])) == 64.0


def test_the_full_batch_on_one_rank_meets_the_loss_as_it_is() -> None:
    outputs, targets = batch()

    def odd(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.std() + outputs.sum() / len(outputs)

    loss = GlobalLoss(odd)
    loss.prepare([(outputs, targets)])
    assert loss(outputs, targets) == odd(outputs, targets)


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: o.square().sum() / len(o) ** 2,
        lambda o, t: o.square().sum() * (1 / len(o)),
        lambda o, t: o.square().sum().sqrt() / len(o),
        lambda o, t: (o.square().sum(-1) * (t > 1)).sum() / max((t > 1).sum().item(), 1),
        lambda o, t: (o.square().sum(-1) * (t > 1)).sum() / len(t[t > 1]),
        lambda o, t: o.mean().square(),
        lambda o, t: o.flatten(1).var(0).sum(),
        lambda o, t: (o.flatten(1) @ o.flatten(1).T * 0.1).logsumexp(1).mean(),
        lambda o, t: o.sum() / o.square().sum(),
    ],
)
def test_a_loss_that_cannot_be_split_is_refused(loss: Any) -> None:
    outputs, targets = batch()
    normaliser = GlobalLoss(loss)
    outputs.requires_grad_()
    shards = list(zip(outputs.split([3, 4]), targets.split([3, 4]), strict=True))
    normaliser.prepare(shards)
    with pytest.raises(UsageError, match="not made of sums and means"):
        normaliser(*shards[0])


def test_a_loss_that_fails_on_fewer_samples_is_reported_what_to_do() -> None:
    outputs, targets = batch()
    shards = list(zip(outputs.split([3, 4]), targets.split([3, 4]), strict=True))
    normaliser = GlobalLoss(lambda o, t: o.flatten(1).sum(1).topk(3).values.mean())
    normaliser.prepare(shards)
    with pytest.raises(UsageError, match=r"but not for a half of them .*uni\.BatchLoss"):
        normaliser(*shards[0])


def test_a_single_sample_a_part_hides_no_loss_that_compares_samples() -> None:
    def similar(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.flatten(1) @ outputs.flatten(1).T * 0.1).logsumexp(1).mean()

    outputs, targets = batch()
    shards = list(zip(outputs.split(1), targets.split(1), strict=True))
    for loss, is_fine in [(similar, False), (flat(F.cross_entropy), True)]:
        normaliser = GlobalLoss(loss)
        normaliser.prepare(shards)
        with contextlib.nullcontext() if is_fine else pytest.raises(UsageError, match="not made of sums and means"):
            normaliser(*shards[0])


def test_a_loss_that_cannot_be_split_along_the_sequence_is_refused() -> None:
    outputs, targets = batch()

    def shifted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return flat(F.cross_entropy)(outputs[:, :-1], targets[:, 1:])

    shards = list(zip(outputs.split([3, 4]), targets.split([3, 4]), strict=True))
    normaliser = GlobalLoss(shifted)
    normaliser.prepare(shards)
    normaliser(*shards[0])  # along the batch it can
    normaliser = GlobalLoss(shifted, dims=(0, 1))
    normaliser.prepare(shards)
    with pytest.raises(UsageError, match="along dim 1"):
        normaliser(*shards[0])


def test_an_output_without_tokens_hides_behind_no_zeros() -> None:
    """As many weights of terms as samples, and zeros: every rank of a sequence would add them."""
    outputs, targets = batch()
    weights = torch.zeros(3, requires_grad=True)

    def weighted(given: Any, targets: torch.Tensor) -> torch.Tensor:
        outputs, weights = given
        return flat(F.cross_entropy)(outputs, targets) * torch.exp(-weights[0]) + weights.sum()

    shards = [((each, weights), of) for each, of in zip(outputs.split(3), targets.split(3), strict=True)][:2]
    normaliser = GlobalLoss(weighted, dims=(0, 1))
    normaliser.prepare(shards)
    with pytest.raises(UsageError, match="not made of sums and means"):
        normaliser(*shards[0])


def test_a_count_that_depends_on_the_outputs_is_refused() -> None:
    outputs, targets = batch()

    def confident(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs[outputs > 0.1].mean()

    def confident_sum(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        sure = outputs.detach() > 0.1
        return (outputs * sure).sum() / sure.sum()

    for loss in (confident, confident_sum):
        normaliser = GlobalLoss(loss)
        shards = list(zip(outputs.split([3, 4]), targets.split([3, 4]), strict=True))
        normaliser.prepare(shards)
        with pytest.raises(UsageError, match="use microbatches=1"):
            normaliser.total([normaliser(*shard) for shard in shards])


def test_errors_say_what_was_given() -> None:
    outputs, targets = batch()
    shards = [(outputs[:3], targets[:3]), (outputs[3:], targets[3:])]
    wrong = GlobalLoss(F.cross_entropy)
    wrong.prepare(shards)
    with pytest.raises(UsageError, match=r"cannot take what the model returns, float64\[\d, 4, 5\], .*int64\[\d, 4\]"):
        wrong(*shards[0])
    with pytest.raises(UsageError, match="expected one number"):
        GlobalLoss(lambda o, t: o.sum(0)).prepare(shards)
    with pytest.raises(UsageError, match="at most 61"):
        GlobalLoss(lambda o, t: sum(o.mean() for _ in range(99))).prepare(shards)
    with pytest.raises(UsageError, match="another number elsewhere"):
        GlobalLoss(lambda o, t: sum(F.mse_loss(row, row) for row in o)).prepare(shards)
    loss = GlobalLoss(LOSSES["cross_entropy"])
    loss.prepare(shards)
    with pytest.raises(UsageError, match="prepared for 2 microbatches"):
        [loss(*shard) for shard in (*shards, shards[0])]


def test_counts_on_a_device_are_compared_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found of one batch is not lost when the next one is counted."""
    monkeypatch.setattr(PendingFlag, "is_here", property(lambda self: False))  # as of counts on a GPU
    outputs, targets = batch(rows=6)
    shards = [(outputs[:3], targets[:3]), (outputs[3:], targets[3:])]
    counted = GlobalLoss(lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()))
    counted.prepare(shards)
    elsewhere = targets.clone()
    elsewhere[0, 0] = -100  # not among the targets that were counted
    counted(outputs[:3], elsewhere[:3])
    partials = [counted(*shards[1])]
    counted._require_no_surprise()
    counted._astray = [torch.tensor(False)]
    counted.total(partials)
    with pytest.raises(UsageError, match="count depends on the outputs"):
        counted.settle()


def predicted(comm: Communicator) -> tuple[list[int], bool]:
    """Messages in each of three steps; and whether counts that go astray later are noticed."""
    outputs, targets = batch(rows=6)
    targets = targets.clone()
    targets[0, 0] = -100
    mine = slice(0, 4) if comm.rank == 0 else slice(4, 6)
    counted = GlobalLoss(lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()), comm)
    calls = []
    for _ in range(3):
        with traffic.counted() as seen:
            counted.prepare([(outputs[mine], targets[mine])], (outputs, targets))
            value = counted.total([counted(outputs[mine], targets[mine])])
        calls.append(sum(seen.calls.values()))
        full_value = F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
        assert torch.allclose(value, full_value, rtol=1e-12)
    elsewhere = targets[mine].clone()
    elsewhere[-1, -1] = -100  # not among the targets that were counted
    counted.prepare([(outputs[mine], targets[mine])], (outputs, targets))
    try:
        counted.total([counted(outputs[mine], elsewhere)])
    except UsageError:
        return calls, True
    return calls, False


def test_ranks_that_have_all_targets_ask_once(pools: Pools) -> None:
    for calls, noticed in pools("gloo", 2).run(predicted):
        assert calls == [2, 1, 1]
        assert noticed


def computed(comm: Communicator) -> list[int]:
    """A loss whose counting would compute on the full batch's outputs keeps asking."""
    outputs, targets = batch(rows=6)
    mine = slice(3 * comm.rank, 3 * comm.rank + 3)
    squares = GlobalLoss(lambda o, t: (o.softmax(-1) ** 2).mean(), comm)
    calls = []
    for _ in range(2):
        with traffic.counted() as seen:
            squares.prepare([(outputs[mine], targets[mine])], (outputs, targets))
            squares.total([squares(outputs[mine], targets[mine])])
        calls.append(sum(seen.calls.values()))
    return calls


def test_nobody_computes_the_full_to_count(pools: Pools) -> None:
    assert pools("gloo", 2).run(computed) == [[2, 2]] * 2
