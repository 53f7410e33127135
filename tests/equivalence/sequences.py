"""Hugging Face models with layers that need all tokens of a sequence, by their own tensor-parallel plans or none."""

from __future__ import annotations

from tests.matrix.architectures import task

olmo2, phi3, glm4 = task("olmo2"), task("phi3"), task("glm4")
roberta, modernbert, gpt_neox = task("roberta"), task("modernbert"), task("gpt-neox")
