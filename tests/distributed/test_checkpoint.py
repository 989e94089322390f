"""Checkpoints by global expert id: saved at one number of ranks, loaded at another, whole or not at all.

E experts, e one of them.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.tiny_run import DIM, TOKENS, TinyRun
from distributed.world import run_world
from torch import Tensor, nn

from lrmoe.balance.plan import home_ranks
from lrmoe.parallel.checkpoint import CheckpointError, load, newest, save
from lrmoe.parallel.checkpoint import save_load as checkpoints
from lrmoe.parallel.expert_parameters import mark_experts


def my_experts(num_experts: int, group: dist.ProcessGroup) -> list[int]:
    return [e for e, home in enumerate(home_ranks(num_experts, group.size())) if home == group.rank()]


class Experts(nn.Module):
    """A dense parameter, a buffer, and experts of this rank alone."""

    def __init__(self, experts: Sequence[int], *, mark: bool = True) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.zeros(3))
        self.weight = nn.Parameter(torch.zeros(len(experts), 2, 3))
        self.bias = nn.Parameter(torch.zeros(len(experts)))
        self.register_buffer("selection", torch.zeros(2, dtype=torch.int64))
        if mark:
            mark_experts(self.weight, self.bias)


def by_id(experts: Sequence[int], like: Tensor, scale: float, offset: float) -> Tensor:
    ids = torch.tensor(experts, dtype=like.dtype)
    return (scale * ids + offset).view(-1, *[1] * (like.dim() - 1)).expand(like.shape).clone()


def fill(model: Experts, optimizer: torch.optim.Adam, experts: Sequence[int]) -> None:
    """Weights e + 1 and moments 10 e, as case 28 has them; 20 e for the second moment."""
    with torch.no_grad():
        model.dense.copy_(torch.tensor([1.0, 2.0, 3.0]))
        model.selection.copy_(torch.tensor([4, 5]))
        for parameter in (model.weight, model.bias):
            parameter.copy_(by_id(experts, parameter, 1, 1))
    for parameter in model.parameters():
        shared = parameter is model.dense
        optimizer.state[parameter] = {
            "step": torch.tensor(7.0),
            "exp_avg": torch.full_like(parameter, 0.5) if shared else by_id(experts, parameter, 10, 0),
            "exp_avg_sq": torch.full_like(parameter, 0.25) if shared else by_id(experts, parameter, 20, 0),
        }


def check(model: Experts, optimizer: torch.optim.Adam, experts: Sequence[int]) -> None:
    wanted = Experts(experts)
    fill(wanted, reference := torch.optim.Adam(wanted.parameters()), experts)
    for (name, tensor), expected in zip(model.state_dict().items(), wanted.state_dict().values(), strict=True):
        assert torch.equal(tensor, expected), name
    for parameter, expected in zip(model.parameters(), wanted.parameters(), strict=True):
        assert list(optimizer.state[parameter]) == list(reference.state[expected])
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, reference.state[expected][key]), key


def adam(model: nn.Module, lr: float = 0.1) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=lr, betas=(0.8, 0.9))


def case_28(group: dist.ProcessGroup, num_experts: int, source: str | None, target: str | None) -> None:
    """Loads ``source``, if there is one, into a model that knows nothing, checks it, and saves ``target``."""
    experts = my_experts(num_experts, group)
    model = Experts(experts)
    optimizer = adam(model, lr=0.5)
    if source is None:
        optimizer = adam(model)
        fill(model, optimizer, experts)
    else:
        found = newest(source)
        assert found is not None
        loaded = load(found, model=model, optimizer=optimizer)
        assert (loaded.step, loaded.extra) == (3, {"text": "α", "numbers": [0.1, 2]})
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    check(model, optimizer, experts)
    if target is not None:
        path = save(target, step=3, model=model, optimizer=optimizer, extra={"text": "α", "numbers": [0.1, 2]})
        assert path == Path(target) / "step-00000003"
        assert newest(target) == path


@pytest.mark.parametrize("num_experts", [4, 7])
def test_case_28_every_expert_is_found_at_any_number_of_ranks(tmp_path: Path, num_experts: int) -> None:
    source = None
    for place, size in enumerate((2, 1, 4, 2, 3, 1)):
        target = str(tmp_path / str(place))
        run_world(size, case_28, num_experts, source, target)
        source = target
    # The same without torch.distributed, in this process.
    model = Experts(range(num_experts))
    optimizer = adam(model)
    found = newest(str(source))
    assert found is not None
    load(found, model=model, optimizer=optimizer)
    check(model, optimizer, range(num_experts))
    assert save(tmp_path / "alone", step=3, model=model, optimizer=optimizer).is_dir()
    run_world(1, case_28, num_experts, str(source), None)


def test_keys_are_global_expert_ids(tmp_path: Path) -> None:
    run_world(2, case_28, 3, None, str(tmp_path))
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    found = newest(tmp_path)
    assert found is not None
    names = {"dense": [""], "weight": [f".expert.{e}" for e in range(3)], "bias": [f".expert.{e}" for e in range(3)]}
    expected = {f"model.{name}{end}" for name, ends in names.items() for end in ends} | {"model.selection"}
    for name, ends in names.items():
        expected |= {f"optimizer.{name}.{key}{end}" for key in ("exp_avg", "exp_avg_sq") for end in ends}
        expected.add(f"optimizer.{name}.step")
    assert set(FileSystemReader(found).read_metadata().state_dict_metadata) == expected


def load_unmarked(group: dist.ProcessGroup, folder: str) -> None:
    experts = my_experts(5, group)
    model = Experts(experts)
    optimizer = adam(model)
    load(folder, model=model, optimizer=optimizer)
    check(model, optimizer, experts)


def test_experts_that_one_process_has_not_marked(tmp_path: Path) -> None:
    whole = Experts(range(5), mark=False)
    optimizer = adam(whole)
    fill(whole, optimizer, range(5))
    run_world(2, load_unmarked, str(save(tmp_path, step=0, model=whole, optimizer=optimizer)))
    # And back.
    run_world(2, case_28, 5, None, str(tmp_path / "spread"))
    again = Experts(range(5), mark=False)
    found = newest(tmp_path / "spread")
    assert found is not None
    load(found, model=again, optimizer=(optimizer := adam(again)))
    check(again, optimizer, range(5))


def interrupted(group: dist.ProcessGroup, folder: str) -> tuple[list[float], list[float], list[str]]:
    run = TinyRun(group)
    run.train(3)
    path = save(folder, step=run.step, **run.state())
    expected = run.train(3)
    assert run.ep.metrics()["replicas"] > 0 or group.size() == 1
    fresh = TinyRun(group)
    fresh.step = load(path, **fresh.state()).step
    assert fresh.recal.state_dict()["step"] == 3
    return expected, fresh.train(3), sorted(json.loads((path / "lrmoe.json").read_text())["optimizer"]["states"])


NAMES = sorted(
    ["0.bias", "0.weight"]
    + [f"{layer}.{name}" for layer in (1, 2) for name in ("experts.down_proj", "experts.gate_up_proj", "router.weight")]
)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, size: int) -> None:
    """Model, moments, schedule and draws, with the engine and its replicas; the optimizer holds parameters alone."""
    for expected, found, states in run_world(size, interrupted, str(tmp_path)):
        assert expected == found
        assert len(set(expected)) == 3
        assert states == NAMES


def resume_elsewhere(group: dist.ProcessGroup, folder: str) -> Tensor:
    run = TinyRun(group)
    found = newest(folder)
    assert found is not None
    run.step = load(found, **run.state()).step
    # The same tokens at any number of ranks, so that the losses can be compared.
    x = torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(9)) + 2.0
    part = x.chunk(group.size())[group.rank()]
    output: Tensor = run.model(part).detach()
    return output


def test_the_engine_computes_the_same_at_another_number_of_ranks(tmp_path: Path) -> None:
    run_world(2, interrupted, str(tmp_path))
    outputs = [torch.cat(run_world(size, resume_elsewhere, str(tmp_path))) for size in (1, 2, 4)]
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0])


def fsdp(group: dist.ProcessGroup, folder: str, save_it: bool, sharded: bool) -> None:
    """Expert-parallel groups [0, 1] and [2, 3]; experts sharded over [0, 2] and [1, 3]."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "ep"))
    ep = mesh.get_group("ep")
    experts = my_experts(5, ep)
    model = Experts(experts)
    if sharded:
        fully_shard(model, mesh=mesh["replica"])
        mark_experts(model.weight, model.bias)
    optimizer = adam(model)
    if not save_it:
        load(folder, model=model, optimizer=optimizer, group=ep)
    whole = Experts(experts)
    fill(whole, other := adam(whole), experts)
    for parameter, values in zip(model.parameters(), whole.parameters(), strict=True):
        state = {}
        for key, value in [("", values.detach()), *other.state[values].items()]:
            if key == "step" or not sharded:
                state[key] = value
            else:
                state[key] = torch.zeros_like(parameter.detach())
                rows = value.chunk(2)
                local = state[key].to_local()  # type: ignore[attr-defined]
                if ep_replica := mesh.get_local_rank("replica") < len(rows):
                    local.copy_(rows[mesh.get_local_rank("replica")])
                assert ep_replica or local.shape[0] == 0
        data = state.pop("")
        if save_it:
            with torch.no_grad():
                parameter.copy_(data)
            optimizer.state[parameter] = state
        else:
            full = [t.to_local() if sharded else t for t in (parameter.detach(), data)]  # type: ignore[attr-defined]
            assert torch.equal(*full)
            assert list(optimizer.state[parameter]) == list(state)
            for key, value in state.items():
                found = optimizer.state[parameter][key]
                assert type(found) is type(value)
                pair = [t.to_local() if hasattr(t, "to_local") else t for t in (found, value)]
                assert torch.equal(*pair), key
    if save_it:
        model.selection.copy_(torch.tensor([4, 5]))
        del model.weight.lrmoe_expert
        with pytest.raises(ValueError, match="the parameter weight is not the same on ranks 0 and 1 of the group"):
            save(folder, step=0, model=model, optimizer=optimizer, group=ep)
        mark_experts(model.weight, group=ep)
        save(folder, step=0, model=model, optimizer=optimizer, group=ep)


def test_experts_that_fsdp_shards_further(tmp_path: Path) -> None:
    run_world(4, fsdp, str(tmp_path), True, True)
    path = newest(tmp_path)
    run_world(4, fsdp, str(path), False, True)
    run_world(4, fsdp, str(path), False, False)
    model = Experts(range(5))
    load(str(path), model=model, optimizer=(optimizer := adam(model)))
    check(model, optimizer, range(5))
    # And from plain tensors into shards.
    save(tmp_path / "plain", step=0, model=model, optimizer=optimizer)
    run_world(4, fsdp, str(newest(tmp_path / "plain")), False, True)


class Broken:
    """State that cannot be read on one rank, or saved at all."""

    def __init__(self, state: Any, error: Exception | None = None) -> None:
        self.name = "broken"
        self.state, self.error = state, error

    def state_dict(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.state

    def load_state_dict(self, state: Any) -> None:
        if self.error is not None:
            raise self.error


def fail_to_save(group: dist.ProcessGroup, folder: str) -> list[str]:
    rank = group.rank()
    model = Experts(my_experts(4, group))
    messages = []

    def attempt(kind: type[Exception], **options: Any) -> None:
        arguments = {"step": 1, "model": model, **options}
        with pytest.raises(kind) as caught:
            save(folder, **arguments)
        messages.append(str(caught.value))
        assert newest(folder) is None
        # Rank 0 has cleared up when it comes here.
        dist.barrier(group)
        assert not any(Path(folder).iterdir())
        dist.barrier(group)

    attempt(ValueError, extra=object())
    attempt(ValueError, step=-1)
    attempt(CheckpointError, recalibrator=Broken({}, OSError("no disk") if rank == 1 else None))
    attempt(ValueError, recalibrator=Broken({}, ValueError("no state") if rank == 0 else None))
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    attempt(ValueError, optimizer=stranger)
    uneven = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    uneven.state[model.weight] = {"momentum_buffer": torch.zeros(7)}
    attempt(ValueError, optimizer=uneven)
    uneven.state[model.weight] = {"momentum_buffer": torch.zeros_like(model.weight)} if rank == 0 else {}
    attempt(ValueError, optimizer=uneven)
    # Parameters that only lost their mark, or drifted apart, and experts of another group.
    unmarked = Experts(my_experts(4, group), mark=False)
    with torch.no_grad():
        unmarked.weight.fill_(rank)
    attempt(ValueError, model=unmarked)
    drifted = Experts(my_experts(4, group))
    with torch.no_grad():
        drifted.dense[1] = 1e-7 * rank
    attempt(ValueError, model=drifted)
    alone = dist.new_group([rank], use_local_synchronization=True)
    elsewhere = Experts([0, 1], mark=False)
    mark_experts(elsewhere.weight, elsewhere.bias, group=alone)
    attempt(ValueError, model=elsewhere)
    # The disk of one rank fails while it writes.
    original = checkpoints.FileSystemWriter.write_data

    def write_data(self: Any, *args: Any) -> Any:
        if rank == 1:
            raise OSError("no space left on device")
        return original(self, *args)

    checkpoints.FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
    try:
        attempt(CheckpointError)
    finally:
        checkpoints.FileSystemWriter.write_data = original  # type: ignore[method-assign]
    # Nothing of this is in the way of a good one.
    assert newest(folder) is None
    assert save(folder, step=1, model=model) == newest(folder)
    return messages


def test_what_fails_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    first, second = run_world(2, fail_to_save, str(tmp_path))
    for messages in (first, second):
        assert "extra, or an option of the optimizer, is nothing that JSON can hold" in messages[0]
        assert "step=-1" in messages[1]
        assert "rank 1: OSError: no disk" in messages[2]
        assert messages[3] == "rank 0: no state"
        assert "parameter 0 of the optimizer's group 0 is none of the model's" in messages[4]
        assert "'momentum_buffer' of weight has shape (7,), which is not by expert (2 on this rank)" in messages[5]
        assert "the experts weight have optimizer state ['momentum_buffer'] on the first rank" in messages[6]
        assert "the parameter weight is not the same on ranks 0 and 1 of the group" in messages[7]
        assert "the parameter dense is not the same on ranks 0 and 1 of the group" in messages[8]
        assert "holds experts of the ranks [0], but group has the ranks [0, 1]" in messages[9]
        assert "writing the checkpoint failed: rank 1: OSError: no space left on device" in messages[10]


def fail_to_load(group: dist.ProcessGroup, folder: str) -> list[str]:
    path = newest(folder)
    assert path is not None
    messages = []

    def attempt(kind: type[Exception], model: nn.Module | None = None, source: Path = path, **options: Any) -> None:
        model = Experts(my_experts(4, group)) if model is None else model
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(kind) as caught:
            load(source, model=model, **options)
        messages.append(str(caught.value))
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name])
        dist.barrier(group)

    attempt(ValueError, Experts(my_experts(5, group)))
    other = Experts(my_experts(4, group))
    other.extra = nn.Parameter(torch.zeros(2))
    del other.selection
    attempt(ValueError, other)
    attempt(ValueError, Experts(my_experts(4, group)).double())
    model = Experts(my_experts(4, group))
    attempt(ValueError, model, optimizer=torch.optim.SGD([model.dense], lr=1.0))
    attempt(ValueError, policy=Broken({}))
    attempt(ValueError, source=path.parent)
    attempt(ValueError, source=path.parent / "missing")
    attempt(ValueError, source=path if group.rank() == 0 else path.with_name("step-00000099"))
    return messages


def test_loading_names_what_does_not_fit_and_changes_nothing(tmp_path: Path) -> None:
    run_world(2, case_28, 4, None, str(tmp_path))
    found = newest(tmp_path)
    assert found is not None
    shutil.copytree(found, found.with_name("step-00000099"))
    manifest = json.loads((found / "lrmoe.json").read_text())
    later = found.with_name("step-00000099") / "lrmoe.json"
    later.write_text(json.dumps({**manifest, "step": 99}))
    (found.parent / "step-00000003").rename(found.parent / "step-00000100")
    for messages in run_world(2, fail_to_load, str(tmp_path)):
        assert "model.weight is (4, 2, 3) in the checkpoint, (5, 2, 3) here" in messages[0]
        assert "model.extra (2,) is not in the checkpoint" in messages[1]
        assert "model.selection (2,) is in the checkpoint only" in messages[1]
        assert "model.dense is torch.float32 in the checkpoint, torch.float64 here" in messages[2]
        assert "no group of the saved optimizer has the parameters of this one's group [dense]" in messages[3]
        assert "holds no state of a policy" in messages[4]
        assert "is no complete checkpoint: it has no lrmoe.json" in messages[5]
        assert "there is no such folder" in messages[6]
        assert "the ranks load different checkpoints" in messages[7]


def test_another_policy_is_refused(tmp_path: Path) -> None:
    model = Experts(range(2))
    path = save(tmp_path, step=1, model=model, policy=Broken({"a": 1}))
    load(path, model=model, policy=Broken({}))
    other = Broken({})
    other.name = "other"
    with pytest.raises(ValueError, match="saved with policy 'broken', this is 'other'"):
        load(path, model=model, policy=other)
    with pytest.raises(ValueError, match="holds no state of a recalibrator"):
        load(path, model=model, recalibrator=Broken({}))
    with pytest.raises(ValueError, match="has no optimizer"):
        load(path, model=model, optimizer=adam(model))


def test_half_written_checkpoints_are_passed_over(tmp_path: Path) -> None:
    model = Experts(range(2))
    assert newest(tmp_path) is None
    assert newest(tmp_path / "missing") is None
    paths = {step: save(tmp_path, step=step, model=model) for step in (2, 10, 9)}
    assert newest(tmp_path) == paths[10]
    (tmp_path / "step-last").mkdir()
    (tmp_path / ".step-00000011.partial").mkdir()
    (tmp_path / "step-00000012").mkdir()
    assert newest(tmp_path) == paths[10]
    for file in sorted(paths[10].iterdir()):
        content = file.read_bytes()
        for spoiled in (content[: len(content) // 2], None):
            file.unlink() if spoiled is None else file.write_bytes(spoiled)
            assert newest(tmp_path) == paths[9], file
            with pytest.raises(ValueError, match="is no complete checkpoint"):
                load(paths[10], model=model)
            file.write_bytes(content)
    assert newest(tmp_path) == paths[10]
    # The next save clears up after the killed one, and one of the same step takes the place of the old.
    with torch.no_grad():
        model.dense.fill_(math.pi)
    assert save(tmp_path, step=10, model=model) == paths[10]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    other = Experts(range(2))
    load(paths[10], model=other)
    assert torch.equal(other.dense, model.dense)


def wrapped(group: dist.ProcessGroup, folder: str) -> None:
    from torch.nn.parallel import DistributedDataParallel

    experts = my_experts(3, group)
    inner = Experts(experts)
    outer = nn.Sequential(inner)
    outer._ddp_params_and_buffers_to_ignore = ["0.weight", "0.bias"]  # type: ignore[assignment]
    fill(inner, optimizer := adam(inner), experts)
    save(folder, step=1, model=torch.compile(DistributedDataParallel(outer)), optimizer=optimizer)  # type: ignore[arg-type]
    save(folder, step=2, model=nn.Sequential(torch.compile(inner)), optimizer=optimizer)
    for step in (1, 2):
        bare = Experts(experts)
        load(Path(folder) / f"step-0000000{step}", model=nn.Sequential(bare), optimizer=(other := adam(bare)))
        check(bare, other, experts)


def test_wrappers_leave_no_trace_in_the_names(tmp_path: Path) -> None:
    run_world(2, wrapped, str(tmp_path))
