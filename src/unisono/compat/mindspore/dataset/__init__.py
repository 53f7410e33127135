"""MindSpore's datasets, as far as Model reads them (datasets.py)."""

from __future__ import annotations

from unisono.compat.mindspore.dataset.datasets import Dataset as Dataset
from unisono.compat.mindspore.dataset.datasets import GeneratorDataset as GeneratorDataset
from unisono.compat.mindspore.dataset.datasets import NumpySlicesDataset as NumpySlicesDataset
from unisono.compat.mindspore.mindspore_names import missing_names

__getattr__ = missing_names(__name__)
