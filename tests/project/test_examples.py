"""The examples, run as a reader would run them. For examples."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = [
    "hf_trainer.py",
    "fsdp_dcp.py",
    "lightning_module.py",
    "lora_export.py",
    "trl_sft.py",
    "accelerate_fsdp2.py",
    "torchtitan_container.py",
    "optimizer_in_backward.py",
    "ema.py",
]
"""Examples that docs/start.md and docs/recipes.md show."""


@pytest.mark.parametrize("name", SHORT)
def test_they_fit_on_a_page_and_are_shown(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) <= 60
    pages = ((EXAMPLES.parent / "docs" / page).read_text() for page in ("start.md", "recipes.md"))
    assert any(f"examples/{name}" in page for page in pages)


def output(name: str) -> str:
    """Return what an example prints, which ends without an error."""
    path = str(EXAMPLES / name)
    # The process has pytest's arguments, of which it is a fork.
    alone = f"import runpy, sys; sys.argv = [{path!r}]; "
    done = run_script(f"{alone}runpy.run_path({path!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr
    return done.stdout


def torchrun(ranks: int, name: str, *rest: str) -> str:
    """Return what an example prints under torchrun, which ends without an error."""
    arguments = ["torchrun", "--nproc-per-node", str(ranks), str(EXAMPLES / name), *rest]
    script = f"""
import sys
from torch.distributed.run import main
sys.argv = {arguments!r}
main()
"""
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_trainer_resumes_with_the_same_bits() -> None:
    pytest.importorskip("transformers")
    printed = output("hf_trainer.py")
    assert "the resumed run has the same bits" in printed
    assert "56 of 84 states compensated" in printed  # parameters and second moments


@pytest.mark.slow
def test_lightning_resumes_with_the_same_bits() -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    printed = output("lightning_module.py")
    assert "the resumed run has the same bits" in printed


@pytest.mark.slow
def test_trl_with_adapters_resumes_with_the_same_bits() -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    pytest.importorskip("datasets", reason="datasets, which trl needs, is not installed")
    printed = output("trl_sft.py")
    assert "the resumed run has the same bits" in printed
    assert "8 of 12 states compensated" in printed  # parameters and second moments


@pytest.mark.slow
def test_a_container_of_torchtitan_resumes_with_the_same_bits() -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    assert "the resumed run has the same bits" in output("torchtitan_container.py")


@pytest.mark.slow
def test_an_average_has_what_bf16_has_no_room_for() -> None:
    printed = output("ema.py")
    found = [float(n) for n in re.findall(r"off by ([\d.e-]+) of", printed)]
    plain, wide, remainder16, mcf2 = found
    assert plain > 0.9 and remainder16 < 2e-5 < 1e-4 < wide and mcf2 < 0.01
    assert "the weights are back: True" in printed


@pytest.mark.slow
def test_optimizers_in_the_backward_pass_have_the_bits_of_one() -> None:
    printed = output("optimizer_in_backward.py")
    assert "56 of 84 states compensated" in printed
    assert "the bits of those of one optimizer" in printed


@pytest.mark.slow
def test_accelerate_shards_and_resumes_with_the_same_bits() -> None:
    pytest.importorskip("accelerate")
    assert "2 processes: the resumed run has the same bits" in torchrun(2, "accelerate_fsdp2.py")


@pytest.mark.slow
def test_adapters_move_that_plain_bf16_leaves_where_they_are() -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    printed = output("lora_export.py")
    ours, plain = (float(n) for n in re.findall(r"moved by (\d+\.\d) rates", printed))
    assert ours > 25 and plain < 2  # of 30 steps


@pytest.mark.slow
def test_sharded_training_goes_on_on_fewer_processes(tmp_path: Path) -> None:
    runs = []
    for ranks in (2, 1):
        runs.append(torchrun(ranks, "fsdp_dcp.py", str(tmp_path)))
        if ranks == 2:
            for file in sorted((tmp_path / "12").glob(".*")):
                file.unlink()  # the last checkpoint, as if it had been killed in writing it
    assert "from step 0 to 12" in runs[0] and "from step 8 to 12" in runs[1]
    assert runs[0].partition("loss")[2] == runs[1].partition("loss")[2]


@pytest.mark.slow
def test_changes_are_fewer_bytes_than_weights() -> None:
    command = [sys.executable, str(EXAMPLES / "send_changes.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "has the same bits" in printed
    found = re.search(r"([\d.]+)% fewer", printed)
    assert found is not None and float(found[1]) > 90
