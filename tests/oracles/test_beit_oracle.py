"""BEiT beside timm's, and its tokenizers and masks beside loops, for unusual calls."""

import math
import random
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from draws import batches, drawn, dtypes, layouts, map_sizes, normal, seeds, tolerance
from hypothesis import example
from hypothesis import strategies as st
from timm.layers import resize_rel_pos_bias_table
from timm.models import beit as timms

from attnlib import beit as module
from attnlib.beit import (
    _TABLE,
    Beit,
    BeitAttention,
    BeitBlock,
    BeitForMaskedImageModeling,
    BeitPositionBias,
    DiscreteVAE,
    FeatureEncoder,
    VectorQuantizer,
    VQAutoencoder,
    _adapt_tables,
    _bias_table,
    _check_masked,
    _check_num_masked,
    _check_vocabulary,
    _init_beit,
    _mask_rectangle,
    _random_rectangle,
    _renew_index,
    _resize_beit_table,
    _without_pretraining,
    beit_position_index,
    block_mask,
    conv_decoder,
    conv_encoder,
    dvae_loss,
    masked_loss,
    perplexity,
    position_bias,
)
from helpers import build, close, pair, same_weights

HALF = (torch.bfloat16, torch.float16)


def near(found, wanted, dtype, steps=16):
    """`found` of a dtype beside numbers in float64."""
    assert found.dtype == dtype and found.shape == wanted.shape
    largest = wanted.abs().max().item() if wanted.numel() else 0
    close(found.double(), wanted, tolerance(dtype, steps) * max(1, largest))


# --- positions --------------------------------------------------------------------------------


@drawn(map_sizes(5), st.integers(1, 3), dtypes(), seeds)
def test_biases_are_those_of_each_pair(window, heads, dtype, seed):
    rows = (2 * window[0] - 1) * (2 * window[1] - 1) + 3
    table, index = _bias_table(window, heads, dtype=dtype), beit_position_index(window)
    assert table.shape == (rows, heads) and table.dtype == dtype and not table.any()
    assert torch.equal(index, timms.gen_relative_position_index(window))
    table = normal((rows, heads), dtype, seed).requires_grad_()
    found = position_bias(table, index)
    wanted = table[index].permute(2, 0, 1)
    assert torch.equal(found, wanted)
    slopes = [torch.autograd.grad(x.double().square().sum(), table)[0] for x in (found, wanted)]
    near(slopes[0], slopes[1].double(), dtype)
    layer = BeitPositionBias(window, heads, dtype=dtype)
    layer.relative_position_bias_table.data.copy_(table)
    assert torch.equal(layer(), found)
    layer.relative_position_index = torch.zeros_like(index)
    _renew_index(layer)
    assert torch.equal(layer(), found)


@drawn(map_sizes(5), map_sizes(5), st.integers(1, 2), dtypes(), seeds, layouts)
def test_tables_are_resized_as_timm_does(old, new, heads, dtype, seed, layout):
    rows = [math.prod(2 * side - 1 for side in window) + 3 for window in (old, new)]
    table = normal((rows[0], heads), dtype, seed, layout)
    found = _resize_beit_table(table, new, old)
    wanted = resize_rel_pos_bias_table(table, new, (rows[1], heads), old)
    assert found.dtype == dtype and torch.equal(found[-3:], table[-3:])
    close(found.double(), wanted.double(), max(1e-5, tolerance(dtype, 4)))  # timm's: float32


@drawn(map_sizes(4), map_sizes(4), seeds)
def test_tables_of_weights_are_adapted_to_the_model(old, new, seed):
    source, target = (build("beit", img_size=tuple(8 * s for s in grid)) for grid in (old, new))
    for block in source.blocks:
        block.attn.relative_position_bias_table.data.normal_()
    stored = source.state_dict()
    found = _adapt_tables(stored, target, old)
    assert found.keys() == stored.keys()
    for key, x in stored.items():
        wanted = _resize_beit_table(x, new, old) if key.endswith(_TABLE) else x
        assert torch.equal(found[key], wanted)
    source.set_input_size(tuple(8 * s for s in new))
    target.load_state_dict(found)
    x = normal((2, 3, 8 * new[0], 8 * new[1]), torch.float32, seed)
    close(source.eval()(x), target.eval()(x), 1e-6)


# --- blocks and models ------------------------------------------------------------------------


@drawn(
    map_sizes(3),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
    dtypes(),
    seeds,
    layouts,
)
def test_attention_and_a_block_are_timms(
    window, heads, qkv_bias, scale, batch, dtype, seed, layout
):
    dim, length = 4 * heads, 1 + math.prod(window)
    options = dict(dim=dim, num_heads=heads, window_size=window, qkv_bias=qkv_bias)
    x = normal((batch, length, dim), dtype, seed, layout)
    block = options | dict(init_values=0.3 if scale else None, mlp_ratio=2.5)
    for ours, theirs, given in (
        (BeitAttention, timms.Attention, options),
        (BeitBlock, timms.Block, block),
    ):
        ours, _ = same_weights(ours, ours, seed, **given)
        ours, theirs = ours.to(dtype), theirs(**given)
        theirs.load_state_dict(ours.state_dict())
        theirs = theirs.double()
        for norm in ("norm1", "norm2"):
            if hasattr(theirs, norm):
                getattr(theirs, norm).eps = 1e-6
        found = []
        for layer, d in ((ours, dtype), (theirs, torch.float64)):
            inputs = [x.to(d).detach().clone().requires_grad_(), *layer.parameters()]
            out = layer(inputs[0])
            found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        for a, b in zip(*found, strict=True):
            near(a, b, dtype, 256)
        assert ours(x[:0]).shape == (0, length, dim)
        bias = normal((heads, length, length), dtype, seed)
        near(ours(x, bias), given_bias(theirs, x.double(), bias.double()), dtype, 256)


def given_bias(layer, x, bias):
    """timm adds a shared bias to that of its own table, which is removed."""
    own = layer.attn if hasattr(layer, "attn") else layer
    table, own.relative_position_bias_table = own.relative_position_bias_table, None
    out = layer(x, shared_rel_pos_bias=bias[None])
    own.relative_position_bias_table = table
    return out


@drawn(
    map_sizes(4),
    st.sampled_from(("avg", "token", "")),
    st.sampled_from((None, 0.1)),
    st.integers(1, 3),
    seeds,
    layouts,
)
def test_a_model_is_timms(grid, pool, init_values, batch, seed, layout):
    size = 8 * grid[0], 8 * grid[1]
    found = []
    for model in pair("beit", seed, img_size=size, global_pool=pool, init_values=init_values):
        x = normal((batch, 3, *size), seed=seed, layout=layout).requires_grad_()
        out = model.double()(x)
        out.square().sum().backward()
        found.append([out, x.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        close(a, b, 1e-9 * max(1, b.abs().max().item()))


MASKED = dict(patch_size=4, embed_dim=12, depth=2, num_heads=3)


def pretrained(grid, seed):
    """A small model of pre-training in float64, with random weights."""
    torch.manual_seed(seed)
    size = 4 * grid[0], 4 * grid[1]
    model = BeitForMaskedImageModeling(img_size=size, vocab_size=7, **MASKED)
    for p in model.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    return model.double()


def timms_pretrained(model, x, mask):
    """Logits of hidden patches by timm's blocks, which share the bias of one table."""
    options = dict(use_abs_pos_emb=False, use_shared_rel_pos_bias=True, init_values=0.1)
    options |= dict(num_classes=0, global_pool="", img_size=x.shape[2:], **MASKED)
    theirs = timms.Beit(**options).double()
    own = model.state_dict()
    theirs.load_state_dict({key: own[key] for key in theirs.state_dict()})
    tokens = theirs.patch_embed(x)
    tokens = torch.where(mask.flatten(1)[..., None], own["mask_token"], tokens)
    tokens = torch.cat([own["cls_token"].expand(len(x), -1, -1), tokens], 1)
    for block in theirs.blocks:
        tokens = block(tokens, shared_rel_pos_bias=theirs.rel_pos_bias())
    tokens = theirs.norm(tokens)[:, 1:]
    chosen = torch.cat([row[hidden] for row, hidden in zip(tokens, mask.flatten(1))])
    return F.linear(chosen, own["lm_head.weight"], own["lm_head.bias"])


@drawn(map_sizes(4).filter(lambda grid: math.prod(grid) > 1), st.integers(1, 3), seeds)
@example((3, 2), 2, 0)
def test_guesses_of_hidden_patches_are_timms(grid, batch, seed):
    model, n = pretrained(grid, seed), math.prod(grid)
    x = normal((batch, 3, 4 * grid[0], 4 * grid[1]), seed=seed)
    mask = torch.zeros(batch, n, dtype=torch.bool)
    for row, chance in zip(mask, normal((batch, n), seed=seed)):
        row[chance.argsort()[: 1 + seed % (n - 1)]] = True  # some and not all
    mask = mask.view(batch, *grid)
    wanted = timms_pretrained(model, x, mask)
    close(model(x, mask), wanted, 1e-9)
    close(model(x, mask.flatten(1)), wanted, 1e-9)
    tokens = torch.arange(batch * n).view(batch, *grid) % 7
    loss, count = masked_loss(model, (x, tokens, mask))
    shares = wanted.softmax(-1).gather(1, tokens[mask][:, None])
    close(loss, -shares.log().sum(), 1e-8)
    assert count == mask.sum() == len(shares)
    nothing, none = masked_loss(model, (x[:0], tokens[:0], mask[:0]))
    assert nothing == 0 and none == 0


@drawn(map_sizes(3), st.sampled_from(("avg", "token", "")), seeds)
def test_the_encoder_is_the_pretrained_network(grid, pool, seed):
    model = pretrained(grid, seed)
    encoder = model.encoder(global_pool=pool).double()
    found = _without_pretraining(model.state_dict(), encoder)
    assert found.keys() == encoder.state_dict().keys()
    assert isinstance(encoder, Beit) and _without_pretraining(found, encoder) == found
    x = normal((2, 3, 4 * grid[0], 4 * grid[1]), seed=seed)
    nothing = torch.zeros(2, math.prod(grid), dtype=torch.bool)
    tokens = model.forward_features(x, nothing)
    if pool == "avg":  # its norm starts anew, behind the mean
        bias, tokens = model.rel_pos_bias(), encoder.embed(x)
        for block in model.blocks:
            tokens = block(tokens, bias)
        wanted = F.layer_norm(tokens[:, 1:].mean(1), (12,), eps=1e-6)
    else:
        wanted = tokens[:, 0] if pool == "token" else tokens
    close(encoder(x), wanted, 1e-10)


@drawn(st.integers(0, 3), st.integers(1, 5), st.integers(0, 99))
def test_a_mask_hides_some_patches_of_each_image(batch, count, seed):
    mask = normal((batch, count), seed=seed) > 0
    fits = all(0 < row < count for row in mask.sum(1).tolist())
    if fits:
        _check_masked(mask, (batch, count))
    else:
        with pytest.raises(ValueError, match="masked has"):
            _check_masked(mask, (batch, count))
    for other in (mask.int(), mask[:, 1:], mask[None]):
        with pytest.raises(ValueError, match="masked of shape"):
            _check_masked(other, (batch, count))


def test_deeper_layers_start_with_smaller_weights():
    model = build("beit", embed_dim=48, num_heads=3)
    _init_beit(model)
    for i, block in enumerate(model.blocks, 1):
        for layer in (block.attn.proj, block.mlp.fc2):
            wanted = 0.02 / math.sqrt(2 * i)
            assert layer.weight.std().item() == pytest.approx(wanted, rel=0.1)
        assert block.mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.1)


# --- masks ------------------------------------------------------------------------------------


@drawn(map_sizes(7), st.integers(-1, 50), st.integers(1, 20), st.floats(0.1, 1), seeds)
@example((1, 7), 3, 2, 0.3, 0)
@example((1, 1), 1, 1, 0.3, 0)
def test_masks_hide_almost_as_many_as_asked_for(grid, count, smallest, aspect, seed):
    rng = random.Random(seed)
    if not 1 <= count < math.prod(grid):
        with pytest.raises(ValueError, match=r"num_masked \("):
            _check_num_masked(count, math.prod(grid))
        with pytest.raises(ValueError, match=r"num_masked \("):
            block_mask(grid, count, smallest, aspect, rng)
        return
    _check_num_masked(count, math.prod(grid))
    state = random.getstate()
    mask = block_mask(grid, count, smallest, aspect, rng)
    assert random.getstate() == state and mask.shape == grid and mask.dtype == torch.bool
    assert count - min(smallest, count // 4) <= mask.sum() <= count
    again = block_mask(grid, count, smallest, aspect, random.Random(seed))
    assert torch.equal(mask, again)


@drawn(st.floats(0.5, 40), st.floats(0.05, 1), seeds)
def test_rectangles_have_the_area_and_the_shape(area, aspect, seed):
    draws, rng = random.Random(seed), random.Random(seed)
    for _ in range(20):
        height, width = _random_rectangle(area, aspect, rng)
        ratio = math.exp(draws.uniform(math.log(aspect), -math.log(aspect)))
        assert aspect <= ratio * (1 + 1e-9) and ratio <= (1 + 1e-9) / aspect
        assert abs(height - math.sqrt(area * ratio)) <= 0.5 + 1e-9
        assert abs(width - math.sqrt(area / ratio)) <= 0.5 + 1e-9


@drawn(map_sizes(6), st.integers(0, 40), seeds, st.data())
def test_a_rectangle_is_hidden_or_nothing(grid, most, seed, data):
    height, width = (data.draw(st.integers(0, side)) for side in grid)
    before = normal(grid, seed=seed) > 0.5
    mask = before.clone()
    new = _mask_rectangle(mask, height, width, most, random.Random(seed))
    changed = mask & ~before
    assert new == changed.sum() <= most and (mask | before).equal(mask)
    if new == 0:
        assert torch.equal(mask, before)
        return
    rows, columns = (changed.any(axis).nonzero().flatten() for axis in (1, 0))
    assert rows[-1] - rows[0] < height and columns[-1] - columns[0] < width
    fits = [
        (top, left)
        for top in range(grid[0] - height + 1)
        for left in range(grid[1] - width + 1)
        if mask[top : top + height, left : left + width].all()
        and changed[top : top + height, left : left + width].sum() == new
    ]
    assert fits


# --- tokenizers -------------------------------------------------------------------------------


@drawn(st.one_of(st.integers(-1, 4), st.sampled_from((2.0, None, "3"))))
def test_a_vocabulary_has_two_words(count):
    if isinstance(count, int) and count >= 2:
        _check_vocabulary(count)
    else:
        with pytest.raises(ValueError, match=r"num_embeddings \("):
            _check_vocabulary(count)


def conv(x, layer, **options):
    return F.conv2d(x, layer.weight.double(), layer.bias.double(), **options)


@drawn(map_sizes(4), st.sampled_from((1, 2, (2, 3), (3, 1))), batches, dtypes(), seeds, layouts)
def test_coders_are_three_layers(grid, patch, batch, dtype, seed, layout):
    pair = patch if isinstance(patch, tuple) else (patch, patch)
    size = grid[0] * pair[0], grid[1] * pair[1]
    torch.manual_seed(seed)
    encoder, decoder = (
        conv_encoder(2, 6, 5, patch).to(dtype),
        conv_decoder(5, 6, 2, patch).to(dtype),
    )
    x = normal((batch, 2, *size), dtype, seed, layout)
    z = encoder(x)
    wanted = F.gelu(conv(x.double(), encoder[0], padding=1))
    wanted = F.gelu(conv(wanted, encoder[2], stride=pair))
    near(z, conv(wanted, encoder[4]), dtype)
    assert z.shape == (batch, 5, *grid)
    y = decoder(z)
    hidden = F.gelu(conv(z.double(), decoder[0], padding=1))
    spread = torch.einsum("bchw,cdpq->bdhpwq", hidden, decoder[2].weight.double())
    spread = spread.flatten(4).flatten(2, 3) + decoder[2].bias.double()[:, None, None]
    near(y, conv(F.gelu(spread), decoder[4], padding=1), dtype)
    assert y.shape == x.shape


@drawn(
    map_sizes(3), st.integers(2, 5), batches, st.booleans(), st.sampled_from((1.0, 0.3)), seeds
)
def test_the_discrete_autoencoder_samples_tokens(grid, codes, batch, hard, tau, seed):
    torch.manual_seed(seed)
    model = DiscreteVAE(codes, 1, 2, 6).double()
    x = normal((batch, 1, 2 * grid[0], 2 * grid[1]), seed=seed)
    torch.manual_seed(seed)
    found, logits = model(x, tau, hard)
    torch.manual_seed(seed)
    noise = -torch.empty_like(logits).exponential_().log()
    soft = ((logits + noise) / tau).softmax(1)
    z = F.one_hot(soft.argmax(1), codes).movedim(3, 1).double() if hard else soft
    weight = model.codes.weight[:, :, 0, 0]
    close(found, model.decoder(torch.einsum("bkhw,dk->bdhw", z, weight)), 1e-10)
    tokens = model.tokens(x)
    assert torch.equal(tokens, logits.argmax(1)) and tokens.shape == (batch, *grid)
    close(model.decode(tokens), model.decoder(weight.T[tokens].permute(0, 3, 1, 2)), 1e-10)


@drawn(
    map_sizes(3),
    st.integers(2, 6),
    st.integers(1, 3),
    dtypes(),
    st.sampled_from((0.0, 1.0, 3.0)),
    st.sampled_from((1.0, 0.05)),
    seeds,
)
def test_the_bound_is_the_sum_over_places(grid, codes, batch, dtype, beta, spread, seed):
    shapes = [(batch, 1, 3, 5), (batch, 1, 3, 5), (batch, codes, *grid)]
    inputs = [normal(shape, dtype, seed + i) for i, shape in enumerate(shapes)]
    inputs[2] = inputs[2] * spread
    x, y, logits = (tensor.double() for tensor in inputs)
    q = logits.softmax(1)
    divergence = (q * (q * codes).log()).sum()
    wanted = (x - y).square().sum() + beta * divergence

    def forward(images, tau):
        assert images is inputs[0] and tau == 0.7
        return inputs[1], inputs[2]

    model = DiscreteVAE(codes)
    model.forward = forward
    loss, count = dvae_loss(model, (inputs[0],), beta, tau=0.7)
    assert count == batch
    near(loss, wanted, torch.promote_types(dtype, torch.float32))


def test_the_bound_of_large_images_in_float16():
    x = torch.full((1, 3, 224, 224), 2.0, dtype=torch.float16)
    model = DiscreteVAE(3)
    model.forward = lambda x, tau: (0 * x, x[:, :, :2, :2])
    loss, count = dvae_loss(model, (x,))
    assert count == 1 and loss == 4 * 3 * 224 * 224  # more than 65,504


@drawn(st.sampled_from(((), (0,), (5,), (2, 3, 4))), st.integers(1, 9), seeds)
def test_the_perplexity_is_the_entropys(shape, count, seed):
    tokens = (normal(shape, seed=seed) * 2).abs().long().clamp(max=count - 1)
    if tokens.numel() == 0:
        with pytest.raises(ValueError, match="at least one token"):
            perplexity(tokens, count)
        return
    shares = [n / tokens.numel() for n in Counter(tokens.flatten().tolist()).values()]
    wanted = math.exp(-sum(share * math.log(share) for share in shares))
    assert perplexity(tokens, count) == pytest.approx(wanted, rel=1e-5)


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


@drawn(
    st.integers(2, 6),
    st.integers(2, 5),
    st.integers(1, 30),
    st.sampled_from((0.0, 0.9)),
    seeds,
    layouts,
)
def test_codes_move_towards_the_vectors_that_chose_them(
    codes, width, count, decay, seed, layout
):
    torch.manual_seed(seed)
    layer = VectorQuantizer(codes, width, decay, kmeans_steps=0).double()
    before = layer.embedding.clone()
    z = normal((count, width), seed=seed, layout=layout).requires_grad_()
    found, tokens, loss = layer(z)
    direction = unit(z.detach())
    assert torch.equal(tokens, (direction @ before.T).argmax(-1))
    assert torch.equal(layer.eval().tokens(z[None])[0], (z @ layer.embedding.T).argmax(-1))
    close(found, before[tokens], 1e-12)
    close(loss, (direction - before[tokens]).square().mean(), 1e-12)
    (slope,) = torch.autograd.grad(found.square().sum(), z)
    straight = 2 * before[tokens]  # through the direction of z to z
    along = (straight * direction).sum(-1, keepdim=True) * direction
    close(slope, (straight - along) / z.detach().norm(dim=-1, keepdim=True), 1e-9)
    for k in range(codes):
        chosen = direction[tokens == k]
        moved = before[k]
        if len(chosen):
            moved = unit(decay * before[k] + (1 - decay) * unit(chosen.mean(0)))
        close(layer.embedding[k], moved, 1e-10)


@drawn(st.integers(2, 5), st.integers(0, 12), st.integers(1, 3), seeds)
def test_the_first_batch_sets_the_codes(codes, count, steps, seed):
    layer = VectorQuantizer(codes, 3, kmeans_steps=steps).double()
    z = unit(normal((count, 3), seed=seed))
    if count < codes:
        with pytest.raises(ValueError, match="k-means needs at least"):
            layer.start(z)
        return
    torch.manual_seed(seed)
    layer.start(z)
    torch.manual_seed(seed)
    means = z[torch.randperm(count)[:codes]]
    for _ in range(steps):
        nearest = (z @ means.T).argmax(-1)
        chosen = [z[nearest == k] for k in range(codes)]
        means = torch.stack(
            [unit(rows.mean(0)) if len(rows) else old for rows, old in zip(chosen, means)]
        )
    close(layer.embedding, means, 1e-9)
    assert bool(layer.started)


def tokenizer(**options):
    torch.manual_seed(0)
    quantizer = VectorQuantizer(4, 3, **options)
    return VQAutoencoder(conv_encoder(1, 6, 3, 2), quantizer, conv_decoder(3, 6, 1, 2))


@drawn(map_sizes(4), st.integers(1, 3), seeds, layouts)
def test_places_of_a_map_are_quantized_one_by_one(grid, batch, seed, layout):
    model = tokenizer(kmeans_steps=0).double().eval()
    x = normal((batch, 1, 2 * grid[0], 2 * grid[1]), seed=seed, layout=layout)
    found, tokens, loss = model(x)
    maps, codes = model.encoder(x), model.quantizer.embedding
    for place in torch.cartesian_prod(*map(torch.arange, (batch, *grid))).tolist():
        b, row, column = place
        wanted = (unit(maps[b, :, row, column]) @ codes.T).argmax()
        assert tokens[b, row, column] == wanted
    wanted = codes[tokens].permute(0, 3, 1, 2)
    close(found, model.decoder(wanted), 1e-10)
    close(model.decode(tokens), found, 1e-10)
    close(loss, (unit(maps.movedim(1, -1)) - codes[tokens]).square().mean(), 1e-12)
    assert torch.equal(model.tokens(x), tokens)
    assert model.tokens(x[:0]).shape == (0, *grid)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("steps", [0, 3])
def test_codes_keep_their_dtype_under_autocast(dtype, steps):
    """Otherwise a tokenizer that was trained under autocast fails without it."""
    model, x = tokenizer(kmeans_steps=steps).train(), normal((2, 1, 8, 12), torch.float32)
    for _ in range(2):
        with torch.autocast("cpu", dtype):
            model(x)
    assert model.quantizer.embedding.dtype == torch.float32
    found, tokens, _ = model.eval()(x)
    close(model.decode(tokens), found, 1e-5)


@drawn(st.sampled_from(("vit", "beit", "swin")), map_sizes(3), batches, seeds)
def test_the_encoder_of_features_projects_the_last_map(name, grid, batch, seed):
    size = 8 * grid[0], 8 * grid[1]
    model = FeatureEncoder(build(name, img_size=size), 5).double().eval()
    x = normal((batch, 3, *size), seed=seed)
    tokens = model.backbone.forward_features(x)
    if name != "swin":
        rows, columns = grid
        tokens = tokens[:, 1:].unflatten(1, (rows, columns))
    weight, bias = model.proj.weight[:, :, 0, 0], model.proj.bias
    close(model(x), (tokens @ weight.T + bias).permute(0, 3, 1, 2), 1e-10)


ORACLES = {
    "_TABLE": test_tables_of_weights_are_adapted_to_the_model,
    "conv_encoder": test_coders_are_three_layers,
    "conv_decoder": test_coders_are_three_layers,
    "_check_vocabulary": test_a_vocabulary_has_two_words,
    "DiscreteVAE": test_the_discrete_autoencoder_samples_tokens,
    "dvae_loss": test_the_bound_is_the_sum_over_places,
    "perplexity": test_the_perplexity_is_the_entropys,
    "VectorQuantizer": test_codes_move_towards_the_vectors_that_chose_them,
    "VQAutoencoder": test_places_of_a_map_are_quantized_one_by_one,
    "_check_num_masked": test_masks_hide_almost_as_many_as_asked_for,
    "block_mask": test_masks_hide_almost_as_many_as_asked_for,
    "_random_rectangle": test_rectangles_have_the_area_and_the_shape,
    "_mask_rectangle": test_a_rectangle_is_hidden_or_nothing,
    "beit_position_index": test_biases_are_those_of_each_pair,
    "_resize_beit_table": test_tables_are_resized_as_timm_does,
    "_bias_table": test_biases_are_those_of_each_pair,
    "position_bias": test_biases_are_those_of_each_pair,
    "_renew_index": test_biases_are_those_of_each_pair,
    "BeitAttention": test_attention_and_a_block_are_timms,
    "BeitBlock": test_attention_and_a_block_are_timms,
    "_init_beit": test_deeper_layers_start_with_smaller_weights,
    "Beit": test_a_model_is_timms,
    "_adapt_tables": test_tables_of_weights_are_adapted_to_the_model,
    "_without_pretraining": test_the_encoder_is_the_pretrained_network,
    "BeitPositionBias": test_biases_are_those_of_each_pair,
    "BeitForMaskedImageModeling": test_guesses_of_hidden_patches_are_timms,
    "_check_masked": test_a_mask_hides_some_patches_of_each_image,
    "masked_loss": test_guesses_of_hidden_patches_are_timms,
    "FeatureEncoder": test_the_encoder_of_features_projects_the_last_map,
}
NOT_HERE = {
    "SIZES": "widths and depths of the paper, compared with timm's in test_beit.py",
    "_gather_rows": "needs several processes, as in test_train_parallel.py",
}


def test_every_public_name_is_tested_here_or_has_a_reason():
    names = ORACLES.keys() | NOT_HERE.keys()
    assert {name for name in names if name[0] != "_"} == set(module.__all__)
