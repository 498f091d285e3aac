"""A run that is interrupted ends as one that is not, and leaves nothing to the next one: with
batch norms, dropout, a codebook, frozen parts, and rows that processes cannot share equally."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from accelerate import Accelerator
from processes import SHARDED, together

from attnlib.beit import VectorQuantizer
from attnlib.finetune import MixupCrossEntropy
from attnlib.train import fit, load_checkpoint
from helpers import build

pytestmark = pytest.mark.usefixtures("quiet")

RUN = dict(steps=12, lr=1e-2, warmup=2, log_every=4, seed=3)


class Tokenizer(nn.Module):
    """All that has a state beside its weights, and a part that is frozen."""

    def __init__(self):
        super().__init__()
        # a bias before a norm would have no gradient but noise
        self.encoder = nn.Sequential(
            nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3)
        )
        self.quantizer = VectorQuantizer(6, 8, decay=0.8, kmeans_steps=2)
        self.frozen = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.frozen.requires_grad_(False).eval()
        self.decoder = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 4))

    def forward(self, x):
        codes, _, loss = self.quantizer(self.encoder(x))
        return self.decoder(self.frozen(codes)), loss


def model_of(seed=0):
    torch.manual_seed(seed)
    return Tokenizer()


def batches(step, rows=17):  # which two processes cannot share equally
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(step))
    return x, 3 * x.roll(1, 1) + x.square()


def loss_fn(model, batch):
    x, y = batch
    found, commitment = model(x)
    return (found - y).square().sum() + commitment * y.numel(), y.numel()


def evaluate(model):
    found, _ = model(batches(1000)[0])
    return {"mean": found.mean()}


def train_once(path, parallel="ddp", stop=None, seed=0):
    """A run, or one that goes on; returns its history."""
    options = dict(checkpoint=path, parallel=parallel, stop_after=stop, evaluate=evaluate)
    model = model_of(seed)
    history = fit(
        model, batches, loss_fn=loss_fn, **RUN, **options, accelerator=Accelerator(cpu=True)
    )
    return model, history


def same(path, other):
    """Raise unless two checkpoints have the same tensors, bit for bit, and history."""
    (tensors, state), (expected, wanted) = load_checkpoint(path), load_checkpoint(other)
    assert tensors.keys() == expected.keys()
    for key, x in tensors.items():
        assert torch.equal(x, expected[key]), key
    assert state == wanted | {"tensors": state["tensors"]}


def check_frozen(path):
    """The frozen part is as it was, and what is not frozen has moved, codes and norms too."""
    tensors, state = load_checkpoint(path)
    assert state["step"] == RUN["steps"]
    before = model_of().state_dict()
    trained = [name for name, p in model_of().named_parameters() if p.requires_grad]
    assert len([key for key in tensors if key.endswith("exp_avg")]) == len(trained)
    for name, x in before.items():
        stays = name.startswith("frozen.")
        assert torch.equal(tensors[f"model.{name}"], x) == stays, name


# --- one process ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run.json"
    train_once(path)
    return path


@pytest.mark.parametrize("stops", [[4], [8], [4, 8]])
def test_one_process_goes_on_as_if_nothing_had_happened(stops, whole, tmp_path):
    path = tmp_path / "run.json"
    for number, stop in enumerate([*stops, None]):
        torch.rand(number)
        train_once(path, stop=stop, seed=number)  # its weights are replaced
    same(path, whole)


def test_frozen_parts_do_not_move(whole):
    check_frozen(whole)


def test_a_run_leaves_nothing_to_the_next(whole, tmp_path):
    """Neither a run that ends, nor one that is interrupted, nor one that fails."""

    def fail(model, batch):
        model(batch[0])
        raise ArithmeticError

    train_once(tmp_path / "first.json")
    train_once(tmp_path / "second.json", stop=4)
    model = model_of()
    modes = [part.training for part in model.modules()]
    with pytest.raises(ArithmeticError):
        fit(model, batches, loss_fn=fail, **RUN, accelerator=Accelerator(cpu=True))
    assert [part.training for part in model.modules()] == modes
    train_once(tmp_path / "third.json")
    same(tmp_path / "first.json", whole)
    same(tmp_path / "third.json", whole)


def test_two_runs_of_one_model_are_a_run_of_its_copy():
    """A second `fit` begins with the weights and codes of the first, and nothing else."""
    model, _ = train_once(None)
    copy = model_of(1)
    copy.load_state_dict(model.state_dict())
    histories = []
    for one in (model, copy):
        torch.rand(3)
        histories.append(fit(one, batches, loss_fn=loss_fn, **RUN, evaluate=evaluate))
    assert histories[0] == histories[1]
    for a, b in zip(model.state_dict().values(), copy.state_dict().values()):
        assert torch.equal(a, b)


def classifier(seed=0):
    """A backbone whose first block is frozen, in evaluation mode, and would drop much."""
    torch.manual_seed(seed)
    model = build("vit", proj_drop_rate=0.5)
    model.blocks[0].requires_grad_(False).eval()
    return model


def test_blended_images_leave_frozen_parts_in_evaluation_mode():
    model, modes = classifier(), []
    before = {name: x.clone() for name, x in model.state_dict().items()}
    model.blocks[0].register_forward_hook(lambda part, *_: modes.append(part.training))
    model.blocks[1].register_forward_hook(lambda part, *_: modes.append(part.training))
    flags = [part.training for part in model.modules()]
    images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    run = dict(steps=3, lr=1e-2, batch_size=3, ema=0.9, loss_fn=MixupCrossEntropy(5))
    fit(model, (images, torch.arange(6) % 5), **run)
    assert modes == [False, True] * 3
    assert [part.training for part in model.modules()] == flags
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]) == name.startswith("blocks.0."), name


def test_blending_twice_is_the_same_and_draws_no_numbers():
    images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for seed in range(2):
        model = classifier()
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        run = dict(steps=3, lr=1e-2, batch_size=3, ema=0.9, loss_fn=MixupCrossEntropy(5))
        fit(model, (images, torch.arange(6) % 5), **run)
        assert torch.equal(torch.get_rng_state(), before)
        found.append(torch.cat([x.flatten() for x in model.state_dict().values()]))
    assert torch.equal(*found)


# --- two processes ----------------------------------------------------------------------------

KINDS = [pytest.param("ddp"), pytest.param("fsdp", marks=SHARDED)]


def first_part(folder, kinds):
    """Whole runs, twice, and the first steps of others; each process takes notes."""
    for parallel in kinds:
        for name, stop in (("whole", None), ("stopped", 4), ("again", None)):
            model, history = train_once(folder / f"{name}-{parallel}.json", parallel, stop)
            note = folder / f"{name}-{parallel}.rank{dist.get_rank()}"
            torch.save([dict(model.named_buffers()), history], note)


def second_part(folder, kinds):
    """What is left of the runs that were stopped."""
    torch.rand(1 + dist.get_rank())
    for parallel in kinds:
        path = folder / f"stopped-{parallel}.json"
        train_once(path, parallel, seed=1 + dist.get_rank())


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder in which two processes have trained, and two other ones have gone on."""
    folder = tmp_path_factory.mktemp("shared")
    kinds = ["ddp"] + ["fsdp"] * (torch.__version__ >= (2, 9))
    for part in (first_part, second_part):
        assert together(2, folder, part, folder, kinds) == [0, 0]
    return folder


@pytest.mark.parametrize("parallel", KINDS)
def test_two_processes_go_on_as_if_nothing_had_happened(parallel, shared):
    same(shared / f"stopped-{parallel}.json", shared / f"whole-{parallel}.json")


@pytest.mark.parametrize("parallel", KINDS)
def test_a_run_of_two_processes_leaves_nothing_to_the_next(parallel, shared):
    same(shared / f"again-{parallel}.json", shared / f"whole-{parallel}.json")


@pytest.mark.parametrize("parallel", KINDS)
def test_frozen_parts_of_two_processes_do_not_move(parallel, shared):
    check_frozen(shared / f"whole-{parallel}.json")


@pytest.mark.parametrize("parallel", KINDS)
def test_both_processes_have_the_buffers_and_the_history_of_the_checkpoint(parallel, shared):
    """Each batch norm has seen the rows of its own process only."""
    tensors, state = load_checkpoint(shared / f"whole-{parallel}.json")
    for rank in range(2):
        buffers, history = torch.load(shared / f"whole-{parallel}.rank{rank}")
        for name, x in buffers.items():
            assert torch.equal(x, tensors[f"model.{name}"]), (rank, name)
        assert history == state["history"]


@SHARDED
def test_sharing_the_model_changes_no_step(shared):
    """DDP and FSDP differ in the order of sums only."""
    tensors, _ = load_checkpoint(shared / "whole-fsdp.json")
    expected, _ = load_checkpoint(shared / "whole-ddp.json")
    assert tensors.keys() == expected.keys()
    for key, x in tensors.items():
        torch.testing.assert_close(x, expected[key], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@SHARDED
def test_any_number_of_processes_goes_on(tmp_path):
    """1, 2, 3 and again 2: every kind reads what another has written, and ends the run."""
    path = tmp_path / "run.json"
    train_once(path, stop=4)
    assert together(2, tmp_path, train_once, path, "fsdp", 8) == [0, 0]
    assert together(3, tmp_path, train_once, path, "ddp") == [0, 0, 0]
    check_frozen(path)
    assert together(2, tmp_path, train_once, path, "fsdp") == [0, 0]  # it has ended
    check_frozen(path)
