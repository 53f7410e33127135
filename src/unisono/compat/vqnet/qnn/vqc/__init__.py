"""VQNet's variational circuits: functional gates and measurements."""

from __future__ import annotations

from unisono.compat.vqnet.qnn.vqc.gate import ccz as ccz
from unisono.compat.vqnet.qnn.vqc.gate import ch as ch
from unisono.compat.vqnet.qnn.vqc.gate import cnot as cnot
from unisono.compat.vqnet.qnn.vqc.gate import controlledphaseshift as controlledphaseshift
from unisono.compat.vqnet.qnn.vqc.gate import cr as cr
from unisono.compat.vqnet.qnn.vqc.gate import crx as crx
from unisono.compat.vqnet.qnn.vqc.gate import cry as cry
from unisono.compat.vqnet.qnn.vqc.gate import crz as crz
from unisono.compat.vqnet.qnn.vqc.gate import cswap as cswap
from unisono.compat.vqnet.qnn.vqc.gate import cu1 as cu1
from unisono.compat.vqnet.qnn.vqc.gate import cu3 as cu3
from unisono.compat.vqnet.qnn.vqc.gate import cy as cy
from unisono.compat.vqnet.qnn.vqc.gate import cz as cz
from unisono.compat.vqnet.qnn.vqc.gate import h as h
from unisono.compat.vqnet.qnn.vqc.gate import hadamard as hadamard
from unisono.compat.vqnet.qnn.vqc.gate import i as i
from unisono.compat.vqnet.qnn.vqc.gate import isingxx as isingxx
from unisono.compat.vqnet.qnn.vqc.gate import isingyy as isingyy
from unisono.compat.vqnet.qnn.vqc.gate import isingzz as isingzz
from unisono.compat.vqnet.qnn.vqc.gate import iswap as iswap
from unisono.compat.vqnet.qnn.vqc.gate import p as p
from unisono.compat.vqnet.qnn.vqc.gate import paulix as paulix
from unisono.compat.vqnet.qnn.vqc.gate import pauliy as pauliy
from unisono.compat.vqnet.qnn.vqc.gate import pauliz as pauliz
from unisono.compat.vqnet.qnn.vqc.gate import phaseshift as phaseshift
from unisono.compat.vqnet.qnn.vqc.gate import rot as rot
from unisono.compat.vqnet.qnn.vqc.gate import rx as rx
from unisono.compat.vqnet.qnn.vqc.gate import rxx as rxx
from unisono.compat.vqnet.qnn.vqc.gate import ry as ry
from unisono.compat.vqnet.qnn.vqc.gate import ryy as ryy
from unisono.compat.vqnet.qnn.vqc.gate import rz as rz
from unisono.compat.vqnet.qnn.vqc.gate import rzx as rzx
from unisono.compat.vqnet.qnn.vqc.gate import rzz as rzz
from unisono.compat.vqnet.qnn.vqc.gate import s as s
from unisono.compat.vqnet.qnn.vqc.gate import sdg as sdg
from unisono.compat.vqnet.qnn.vqc.gate import swap as swap
from unisono.compat.vqnet.qnn.vqc.gate import t as t
from unisono.compat.vqnet.qnn.vqc.gate import tdg as tdg
from unisono.compat.vqnet.qnn.vqc.gate import toffoli as toffoli
from unisono.compat.vqnet.qnn.vqc.gate import u1 as u1
from unisono.compat.vqnet.qnn.vqc.gate import u2 as u2
from unisono.compat.vqnet.qnn.vqc.gate import u3 as u3
from unisono.compat.vqnet.qnn.vqc.gate import x as x
from unisono.compat.vqnet.qnn.vqc.gate import x1 as x1
from unisono.compat.vqnet.qnn.vqc.gate import y as y
from unisono.compat.vqnet.qnn.vqc.gate import y1 as y1
from unisono.compat.vqnet.qnn.vqc.gate import z as z
from unisono.compat.vqnet.qnn.vqc.gate import z1 as z1
from unisono.compat.vqnet.qnn.vqc.measure import MeasureAll as MeasureAll
from unisono.compat.vqnet.vqnet_names import missing_names

__getattr__ = missing_names(__name__)
