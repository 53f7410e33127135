"""The names that `unisono run --as NAME` puts in the place of other frameworks' packages, in the ranks only.

    unisono run -n 2 --as pyvqnet program.py    # `import pyvqnet` imports unisono.compat.vqnet

A further framework is one line here. Its package may define `explain_missing_module(name)`: see launch/worker/aliases.
"""

from __future__ import annotations

# the name of --as, with the import name and the module that stands for it
ALIASES: dict[str, dict[str, str]] = {
    "paddle": {"paddle": "unisono.compat.paddle"},
    "pyvqnet": {"pyvqnet": "unisono.compat.vqnet"},
    "mindspore": {"mindspore": "unisono.compat.mindspore"},
}

# the name of --compat, with the module whose `install` ranks call before their program
COMPAT = {"torch": "unisono.compat.torch"}
