"""The command line: what it needs to answer, how it names what was typed, and what it tells all at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lrmoe
from lrmoe.cli import main

SOURCE = Path(lrmoe.__file__).parent
VERBS = ("train", "compare", "report", "balance", "plan", "study", "doctor")
HEAVY = ("torch", "transformers", "accelerate", "plotly", "tensorboard", "rich", "numpy")


def python(code: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, in which nothing is imported yet."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE.parent), *sys.path])}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, cwd=cwd, capture_output=True, text=True, check=False
    )


COMMAND = f"""
import sys
from lrmoe.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code or 0
print("imported:", *(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        *([verb, "--help"] for verb in VERBS),
    ],
    ids=" ".join,
)
def test_w3_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = python(COMMAND, *arguments)
    assert done.returncode == 0
    assert done.stdout.startswith(("usage: lrmoe", "lrmoe "))
    assert done.stderr.split() == ["imported:"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["tran"],
        ["train"],
        ["train", "--out", "x", "--dorp", "0.2"],
        ["train", "--out", "x", "--drop", "2"],
        ["train", "--out", "x", "--steps", "0"],
        ["train", "--out", "x", "--model", "nothing"],
        ["train", "--out", "x", "--text", "nowhere"],
        ["train", "--out", "x", "--ep", "3"],
        ["train", "--out", "x", "--resume"],
        ["compare", "--out", "x", "--variant", "drop=0.2"],
        ["compare", "--out", "x", "--variant", "a: drop=2"],
        ["compare", "--out", "x", "--start-from", "nowhere"],
        ["report", "nowhere"],
        ["balance", "--drop", "2"],
        ["balance", "--loads", "nowhere"],
        ["balance", "--trace", "nowhere"],
        ["plan", "--model", "nothing"],
        ["plan", "--hardware", "nothing"],
        ["pressure", "--min-keep", "1"],
        ["study", "anatomy", "--out", "x"],
        ["study", "nothing", "--out", "x"],
        ["study", "quota", "--out", "x", "--steps", "1"],
        ["doctor", "--drop", "2"],
        ["doctor", "--model", "nothing"],
    ],
    ids=" ".join,
)
def test_w3_bad_arguments_are_told_before_anything_heavy_is_imported(arguments: list[str], tmp_path: Path) -> None:
    done = python(COMMAND, *arguments, cwd=tmp_path)
    error, imported = done.stderr.splitlines()
    assert done.returncode == 2
    assert done.stdout == ""
    assert error.startswith("lrmoe")
    assert ": error: " in error
    assert imported.split() == ["imported:"]
    assert list(tmp_path.iterdir()) == []


def test_w3_import_lrmoe_is_light_and_whole() -> None:
    code = """
import sys, lrmoe
config = lrmoe.LRMoEConfig(drop=0.3)
assert lrmoe.balance.names()[0] == "fixed"
assert "torch" not in sys.modules, "torch"
missing = set(lrmoe.__all__) - set(dir(lrmoe))
assert not missing, missing
import torch, torch.distributed
before = {name for name in sys.modules if name.startswith("torch.distributed")}
for name in lrmoe.__all__:
    if name != "parallel":
        assert getattr(lrmoe, name) is not None
        assert name in vars(lrmoe), name
after = {name for name in sys.modules if name.startswith("torch.distributed")}
assert after == before, after - before
assert "transformers" not in sys.modules
try:
    lrmoe.atach
except AttributeError as error:
    print(error)
"""
    done = python(code)
    assert done.stderr == ""
    assert done.stdout == "module 'lrmoe' has no attribute 'atach'\n"


def test_w3_every_policy_is_named_as_it_is_listed() -> None:
    assert [lrmoe.balance.get(name).name for name in lrmoe.balance.names()] == list(lrmoe.balance.names())


@pytest.mark.slow
def test_w3_a_name_first_asked_for_under_torch_compile() -> None:
    code = """
import torch, lrmoe
x, ids, weights = torch.randn(6, 4), torch.tensor([[0, 1]] * 6), torch.rand(6, 2)
up, down = torch.randn(2, 8, 4), torch.randn(2, 4, 4)
plain = lambda: lrmoe.routed_experts(x, ids, weights, up, down)
found = torch.compile(plain)()
assert torch.equal(found, plain())
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_python_m_lrmoe_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lrmoe", "--version"],
        env={**os.environ, "PYTHONPATH": str(SOURCE.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"lrmoe {lrmoe.__version__}\n")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of an error."""
    assert main(arguments) == 2
    line, end = capsys.readouterr().err.split("\n")
    assert end == ""
    return line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["balance", "--ranks", "8", "--experts", "4"], "--ranks 8 must be between 1 and --experts 4"),
        (["balance", "--skew", "9"], "--skew 9.0 must be between 1 and the number of ranks, 8"),
        (
            ["balance", "--tokens", "5", "--loads", "a b.json"],
            "--tokens 5 is of synthetic loads; leave it out with --loads 'a b.json'",
        ),
        (["plan", "--ep", "200"], "--ep 200 must be between 1 and num_experts=128"),
        (["plan", "--experts-only", "--dense-shards", "2"], "--dense-shards 2 has no effect with --experts-only"),
        (["train", "--out", "x", "--seq", "1"], "--seq 1 must be at least 2"),
        (
            ["train", "--out", "x", "--save-every", "7", "--log-every", "2"],
            "--save-every 7 must be a multiple of --log-every 2",
        ),
        (["train", "--out", "x", "--model", "-m"], "expected one argument"),
        (["train", "--out", "x", "--model=-m"], "--model '-m' is neither a preset"),
        (["train", "--out", "x", "--text", "seed=3 drop=2"], "--text 'seed=3 drop=2' cannot be read"),
        (["train", "--out", "x", "--text", "a\nb"], r"--text 'a\nb' cannot be read"),
        (["compare", "--out", "x", "--seeds", "1,1"], "--seeds 1,1 must be one or more different integers"),
        (["compare", "--out", "x", "--variant", "a: drop=2"], "variant 'a': drop=2.0 must be in [0, 1)"),
        (["compare", "--out", "x", "--start-from", "no"], "--start-from no is neither a preset"),
        (["study", "quota", "--out", "x", "--seeds", "0,0"], "--seeds 0,0 must be one or more different integers"),
    ],
)
def test_w6_errors_name_options_as_typed(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in said(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_w6_python_users_keep_their_spelling() -> None:
    with pytest.raises(ValueError, match=r"^drop=2 must be in"):
        lrmoe.LRMoEConfig(drop=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of 256 ids, without a tokenizer."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, max_position_embeddings=64, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "olmoe")
    return tmp_path / "olmoe"


def train(folder: Path, *more: str) -> list[str]:
    text = folder.parent / "text.txt"
    text.write_text("a text to train on, " * 50)
    size = ["--steps", "1", "--batch", "2", "--seq", "16", "--eval-sequences", "2", "--threads", "1"]
    return ["train", "--model", str(folder), "--text", str(text), *size, "--out", str(folder.parent / "out"), *more]


def test_w6_a_model_with_fewer_ids_than_bytes_gets_advice_that_helps(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = said(capsys, *train(folder))
    assert f"--model {folder} brings no tokenizer" in error
    assert "259 ids" in error
    assert "vocab_size=256" in error
    assert "tokenizer.save_pretrained" in error
    assert not (folder.parent / "out").exists()


def test_w6_the_fallback_to_bytes_is_said_and_recorded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(300)
    model.save_pretrained(folder)
    assert main(train(folder)) == 0
    assert f"tokens: {folder} brings no tokenizer, so the text is taken as bytes, 259 ids" in capsys.readouterr().out
    assert json.loads((folder.parent / "out" / "config.json").read_text())["corpus"]["tokenizer"] == "bytes, 259 ids"


def test_w6_a_tokenizer_of_another_file_is_not_passed_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "tokenizer.model").write_bytes(b"not one")
    assert f"the tokenizer in --model {folder} cannot be loaded" in said(capsys, *train(folder))


def test_w9_nothing_tells_to_install_a_package_that_is_not_ours() -> None:
    root = SOURCE.parents[1]
    pages = [*SOURCE.rglob("*.py"), *(root / "docs").rglob("*.md"), *root.glob("*.md"), root / "pyproject.toml"]
    pages += [*(root / "paper").rglob("*.py"), *(root / "paper").rglob("*.md")]
    assert len(pages) > 100
    assert [str(page) for page in pages if "lrmoe[" in page.read_text(encoding="utf-8")] == []


def test_w10_ranks_that_fit_neither_batch_nor_experts_are_told_so_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = said(capsys, "train", "--out", str(tmp_path / "x"), "--ep", "3")
    assert "(1) --batch 16 cannot be shared out equally to --ep 3 ranks; give a multiple of 3" in error
    assert "(2) the layers of --model qwen3-moe-tiny have 32 experts" in error


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            [
                "train",
                "--out",
                "x",
                "--drop",
                "2",
                "--save",
                "input",
                "--steps",
                "0",
                "--lr",
                "-1",
                "--model",
                "no",
                "--text",
                "no",
            ],
            ["--drop 2.0", "--steps 0", "--lr -1.0", "--model no", "--text no"],
        ),
        (
            ["compare", "--out", "x", "--variant", "a", "--steps", "0", "--model", "no"],
            ["'a'", "--steps 0", "--model no"],
        ),
        (["balance", "--drop", "2", "--slots", "-1", "--loads", "no"], ["--drop 2.0", "--slots -1", "--loads no"]),
        (["balance", "--workload", "burst", "--drop", "2", "--steps", "0"], ["--drop 2.0", "--steps 0"]),
        (["plan", "--model", "no", "--hardware", "no", "--ep", "0"], ["--model no", "--hardware no", "--ep 0"]),
        (["study", "quota", "--out", "x", "--steps", "1", "--model", "no"], ["--steps 1", "--model no"]),
        (["doctor", "--drop", "2", "--model", "no"], ["--drop 2.0", "--model no"]),
    ],
)
def test_w10_all_that_is_wrong_is_told_at_once(
    arguments: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    error = said(capsys, *arguments)
    for number, part in enumerate(parts, start=1):
        assert f"({number}) " in error
        assert part in error
    assert f"({len(parts) + 1}) " not in error


WITHOUT_NUMPY = "import sys; sys.modules['numpy'] = None; "


def test_w10_import_without_numpy_says_nothing() -> None:
    done = python(WITHOUT_NUMPY + "import lrmoe; lrmoe.LRMoEConfig(drop=0.5)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_w10_the_command_does_without_numpy_and_does_not_warn() -> None:
    code = "from lrmoe.cli import main; sys.exit(main(sys.argv[1:]))"
    done = python(WITHOUT_NUMPY + code, "balance", "--experts", "8", "--ranks", "2", "--top-k", "2")
    assert done.returncode == 0
    assert done.stderr == ""


def test_nobody_reads_the_output() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "lrmoe.cli", "balance", "--experts", "8", "--ranks", "2", "--top-k", "2"],
        env={**os.environ, "PYTHONPATH": str(SOURCE.parent)},
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(("verb", "advice"), [("report", ""), ("train", "; continue with --resume")])
def test_an_interrupted_verb_promises_only_what_it_can(
    verb: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(given: object) -> int:
        raise KeyboardInterrupt

    from lrmoe.commands import report, train

    monkeypatch.setattr({"report": report, "train": train}[verb], "run", interrupt)
    where = [str(tmp_path)] if verb == "report" else ["--out", str(tmp_path)]
    assert main([verb, *where]) == 130
    assert capsys.readouterr().err == f"lrmoe {verb}: interrupted{advice}\n"
