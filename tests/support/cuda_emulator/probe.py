"""Kernels compute nothing on the emulated device, which would be lost roundings elsewhere."""

from collage_fx.passes.codegen import rounding_probe


def leave_out_probe() -> None:
    """Have compiled code taken for code that keeps its roundings, for as long as this process runs.

    What other processes have found out is left aside too.
    """
    rounding_probe._differing = lambda device, run: []
    rounding_probe._machine = lambda device: f"emulated {device.type}"
