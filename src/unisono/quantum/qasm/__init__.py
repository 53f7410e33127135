"""OpenQASM 2 and the common part of 3: circuits from text and to text."""

from unisono.quantum.qasm.reader import from_qasm as from_qasm
from unisono.quantum.qasm.reader import load_qasm as load_qasm
from unisono.quantum.qasm.token import QasmError as QasmError
from unisono.quantum.qasm.writer import dumps as dumps
