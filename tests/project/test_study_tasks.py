"""The studies' other tasks: Muon beside AdamW, adapters, and what is read of other packages.

For benchmarks/studies/models.py, benchmarks/studies/tasks.py, benchmarks/studies/strategies.py,
benchmarks/studies/digits.py, benchmarks/studies/words.py and benchmarks/studies/data.py.
"""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.func import functional_call

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks/studies"))
import data
import digits
import models
import run
import strategies
import tasks
import words
from cells import STUDIES, Cell
from study_runs import trained

TINY = tasks.byte_model.Size(width=16, heads=2, context=8, batch=2)


def test_muon_has_the_matrices_of_the_blocks_alone() -> None:
    task = replace(tasks.TASKS["muon"], size=TINY, seeds=2)
    stack = run.Stack(tasks.random_weights(task), task, apart=True)
    params = [w.requires_grad_() for w in stack.start]
    rest, muon = strategies.MuonAdamW(params, stack.each, 1e-3, 0.999).parts
    shapes = {tuple(p.shape) for p in muon.param_groups[0]["params"]}
    assert shapes == {(48, 16), (16, 16), (64, 16), (16, 64)}
    # Two seeds of two layers; embeddings, the head and the five norms are left.
    assert len(muon.param_groups[0]["params"]) == 2 * 8
    assert len(rest.param_groups[0]["params"]) == 2 * 8


def test_both_parts_of_muon_are_compensated() -> None:
    task = replace(tasks.TASKS["muon"], size=TINY, seeds=2, steps=3)
    stack = run.Stack(tasks.random_weights(task), task, apart=True)
    training = strategies.begin("auto", "Muon", 0.999, stack.start, stack.each)
    model = tasks.model(task)
    for batch in tasks.batches(task):
        model.losses(stack.named(training.weights), *batch).sum().backward()
        training.step(1e-3)
    states = training.settings()["states"]
    assert states["parameter: remainder16"] == 2 * 16
    for part in strategies.parts(training.optimizer):
        assert all(len(part.state[p]) for p in part.param_groups[0]["params"])


@pytest.fixture
def adapted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[tasks.Task, models.Model, models.Named]:
    monkeypatch.setattr(tasks, "PRETRAINED", tmp_path)
    task = replace(tasks.TASKS["lora"], size=TINY, seeds=2, pretraining=2, rank=3)
    return task, tasks.model(task), tasks.random_weights(task)


def test_adapters_begin_as_the_model_that_they_are_for(
    adapted: tuple[tasks.Task, models.Model, models.Named],
) -> None:
    task, model, weights = adapted
    full = replace(task, rank=0)
    plain = tasks.model(full)
    start = {n: w.bfloat16() for n, w in tasks.start(full, plain).items()}
    batch = next(tasks.batches(task))
    ours = {n: w.bfloat16().requires_grad_() for n, w in weights.items()}
    losses = model.losses(ours, *batch)
    assert torch.equal(losses, plain.losses(start, *batch))
    losses.sum().backward()
    assert all(n.endswith(models.ADAPTERS) for n in ours) and len(ours) == 16
    assert all(w.grad is not None for w in ours.values())
    # The control: where `up` is not zero, losses are others.
    moved = {n: w + 1 for n, w in ours.items()}
    assert not torch.equal(losses, model.losses(moved, *batch))


@pytest.mark.parametrize("name", ["lora", "muon", "digits", "words"])
def test_seeds_of_one_process_have_the_bits_of_each_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := data.missing(tasks.TASKS[name].text):
        pytest.skip(why)
    monkeypatch.setattr(tasks, "PRETRAINED", tmp_path)
    task = replace(tasks.TASKS[name], size=TINY, seeds=2, steps=2)
    task = replace(task, pretraining=2 if task.rank else 0)
    optimizer = "Muon" if name == "muon" else "AdamW"
    together = trained(tasks.model(task), task, "bf16", optimizer)
    for seed in range(2):
        one = replace(task, seeds=1, first_seed=seed)
        alone = trained(tasks.model(one), one, "bf16", optimizer)
        assert torch.equal(together[seed], alone[0])
        # The control: another seed has other bits.
        assert not torch.equal(together[1 - seed], alone[0])


def test_an_adapted_layer_is_the_sum_of_both() -> None:
    net = models.adapted(TINY, 3)
    layer = net.blocks[0].qkv
    assert isinstance(layer, models.Adapted)
    x = torch.randn(5, 16)
    changes = {"up": torch.randn(48, 3)}
    found = functional_call(layer, changes, (x,))
    whole = layer.weight + 2 * changes["up"] @ layer.down
    torch.testing.assert_close(found, x @ whole.T)


def test_r_is_silent_but_before_a_vowel() -> None:
    for said, new in {
        "T ER1 T AH0 L": "T ER1 T AH0 L",
        "K AA1 R": "K AA1",
        "K AA1 R D": "K AA1 D",
        "V EH1 R IY0": "V EH1 R IY0",
        "R EY1 T ER0": "R EY1 T AH0",
    }.items():
        assert words.without_r(said.split()) == new.split()


def test_a_word_has_one_state_however_many_pads() -> None:
    torch.manual_seed(0)
    shapes = {"enc_emb": (29, 4), "enc_w_ih": (12, 4), "enc_w_hh": (12, 4)}
    weights = {n: torch.randn(s) for n, s in shapes.items()}
    weights |= {"enc_b_ih": torch.randn(12), "enc_b_hh": torch.randn(12)}
    letters = torch.tensor([[5, 6, 2]])
    found = words.encoded(weights, letters)
    assert torch.equal(words.encoded(weights, torch.nn.functional.pad(letters, (0, 4))), found)
    # The control: another letter is another word.
    assert not torch.equal(words.encoded(weights, torch.tensor([[5, 6, 2, 3]])), found)


def test_the_answers_that_are_named_are_all() -> None:
    assert len(words.PHONEMES) == len(set(words.PHONEMES)) == 74
    assert words.PHONEMES[4:8] == ["AA0", "AA1", "AA2", "AE0"] and words.PHONEMES[-1] == "ZH"


@pytest.mark.parametrize("text", list(data.TEXTS))
def test_a_task_reads_what_was_taken(text: str) -> None:
    """Files that `python benchmarks/studies/data.py` has taken."""
    if why := data.missing(text):
        pytest.skip(why)
    task = replace(tasks.TASKS[text], size=TINY, seeds=2, steps=1, pretraining=0)
    first, second = (next(tasks.batches(task)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0][0], first[0][1])
    model, start = tasks.model(task), tasks.start(task, tasks.model(task))
    assert model.validate(start, tasks.held_out(task)).isfinite().all()


def test_digits_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """On images that are as many bars."""
    rows = torch.eye(8).repeat(60, 1).reshape(-1, 1, 1, 8).expand(-1, 1, 8, 8)
    monkeypatch.setattr(digits, "_read", lambda: (rows.contiguous(), torch.arange(480) % 8))
    task = tasks.TASKS["digits"]
    torch.manual_seed(0)
    weights = {n: w.detach()[None].requires_grad_() for n, w in digits.weights().items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3)
    model, held_out = tasks.model(task), digits.held_out()
    before = model.validate(weights, held_out)
    for batch in itertools.islice(digits.batches(0), 40):
        optimizer.zero_grad()
        model.losses(weights, *(t[None] for t in batch)).sum().backward()
        optimizer.step()
    assert (model.validate(weights, held_out) < before - 1).all()


def test_what_is_not_there_is_skipped_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = data.SOURCES["g2p-en"]
    monkeypatch.setattr(data, "DATA", tmp_path)
    cells = [Cell("words", "bf16", 1e-6), Cell("train", "bf16", 1e-3)]
    assert run.there(cells) == cells[1:]
    assert "skipped: words, no checkpoint20.npz of g2p-en" in capsys.readouterr().out
    source.path.write_bytes(b"")
    assert run.there(cells) == cells


def test_what_cannot_be_had_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(package: str, folder: Path) -> bytes:
        if package == "g2p-en":
            raise OSError("no network")
        return package.encode()

    monkeypatch.setattr(data, "DATA", tmp_path)
    sources = {p: s._replace(take=refused) for p, s in data.SOURCES.items()}
    monkeypatch.setattr(data, "SOURCES", sources)
    data.main()
    assert capsys.readouterr().out == "not there: checkpoint20.npz of g2p-en, no network\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["digits.csv.gz", "jargon.txt.gz"]
    assert data.path("digits").read_bytes() == b"scikit-learn"


def test_every_package_is_pinned() -> None:
    pinned = [p.partition("==")[0] for p in data.PINNED.read_text().splitlines() if "==" in p]
    assert set(pinned) == {"scikit-learn", "g2p-en"}
    assert all(c.task in tasks.TASKS for study in STUDIES.values() for c in study.cells)
