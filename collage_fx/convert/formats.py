"""Formats of the values of weights and moments, ours and those of others: told apart and read.

The meanings are those of public sources: Transformer Engine (pytorch/optimizers/fused_adam.py and
common/multi_tensor/adam.cu), Megatron-LM (core/optimizer/optimizer.py) and apex for lists of fp32
weights, optimi 0.3.3 (adam.py), torchdistx (optimizers/anyprecision_optimizer.py) and flashoptim
0.1.4 (optimizers.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collage_fx.convert import flash
from collage_fx.convert.structure import Parts, SavedOptimizer
from collage_fx.errors import CheckpointError
from collage_fx.optimizer.checkpoints.reading import ENTRY
from collage_fx.optimizer.checkpoints.saved_residuals import is_entry
from collage_fx.runtime.storage.registry import join_in

LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Format:
    """A format: how it is named, and what its mark makes of a weight."""

    title: str
    mark: str
    """Key in the state of a parameter, or beside the state dict of an optimizer."""
    value: Callable[[Tensor, Any, Mapping[str, Any], str], Tensor] | None = None
    """(weight, entry of the mark, group, name of the weight) -> the value, fp32 or float64."""
    keeps_mark: bool = False
    """True if the class makes its states anew where the key of the mark is not among them."""
    setting: str = ""
    """Setting of the parameter groups that asks for what the mark is, and is turned off."""
    note: str = ""
    """Words for the summary of a checkpoint of this format."""


def _master_param(weight: Tensor, master: Any, group: Mapping[str, Any], name: str) -> Tensor:
    """Return the fp32 weights of Transformer Engine: themselves, or low halves of them."""
    if weight.dtype == torch.float32:
        return weight  # which a step updates, and not the copy of it
    if not isinstance(master, Tensor) or master.shape != weight.shape:
        raise CheckpointError(f"master_param of {name} is not of its shape {tuple(weight.shape)}")
    if master.dtype == torch.int16 and weight.dtype == torch.bfloat16:
        return join_in(torch.float32, "remainder16", weight, master)
    if master.dtype != torch.float32:
        raise CheckpointError(
            f"master_param of {name} is {master.dtype} beside a weight in {weight.dtype}, which "
            "Transformer Engine multiplies by a scale that is not there: save what "
            "optimizer.state_dict() returns, where it is fp32"
        )
    return checked_master(weight, master, name)


def checked_master(weight: Tensor, master: Tensor, name: str) -> Tensor:
    """Return fp32 weights; raises CheckpointError unless the weight is what they round to."""
    if master.shape != weight.shape:
        raise CheckpointError(
            f"the fp32 weight of {name} is {tuple(master.shape)}, and the weight "
            f"{tuple(weight.shape)}"
        )
    rounded = master.to(weight.dtype)
    if not bool(((rounded == weight) | ((rounded != rounded) & (weight != weight))).all()):
        raise CheckpointError(
            f"the fp32 weight of {name} does not round to its weight: they are of different steps, "
            "or of different parameters"
        )
    return master


def _kahan(weight: Tensor, rest: Any, group: Mapping[str, Any], name: str) -> Tensor:
    """Return weight + what the last additions have left over, which the next one adds."""
    if rest is None or (rest.dtype == torch.uint8 and rest.numel() == 1):
        return weight  # one that is not compensated has something in its place
    if not rest.is_floating_point() or rest.shape != weight.shape:
        raise CheckpointError(
            f"the compensation of {name} is {rest.dtype} {tuple(rest.shape)}, and the weight "
            f"{tuple(weight.shape)}"
        )
    return weight.to(torch.float64) + rest.to(torch.float64)


def _error_bits(weight: Tensor, bits: Any, group: Mapping[str, Any], name: str) -> Tensor:
    if bits is None:
        return weight
    if bits.shape != weight.shape:
        raise CheckpointError(f"error_bits of {name} are not of its shape {tuple(weight.shape)}")
    return flash.with_error_bits(weight, bits, group.get("master_bytewidth"), name)


OURS = Format("collage_fx", "collage_fx.")
PLAIN = Format("PyTorch, without masters or residuals", "")
PEERS = (
    Format("Transformer Engine's FusedAdam", "master_param", _master_param),
    Format(
        "optimi, Kahan summation",
        "kahan_comp",
        _kahan,
        keeps_mark=True,
        setting="kahan_sum",
        note="the averages of optimi are already corrected for their bias: go on with its classes, "
        "not those of torch.optim; kahan_sum is False now",
    ),
    Format(
        "AnyPrecisionAdamW, Kahan summation",
        "compensation",
        _kahan,
        setting="use_kahan_summation",
    ),
    Format("flashoptim", "error_bits", _error_bits),
)
LISTS = (
    Format("Megatron's Float16Optimizer", "fp32_from_fp16_params"),
    Format("apex's FP16_Optimizer", "fp32_from_fp16"),
)
_FLAT = "the parameters of all layers in one buffer, whose order the file does not say"
_REFUSED = {
    "single_partition_of_fp32_groups": f"DeepSpeed's ZeRO 1 and 2 ({_FLAT})",
    "fp32_flat_groups": f"DeepSpeed's ZeRO 3 ({_FLAT})",
    "fp32_groups_flat": f"DeepSpeed's FP16_Optimizer ({_FLAT})",
    "fp32_groups": "DeepSpeed's FP16_UnfusedOptimizer",
    "buckets_coalesced": f"Megatron's distributed optimizer ({_FLAT})",
    "per_bucket_numel": f"Megatron's distributed optimizer ({_FLAT})",
    "param_state_sharding_type": f"Megatron's distributed optimizer ({_FLAT})",
    "gather_on_root": f"apex's DistributedFusedAdam ({_FLAT})",
}
"""Keys -> the formats that are known and not read."""
_TORCH_DIST = (
    "optimizer.distributed.dp_group_idx_",
    "optimizer.state.fp32_param.",
    "optimizer.state.param.",
)
"""Parts of names in Megatron's own checkpoints, `torch_dist`. What it calls `param` there may be a
remainder, as a number in fp32."""


def check_readable(parts: Parts) -> None:
    """Raise CheckpointError for a checkpoint in a format that is known and not read."""
    names = [title for key, title in _REFUSED.items() if key in parts.keys]
    if any(name in key for key in parts.keys for name in _TORCH_DIST):
        names.append("Megatron's torch_dist (steps and layers are kept apart from the tensors)")
    if names:
        raise CheckpointError(
            f"the checkpoint is of {names[0]}, which is not converted: gather its fp32 weights by "
            "name with the tools of that project, and load them by collage_fx.load_master_weights"
        )


def format_of(optimizer: SavedOptimizer) -> Format:
    """Return the format of an optimizer's states.

    Raises:
        CheckpointError: marks of several, so that it cannot be told.
    """
    keys = {key for state in optimizer.states.values() for key in state}
    found = [peer for peer in PEERS if peer.mark in keys]
    if any(map(is_entry, keys)) or any(group.get(ENTRY) for group in optimizer.groups):
        found.append(OURS)
    found += [one for one in LISTS if one.mark in optimizer.around]
    if len(found) > 1:
        marks = " and ".join(repr(one.mark) for one in found)
        raise CheckpointError(
            f"the states have {marks}: it cannot be told if the values are those of "
            f"{' or of '.join(one.title for one in found)}"
        )
    return found[0] if found else PLAIN


def moments(state: Mapping[str, Any], weight: Tensor, name: str, form: Format) -> dict[str, Tensor]:
    """Return the values of the states of a parameter that are floats, by their own keys.

    Args:
        state: of one parameter, without our entries.
        weight: the parameter.
        name: of it, for errors.
        form: of the checkpoint, not ours.

    Raises:
        CheckpointError: a state in numbers whose meaning is not known.
    """
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or key in (form.mark, "step"):
            continue
        if key.endswith("::quantized"):
            own = key.removesuffix("::quantized")
            scales = state.get(f"{own}::scales")
            if not isinstance(scales, Tensor):
                raise CheckpointError(f"{own}::scales of {name} are missing")
            found[own] = flash.dequantized(value, scales, own, name)
        elif value.dim() and value.dtype != torch.bool and not key.endswith("::scales"):
            found[key] = _checked(key, value, weight, name, form)
    return found


def _checked(key: str, value: Tensor, weight: Tensor, name: str, form: Format) -> Tensor:
    """Return a moment; raises CheckpointError unless its numbers are values."""
    scaled = value.itemsize == 1 or (form is PEERS[0] and value.dtype == torch.float16)
    if scaled or not value.is_floating_point():
        raise CheckpointError(
            f"{key} of {name} is {value.dtype}, which is of no format that is known: numbers "
            "without the scale they are to be multiplied by"
        )
    masterlike = value.dtype == torch.float32 and weight.dtype in LOW and bool(weight.any())
    if masterlike and value.shape == weight.shape and torch.equal(value.to(weight.dtype), weight):
        raise CheckpointError(
            f"{key} of {name} rounds to the weight: it seems to be its fp32 weight, under a name "
            "that is not known. Rename it to master_param, or take it out"
        )
    return value
