"""The products of all experts at once, where the GPU can read how many rows each of them has.

Tokens are sorted by expert. A loop over the experts needs the number of each on the host, which waits for the router.
torch.nn.functional.grouped_mm takes the ends of the experts' rows as a tensor instead; its kernel for that is for
bfloat16, on GPUs from Hopper on, and wants a multiple of eight rows for each expert. So rows are spread out:

    expert        0  0  0  1  3  3              sorted visits
    row           0  1  2  8 24 25              each expert begins at a multiple of eight, and has eight at least
    ends          8 16 24 32 ...                the last expert has what is left; its rows are 0, as are all between

The number of rows is known without the counts: that of the visits, and eight for each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

_ALIGNED = 8  # elements of two bytes, for addresses that are multiples of 16 bytes
_KERNELS = (9, 10)  # major compute capabilities


def can_be_grouped(tokens: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Whether products of tokens with these (experts, outputs, inputs) can be, without the host waiting."""
    if not tokens.is_cuda or not len(tokens):
        return False
    is_cast = torch.is_autocast_enabled("cuda")
    dtypes = {torch.get_autocast_dtype("cuda")} if is_cast else {each.dtype for each in (tokens, *weights)}
    is_aligned = all(size % _ALIGNED == 0 for each in weights for size in each.shape[1:])
    return dtypes == {torch.bfloat16} and is_aligned and torch.cuda.get_device_capability(tokens.device)[0] in _KERNELS


class Groups(NamedTuple):
    """Where the rows of sorted tokens are, once they are spread out."""

    rows: torch.Tensor
    ends: torch.Tensor  # of the experts
    choice: torch.Tensor  # (all rows, experts): 1 where the row is of the expert

    @classmethod
    def of(cls, counts: torch.Tensor, visits: int, dtype: torch.dtype = torch.bfloat16) -> Groups:
        """counts: of the visits of each expert. Further ones, of `visits` in all, get rows of the last expert."""
        experts, device = len(counts), counts.device
        spread = ((counts + _ALIGNED - 1) // _ALIGNED * _ALIGNED).clamp(min=_ALIGNED)
        ends, spread_ends = counts.cumsum(0), spread.cumsum(0)
        shift = F.pad(spread_ends, (1, 0)) - F.pad(ends, (1, 0))
        number = torch.arange(visits, device=device)
        rows = number + shift[torch.searchsorted(ends, number, right=True)]
        total = (visits + _ALIGNED - 1) // _ALIGNED * _ALIGNED + experts * _ALIGNED
        spread_ends = torch.cat([spread_ends[:-1], spread_ends.new_full((1,), total)])
        expert = torch.searchsorted(spread_ends, torch.arange(total, device=device), right=True)
        choice = expert[:, None] == torch.arange(experts, device=device)
        return cls(rows, spread_ends.to(torch.int32), choice.to(dtype))

    def run(self, tokens: torch.Tensor, experts: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What the experts, whose layers are `linear`, make of sorted tokens."""
        tokens = tokens.to(self.choice.dtype)
        spread = tokens.new_zeros(len(self.choice), tokens.shape[1]).index_copy(0, self.rows, tokens)
        return experts(spread).index_select(0, self.rows)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """weight (experts, outputs, inputs) and bias (experts, outputs), each for its expert's rows."""
        y = F.grouped_mm(x, weight.to(x.dtype).transpose(-2, -1), offs=self.ends)
        return y if bias is None else y + self.choice @ bias.to(x.dtype)
