"""AutoFormer: counts, the authors' outputs, slices and their gradients, search, bad input."""

import dataclasses
import json
import math
import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import autoformer_reference
from attnlib import autoformer
from attnlib.attention import attention_backend
from attnlib.autoformer import (
    RELEASED,
    SPACES,
    WIDTHS,
    Attention,
    AutoFormer,
    ClassicalSharing,
    Space,
    Subnet,
    SuperTransformer,
    _relative_index,
    crossover,
    evolutionary_search,
    extract,
    mutate,
    operations,
    parameter_count,
    sample_subnet,
)
from attnlib.cost import count_operations
from attnlib.models import create_model, load_pretrained
from helpers import close, images

SPACE = Space((16, 24, 32), (1, 2, 3), (1, 2, 3), (0.5, 1, 2))
DIMS = dict(img_size=12, patch_size=4, num_classes=5, head_dim=8, max_distance=2)
FOUND = autoformer_reference.OUT
COUNTS = {  # the released network, the supernet, the networks of the space
    "tiny": (5_867_944, 11_669_224, 1_056_964_608),
    "small": (22_891_432, 34_790_440, 77_103_263_459_313),
    "base": (53_691_688, 80_160_360, 10_108_977_168_384),
}
ENDS = {  # parameters of the smallest and of the largest network
    "tiny": (5_366_056, 10_517_272),
    "small": (13_057_320, 34_790_440),
    "base": (41_687_896, 76_882_264),
}


def randomized(model, seed=0):
    """Every parameter random, in float64: biases, norms and tables too."""
    torch.manual_seed(seed)
    model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn_like(p))
    return model


def supernet(**options):
    return randomized(SuperTransformer(SPACE, **DIMS | options))


@pytest.mark.parametrize("stored", [32, 40])
def test_intermediate_maps_of_a_supernet_are_those_of_its_largest_network(stored):
    model = supernet(embed_dim=stored).eval()
    largest = extract(model, SPACE.largest()).eval()
    assert model.num_features == largest.num_features == 32
    x = images(2, largest.patch_embed.img_size)
    for norm in (False, True):
        found = model.forward_intermediates(x, norm=norm)
        wanted = largest.forward_intermediates(x, norm=norm)
        for a, b in zip((found[0], *found[1]), (wanted[0], *wanted[1]), strict=True):
            close(a, b, 1e-5)
    assert model(x).shape == largest(x).shape
    model.reset_classifier(5)
    assert model(x).shape == (2, 5) and model.head.weight.shape == (5, stored)


def numel(model):
    return sum(p.numel() for p in model.parameters())


subnets = st.integers(0, 10**6).map(partial(sample_subnet, SPACE))


# --- counts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPACES)
def test_counts_are_those_of_the_authors(name):
    released, whole, networks = COUNTS[name]
    with torch.device("meta"):
        model = create_model(f"autoformer_{name}")
        every = create_model(f"autoformer_{name}_supernet")
    space, subnet = SPACES[name], RELEASED[name]
    assert numel(model) == released == parameter_count(model, subnet)
    assert numel(every) == whole and space.count() == networks
    ends = space.smallest(), space.largest()
    assert tuple(parameter_count(every, end) for end in ends) == ENDS[name]
    assert every.embed_dim == WIDTHS[name] and every.space is space
    x = torch.empty(1, 3, 224, 224, device="meta")
    assert operations(model, subnet) == count_operations(model, x).flops / 2
    assert (subnet in space) == (name != "tiny")  # three ratios of the released one are 3
    assert subnet in dataclasses.replace(space, mlp_ratio=(3, 3.5, 4))


def test_base_of_the_subnet_file_and_the_papers_number():
    with_8 = dataclasses.replace(SPACES["base"], num_heads=(8, 9, 10))
    assert f"{with_8.count():.3g}" == "6.25e+15" and 3 * 3 * 9**16 == 16_677_181_699_666_569


@given(subnet=subnets)
@settings(max_examples=25, deadline=None)
def test_formulas_count_what_is_there(subnet):
    model = supernet()
    own = extract(model, subnet)
    assert parameter_count(model, subnet) == numel(own) == parameter_count(own, own.subnet)
    x = images(1, 12)
    assert operations(model, subnet) == count_operations(own, x).flops / 2


def test_a_space_lists_its_networks():
    space = dataclasses.replace(SPACE, depth=(1, 3), num_heads=(2, 3))
    listed = list(space.subnets())
    assert len(listed) == len(set(listed)) == space.count() == 3 * (6 + 6**3)
    assert all(subnet in space for subnet in listed)
    model, ends = supernet(), (space.smallest(), space.largest())
    sizes = [parameter_count(model, subnet) for subnet in listed]
    assert [min(sizes), max(sizes)] == [parameter_count(model, end) for end in ends]
    assert set(ends) <= set(listed)


# --- the authors ------------------------------------------------------------------------------


def theirs():
    """The stored supernet's options, subnets, weights as float32, and results."""
    with safe_open(FOUND, "pt") as file:
        about = file.metadata()
        tensors = {key: file.get_tensor(key) for key in list(file.keys())}
    weights = {key: x.float() / 64 for key, x in tensors.items() if x.dtype == torch.int8}
    return json.loads(about["supernet"]), json.loads(about["subnets"]), weights, tensors


@pytest.mark.parametrize("number", range(4))
def test_outputs_are_those_of_the_authors_class(number):
    options, subnets, weights, tensors = theirs()
    width, heads, ratios = subnets[number]
    space = Space((96, 112, options["embed_dim"]), (1, 2), (1, 2), (0.5, 1))
    model = SuperTransformer(
        space,
        img_size=20,
        patch_size=4,
        in_chans=1,
        num_classes=options["num_classes"],
        max_distance=options["max_relative_position"],
    ).eval()
    assert load_pretrained(model, {"model": weights}) == []
    subnet = Subnet(width, tuple(heads), tuple(ratios))
    wanted = tensors[f"logits.{number}"]
    close(model(tensors["images"], subnet), wanted, 1e-5)
    assert wanted.std(0).mean() > 0.05  # the images matter
    close(extract(model, subnet)(tensors["images"]), wanted, 1e-5)
    counted = tensors[f"parameters.{number}"].item()
    assert parameter_count(model, subnet) == counted


def test_the_authors_layout_matters():
    """Rows of queries, keys and values in turn, biases in three pieces: else it is wrong."""
    options, subnets, weights, tensors = theirs()
    space = Space((128,), (2,), (2,), (1,))
    model = SuperTransformer(space, 20, 4, 1, 7, 64, max_distance=3).eval()
    for part in ("weight", "bias"):
        changed = dict(weights)
        for i in range(2):
            x = weights[key := f"blocks.{i}.attn.qkv.{part}"]
            turned = x.unflatten(0, (3, -1)).transpose(0, 1).flatten(0, 1)
            changed[key] = turned
        load_pretrained(model, changed)
        assert (model(tensors["images"]) - tensors["logits.0"]).abs().max() > 0.01


def test_the_reference_is_made_as_it_says(tmp_path, monkeypatch):
    folder = tmp_path / "AutoFormer" / "model"
    folder.mkdir(parents=True)
    (folder / "utils.py").write_text("import torch\n")
    with pytest.raises(ValueError, match="must contain 'from torch._six"):
        autoformer_reference.authors_class(tmp_path, tmp_path / "copy")
    assert FOUND.stat().st_size < 300_000
    options, subnets, weights, _ = theirs()
    assert options == autoformer_reference.SUPERNET
    assert [tuple(x) for x in subnets] == autoformer_reference.SUBNETS
    assert all(x.count_nonzero() > 0.9 * x.numel() for x in weights.values())


# --- slices -----------------------------------------------------------------------------------


@given(subnet=subnets, seed=st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_an_extracted_network_is_the_path_of_the_supernet(subnet, seed):
    model, x = supernet(), images(2, 12, seed=seed)
    own = extract(model, subnet)
    close(own(x), model(x, subnet), 1e-12)
    assert own.subnet == subnet and not own.training
    shared = {x.data_ptr() for x in model.state_dict().values()}
    assert not shared & {x.data_ptr() for x in own.state_dict().values()}


def test_the_extracted_network_in_float32_and_the_default():
    model, x = supernet().float(), images(2, 12).float()
    for seed in range(5):
        subnet = sample_subnet(SPACE, seed)
        close(extract(model, subnet)(x), model(x, subnet), 1e-6)
    close(model(x), model(x, SPACE.largest()), 0)
    assert extract(model.train(), subnet).training


@given(subnet=subnets)
@settings(max_examples=15, deadline=None)
def test_unused_entries_have_no_gradient(subnet):
    model = supernet()
    model(images(2, 12), subnet).square().sum().backward()
    own = {key: x.shape for key, x in extract(model, subnet).named_parameters()}
    for key, p in model.named_parameters():
        if key not in own:
            assert p.grad is None  # of a layer that was left out
            continue
        used = torch.zeros_like(p, dtype=torch.bool)
        used[tuple(map(slice, own[key]))] = True
        assert (p.grad[~used] == 0).all(), key
        if not key.endswith("qkv.bias"):  # keys' biases have none
            assert (p.grad[used] != 0).any(), key


def test_slices_are_views():
    """No copy of a weight: `linear` is given memory of the supernet."""
    model = supernet()
    pointers = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = []
    linear = F.linear

    def spy(x, weight, bias=None):
        seen.append(weight.untyped_storage().data_ptr())
        return linear(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", spy)
        model(images(1, 12), Subnet(16, (1, 2), (1, 2)))
    assert len(seen) == 2 * 4 + 1 and set(seen) <= pointers


def test_training_a_network_leaves_the_other_entries(seed=0):
    model = supernet().train()
    before = {key: x.clone() for key, x in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    subnet = Subnet(24, (2,), (1,))
    model(images(2, 12), subnet).square().sum().backward()
    optimizer.step()
    after, own = model.state_dict(), extract(model, subnet).state_dict()
    for key, x in after.items():
        changed = x != before[key]
        if key in own:
            changed[tuple(map(slice, own[key].shape))] = False
        assert not changed.any()


# --- relative positions -----------------------------------------------------------------------


def dense(attn, x, grid):
    """Attention with a vector for each pair, as the paper and the authors write it."""
    (h, w), D, d = grid, attn.max_distance, attn.head_dim
    index = torch.zeros(2, 1 + h * w, 1 + h * w, dtype=torch.long)
    for i in range(h * w):
        for j in range(h * w):
            for axis, (a, b) in enumerate(((i // w, j // w), (i % w, j % w))):
                index[axis, 1 + i, 1 + j] = max(-D, min(D, b - a)) + D + 1
    R_k, R_v = (r.vertical[index[0]] + r.horizontal[index[1]] for r in (attn.rel_k, attn.rel_v))
    q, k, v = attn.project(x, attn.num_heads)
    logits = (q @ k.mT + torch.einsum("bhnd,nmd->bhnm", q, R_k)) / math.sqrt(d)
    weights = logits.softmax(-1)
    out = weights @ v + torch.einsum("bhnm,nmd->bhnd", weights, R_v)
    return attn.proj(out.transpose(1, 2).flatten(2)), weights


@pytest.mark.parametrize("grid", [(3, 3), (2, 5), (1, 1), (6, 4)])
@pytest.mark.parametrize("distance", [1, 2, 14])
def test_separate_relative_positions_are_the_dense_ones(grid, distance):
    attn = randomized(Attention(12, 2, 8, grid, distance))
    x = torch.randn(2, 1 + grid[0] * grid[1], 12, dtype=torch.float64)
    wanted, weights = dense(attn, x, grid)
    for backend in ("reference", "sdpa"):
        with attention_backend(backend):
            close(attn(x), wanted, 1e-12)
    close(attn.float()(x.float()), wanted.float(), 1e-5)


def test_recorded_weights_are_those_of_the_equation():
    model = supernet()
    x = images(2, 12)
    maps = model.attention_maps(x)
    assert [m.shape for m in maps] == [(2, 3, 10, 10)] * 3
    tokens = model.blocks[0].norm1(model.embed(x))
    close(maps[0], dense(model.blocks[0].attn, tokens, (3, 3))[1], 1e-12)


def test_index_of_a_grid():
    rows, columns, places = _relative_index((2, 3), 1)
    assert rows.shape == (7, 3) and columns.shape == (7, 4) and places.shape == (7, 7)
    assert (rows[0] == 0).all() and (rows[:, 0] == 0).all() and (columns[:, 0] == 0).all()
    assert rows[1:, 1:].tolist() == [[2, 3]] * 3 + [[1, 2]] * 3
    assert columns[3].tolist() == [0, 1, 1, 2]  # two columns to the left count as one
    assert (places.sum(1) == 2).all() and places[0, [0, 3]].all()


# --- the model --------------------------------------------------------------------------------


def test_classifier_pools_sizes_and_maps():
    model, x = supernet(), images(2, 12)
    model.reset_classifier(3, "token")
    small = Subnet(16, (1,), (2,))
    assert model(x, small).shape == (2, 3) and model.head.weight.dtype == torch.float64
    tokens = model.forward_features(x, small)
    close(model(x, small), model.head(tokens[:, 0]))
    model.reset_classifier(0)
    assert model(x, small).shape == (2, 16) and parameter_count(model, small) == numel(
        extract(model, small)
    )
    model.set_input_size((16, 24))
    assert model(images(1, (16, 24)), small).shape == (1, 16)
    own = extract(model, small)
    close(own(images(1, (16, 24))), model(images(1, (16, 24)), small))
    last, maps = own.forward_intermediates(images(1, (16, 24)))
    assert last.shape == (1, 25, 16) and [m.shape for m in maps] == [(1, 16, 4, 6)]


def test_weights_of_a_larger_grid_are_interpolated():
    model = SuperTransformer(SPACE, **DIMS | dict(img_size=24))
    assert load_pretrained(model, supernet().state_dict()) == []


def test_gradient_checkpointing_and_stochastic_depth():
    model, x = supernet(drop_path_rate=0.2), images(2, 12)
    model(x, SPACE.smallest()).sum().backward()
    wanted = model.head.weight.grad.clone()
    model.zero_grad()
    model.set_grad_checkpointing()
    model(x, SPACE.smallest()).sum().backward()
    close(model.head.weight.grad, wanted)
    rates = [block.drop_path.drop_prob for block in model.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2])


def test_classical_sharing_has_a_block_for_each_choice():
    model = randomized(ClassicalSharing(SPACE, **DIMS))
    one = SuperTransformer(SPACE, **DIMS)
    total = 0
    for width in SPACE.embed_dim:
        for h, r in model.choices:
            sizes = [parameter_count(one, Subnet(width, (h,) * n, (r,) * n)) for n in (0, 1)]
            total += 3 * (sizes[1] - sizes[0])
        total += sizes[0]
    assert numel(model) == total
    subnet = Subnet(24, (1, 3), (2, 0.5))
    model(images(2, 12), subnet).sum().backward()
    trained = sum(p.numel() for p in model.parameters() if p.grad is not None)
    assert trained == parameter_count(one, subnet)
    assert model(images(2, 12)).shape == (2, 5)


def test_export_and_compile_of_an_extracted_network():
    own, x = extract(supernet(), SPACE.smallest()), images(2, 12)
    program = torch.export.export(own, (x,))
    close(program.module()(x), own(x))


# --- sampling, search -------------------------------------------------------------------------


def test_sampling_is_seeded_and_uniform_in_each_choice():
    assert (
        sample_subnet(SPACE, 3)
        == sample_subnet(SPACE, 3)
        == sample_subnet(SPACE, random.Random(3))
    )
    rng = random.Random(0)
    drawn = [sample_subnet(SPACE, rng) for _ in range(3000)]
    assert all(subnet in SPACE for subnet in drawn)
    for values in ([s.depth for s in drawn], [s.embed_dim for s in drawn]):
        for value in set(values):
            assert abs(values.count(value) / 3000 - 1 / 3) < 0.04


@given(a=subnets, b=subnets, seed=st.integers(0, 1000), p=st.sampled_from([0.0, 0.3, 1.0]))
def test_children_are_legal(a, b, seed, p):
    rng = random.Random(seed)
    child = crossover(a, b, rng)
    assert child in SPACE and child.depth in (a.depth, b.depth)
    long = a if a.depth >= b.depth else b
    for i, pair in enumerate(zip(child.num_heads, child.mlp_ratio)):
        parents = [x for x in (a, b, long) if i < x.depth]
        assert pair[0] in [x.num_heads[i] for x in parents]
        assert pair[1] in [x.mlp_ratio[i] for x in parents]
    assert mutate(a, SPACE, p, p, rng) in SPACE
    assert mutate(a, SPACE, 0.0, 0.0, rng) == a == crossover(a, a, rng)


def test_search_scores_legal_distinct_networks_within_limits():
    model = supernet()
    limit = 9000

    def score(subnet):
        assert subnet in SPACE and 4000 <= parameter_count(model, subnet) <= limit
        return -abs(subnet.depth - 2) - abs(subnet.embed_dim - 24) + sum(subnet.num_heads) / 10

    limits = dict(max_params=limit, min_params=4000, max_operations=80_000)
    options = dict(population=12, generations=4, parents=3, crossovers=4, mutations=4)
    best, history = evolutionary_search(score, model, seed=1, **limits, **options)
    again = evolutionary_search(score, model, seed=1, **limits, **options)
    assert (best, history) == again
    assert len(history) == len(dict(history)) == 48
    assert dict(history)[best] == max(dict(history).values())
    assert all(operations(model, subnet) <= 80_000 for subnet, _ in history)


def test_a_score_that_is_no_number_does_not_win():
    def score(subnet):
        return float("nan") if subnet.depth == 2 else subnet.depth

    with pytest.raises(ValueError, match=r"score returned nan for Subnet\("):
        evolutionary_search(score, supernet())


def test_search_ends_where_a_space_is_exhausted():
    space = Space((16,), (1,), (1, 2), (1, 2))
    model = SuperTransformer(space, **DIMS)
    best, history = evolutionary_search(
        lambda s: s.num_heads[0], model, population=10, generations=3
    )
    assert len(history) == space.count() == 4 and best.num_heads == (2,)


def test_evolution_finds_the_best_of_an_easy_score():
    model = supernet()
    options = dict(population=20, generations=12, parents=5, crossovers=8, mutations=8)
    best, _ = evolutionary_search(partial(parameter_count, model), model, **options)
    assert best == SPACE.largest()


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        Subnet(17, (1,), (1,)),
        Subnet(16, (4,), (1,)),
        Subnet(16, (1,), (3,)),
        Subnet(16, (1,) * 4, (1,) * 4),
        Subnet(16, (), ()),
    ],
)
def test_a_subnet_outside_its_space(wrong):
    model = supernet()
    for call in (
        lambda: model(images(1, 12), wrong),
        lambda: extract(model, wrong),
        lambda: ClassicalSharing(SPACE, **DIMS)(images(1, 12).float(), wrong),
    ):
        with pytest.raises(ValueError, match=r"subnet Subnet\(.*must be a network of Space\("):
            call()


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: Subnet(16, (1, 2), (1,)),
            r"num_heads \(1, 2\) and mlp_ratio \(1,\) must be",
        ),
        (lambda: Space((), (1,), (1,), (1,)), r"embed_dim \(\(\)\) must be a tuple"),
        (lambda: Space((1,), (2, 1), (1,), (1,)), r"depth \(\(2, 1\)\) must be .* increasing"),
        (lambda: Space((1,), [1, 2], (1,), (1,)), r"depth \(\[1, 2\]\) must be a tuple"),
        (lambda: Subnet(16, [1], [2]), r"num_heads \[1\] and mlp_ratio \[2\] must be tuples"),
        (lambda: Space((1,), (1,), (0,), (1,)), r"num_heads \(\(0,\)\) must be .* positive"),
        (lambda: supernet(embed_dim=24), r"embed_dim \(24\) must be at least 32"),
        (
            lambda: AutoFormer(num_heads=(1, 1.5), mlp_ratio=(1, 1)),
            r"num_heads\[1\] \(1.5\) must be an integer",
        ),
        (lambda: AutoFormer(head_dim=0), r"head_dim \(0\) must be an integer of at least 1"),
        (lambda: supernet(global_pool="max"), r"global_pool \('max'\) must be one of"),
        (lambda: supernet()(images(1, 16)), r"must be of the model's img_size \(12, 12\)"),
        (lambda: supernet(img_size=13), r"patch_size \(4, 4\) must divide"),
        (
            lambda: evolutionary_search(len, supernet(), max_params=5),
            r"max_params \(5\) leaves no network; the space's have \d+ to \d+",
        ),
        (
            lambda: evolutionary_search(len, supernet(), min_params=10**9),
            r"min_params \(1000000000\) leaves no network",
        ),
        (
            lambda: evolutionary_search(len, supernet(), max_operations=10),
            r"max_operations \(10\) leaves no network",
        ),
        (
            lambda: evolutionary_search(
                len, supernet(), max_params=6000, min_params=6000, population=20, generations=1
            ),
            r"no network within \{'max_params': 6000, 'min_params': 6000\} was found",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_checkpoint_of_another_space():
    other = SuperTransformer(dataclasses.replace(SPACE, num_heads=(1, 2)), **DIMS)
    with pytest.raises(ValueError, match="does not fit SuperTransformer; nothing was loaded"):
        load_pretrained(supernet(), other.state_dict())
    deeper = SuperTransformer(dataclasses.replace(SPACE, depth=(3, 4)), **DIMS)
    with pytest.raises(ValueError, match=r"unexpected: blocks.3.norm1.weight \(32,\)"):
        load_pretrained(supernet(), deeper.state_dict())


def test_everything_public_is_documented():
    for name in autoformer.__all__:
        thing = getattr(autoformer, name)
        assert not callable(thing) or thing.__doc__, name
