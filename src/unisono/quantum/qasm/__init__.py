"""OpenQASM 2 and the common part of 3: circuits from text and to text.

    reader    from_qasm, load_qasm: a circuit from text; token, expression, call, flow (if, for, while), subroutine and
              scope are its parts, catalogue and native the gates it knows
    writer    dumps: a circuit as text; decompose rewrites what the language has no gate for

Called by Circuit.to_qasm and the qsim command.
"""

from unisono.quantum.qasm.reader import from_qasm as from_qasm
from unisono.quantum.qasm.reader import load_qasm as load_qasm
from unisono.quantum.qasm.token import QasmError as QasmError
from unisono.quantum.qasm.writer import dumps as dumps
