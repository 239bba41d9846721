"""Checkpoints of many structures: what is told apart, what is refused by name, the command line.

For convert.structure, convert.matching and convert.script.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import Tree, checkpoint, fp32, trained
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from collage_fx.__main__ import main
from collage_fx.convert.conversion import convert
from collage_fx.convert.matching import match
from collage_fx.convert.structure import parts_of
from collage_fx.errors import CheckpointError, OptionError, StorageError

BF16 = torch.bfloat16


def in_groups(named: bool, layers: int = 2) -> Tree:
    """Weights decayed apart from biases: the order is not that of the model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4 + k) for k in range(layers)))
    pairs = list(model.named_parameters())
    matrices = [(n, p) if named else p for n, p in pairs if p.dim() > 1]
    vectors = [(n, p) if named else p for n, p in pairs if p.dim() == 1]
    optimizer: Any = AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0}])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def names_in(tree: Any, given: list[str] | None = None) -> list[str]:
    parts = parts_of(tree)
    return match(parts.optimizers[0], parts.models, given)[1]


def test_names_in_groups_are_taken() -> None:
    expected = ["0.weight", "1.weight", "0.bias", "1.bias"]
    assert names_in(in_groups(named=True)) == expected
    assert names_in(in_groups(named=False)) == expected  # by shapes, which differ


def test_shapes_that_fit_in_several_ways() -> None:
    """Of three tensors of a shape two are the optimizer's, or each is in another group."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    some: Any = AdamW(model[1:].parameters())
    apart: Any = AdamW(
        [{"params": [*model[2].parameters()]}, {"params": [*model[:2].parameters()]}]
    )
    for optimizer in (some, apart):
        optimizer.step()
        tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        with pytest.raises(CheckpointError, match=r"cannot be told .* \(4, 4\).*--names FILE"):
            names_in(tree)
    given = ["1.weight", "1.bias", "2.weight", "2.bias"]
    tree = {"model": model.state_dict(), "optimizer": some.state_dict()}
    assert names_in(tree, given) == given
    wrong = {"1.bias 1.weight 2.weight 2.bias": "0.weight|1.bias is", "1.bias": "1 names"}
    for words, reason in wrong.items():
        with pytest.raises(CheckpointError, match=reason):
            names_in(tree, words.split())
    with pytest.raises(CheckpointError, match="named twice"):
        names_in(tree, ["1.weight", "1.bias", "1.weight", "1.bias"])
    with pytest.raises(CheckpointError, match="no weight 'other'"):
        names_in(tree, ["1.weight", "1.bias", "other", "2.bias"])


def test_buffers_are_no_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    tree = {"net": {"module": model.state_dict()}, "training": [{"sgd": optimizer.state_dict()}]}
    assert names_in(tree) == [name for name, _ in model.named_parameters()]


def test_two_models_that_fit(tmp_path: Path) -> None:
    tree = fp32()
    ema = {f"module.{name}": weight + 1 for name, weight in tree["model"].items()}
    both = {**tree, "ema": {"weights": {**ema, "n_averaged": torch.tensor(3)}}}
    with pytest.raises(CheckpointError, match=r"'model' and 'ema.weights': .* --model"):
        names_in(both)
    torch.save(both, tmp_path / "both.pt")
    summary = convert(tmp_path / "both.pt", tmp_path / "one.pt", "remainder16", model="model")
    assert summary.notes == ["ema.weights: as before, since no optimizer has it"]
    out = torch.load(tmp_path / "one.pt")
    assert out["model"]["0.bias"].dtype == BF16
    assert torch.equal(out["ema"]["weights"]["module.0.bias"], ema["module.0.bias"])
    with pytest.raises(CheckpointError, match=r"'net' is none of 'model', 'ema\.weights'"):
        convert(tmp_path / "both.pt", tmp_path / "two.pt", "remainder16", model="net")
    other = {**tree, "rng": {"cpu": torch.get_rng_state()}, "teacher": nn.Linear(2, 2).state_dict()}
    torch.save(other, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out.pt", "remainder16")
    out = torch.load(tmp_path / "out.pt")
    assert torch.equal(out["teacher"]["weight"], other["teacher"]["weight"])
    assert torch.equal(out["rng"]["cpu"], other["rng"]["cpu"]) and out["epoch"] == 3


def test_two_optimizers_of_two_models(tmp_path: Path) -> None:
    one, other = fp32(), in_groups(named=True)
    torch.save(((one["model"], one["optimizer"]), other), tmp_path / "in.pt")
    summary = convert(tmp_path / "in.pt", tmp_path / "out.pt", "mcf2")
    assert summary.parameters == 8
    (weights, _), second = torch.load(tmp_path / "out.pt")
    assert {w.dtype for w in (*weights.values(), *second["model"].values())} == {BF16}


def test_two_optimizers_of_one_model(tmp_path: Path) -> None:
    """Matrices by one class, vectors by another, as Muon is used."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    pairs = list(model.named_parameters())
    one: Any = SGD([(n, p) for n, p in pairs if p.dim() > 1], lr=0.1, momentum=0.9)
    other: Any = AdamW([(n, p) for n, p in pairs if p.dim() == 1])
    model(torch.randn(8, 4)).sum().backward()
    states = []
    for optimizer in (one, other):
        optimizer.step()
        states.append(optimizer.state_dict())
    torch.save({"model": model.state_dict(), "optimizers": states}, tmp_path / "in.pt")
    summary = convert(tmp_path / "in.pt", tmp_path / "out.pt", "ulp8")
    assert (summary.parameters, summary.left) == (4, 3)  # a norm has three buffers
    out = torch.load(tmp_path / "out.pt")["model"]
    assert [name for name in out if out[name].dtype == BF16] == [name for name, _ in pairs]


def test_groups_of_megatron_fsdp(tmp_path: Path) -> None:
    tree, values = checkpoint("remainders")
    states = dict(zip(tree["model"], tree["optimizer"]["state"].values(), strict=True))
    meta = {name: {"lr": 1e-3, "step": 3} for name in states}
    tree["optimizer"] = {"state": states, "param_to_group_meta": meta}
    torch.save(tree, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out.pt", "fp32")
    out = torch.load(tmp_path / "out.pt")
    assert all(torch.equal(out["model"][name], values[name]) for name in values)
    assert out["optimizer"]["param_groups"] == [{"lr": 1e-3, "step": 3, "params": [*values]}]


def _with(change: Callable[[Tree], Any], mark: str = "") -> Tree:
    tree = checkpoint(mark)[0] if mark else fp32()
    if mark == "bf16":
        tree["model"] = {name: weight.to(BF16) for name, weight in tree["model"].items()}
    change(tree)
    return tree


def _states(tree: Tree) -> list[dict[str, Tensor]]:
    return list(tree["optimizer"]["state"].values())


def _each(key: str, value: Callable[[Tensor], Tensor]) -> Callable[[Tree], None]:
    def change(tree: Tree) -> None:
        for weight, state in zip(tree["model"].values(), _states(tree), strict=True):
            state[key] = value(weight)

    return change


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "no optimizer": ("load_master_weights", lambda: {"model": trained()[0].state_dict()}),
    "no weights": ("no weights", lambda: {"optimizer": fp32()["optimizer"]}),
    "nothing": ("no states", lambda: 3),
    "two marks": (
        "'kahan_comp' and 'compensation'",
        lambda: _with(_each("compensation", torch.zeros_like), "kahan_comp"),
    ),
    "deepspeed": (
        "DeepSpeed's ZeRO 1 and 2",
        lambda: {**fp32(), "single_partition_of_fp32_groups": [torch.ones(3)]},
    ),
    "megatron": ("Megatron's distributed", lambda: {**fp32(), "buckets_coalesced": True}),
    "torch_dist": (
        "Megatron's torch_dist",
        lambda: {"optimizer.state.fp32_param.w": torch.ones(2), "w": torch.ones(2)},
    ),
    "eight bits": (
        "exp_avg of 0.weight is torch.uint8",
        lambda: _with(_each("exp_avg", lambda w: w.to(torch.uint8))),
    ),
    "fp8": ("float8", lambda: _with(_each("exp_avg", lambda w: w.to(torch.float8_e4m3fn)))),
    "scaled": (
        "exp_avg of 0.weight is torch.float16",
        lambda: _with(_each("exp_avg", lambda w: w.half()), "master_param"),
    ),
    "unknown master": (
        "seems to be its fp32 weight",
        lambda: _with(_each("main", lambda w: w.float()), "bf16"),
    ),
    "another shape": (
        r"0.weight is \(2, 2\).*\(9, 6\)",
        lambda: _with(lambda tree: tree["model"].update({"0.weight": torch.ones(2, 2)})),
    ),
    "sparse": (
        "another kind .*sparse",
        lambda: _with(_each("exp_avg", lambda w: w.to_sparse())),
    ),
    "unknown state": (
        "77",
        lambda: _with(lambda tree: tree["optimizer"]["state"].update({77: {"a": torch.ones(2)}})),
    ),
    "too few lists": (
        "3 weights for group 0",
        lambda: _with(lambda tree: tree["optimizer"]["fp32_from_fp16_params"][0].pop(), "lists"),
    ),
    "other lists": (
        "has 2 lists",
        lambda: _with(lambda tree: tree["optimizer"]["fp32_from_fp16_params"].append([]), "lists"),
    ),
}


@pytest.mark.filterwarnings("ignore:.*[Ss]parse")  # torch, of one that is loaded
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_told_is_refused(case: str, tmp_path: Path) -> None:
    words, made = REFUSED[case]
    torch.save(made(), tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", "remainder16")
    assert [p.name for p in tmp_path.iterdir()] == ["in.pt"]


def test_what_a_storage_cannot_hold(tmp_path: Path) -> None:
    tree = fp32()
    tree["model"] = {name: weight.half() for name, weight in tree["model"].items()}
    torch.save(tree, tmp_path / "in.pt")
    with pytest.raises(StorageError, match="float16"):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", "remainder16")
    with pytest.raises(OptionError, match="'sr'"):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", "sr")
    assert not convert(tmp_path / "in.pt", tmp_path / "out.pt", "mcf2").errors


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree, _ = checkpoint("compensation")
    torch.save(tree, tmp_path / "in.pt")
    names = tmp_path / "names.txt"
    names.write_text("\n".join(tree["model"]))
    arguments = ["convert", str(tmp_path / "in.pt"), str(tmp_path / "out.pt")]
    assert main([*arguments, "--to", "ulp8", "--names", str(names)]) == 0
    said = capsys.readouterr().out
    assert "AnyPrecisionAdamW, Kahan summation (torch.save)" in said
    assert "4 parameters and 0 states to storage ulp8" in said
    assert "not exact: 4 of them" in said and "8 states stay as wide as they are" in said
    assert main([*arguments, "--to", "ulp8"]) == 1
    assert "out.pt exists" in capsys.readouterr().err
    assert main([*arguments, "--to", "fp32", "--names", str(tmp_path / "none")]) == 1
    assert "--names" in capsys.readouterr().err
    (tmp_path / "out.pt").unlink()
    assert main([*arguments, "--to", "fp32"]) == 0
    assert "every value is kept exactly" in capsys.readouterr().out
