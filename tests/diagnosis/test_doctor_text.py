"""collage_fx/diagnosis/finding and judgement: what is told of what a doctor has seen.

For diagnosis.finding and diagnosis.judgement.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, AdamW

import collage_fx
from collage_fx.diagnosis import looks
from collage_fx.diagnosis.doctor import Doctor
from collage_fx.diagnosis.finding import FEWER, ROWS
from collage_fx.diagnosis.judgement import finding_of
from collage_fx.errors import SubjectError

BF16 = torch.bfloat16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(3)
        )
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.head(x)
        return out


def test_weights_that_stand_still_are_named_and_all_storages_are_told(
    doctors: list[Doctor],
) -> None:
    torch.manual_seed(0)
    model = Net().to(BF16)
    doctor = Doctor()
    doctors.append(doctor)
    # One optimizer for each parameter, as for steps within the backward pass.
    optimizers = [AdamW([p], lr=1e-5) for p in model.parameters()]
    for optimizer in optimizers:
        doctor.see(optimizer)
    for _ in range(5):
        model(torch.randn(4, 6, dtype=BF16)).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    finding = doctor.finding()
    rows = {r.name: r for r in finding.parameters}
    assert {"layers.*.0.weight", "layers.*.1.weight", "head.bias"} <= rows.keys()
    norms = rows["layers.*.0.weight"]
    assert norms.stands_still and norms.tensors == 3 and norms.value == 1.0
    assert finding.losing and "stay 1" in str(finding)
    kept = {one.storage: one for one in finding.storages}
    assert kept["remainder16"].share > 0.999 and kept["remainder16"].default
    assert kept[""].share < 0.5 < kept["ulp8"].share < kept["remainder16"].share
    losing = sum(r.elements for r in finding.parameters if r.losing)
    assert kept["remainder16"].bytes == 2 * losing == 2 * kept["ulp8"].bytes
    assert finding.to_dict()["status"] == "losing"
    assert "<th>lost whole</th>" in finding._repr_html_()


def test_the_text_has_at_most_thirty_lines(doctors: list[Doctor]) -> None:
    """Of as many kinds of parameters, averages and dtypes as a table has rows, and more."""
    dtypes = (BF16, torch.float16)
    params = {
        f"w{'abcdefghij'[i]}": Parameter(torch.ones(4, dtype=dtypes[i % 2])) for i in range(10)
    }
    optimizer = AdamW(params.items(), lr=1e-6)
    doctors.append(collage_fx.doctor(optimizer))
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    finding = doctors[0].finding()
    finding.averages = [copy.copy(r) for r in finding.parameters]
    for row in finding.averages:
        row.missing = -1.0
    lines = str(finding).splitlines()
    assert len(finding.parameters) > ROWS and len(finding.averages) > FEWER
    assert len(lines) <= 30 and max(map(len, lines)) <= 120


def test_what_it_is_given_is_checked() -> None:
    params = [Parameter(torch.ones(2))]
    with pytest.raises(SubjectError, match="doctor takes an optimizer, got Linear"):
        collage_fx.doctor(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(SubjectError, match="does not have"):
        collage_fx.doctor(SGD(params, lr=1.0), nn.Linear(2, 2))
    nothing = finding_of([], [])
    assert nothing.status == "unknown" and "No step of an optimizer was seen." in str(nothing)


def test_a_look_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def size(count: int) -> int:
        optimizer = SGD([Parameter(torch.empty(10, device="meta")) for _ in range(count)], lr=1.0)
        looker = looks.Looker(optimizer, lambda o: {})
        looker._prepare(optimizer, ())
        return looker._size * count * looks._BYTES

    assert size(2) == 2 * looks.ELEMENTS * looks._BYTES
    assert 0.9 * looks.MEMORY < size(1000) <= looks.MEMORY
