"""Greedy generation through a pipeline, as Hugging Face's `generate` does it on one device.

No rank has the full model, so `generate` cannot be called. Each new token is taken from the outputs of the full
sequence so far, which the pipeline computes again: the tokens are those that a cache of keys and values would give.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unisono.errors import UsageError

_PLAIN = {  # options of a generation config, and the values with which generation is greedy
    "do_sample": (None, False),
    "num_beams": (None, 1),
    "repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "min_new_tokens": (None, 0),
    "min_length": (None, 0),
    "bad_words_ids": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "penalty_alpha": (None, 0.0),
}


def generated(
    predict: Callable[[Any], Any],
    model: nn.Module,
    input_ids: torch.Tensor,
    *,
    max_new_tokens: int | None = None,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """The prompts and what follows them; `predict` gives the model's outputs for a global batch on every rank."""
    config = getattr(model, "generation_config", None)
    given = {"eos_token_id": options.pop("eos_token_id", getattr(config, "eos_token_id", None))}
    given["pad_token_id"] = options.pop("pad_token_id", getattr(config, "pad_token_id", None))
    _require_greedy(config, options)
    if max_new_tokens is None or max_new_tokens < 1:
        raise UsageError(f"generate(max_new_tokens={max_new_tokens}); expected how many tokens to add to the prompts")
    ends = _numbers(given["eos_token_id"], input_ids)
    padding = given["pad_token_id"] if given["pad_token_id"] is not None or not len(ends) else int(ends[0])
    is_done = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    mask = None if attention_mask is None or bool(attention_mask.all()) else attention_mask
    for _ in range(max_new_tokens):
        following = _logits(predict(_inputs(model, input_ids, mask)))[:, -1].argmax(-1).to(input_ids.device)
        if len(ends):
            following = torch.where(is_done, torch.full_like(following, int(padding or 0)), following)
            is_done = is_done | torch.isin(following, ends)
        input_ids = torch.cat([input_ids, following[:, None]], 1)
        mask = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        if bool(is_done.all()):
            break
    return input_ids


def _inputs(model: nn.Module, input_ids: torch.Tensor, mask: torch.Tensor | None) -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
    if mask is not None:
        inputs["attention_mask"] = mask
        if "position_ids" in inspect.signature(type(model).forward).parameters:
            inputs["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)  # prompts are padded on the left
    return inputs


def _require_greedy(config: Any, options: dict[str, Any]) -> None:
    for name in options:
        if name not in _PLAIN:
            raise UsageError(
                f"generate({name}=...) through a pipeline; expected max_new_tokens=, attention_mask=, eos_token_id= "
                "and pad_token_id=: use a plan with pp=1 for other options"
            )
    for name, plain in _PLAIN.items():
        value = options.get(name, getattr(config, name, None))
        if value not in plain:
            raise UsageError(
                f"generate with {name}={value!r} through a pipeline, which generates greedily; pass "
                f"{name}={plain[-1]!r}, or use a plan with pp=1"
            )


def _numbers(value: Any, like: torch.Tensor) -> torch.Tensor:
    numbers = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)


def _logits(outputs: Any) -> torch.Tensor:
    logits = getattr(outputs, "logits", outputs)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
        raise UsageError(
            f"generate: the model gave {type(outputs).__name__}; expected logits of shape (batch, sequence, vocabulary)"
        )
    return logits
