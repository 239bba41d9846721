"""gpu_model.py: what it reads off machine code, and what it makes of that.

For benchmarks/gpu_model.py.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_model
from gpu_model import Card, Loop, main_loop, predicted

SASS = """
.text.multi_tensor:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 BRA `(.L_x_9) ;
.L_x_1:
        /*0020*/                   LDG.E.128 R4, desc[UR20][R8.64] ;
        /*0030*/               @P1 BRA `(.L_x_2) ;
        /*0040*/                   MOV R2, 0x60 ;
        /*0050*/                   CALL.REL.NOINC `($slow_path) ;
.L_x_2:
        /*0060*/              @!P2 FADD R4, R4, R5 ;
        /*0070*/                   MUFU.RCP R4, R4 ;
        /*0080*/                   STG.E.128 desc[UR20][R8.64], R4 ;
        /*0090*/               @P3 BRA `(.L_x_1) ;
.L_x_9:
        /*00a0*/                   LDG.E.U16 R4, desc[UR20][R8.64] ;
        /*00b0*/               @P0 BRA `(.L_x_9) ;
"""


def test_the_loop_is_found_without_what_is_rarely_done() -> None:
    loop = main_loop(SASS)
    assert loop.moved == 32
    assert loop.instructions == Counter(["LDG", "BRA", "FADD", "MUFU", "STG", "BRA"])
    with pytest.raises(ValueError, match="0 loops"):
        main_loop(SASS.replace("LDG.E.128", "LDG.E.64"))


def test_the_slower_of_memory_and_execution_decides() -> None:
    """A device of one multiprocessor at 1 GHz, and 8 elements of 4 bytes in a loop."""
    work = Counter({"FADD": 256, "PRMT": 64, "MUFU": 8})
    slow, fast = (
        predicted(Loop(work, 32), 4, 64, Card(1, 1.0, terabytes)) for terabytes in (1e-3, 1.0)
    )
    # 328 instructions for 8 elements, 128 of which a clock takes; and 4 bytes at 0.9 GB/s.
    assert slow["busiest"] == "issue" and slow["by execution, ns"] == 320.31
    assert slow["by memory, ns"] == 4444.44 and slow["most, share of copy"] == 1
    assert slow["least, share of copy"] == round(4444.44 / (4444.44 + 320.31), 3)
    assert fast["most, share of copy"] == round(4.444 / 320.31, 3)
    roots = predicted(Loop(work + Counter({"MUFU": 64}), 32), 4, 64, Card(1, 1.0, 1.0))
    assert roots["busiest"] == "XU" and roots["by execution, ns"] == 1000 * 72 / 8 / 16
    assert fast["blocks at once"] == 8  # 65536 registers for 128 threads of 64
    assert predicted(Loop(work, 32), 4, 88, Card(1, 1.0, 1.0))["blocks at once"] == 5


@pytest.mark.slow
def test_a_kernel_of_a_class_is_read_as_it_is() -> None:
    found = gpu_model.row("light eft")
    assert sum(found["counts in a loop"].values()) == 8 * found["instructions"]
    case = gpu_model.CASES["adamw-light"]
    assert found["bytes"] == case.traffic
    # Five columns are read and four written, each by one instruction for 8 elements.
    assert found["counts in a loop"]["LDG"] + found["counts in a loop"]["STG"] == case.traffic // 2
