"""paddle.static: programs that are recorded once and run many times.

variable   a tensor of a program; functions of torch that are given one record themselves
program    Program, static mode and its default programs, data, InputSpec
executor   Executor
"""

from __future__ import annotations

from unisono.compat.paddle.paddle_names import missing_names
from unisono.compat.paddle.static.executor import Executor as Executor
from unisono.compat.paddle.static.program import InputSpec as InputSpec
from unisono.compat.paddle.static.program import Program as Program
from unisono.compat.paddle.static.program import data as data
from unisono.compat.paddle.static.program import default_main_program as default_main_program
from unisono.compat.paddle.static.program import default_startup_program as default_startup_program
from unisono.compat.paddle.static.program import program_guard as program_guard
from unisono.compat.paddle.static.variable import Variable as Variable

__getattr__ = missing_names(__name__)
