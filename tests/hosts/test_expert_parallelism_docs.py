"""The script on the page about several ranks runs as it is printed, under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_transformers as tiny
from transformers import AutoModelForCausalLM


@pytest.mark.slow
def test_the_script_runs_under_torchrun(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "expert_parallelism.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    model = tiny.build("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^kept shares:( 0\.8\d*){4}$", done.stdout, flags=re.MULTILINE), done.stdout
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "trained").state_dict()
    before = model.state_dict()
    assert trained.keys() == before.keys()
    assert any(not trained[name].equal(before[name]) for name in trained if "experts" in name)
