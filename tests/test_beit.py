"""BEiT: numbers of timm and of transformers, masks, tokenizers, weights, bad input."""

import copy
import inspect
import math
import random

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.beit import Beit as TimmBeit
from timm.models.beit import checkpoint_filter_fn, gen_relative_position_index
from torch import nn

from attnlib.beit import (
    Beit,
    BeitAttention,
    BeitForMaskedImageModeling,
    DiscreteVAE,
    FeatureEncoder,
    VectorQuantizer,
    VQAutoencoder,
    _resize_beit_table,
    beit_position_index,
    block_mask,
    conv_decoder,
    conv_encoder,
    dvae_loss,
    masked_loss,
    perplexity,
)
from attnlib.convert import rename_keys
from attnlib.finetune import layer_scales
from attnlib.models import create_model, list_models, load_pretrained
from attnlib.train import fit, shuffled_batches
from attnlib.vit import VisionTransformer
from helpers import close, images

SMALL = dict(img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=5)
RELATIVE = dict(use_abs_pos_emb=False, use_rel_pos_bias=True)
COUNTS = {
    "beit_base_patch16_224": 86_530_984,
    "beit_base_patch16_384": 86_744_104,
    "beit_large_patch16_224": 304_430_568,
    "beit_large_patch16_384": 304_998_888,
    "beit_large_patch16_512": 305_674_728,
    "beitv2_base_patch16_224": 86_530_984,
    "beitv2_large_patch16_224": 304_430_568,
}
MASKED = dict(embed_dim=24, depth=3, num_heads=3, img_size=32, patch_size=8, vocab_size=11)


def randomized(model, seed=0):
    """All parameters random, so that exchanged keys show."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.3)
    return model


def twins(**options):
    """A small Beit and timm's with the same random weights, in float64."""
    theirs = randomized(TimmBeit(**SMALL | RELATIVE | dict(init_values=0.1) | options))
    ours = Beit(**SMALL | dict(init_values=0.1) | options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    return ours.double().eval(), theirs.double().eval()


def derivatives(model, x):
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return {"out": out, "x": x.grad} | {key: p.grad for key, p in model.named_parameters()}


def same(found, wanted, tolerance=1e-10):
    """Equal up to a tolerance in units of the largest entry where that is above 1."""
    assert found.keys() == wanted.keys()
    for key, y in wanted.items():
        assert (found[key] is None) == (y is None), key
        if y is not None:
            close(found[key], y, tolerance * max(1, y.abs().max().item()))


# --- timm -------------------------------------------------------------------------------------

CASES = [
    {},
    {"num_classes": 0},
    {"qkv_bias": False},
    {"in_chans": 1},
    {"img_size": (32, 48)},
    {"img_size": (64, 96), "patch_size": 16},
    {"mlp_ratio": 2.5},
    {"init_values": None},
    {"global_pool": "token"},
    {"global_pool": ""},
    {"patch_size": (8, 4)},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_outputs_and_gradients_are_timms(options):
    ours, theirs = twins(**options)
    x = images(2, options.get("img_size", 32), options.get("in_chans", 3))
    same(derivatives(ours, x), derivatives(theirs, x))
    ours, theirs, x = ours.float(), theirs.float(), x.float()
    with torch.no_grad():
        same({"out": ours(x)}, {"out": theirs(x)}, 1e-5)


@pytest.mark.parametrize("size", [64, 24, (16, 56), (40, 32)])
def test_other_sizes_are_timms(size):
    ours, theirs = twins()
    for model in (ours, theirs):
        model.set_input_size(size)
    x = images(2, size)
    table = "blocks.1.attn.relative_position_bias_table"
    close(ours.get_parameter(table), theirs.get_parameter(table), 1e-5)
    ours.load_state_dict(theirs.state_dict())  # the resize is computed in float32
    same(derivatives(ours, x), derivatives(theirs, x))


@pytest.mark.parametrize("size", [48, (32, 64)])
def test_stored_tables_are_resampled_as_timm_does(size):
    small, _ = twins()
    ours, theirs = twins(img_size=size)
    found = ours.resample_state_dict(small.state_dict())
    wanted = checkpoint_filter_fn(small.state_dict(), theirs)
    for key, x in wanted.items():
        close(found[key], x, 1e-5)
    assert load_pretrained(ours.float(), small.float().state_dict()) == []


def test_the_present_size_leaves_the_parameters_alone():
    model = Beit(**SMALL)
    old = list(model.parameters())
    model.set_input_size(32)
    assert all(a is b for a, b in zip(old, model.parameters(), strict=True))
    model.blocks[0].attn.relative_position_bias_table.requires_grad_(False)
    model.set_input_size(48)
    assert not model.blocks[0].attn.relative_position_bias_table.requires_grad


def test_features_maps_and_a_new_head():
    ours, theirs = twins(global_pool="token")
    x = images()
    found = ours.forward_intermediates(x, [0, 2], norm=True, return_prefix_tokens=True)
    wanted = theirs.forward_intermediates(x, [0, 2], norm=True, return_prefix_tokens=True)
    close(found[0], wanted[0])
    for mine, other in zip(found[1], wanted[1], strict=True):
        for a, b in zip(mine, other, strict=True):
            close(a, b)
    close(ours.forward_features(x), theirs.forward_features(x))
    logits = ours.forward_head(ours.forward_features(x), pre_logits=True)
    close(logits, theirs.forward_head(theirs.forward_features(x), pre_logits=True))
    maps = ours.attention_maps(x)
    assert [m.shape for m in maps] == 3 * [(2, 3, 17, 17)]
    close(maps[0].sum(-1), torch.ones_like(maps[0][..., 0]), 1e-12)
    ours.reset_classifier(7, "avg")
    _, theirs = twins(global_pool="avg", num_classes=7)  # timm's reset leaves the norm in place
    theirs.load_state_dict(ours.state_dict(), strict=True)
    close(ours(x), theirs(x))


@pytest.mark.parametrize("name", COUNTS)
def test_every_name_has_timms_keys_shapes_and_count(name):
    with torch.device("meta"):
        theirs, ours = timm.create_model(name, num_classes=1000), create_model(name)
    keys = [{k: (x.shape, x.dtype) for k, x in m.state_dict().items()} for m in (ours, theirs)]
    assert keys[0] == keys[1] and list(keys[0]) == list(keys[1])
    assert ours.no_weight_decay() == theirs.no_weight_decay() & set(keys[0])
    assert sum(p.numel() for p in ours.parameters()) == COUNTS[name]
    assert ours.blocks[0].norm1.eps == theirs.blocks[0].norm1.eps == ours.fc_norm.eps


def test_every_name_is_counted():
    assert set(list_models("beit*")) == set(COUNTS)
    assert set(COUNTS) == {n for n in timm.list_models("beit*") if not n.startswith("beit3")}


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "beitv2_large_patch16_224"])
@pytest.mark.parametrize("size", [224, (64, 96)])
def test_logits_of_a_name_are_timms(name, size):
    """Two blocks; widths and all that is not depth are the name's."""
    options = dict(depth=2, img_size=size, num_classes=5)
    theirs = timm.create_model(name, **options).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.05)
    ours = create_model(name, **options).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = images(1, size).float()
    with torch.no_grad():
        same({"out": ours(x)}, {"out": theirs(x)}, 1e-5)


def test_it_starts_as_timms():
    """The scale of every parameter; random numbers differ."""
    options = SMALL | dict(embed_dim=192, init_values=0.1)
    ours, theirs = Beit(**options), TimmBeit(**options, **RELATIVE)
    theirs = dict(theirs.named_parameters())
    for key, p in ours.named_parameters():
        if key in ("patch_embed.proj.bias", "cls_token", "head.weight"):
            assert p.std() < 2 * theirs[key].std() < 4 * p.std(), key
        else:
            assert (p.std() - theirs[key].std()).abs() <= 0.05 * theirs[key].std(), key
            assert (p.mean() - theirs[key].mean()).abs() <= 5e-3, key
    ratio = ours.blocks[0].mlp.fc2.weight.std() / ours.blocks[2].mlp.fc2.weight.std()
    assert abs(ratio - math.sqrt(3)) < 0.05


def test_dropout_depth_checkpoints_and_rates():
    torch.manual_seed(0)
    model = Beit(**SMALL, drop_path_rate=0.5, attn_drop_rate=0.2).double().train()
    x, gradients = images(4), []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        torch.manual_seed(0)
        gradients.append(torch.autograd.grad(model(x).square().sum(), model.parameters()))
    for a, b in zip(*gradients, strict=True):
        close(a, b, 1e-12)
    scales = layer_scales(model, 0.5)
    assert scales["cls_token"] == 1 / 16 and scales["fc_norm.weight"] == 1
    assert scales["blocks.0.attn.relative_position_bias_table"] == 1 / 8
    assert copy.deepcopy(model).eval()(x).shape == (4, 5)


# --- positions --------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [(1, 1), (3, 3), (4, 6), (5, 2), (14, 14)])
def test_the_index_is_timms(window):
    assert torch.equal(beit_position_index(window), gen_relative_position_index(window))


@given(st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_offsets_and_rows_are_one_to_one(rows, columns):
    index = beit_position_index((rows, columns))
    last = (2 * rows - 1) * (2 * columns - 1)
    place = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    offsets = (place[:, None] - place).flatten(0, 1)
    pairs = set(zip(map(tuple, offsets.tolist()), index[1:, 1:].flatten().tolist()))
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}) == last
    assert set(index[0, 1:].tolist()) | {last} == {last}
    assert set(index[1:, 0].tolist()) | {last + 1} == {last + 1}
    assert index[0, 0] == last + 2


def test_a_constant_in_a_table_changes_nothing():
    ours, _ = twins()
    x, before = images(), None
    before = ours(x)
    with torch.no_grad():
        ours.blocks[1].attn.relative_position_bias_table.add_(3.0)
    close(ours(x), before)


def test_a_resized_table_keeps_the_rows_of_the_class_token():
    table = torch.randn(7 * 7 + 3, 2)
    assert torch.equal(_resize_beit_table(table, (6, 6))[-3:], table[-3:])
    assert torch.equal(_resize_beit_table(table, (4, 4)), table)
    layer = BeitAttention(8, 2, (4, 4))
    layer.set_window_size((3, 5))
    assert layer(torch.randn(1, 16, 8)).shape == (1, 16, 8)


# --- the transformers library and the authors' files ------------------------------------------


def config(**options):
    return transformers.BeitConfig(
        **dict(vocab_size=11, hidden_size=24, num_hidden_layers=3, num_attention_heads=3),
        **dict(intermediate_size=96, image_size=32, patch_size=8, layer_norm_eps=1e-6),
        **dict(layer_scale_init_value=0.1, num_labels=5, drop_path_rate=0.0) | options,
    )


def masked_peer():
    """transformers' model for masked patches as the authors configure it."""
    options = dict(use_mask_token=True, use_shared_relative_position_bias=True)
    theirs = transformers.BeitForMaskedImageModeling(config(**options))
    return randomized(theirs).double().eval()


def older_names(state_dict):
    """The names that transformers had until version 5."""
    table = (
        (r"^beit\.layers\.", "beit.encoder.layer."),
        (r"^beit\.shared_position_bias\.", "beit.encoder.relative_position_bias."),
        (r"(layer\.\d+)\.(relative_position_bias\.)", r"\1.attention.attention.\2"),
        (r"\.attention\.q_proj", ".attention.attention.query"),
        (r"\.attention\.k_proj", ".attention.attention.key"),
        (r"\.attention\.v_proj", ".attention.attention.value"),
        (r"\.attention\.o_proj", ".attention.output.dense"),
        (r"mlp\.fc1", "intermediate.dense"),
        (r"mlp\.fc2", "output.dense"),
    )  # fmt: skip
    return rename_keys(state_dict, table)


def some_mask(n=2):
    rng = random.Random(0)
    return torch.stack([block_mask((4, 4), 6, 2, rng=rng) for _ in range(n)])


@pytest.mark.parametrize("older", [False, True])
def test_classification_of_transformers(older):
    options = dict(use_relative_position_bias=True)
    theirs = randomized(transformers.BeitForImageClassification(config(**options)))
    theirs, ours = theirs.double().eval(), Beit(**SMALL, init_values=0.1).double().eval()
    state_dict = theirs.state_dict()
    assert load_pretrained(ours, older_names(state_dict) if older else state_dict) == []
    close(ours(images()), theirs(images()).logits)


@pytest.mark.parametrize("older", [False, True])
def test_masked_modelling_of_transformers(older):
    """Logits and the gradients of all parameters."""
    theirs = masked_peer()
    ours = BeitForMaskedImageModeling(**MASKED).double().eval()
    state_dict = theirs.state_dict()
    assert load_pretrained(ours, older_names(state_dict) if older else state_dict) == []
    x, mask = images(), some_mask()
    logits = theirs(x, bool_masked_pos=mask.flatten(1)).logits[mask.flatten(1)]
    close(ours(x, mask), logits)
    tokens = torch.randint(11, (2, 4, 4))
    total, count = masked_loss(ours, (x, tokens, mask))
    (total / count).backward()
    found = theirs(x, bool_masked_pos=mask.flatten(1), labels=tokens[mask])
    found.loss.backward()
    close(total / count, found.loss)
    grads = {key: p.grad for key, p in theirs.named_parameters()}
    other = BeitForMaskedImageModeling(**MASKED).double()
    load_pretrained(other, grads)
    for key, p in ours.named_parameters():
        close(p.grad, other.get_parameter(key).data, 1e-9)


@pytest.mark.parametrize("wrapper", [None, "model", "module"])
def test_the_authors_files(wrapper):
    ours = randomized(BeitForMaskedImageModeling(**MASKED))
    state_dict = dict(ours.state_dict())
    names = {".".join(key.split(".")[2:]) for key in state_dict if key.startswith("blocks.")}
    assert names == {
        *("gamma_1", "gamma_2", "attn.q_bias", "attn.v_bias", "attn.qkv.weight"),
        *(f"{layer}.{kind}" for layer in ("norm1", "norm2", "attn.proj", "mlp.fc1", "mlp.fc2")
          for kind in ("weight", "bias")),
    }  # fmt: skip
    state_dict["rel_pos_bias.relative_position_index"] = torch.zeros(17, 17, dtype=torch.int64)
    source = {wrapper: state_dict} if wrapper else state_dict
    again = BeitForMaskedImageModeling(**MASKED)
    assert load_pretrained(again, source) == []
    x, mask = images().float(), some_mask()
    assert torch.equal(ours.eval()(x, mask), again.eval()(x, mask))
    model = Beit(**SMALL, init_values=0.1)
    with pytest.warns(UserWarning, match="source has no classifier"):
        assert load_pretrained(model, source) == ["head.weight", "head.bias"]
    tables = [b.attn.relative_position_bias_table for b in model.blocks]
    for table in tables:
        assert torch.equal(table, ours.rel_pos_bias.relative_position_bias_table)
    assert len({id(table) for table in tables}) == 3
    assert torch.equal(model.fc_norm.weight, torch.ones(24))  # starts anew
    larger = Beit(**SMALL | dict(img_size=48, num_classes=0), init_values=0.1)
    assert load_pretrained(larger, source) == []


def test_the_encoder_is_the_pretrained_one():
    """Its tokens before the norm are those of the masked model with nothing hidden."""
    model = randomized(BeitForMaskedImageModeling(**MASKED)).double().eval()
    encoder, x = model.encoder().eval(), images()
    assert isinstance(encoder.norm, nn.Identity) and encoder.num_classes == 0
    features = model.forward_features(x, torch.zeros(2, 16, dtype=torch.bool))
    close(model.norm(encoder.forward_features(x)), features)
    classifier = model.encoder(7, drop_path_rate=0.1)
    assert classifier(x).shape == (2, 7)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(qkv_bias=False), r"qkv_bias \(False\) must be True"),
        (dict(depth=4), r"depth \(4\) must be 3"),
        (dict(init_values=None), r"init_values \(None\) must be 0.1"),
    ],
)
def test_an_encoder_that_was_not_trained_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BeitForMaskedImageModeling(**MASKED).encoder(**options)


def test_the_encoder_has_the_dtype_that_is_wanted():
    model = BeitForMaskedImageModeling(**MASKED).double()
    assert {p.dtype for p in model.encoder().parameters()} == {torch.float64}
    half = model.encoder(dtype=torch.bfloat16, global_pool="token")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    close(half.cls_token, model.cls_token.bfloat16(), 0)


def test_parameters_of_pretraining():
    sizes = dict(embed_dim=1024, depth=24, num_heads=16)
    for options, count in (({}, 91_965_776), (sizes, 311_534_016)):
        model = BeitForMaskedImageModeling(**options, device="meta")
        assert sum(p.numel() for p in model.parameters()) == count


def test_what_is_hidden_is_not_seen():
    model, x = randomized(BeitForMaskedImageModeling(**MASKED)).double().eval(), images()
    mask = some_mask()
    pixels = F.interpolate(mask[:, None].double(), scale_factor=8).bool()
    other = torch.where(pixels, torch.randn_like(x), x)
    close(model(x, mask), model(other, mask), 1e-12)
    assert (model(x, mask) - model(torch.where(pixels, x, 0 * x), mask)).abs().max() > 1e-3


# --- masks ------------------------------------------------------------------------------------


def authors_mask(height, width, count, smallest, rng):
    """beit/masking_generator.py, line by line."""
    mask = [[0] * width for _ in range(height)]
    done = 0
    while done < count:
        most, delta = count - done, 0
        for _ in range(10):
            area = rng.uniform(smallest, most)
            aspect = math.exp(rng.uniform(math.log(0.3), math.log(1 / 0.3)))
            h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if w < width and h < height:
                top, left = rng.randint(0, height - h), rng.randint(0, width - w)
                old = sum(sum(row[left : left + w]) for row in mask[top : top + h])
                if 0 < h * w - old <= most:
                    for row in mask[top : top + h]:
                        row[left : left + w] = [1] * w
                    delta = h * w - old
                if delta > 0:
                    break
        if delta == 0:
            break
        done += delta
    return torch.tensor(mask).bool()


@pytest.mark.parametrize("sizes", [(14, 14, 75, 16), (4, 4, 6, 2), (7, 5, 12, 4)])
def test_masks_are_the_authors(sizes):
    height, width, count, smallest = sizes
    for seed in range(60):
        wanted = authors_mask(*sizes, random.Random(seed))
        found = block_mask((height, width), count, smallest, rng=random.Random(seed))
        assert torch.equal(found, wanted), seed


@pytest.mark.parametrize(
    "grid, count, smallest",
    [((14, 14), 10, 16), ((4, 4), 8, 16), ((1, 20), 5, 2), ((2, 2), 2, 1), ((14, 14), 190, 16)],
)
def test_masks_hide_almost_as_many_as_asked_for(grid, count, smallest):
    """On a grid that holds no block of the smallest area, too."""
    rng = random.Random(0)
    for _ in range(100):
        hidden = int(block_mask(grid, count, smallest, rng=rng).sum())
        assert count - min(smallest, count // 4) <= hidden <= count


def test_where_blocks_fall():
    rng = random.Random(0)
    drawn = torch.stack([block_mask((14, 14), 75, rng=rng) for _ in range(1500)])
    count, share = drawn.flatten(1).sum(1).float(), drawn.float().mean(0)
    assert count.max() == 75 and count.mean() >= 74
    assert share[[0, 0, -1, -1], [0, -1, 0, -1]].max() < 0.1
    assert share[6:8, 6:8].min() > 0.6


# --- tokenizers -------------------------------------------------------------------------------


def tokenizer(**options):
    torch.manual_seed(0)
    return VQAutoencoder(
        conv_encoder(1, 8, 4, 2), VectorQuantizer(6, 4, **options), conv_decoder(4, 8, 1, 2)
    )


def test_the_nearest_code_and_the_gradient_straight_through():
    torch.manual_seed(0)
    quantizer = VectorQuantizer(6, 4, kmeans_steps=0).eval()
    z = torch.randn(20, 4, requires_grad=True)
    codes, tokens, loss = quantizer(z)
    near = torch.cdist(F.normalize(z, dim=-1), quantizer.embedding).argmin(-1)
    assert torch.equal(tokens, near)
    close(codes, quantizer.embedding[tokens], 1e-6)
    (gradient,) = torch.autograd.grad((codes * torch.arange(4.0)).sum(), z)
    wanted = torch.autograd.grad((F.normalize(z, dim=-1) * torch.arange(4.0)).sum(), z)
    close(gradient, *wanted, 1e-6)
    close(loss, (F.normalize(z, dim=-1) - quantizer.embedding[tokens]).square().mean(), 1e-6)


def test_codes_move_in_training_alone():
    torch.manual_seed(0)
    quantizer, z = VectorQuantizer(3, 2, decay=0.5, kmeans_steps=0), torch.randn(50, 2)
    before = quantizer.embedding.clone()
    quantizer.eval()(z)
    assert torch.equal(quantizer.embedding, before)
    tokens = quantizer.train()(z)[1]
    for k in range(3):
        mean = F.normalize(F.normalize(z, dim=-1)[tokens == k].mean(0), dim=-1)
        close(quantizer.embedding[k], F.normalize(before[k] + mean, dim=-1), 1e-5)
    quantizer.embedding.copy_(torch.tensor([[1.0, 0], [0, 1], [0, -1]]))
    quantizer(torch.tensor([[1.0, 0.1]]))  # codes that nobody chose stay
    close(quantizer.embedding[1:], torch.tensor([[0.0, 1], [0, -1]]), 0)


def test_a_start_by_k_means_uses_all_codes():
    torch.manual_seed(0)
    z = F.normalize(torch.randn(400, 4) + torch.tensor([5.0, 0, 0, 0]), dim=-1)
    used = []
    for steps in (0, 10):
        quantizer = VectorQuantizer(8, 4, kmeans_steps=steps)
        used.append(len(quantizer(z)[1].unique()))
    assert used[0] < used[1] == 8
    again = VectorQuantizer(8, 4)
    again.load_state_dict(quantizer.state_dict())  # and a loaded one does not start anew
    assert bool(again.started) and torch.equal(again.embedding, quantizer.embedding)


def test_tokens_and_decoding():
    model, x = tokenizer().eval(), torch.randn(2, 1, 8, 12)
    found, tokens, _ = model(x)
    assert found.shape == x.shape and tokens.shape == (2, 4, 6)
    assert torch.equal(model.tokens(x), tokens)
    close(model.decode(tokens), found, 1e-5)
    dvae = DiscreteVAE(5, 1, 2, 8)
    found, logits = dvae(x, 0.5, hard=True)
    assert found.shape == x.shape and logits.shape == (2, 5, 4, 6)
    assert torch.equal(dvae.tokens(x), logits.argmax(1))
    assert dvae.decode(dvae.tokens(x)).shape == x.shape
    maps = FeatureEncoder(Beit(**SMALL), 4)(images(2).float())
    assert maps.shape == (2, 4, 4, 4)


def test_a_hard_sample_decodes_as_its_token():
    torch.manual_seed(0)
    dvae, x = DiscreteVAE(5, 1, 2, 8).eval(), torch.randn(2, 1, 8, 8)
    torch.manual_seed(1)
    found, logits = dvae(x, 1.0, hard=True)
    torch.manual_seed(1)
    tokens = F.gumbel_softmax(logits, 1.0, hard=True, dim=1).argmax(1)
    close(found, dvae.decode(tokens), 1e-5)


def test_the_divergence():
    x, logits = torch.zeros(2, 1, 4, 4), torch.zeros(2, 5, 2, 2)

    def loss(reconstruction, beta):
        model = DiscreteVAE(5)
        model.forward = lambda x, tau: (reconstruction, logits)
        total, count = dvae_loss(model, (x,), beta)
        return total / count

    close(loss(x, 1.0), torch.tensor(0.0), 1e-6)  # uniform
    logits[:, 0] = 100.0
    close(loss(x, 1.0), torch.tensor(4 * math.log(5)), 1e-4)
    close(loss(x + 2, 0.0), torch.tensor(64.0), 1e-4)


def test_perplexity():
    assert perplexity(torch.arange(8), 8) == pytest.approx(8)
    assert perplexity(torch.zeros(5, dtype=torch.int64), 8) == pytest.approx(1)
    assert perplexity(torch.tensor([0, 0, 1, 1]), 8) == pytest.approx(2)


def test_it_learns_to_guess():
    """Two kinds of image: what is visible tells the tokens, and the loss falls to zero."""
    torch.manual_seed(0)
    kind = torch.arange(64) % 2
    x = kind.float().view(-1, 1, 1, 1).expand(-1, 1, 8, 8) + 0.1 * torch.randn(64, 1, 8, 8)
    tokens, mask = kind.view(-1, 1, 1).expand(-1, 4, 4).contiguous(), some_mask(64)
    small = MASKED | dict(img_size=8, patch_size=2, in_chans=1, vocab_size=4)
    model = BeitForMaskedImageModeling(**small)
    options = dict(steps=40, lr=1e-2, warmup=4, log_every=10)
    batches = shuffled_batches(x, tokens, mask, batch_size=32)
    history = fit(model, batches, loss_fn=masked_loss, **options)
    assert history[0]["loss"] > 0.3 and history[-1]["loss"] < 0.1 < math.log(4)


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: DiscreteVAE(1), r"num_embeddings \(1\) must be an integer of at least 2"),
        (lambda: VectorQuantizer(1, 4), r"num_embeddings \(1\) must be an integer of at"),
        (lambda: VectorQuantizer(4, 4, decay=1.0), r"decay \(1.0\) must be in \[0, 1\)"),
        (lambda: BeitForMaskedImageModeling(vocab_size=1), r"vocab_size \(1\) must be"),
        (lambda: block_mask((4, 4), 0), r"num_masked \(0\) must be an integer from 1 to 15"),
        (lambda: block_mask((4, 4), 16), r"num_masked \(16\) must be an integer from 1 to 15"),
        (lambda: block_mask((4, 4), 6, 0), r"min_patches \(0\) must be an integer of at least"),
        (lambda: block_mask((4, 4), 6, 2, 0.0), r"min_aspect \(0.0\) must be in \(0, 1\]"),
        (lambda: Beit(**SMALL | dict(img_size=30)), r"patch_size \(8, 8\) must divide"),
        (lambda: Beit(**SMALL, global_pool="max"), r"global_pool \('max'\) must be one of"),
        (lambda: Beit(**SMALL | dict(num_heads=5)), r"dim \(24\) must be divisible by"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_masks_may_have_their_former_name():
    torch.manual_seed(0)
    model, x, masked = BeitForMaskedImageModeling(**MASKED), images().float(), some_mask()
    with pytest.warns(DeprecationWarning, match="mask of .*forward is called"):
        assert torch.equal(model(x, mask=masked), model(x, masked=masked))


def test_arguments_are_in_the_order_of_the_other_models():
    names = list(inspect.signature(Beit).parameters)
    other = list(inspect.signature(VisionTransformer).parameters)
    assert names[:10] == other[:10] and names[8:10] == ["mlp_ratio", "qkv_bias"]


def test_bad_masks_are_named():
    model, x = BeitForMaskedImageModeling(**MASKED), images().float()
    mask = some_mask()
    for wrong, message in (
        (mask.long(), r"masked of shape \(2, 16\) and dtype torch.int64 must be boolean of"),
        (mask[:, :2], r"masked of shape \(2, 8\) .* must be boolean of shape \(2, 16\)"),
        (mask[:1], r"masked of shape \(1, 16\)"),
        (torch.zeros_like(mask), r"masked has 0 to 0 masked patches per image; .* 1 to 15"),
        (torch.ones_like(mask), r"masked has 16 to 16 masked"),
        (torch.stack([mask[0], ~torch.zeros_like(mask[1])]), r"to 16 masked patches per image"),
    ):
        with pytest.raises(ValueError, match=message):
            model(x, wrong)
    with pytest.raises(ValueError, match=r"\(2, 1, 32, 32\)"):
        model(x[:, :1], mask)


def test_k_means_needs_as_many_vectors_as_codes():
    with pytest.raises(ValueError, match=r"num_embeddings \(8\)"):
        VectorQuantizer(8, 4)(torch.randn(7, 4))
