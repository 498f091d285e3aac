"""Unusual calls of `attnlib.autoformer`: PyTorch, enumeration, formulas in float64."""

import copy
import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from draws import batches, counts, drawn, dtypes, layouts, map_sizes, normal, seeds, tolerance
from hypothesis import example
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attnlib import autoformer
from attnlib.attention import attention_backend
from attnlib.autoformer import ClassicalSharing, Space, Subnet, SuperTransformer
from helpers import close

SPACE = Space((8, 12), (1, 2, 3), (1, 2), (1, 1.5))
SHAPE = dict(img_size=(6, 9), patch_size=3, num_classes=5, head_dim=4, in_chans=2)
subnets = st.sampled_from(list(SPACE.subnets()))
spaces = st.builds(
    Space,
    st.sampled_from(((4,), (4, 8))),
    st.sampled_from(((1,), (1, 3), (2, 3))),
    st.sampled_from(((1,), (1, 2))),
    st.sampled_from(((0.5, 2), (3,))),
)


def largest(x):
    return x.abs().max().item() if x.numel() else 0.0


def randomized(module, seed, dtype=torch.float64):
    """The module with parameters that are not zero or one, and the same in float64."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    module = module.to(dtype).eval()
    return module, copy.deepcopy(module).double()


# --- spaces -----------------------------------------------------------------------------------


def listed(space):
    """All networks of a space, by loops of their own."""
    found = []
    for depth in space.depth:
        for width in space.embed_dim:
            for heads in itertools.product(space.num_heads, repeat=depth):
                for ratios in itertools.product(space.mlp_ratio, repeat=depth):
                    found.append(Subnet(width, heads, ratios))
    return found


@drawn(spaces, seeds)
def test_space(space, seed):
    every = listed(space)
    assert space.count() == len(every) == len(set(every))
    assert len(list(space.subnets())) == len(every) and set(space.subnets()) == set(every)
    size = {s: (s.depth, s.embed_dim, sum(s.num_heads), sum(s.mlp_ratio)) for s in every}
    assert space.smallest() == min(every, key=size.get)
    assert space.largest() == max(every, key=size.get)
    for subnet in every:
        assert subnet in space and space.check(subnet) is subnet
    one = every[seed % len(every)]
    h, r, C = one.num_heads, one.mlp_ratio, one.embed_dim
    for wrong in (
        Subnet(C + 1, h, r),
        Subnet(C, h + h[:1] * 3, r + r[:1] * 3),
        Subnet(C, (*h[1:], 9), r),
        Subnet(C, h, (*r[1:], 0.7)),
        Subnet(C, (), ()),
    ):
        assert wrong not in space
        with pytest.raises(ValueError, match=r"subnet Subnet\("):
            space.check(wrong)


@pytest.mark.parametrize(
    "choices", [(), (2, 1), (1, 1), (0, 1), (-1,), [1, 2], (1, math.inf, 2)]
)
def test_choices_that_are_none(choices):
    for name in ("embed_dim", "depth", "num_heads", "mlp_ratio"):
        fields = dict(embed_dim=(1,), depth=(1,), num_heads=(1,), mlp_ratio=(1,))
        with pytest.raises(ValueError, match=rf"{name} \(.*\)"):
            Space(**fields | {name: choices})


@pytest.mark.parametrize("lists", [((1, 2), (1,)), ([1], [1]), ((), (1,)), ("1", (1,))])
def test_layers_that_do_not_fit(lists):
    with pytest.raises(ValueError, match="must be tuples with an entry for each layer"):
        Subnet(8, *lists)


def share_of(sampled, choices):
    """Each choice's share, and four standard errors of it."""
    n, p = len(sampled), 1 / len(choices)
    return [(sampled.count(c) / n - p, 4 * math.sqrt(p * (1 - p) / n)) for c in choices]


def test_samples_are_uniform():
    rng = random.Random(0)
    every = [autoformer.sample_subnet(SPACE, rng) for _ in range(4000)]
    assert set(every) <= set(listed(SPACE))
    for choices, sampled in (
        (SPACE.depth, [s.depth for s in every]),
        (SPACE.embed_dim, [s.embed_dim for s in every]),
        (SPACE.num_heads, [h for s in every for h in s.num_heads]),
        (SPACE.mlp_ratio, [r for s in every for r in s.mlp_ratio]),
    ):
        assert all(abs(share) < error for share, error in share_of(sampled, choices))
    assert autoformer.sample_subnet(SPACE, 3) == autoformer.sample_subnet(
        SPACE, random.Random(3)
    )


def test_published_networks():
    for name, subnet in autoformer.RELEASED.items():
        space, width = autoformer.SPACES[name], autoformer.WIDTHS[name]
        assert space.embed_dim[-1] <= width and subnet.embed_dim in space.embed_dim
        assert subnet.depth in space.depth and set(subnet.num_heads) <= set(space.num_heads)
    assert autoformer.SPACES.keys() == autoformer.RELEASED.keys() == autoformer.WIDTHS.keys()


# --- slices -----------------------------------------------------------------------------------


@drawn(batches, counts, counts, dtypes(), seeds, layouts, st.booleans(), st.booleans())
@example(2, 3, 4, torch.float64, 0, "contiguous", False, False)
def test_linear(batch, tokens, width, dtype, seed, layout, bias, whole):
    layer, exact = randomized(autoformer.Linear(6, 5, bias=bias), seed, dtype)
    x = normal((batch, tokens, width), dtype, seed, layout)
    count = None if whole else seed % 5 + 1
    rows = range(5 if whole else count)
    found = layer(x) if whole else layer(x, count)
    wanted = torch.zeros(batch, tokens, len(rows)).double()
    for i in rows:
        wanted[..., i] = x.double() @ exact.weight[i, :width]
        wanted[..., i] += exact.bias[i] if bias else 0
    close(found.double(), wanted, tolerance(dtype))
    plain, six = nn.Linear(6, 5), torch.ones(6)
    assert torch.equal(autoformer._first_outputs(plain, six, 5, 5), plain(six))
    if not whole:
        assert torch.equal(autoformer._first_outputs(layer, x, count, 7), found)


@pytest.mark.parametrize("count", [0, -1, 6])
def test_outputs_that_are_not_there(count):
    layer = autoformer.Linear(4, 5)
    with pytest.raises(ValueError, match=rf"count \({count}\) of outputs"):
        autoformer._first_outputs(layer, torch.ones(2, 4), count, 5)


@drawn(batches, counts, st.integers(1, 3), dtypes(), seeds, st.booleans(), st.booleans())
def test_interleaved(batch, width, heads, dtype, seed, bias, whole):
    """Row 3 i + j of the weight is the i-th of queries, keys or values; the bias is cut."""
    layer, exact = randomized(autoformer.InterleavedLinear(6, 18, bias=bias), seed, dtype)
    x = normal((batch, 3, width), dtype, seed)
    count = 18 if whole else 6 * heads
    found = layer(x) if whole else layer(x, count)
    for i in range(count // 3):
        for j in range(3):
            wanted = x.double() @ exact.weight[3 * i + j, :width]
            wanted = wanted + (exact.bias[j * (count // 3) + i] if bias else 0)
            close(found[..., 3 * i + j].double(), wanted, tolerance(dtype))


@drawn(batches, counts, st.integers(2, 6), dtypes(), seeds, layouts, st.sampled_from("wbn"))
@example(2, 3, 4, torch.float64, 0, "contiguous", "n")
def test_layer_norm(batch, tokens, width, dtype, seed, layout, kind):
    options = dict(w=dict(bias=False), b={}, n=dict(elementwise_affine=False))[kind]
    layer, exact = randomized(autoformer.LayerNorm(6, **options), seed, dtype)
    x = normal((batch, tokens, width), dtype, seed, layout)
    y = x.double() - x.double().mean(-1, keepdim=True)
    deviation = (y.square().mean(-1, keepdim=True) + layer.eps).sqrt()
    y = y / deviation
    y = y if kind == "n" else y * exact.weight[:width]
    y = y + exact.bias[:width] if kind == "b" else y
    steepest = max(1, largest(1 / deviation))  # the mean's rounding is divided by it
    close(layer(x).double(), y, tolerance(dtype) * steepest)


# --- relative positions and layers ------------------------------------------------------------


def distance(a, b, most):
    """Which row of a table is for two places of an axis, 0 for the class token's."""
    return 0 if a is None or b is None else max(-most, min(most, b - a)) + most + 1


def places_of(grid):
    """Row and column of each token, None of the class token."""
    return [(None, None), *itertools.product(range(grid[0]), range(grid[1]))]


@drawn(map_sizes(6), st.integers(1, 7))
def test_relative_index(grid, most):
    rows, columns, places = autoformer._relative_index(grid, most)
    assert places.dtype == torch.bool
    own = places_of(grid)
    for found, axis in ((rows, 0), (columns, 1)):
        side = [None, *range(grid[axis])]
        wanted = [[distance(place[axis], b, most) for b in side] for place in own]
        assert found.tolist() == wanted
    lines = [("row", None), *(("row", i) for i in range(grid[0]))]
    lines += [("column", None), *(("column", j) for j in range(grid[1]))]
    wanted = []
    for row, column in own:
        wanted.append([at == (row if name == "row" else column) for name, at in lines])
    assert places.tolist() == wanted


@drawn(map_sizes(4), st.integers(1, 5), dtypes(), seeds)
def test_relative_positions(grid, most, dtype, seed):
    torch.manual_seed(seed)
    module = autoformer.RelativePositions(3, most, dtype=dtype)
    rows, columns, _ = autoformer._relative_index(grid, most)
    found = module(rows, columns)
    assert found.dtype == dtype
    for n, (row, column) in enumerate(places_of(grid)):
        for p, at in enumerate([None, *range(grid[0])]):
            assert torch.equal(found[n, p], module.vertical[distance(row, at, most)])
        for p, at in enumerate([None, *range(grid[1])], 1 + grid[0]):
            assert torch.equal(found[n, p], module.horizontal[distance(column, at, most)])


def exact_attention(attn, x, heads):
    """Shaw et al. 2018, equations 3 and 4: a vector for each pair of tokens, in float64."""
    d, most, C = attn.head_dim, attn.max_distance, x.shape[-1]
    index = []
    for axis in (0, 1):
        side = [place[axis] for place in places_of(attn.grid_size)]
        index.append(torch.tensor([[distance(a, b, most) for b in side] for a in side]))
    R_k, R_v = (r.vertical[index[0]] + r.horizontal[index[1]] for r in (attn.rel_k, attn.rel_v))
    count = 3 * heads * d
    y = x @ attn.qkv.weight[:count, :C].T
    bias, read = attn.qkv.bias[:count].view(3, -1), []
    q, k, v = (y[..., i::3] + bias[i] for i in range(3))
    for i in range(heads):
        own = slice(i * d, (i + 1) * d)
        logits = q[..., own] @ k[..., own].mT + torch.einsum("bnd,nmd->bnm", q[..., own], R_k)
        weights = (logits / math.sqrt(d)).softmax(-1)
        read.append(weights @ v[..., own] + torch.einsum("bnm,nmd->bnd", weights, R_v))
    return torch.cat(read, -1) @ attn.proj.weight[:C, : heads * d].T + attn.proj.bias[:C]


def exact_block(block, x, heads, ratio):
    C, y = x.shape[-1], x
    for norm in (block.norm1, block.norm2):
        z = F.layer_norm(y, (C,), norm.weight[:C], norm.bias[:C], norm.eps)
        if norm is block.norm1:
            y = y + exact_attention(block.attn, z, heads)
            continue
        hidden = int(C * ratio)
        z = z @ block.fc1.weight[:hidden, :C].T + block.fc1.bias[:hidden]
        z = z * (1 + torch.erf(z / math.sqrt(2))) / 2
        y = y + z @ block.fc2.weight[:C, :hidden].T + block.fc2.bias[:C]
    return y


def compare(found, wanted, x, wide, dtype, parameters=()):
    """Outputs and gradients are those in float64."""
    assert found.dtype == dtype and found.shape == wanted.shape
    close(found.double(), wanted, tolerance(dtype, 32) * max(1, largest(wanted)))
    slope = normal(wanted.shape, dtype, 5)
    slopes = torch.autograd.grad(found, [x, *(p for p, _ in parameters)], slope)
    exact = torch.autograd.grad(wanted, [wide, *(q for _, q in parameters)], slope.double())
    for a, b in zip(slopes, exact):
        close(a.double(), b, tolerance(dtype, 64) * max(1, largest(b)))


@drawn(
    *(batches, map_sizes(3), st.integers(1, 3), dtypes(), seeds, layouts),
    *(st.integers(1, 2), st.sampled_from((8, 5, 1)), st.booleans()),
)
def test_attention(batch, grid, most, dtype, seed, layout, heads, width, elastic):
    heads, width = (heads, width) if elastic else (2, 8)
    layer = autoformer.Attention(8, 2, 4, grid, most, elastic=elastic)
    layer, exact = randomized(layer, seed, dtype)
    x = normal((batch, 1 + grid[0] * grid[1], width), dtype, seed, layout)
    x, wide = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    tables = [(layer.rel_k.vertical, exact.rel_k.vertical)]
    tables += [(layer.rel_v.horizontal, exact.rel_v.horizontal)]
    compare(layer(x, heads), exact_attention(exact, wide, heads), x, wide, dtype, tables)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x.detach().float(), heads) if dtype == torch.float32 else None
    if found is not None:
        wanted = exact_attention(exact, wide, heads)
        most = tolerance(torch.bfloat16, 32) * max(1, largest(wanted))
        close(found.double(), wanted, most)


@drawn(
    *(batches, map_sizes(3), dtypes(), seeds, layouts, st.integers(1, 2)),
    *(st.sampled_from((1, 1.5, 0.5)), st.sampled_from((8, 6, 3))),
)
def test_block(batch, grid, dtype, seed, layout, heads, ratio, width):
    block = autoformer.Block(8, 2, 1.5, head_dim=4, grid_size=grid, max_distance=2)
    block, exact = randomized(block, seed, dtype)
    x = normal((batch, 1 + grid[0] * grid[1], width), dtype, seed, layout)
    x, wide = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    compare(block(x, heads, ratio), exact_block(exact, wide, heads, ratio), x, wide, dtype)
    full = normal((batch, x.shape[1], 8), dtype, seed)
    assert torch.equal(block(full), block(full, 2, 1.5))


@pytest.mark.parametrize("num_heads", [0, 3, -1])
def test_heads_that_are_not_there(num_heads):
    layer = autoformer.Attention(8, 2, 4, (2, 2))
    with pytest.raises(ValueError, match=rf"num_heads \({num_heads}\)"):
        layer(torch.zeros(1, 5, 8), num_heads)
    block = autoformer.Block(8, 2, 1, head_dim=4, grid_size=(2, 2))
    with pytest.raises(ValueError, match=r"count \(16\) of outputs"):
        block(torch.zeros(1, 5, 8), 2, 2)


def test_a_layer_without_indices_gets_them_with_its_weights():
    made = autoformer.Attention(8, 2, 4, (2, 3))
    with torch.device("meta"):
        empty = autoformer.Attention(8, 2, 4, (2, 3))
    empty.to_empty(device="cpu")
    empty.load_state_dict(made.state_dict())
    x = normal((1, 7, 8), torch.float32)
    assert torch.equal(empty(x), made(x))
    for name in ("rows", "columns", "places"):
        getattr(empty, name).zero_()
    autoformer._renew_grid(empty)
    assert torch.equal(empty(x), made(x))


# --- models -----------------------------------------------------------------------------------


def exact_model(model, x, subnet, pool="avg"):
    """Logits of a network that is the first rows and columns of a model, in float64."""
    C, embed = subnet.embed_dim, model.patch_embed
    height, width = embed.patch_size
    rows, columns = x.shape[2] // height, x.shape[3] // width
    tokens = [model.cls_token[0, 0, :C].expand(len(x), C)]
    weight, bias = embed.proj.weight, embed.proj.bias
    for i in range(rows):
        for j in range(columns):
            patch = x[:, :, i * height : (i + 1) * height, j * width : (j + 1) * width]
            tokens.append((patch.flatten(1) @ weight.flatten(1).T + bias)[:, :C])
    y = torch.stack(tokens, 1) + model.pos_embed[..., :C]
    for block, h, r in zip(model.blocks, subnet.num_heads, subnet.mlp_ratio):
        y = exact_block(block, y, h, r)
    y = F.layer_norm(y, (C,), model.norm.weight[:C], model.norm.bias[:C], model.norm.eps)
    y = {"avg": y[:, 1:].mean(1), "token": y[:, 0], "": y}[pool]
    return y @ model.head.weight[:, :C].T + model.head.bias


@drawn(subnets, batches, dtypes(), seeds, layouts, st.sampled_from(("avg", "token", "")))
def test_supernet_and_extracted(subnet, batch, dtype, seed, layout, pool):
    model = SuperTransformer(SPACE, **SHAPE, embed_dim=13, max_distance=2, global_pool=pool)
    model, exact = randomized(model, seed, dtype)
    x = normal((batch, 2, 6, 9), dtype, seed, layout)
    state, flags = torch.get_rng_state(), model.training
    own = autoformer.extract(model, subnet)
    assert torch.equal(torch.get_rng_state(), state) and model.training == flags
    assert type(own) is autoformer.AutoFormer and own.subnet == subnet
    assert all(p.requires_grad and p.dtype == dtype for p in own.parameters())
    wanted = exact_model(exact, x.double(), subnet, pool)
    for found in (model(x, subnet), own(x)):
        close(found.double(), wanted, tolerance(dtype, 64) * max(1, largest(wanted)))
    assert torch.equal(model(x), model(x, SPACE.largest()))
    with torch.autocast("cpu", torch.bfloat16):
        found = own.float()(x.float())
    close(found.double(), wanted, tolerance(torch.bfloat16, 64) * max(1, largest(wanted)))
    with torch.no_grad():  # they are copies
        for p in own.parameters():
            p.zero_()
    assert all(p.any() for p in model.parameters())


@drawn(subnets, batches, seeds, st.sampled_from((torch.float64, torch.float32)))
def test_classical_sharing(subnet, batch, seed, dtype):
    model, exact = randomized(ClassicalSharing(SPACE, **SHAPE), seed, dtype)
    x = normal((batch, 2, 6, 9), dtype, seed)
    stem = exact.stems[SPACE.embed_dim.index(subnet.embed_dim)]
    blocks = exact.blocks[SPACE.embed_dim.index(subnet.embed_dim)]
    layers = zip(subnet.num_heads, subnet.mlp_ratio)
    choices = [(1, 1), (1, 1.5), (2, 1), (2, 1.5)]
    stem.blocks = nn.ModuleList(blocks[choices.index(c)][i] for i, c in enumerate(layers))
    wanted = exact_model(stem, x.double(), subnet)
    close(model(x, subnet).double(), wanted, tolerance(dtype, 64) * max(1, largest(wanted)))
    assert torch.equal(model(x), model(x, SPACE.largest()))


def test_layers_that_cannot_be_narrower():
    model = SuperTransformer(SPACE, **SHAPE)
    autoformer._check_elastic(model)
    model.blocks[1].fc2 = nn.Linear(18, 12)
    with pytest.raises(TypeError, match=r"blocks.1.fc2 \(Linear\)"):
        autoformer._check_elastic(model)
    with pytest.raises(ValueError, match=r"embed_dim \(0\)"):
        SuperTransformer(SPACE, **SHAPE, embed_dim=0)


@drawn(subnets, st.sampled_from(((6, 9), (3, 12), (3, 3))), st.sampled_from((0, 5)))
def test_counted(subnet, size, num_classes):
    options = SHAPE | dict(img_size=size, num_classes=num_classes)
    model = autoformer.AutoFormer(**options, **vars(subnet), max_distance=2)
    supernet = SuperTransformer(SPACE, **options, max_distance=2)
    parameters = sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter, attention_backend("reference"):
        model.eval()(torch.zeros(1, 2, *size))
    for counted in (model, supernet):
        assert autoformer.parameter_count(counted, subnet) == parameters
        assert autoformer.operations(counted, subnet) == counter.get_total_flops() / 2


# --- evolution --------------------------------------------------------------------------------


@drawn(spaces, seeds, st.sampled_from((0.0, 1.0, 0.3)), st.sampled_from((0.0, 1.0, 0.3)))
def test_mutation(space, seed, mutate_prob, depth_prob):
    rng = random.Random(seed)
    parent = autoformer.sample_subnet(space, rng)
    for _ in range(20):
        child = autoformer.mutate(parent, space, mutate_prob, depth_prob, rng)
        assert child in set(listed(space))
        if depth_prob == 0:
            assert (child.depth, child.embed_dim) == (parent.depth, parent.embed_dim)
        if mutate_prob == 0:
            n = min(child.depth, parent.depth)
            assert child.num_heads[:n] == parent.num_heads[:n]
            assert child.mlp_ratio[:n] == parent.mlp_ratio[:n]


def test_the_share_of_mutations():
    rng, parent = random.Random(0), SPACE.smallest()
    children = [autoformer.mutate(parent, SPACE, 0.4, 0.6, rng) for _ in range(4000)]
    for changed, p in (
        ([c.embed_dim != 8 for c in children], 0.6 / 2),
        ([c.depth != 1 for c in children], 0.6 * 2 / 3),
        ([c.num_heads[0] != 1 for c in children], 0.4 / 2),
        ([c.mlp_ratio[0] != 1 for c in children], 0.4 / 2),
        ([h != 1 for c in children for h in c.num_heads[1:]], 1 / 2),  # of new layers
    ):
        n = len(changed)
        assert abs(sum(changed) / n - p) < 4 * math.sqrt(p * (1 - p) / n)


@drawn(spaces, seeds)
def test_crossover(space, seed):
    rng = random.Random(seed)
    one, other = autoformer.sample_subnet(space, rng), autoformer.sample_subnet(space, rng)
    deep = max(one, other, key=lambda s: s.depth)
    seen = set()
    for _ in range(60):
        child = autoformer.crossover(one, other, rng)
        seen.add(child)
        assert child in set(listed(space)) and child.depth in (one.depth, other.depth)
        assert child.embed_dim in (one.embed_dim, other.embed_dim)
        for name in ("num_heads", "mlp_ratio"):
            a, b = getattr(one, name), getattr(other, name)
            for i, entry in enumerate(getattr(child, name)):
                allowed = {x[i] for x in (a, b) if i < len(x)}
                allowed = allowed if i < min(len(a), len(b)) else {getattr(deep, name)[i]}
                assert entry in allowed
    assert len(seen) > 1 or one == other


@drawn(spaces, st.integers(0, 12), seeds, st.integers(1, 3))
def test_draw(space, count, seed, every):
    networks = listed(space)
    seen, allowed = set(networks[::every]), set(networks[1::2])
    rng = random.Random(seed)
    found = autoformer.sample_distinct(
        lambda: autoformer.sample_subnet(space, rng), count, allowed.__contains__, seen
    )
    left = allowed - seen
    assert len(found) == len(set(found)) <= count and set(found) <= left
    if len(networks) < 50:  # then 200 tries for each find all
        assert len(found) == min(count, len(left))


def limits_of(model, low, high):
    sizes = sorted(autoformer.parameter_count(model, s) for s in listed(model.space))
    return dict(min_params=sizes[low], max_params=sizes[high])


@drawn(seeds, st.sampled_from(((0, -1), (100, -1), (0, 30), (40, 60), (-1, -1))))
def test_search_finds_the_best_of_what_fits(seed, ends):
    model = SuperTransformer(SPACE, **SHAPE)
    limits = limits_of(model, *ends)
    worth = {s: random.Random(f"{seed}{s}").random() for s in listed(SPACE)}
    fits = autoformer.budget(model, **limits, max_operations=10**9)
    inside = set()
    for s in worth:
        count = autoformer.parameter_count(model, s)
        if limits["min_params"] <= count <= limits["max_params"]:
            inside.add(s)
        assert fits(s) == (s in inside)
    best = max(inside, key=worth.get)
    options = dict(population=15, generations=5, parents=3, crossovers=5, mutations=5)

    def find():
        return autoformer.evolutionary_search(worth.get, model, seed=seed, **options, **limits)

    found, history = find()
    assert {s for s, _ in history} <= inside and len(dict(history)) == len(history)
    assert all(score == worth[s] for s, score in history)
    assert found == max(dict(history), key=worth.get)
    assert find() == (found, history)
    if len(history) == len(inside):
        assert found == best


def test_scores():
    a, b, c = listed(SPACE)[:3]
    scores = autoformer._scores_of([a, b, c], {a: 1.0, b: math.inf, c: math.inf}.get)
    assert autoformer._best_subnet(scores, {}) == (b, [(a, 1.0), (b, math.inf), (c, math.inf)])
    with pytest.raises(ValueError, match="score returned nan for Subnet"):
        autoformer._scores_of([a, b], {a: 1.0, b: math.nan}.get)
    with pytest.raises(ValueError, match="no network within {'max_params': 3} was found"):
        autoformer._best_subnet({}, dict(max_params=3))
    with pytest.raises(TypeError, match="max_parms"):
        autoformer.evolutionary_search(len, SuperTransformer(SPACE, **SHAPE), max_parms=10**9)


# --- all of them ------------------------------------------------------------------------------

ORACLES = {
    "SPACES": test_published_networks,
    "WIDTHS": test_published_networks,
    "RELEASED": test_published_networks,
    "Subnet": test_layers_that_do_not_fit,
    "Space": test_space,
    "sample_subnet": test_samples_are_uniform,
    "Linear": test_linear,
    "InterleavedLinear": test_interleaved,
    "LayerNorm": test_layer_norm,
    "_first_outputs": test_linear,
    "_relative_index": test_relative_index,
    "RelativePositions": test_relative_positions,
    "Attention": test_attention,
    "_renew_grid": test_a_layer_without_indices_gets_them_with_its_weights,
    "Block": test_block,
    "AutoFormer": test_supernet_and_extracted,
    "SuperTransformer": test_supernet_and_extracted,
    "_check_elastic": test_layers_that_cannot_be_narrower,
    "extract": test_supernet_and_extracted,
    "ClassicalSharing": test_classical_sharing,
    "parameter_count": test_counted,
    "operations": test_counted,
    "mutate": test_mutation,
    "crossover": test_crossover,
    "budget": test_search_finds_the_best_of_what_fits,
    "sample_distinct": test_draw,
    "evolutionary_search": test_search_finds_the_best_of_what_fits,
    "_scores_of": test_scores,
    "_best_subnet": test_scores,
}
NOT_HERE = {}


def test_everything_has_an_oracle():
    names = ORACLES.keys() | NOT_HERE.keys()
    assert {name for name in names if name[0] != "_"} == set(autoformer.__all__)
