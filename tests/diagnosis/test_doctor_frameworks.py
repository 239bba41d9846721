"""collage_fx/diagnosis: runs of frameworks, sharded ones, and the scripts of docs/doctor.md.

For diagnosis.doctor and examples/doctor.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_script
from sharded_runs import join_group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

import collage_fx

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "doctor"
LOSING, FINE = 1, 0
ANSWERS = {
    "finetune": (LOSING, r"norm.weight +1 +64 +100% +0.00 +100% +stays 1"),
    "policy_gradient": (LOSING, r"23 of 23 parameters lose"),
    "norms": (LOSING, r"5 of them stand still"),
    "adafactor": (LOSING, r"23 of 23 parameters lose"),
    "momentum": (LOSING, r"layers.\*.norm2.weight"),
    "lora": (LOSING, r"lora_A.default.weight"),
    "trainer": (LOSING, r"or give a Trainer callbacks=\[collage_fx.compile_callback\(\)\]"),
    "autocast": (FINE, r"Nothing is lost here: the weights are float32."),
}
"""Script -> its exit status, and a part of what the doctor says."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_a_script_of_the_page_has_its_answer(name: str) -> None:
    if name in ("trainer", "lora"):
        pytest.importorskip("peft", reason="peft is not installed")
    status, said = ANSWERS[name]
    arguments = ["doctor", str(SCRIPTS / f"{name}.py")]
    done = run_script(
        f"import sys; from collage_fx.__main__ import main; sys.exit(main({arguments!r}))"
    )
    assert done.returncode == status, done.stderr
    assert re.search(said, done.stdout), done.stdout
    assert f"examples/doctor/{name}.py" in (ROOT / "docs" / "doctor.md").read_text()


def test_all_scripts_are_tried() -> None:
    assert {p.stem for p in SCRIPTS.glob("*.py")} == {*ANSWERS, "model"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(?!collage_fx)")
def test_lightning_and_accelerate_are_looked_at() -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8).bfloat16()

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return self.layer(batch.bfloat16()).float().square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-6)

    data = torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu"}
    module = Module()
    trainer = lightning.Trainer(max_epochs=1, **quiet)
    optimizer = module.configure_optimizers()
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    with collage_fx.doctor(optimizer) as doctor:
        trainer.fit(module, data)
    (weight, _) = doctor.finding().parameters
    assert weight.exact and weight.losing  # though its steps have a closure

    model = nn.Linear(8, 8).bfloat16()
    wrapper = accelerate.Accelerator(cpu=True).prepare(
        torch.optim.AdamW(model.parameters(), lr=1e-6)
    )
    with collage_fx.doctor(wrapper, model) as doctor:
        for _ in range(3):
            model(torch.randn(2, 8).bfloat16()).float().square().mean().backward()
            wrapper.step()
    finding = doctor.finding()
    assert finding.losing and {r.name for r in finding.parameters} == {"weight", "bias"}


def _sharded(rank: int, folder: str) -> None:
    """Train a sharded model with a doctor and without; write what each process finds."""
    join_group(rank, 2, f"{folder}/store")
    mesh = init_device_mesh("cpu", (2,))
    weights = []
    for looked in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).bfloat16()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        doctor = collage_fx.doctor(optimizer, model) if looked else None
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(4, 16).bfloat16() * (rank + 1)).float().square().mean().backward()
            optimizer.step()
        weights.append([p.to_local().detach().clone() for p in model.parameters()])  # type: ignore[attr-defined]
        if doctor is not None:
            doctor.stop()
            found = doctor.finding().to_dict()
    found["equal"] = all(map(torch.equal, *weights))
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_each_process_looks_at_its_shards(tmp_path: Path) -> None:
    start_processes(_sharded, args=(str(tmp_path),), nprocs=2, start_method="fork")
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["equal"] and found["status"] == "losing"
        rows = {row["name"]: row for row in found["parameters"]}
        assert rows["0.weight"]["elements"] == 128 and rows["0.weight"]["exact"]
        assert rows["1.weight"]["lost"] == 1.0 and rows["1.weight"]["value"] == 1.0
