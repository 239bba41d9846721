"""A CUDA device that is emulated: the host's part of GPU code, on a machine without a GPU.

    PYTHONPATH=tests/support PYTHON -m cuda_emulator python script.py

runs a script, by the same Python, where `torch.cuda.is_available()` is True. PYTHON needs the CUDA
wheel of the torch that `build.TORCH` names. A shared library stands in the place of libcudart,
cuBLAS and libcuda.so.1 (`build.py` makes it at first use): device memory is host memory with a
limit, kernels are compiled for sm_90 by the real ptxas and counted, not run, and what may not be
done while a stream is captured is an error. So Python errors, launches, copies, synchronisations,
captures, running out of memory and the host's time are those of the real code; values and the
device's time are not. CUPTI sees nothing, and cuDNN has to be off.

Its environment variables, which are read when the process starts:

- CUDA_EMULATOR_GIB: memory of the device, 79 by default; fractions are allowed.
- CUDA_EMULATOR_ONES: if set, reading four bytes of zeros from the device gives 1.0, for programs
  that divide by what kernels would have computed.
- CUDA_EMULATOR_ZEROS: if set, reading at most eight bytes from the device gives zeros, for programs
  that read how many elements a kernel has found: memory that none has written is that of before.
- CUDA_EMULATOR_TRACE: if set, synchronisations, and what a capture forbids, are printed to stderr.
"""

from cuda_emulator.build import missing
from cuda_emulator.counters import counted, host_ms, kernels, memory, read, reset, running

__all__ = ["counted", "host_ms", "kernels", "memory", "missing", "read", "reset", "running"]
