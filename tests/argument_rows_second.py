"""More of the table of tests/test_arguments.py: models, training, cost, and kernels."""

import io
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.nn as nn
from argument_rows import (
    BIAS,
    CLUSTER,
    LAYOUT,
    MANY,
    MAP,
    MASK,
    META,
    ON_TOKENS,
    OTHER,
    OTHER_SEGMENTS,
    PADDED,
    PLAIN_LAYOUT,
    QKV,
    QKV_OTHERS,
    SAME,
    SEGMENTS,
    SURE,
    TOKENS,
    WINDOW_OTHERS,
    Fails,
    Q,
    Row,
    config,
    either,
    image,
    make_transformer,
    numbers,
    regressor,
    state,
    tokens,
    words,
)

from attnlib import (
    cost,
    detr,
    flash,
    gpt,
    panoptic,
    scaling,
    spatial,
    swin,
    swinv2,
    tnt,
    train,
    transformer,
    vit,
)


def seeded(make, *arguments, seed=0, **options):
    """A module with fixed weights, in evaluation mode."""
    torch.manual_seed(seed)
    return make(*arguments, **options).eval()


def frozen(*inputs):
    """How a module is used that takes no gradients."""

    def use(module):
        with torch.no_grad():
            return module(*inputs)

    return use


def within(action):
    """How a context manager is used."""

    def use(manager):
        with manager:
            return action()

    return use


# --- cost -------------------------------------------------------------------------------------

X = numbers(4, 4).requires_grad_()
Y = numbers(4, 4, seed=1).requires_grad_()
CALLS = []  # of the functions that take turns
NOWHERE = Fails("nowhere", "nowhere", RuntimeError)
PROBES = {
    "product": cost.Probe(None, 100, 0),
    "copy": cost.Probe(None, 0, 200),
    "start": cost.Probe(None, 0, 0),
}
TIMES = {"product": [2.0, 1.0], "copy": [4.0, 3.0], "start": [0.5, 0.25]}
LEFT, RIGHT = numbers(8, 4), numbers(4, 8)


def product(a=LEFT, b=RIGHT):
    return a @ b


def turns(times):
    found = {name: len(own) for name, own in times.items()}, list(CALLS)
    CALLS.clear()
    return found


SECOND = {
    "cost.OperationCount": Row(
        dict(), dict(operators=[cost.Operator("mm", 10, 20)], uncounted=["fft"]), vars
    ),
    "cost.best_roofline": Row(
        dict(probes=PROBES, times=TIMES),
        dict(
            probes=PROBES | {"copy": cost.Probe(None, 0, 100)},
            times=TIMES | {"copy": [2.0, 2.5]},
        ),
    ),
    "cost.count_operations": Row(dict(call=product), dict(call=partial(product, X)), vars),
    "cost.fastest_float32": Row(
        dict(device="cpu", shapes=[(8, 8, 8)], repeats=1),
        dict(
            device=NOWHERE,
            tolerance=Fails(0.5, "tolerance"),
            shapes=[(8, 32, 8)],
            repeats=Fails(0, "repeats"),
            gain=Fails(0.5, "gain"),
        ),
        lambda choice: [row.error for row in choice.rows],
    ),
    "cost.matmul_precision": Row(
        dict(name="high"),
        dict(name="medium"),
        within(torch.get_float32_matmul_precision),
    ),
    "cost._measure_precisions": Row(
        dict(device="cpu", shapes=[(8, 8, 8)], repeats=1),
        dict(device=NOWHERE, shapes=[(8, 32, 8)], repeats=Fails(0, "empty")),
        lambda pair: pair[1],
    ),
    "cost.measure_roofline": Row(
        dict(device="cpu", size=8, megabytes=0.1, repeats=1),
        dict(
            device=NOWHERE,
            dtype=Fails(torch.int64, "dtype", TypeError),
            size=Fails(-1, "negative", RuntimeError),
            megabytes=Fails(-1, "negative", RuntimeError),
            repeats=Fails(0, "rounds"),
        ),
        lambda roofline: type(roofline).__name__,
    ),
    "cost.operator_group": Row(dict(name="aten::addmm"), dict(name="aten::copy_")),
    "cost.profile_groups": Row(
        dict(call=product, repeats=1),
        dict(call=Fails(None, "callable", TypeError), repeats=Fails(0, "repeats")),
        sorted,
    ),
    "cost.roofline_probes": Row(
        dict(device="cpu", shapes=[(8, 8, 8)], megabytes=[0.1]),
        dict(
            device="meta",
            dtype=torch.float64,
            shapes=[(8, 16, 8)],
            megabytes=[0.1, 0.2],
        ),
        lambda probes: (
            [[name, p.flops, p.bytes, p.call()] for name, p in probes.items()][:1]
            + [[name, p.flops, p.bytes] for name, p in probes.items()]
        ),
    ),
    "cost.saved_activations": Row(
        dict(call=partial(torch.mul, X, Y)),
        dict(call=partial(torch.sum, X), exclude=[X]),
    ),
    "cost.seconds": Row(
        dict(call=product),
        dict(
            call=Fails(None, "callable", TypeError),
            device=NOWHERE,
            repeats=Fails(0, "repeats"),
        ),
        lambda found: found >= 0,
    ),
    "cost.take_turns": Row(
        dict(calls={name: partial(CALLS.append, name) for name in "abc"}, rounds=4, least=0),
        dict(
            calls={name: partial(CALLS.append, name) for name in "abd"},
            device=NOWHERE,
            rounds=3,
            least=1e-4,
            seed=1,
        ),
        turns,
    ),
    "cost.training_memory": Row(
        dict(model=regressor(), x=numbers(8, 4)),
        dict(model=regressor(5), x=numbers(9, 4), moments=1),
    ),
}

# --- kernels ----------------------------------------------------------------------------------

PARTIAL = numbers(2, 6, 4), numbers(2, 6)
OTHER_PARTIAL = numbers(2, 6, 4, seed=1), numbers(2, 6, seed=1)
FIRST, LAST = torch.tensor([0, 0, 1, 2, 3, 4]), torch.tensor([1, 2, 3, 4, 5, 6])
DECODE = dict(q=numbers(1, 2, 1, 4), k=numbers(1, 2, 20, 4), v=numbers(1, 2, 20, 4, seed=1))
SWIN_BLOCK = dict(dim=12, num_heads=3, window_size=(4, 4))
SHIFTED = swin.window_layout((4, 4), (2, 2), (1, 1))
WINDOWS = dict(qkv=numbers(1, 4, 4, 24), bias=numbers(2, 4, 4), layout=SHIFTED, num_heads=2)
WINDOWS_OTHERS = dict(
    qkv=numbers(1, 4, 4, 24, seed=1),
    bias=numbers(2, 4, 4, seed=1),
    layout=swin.window_layout((4, 4), (2, 2)),
    num_heads=Fails(3, "3 heads"),
    scale=2.0,
    cosine_scale=torch.tensor([2.0, 3.0]),
)
FUSED = dict(dim=12, num_heads=3, window_size=(2, 4))
FUSED_OTHERS = WINDOW_OTHERS | dict(window_size=(2, 3), shift_size=(1, 0))
ON_SMALL_MAP = either(MAP[:1, :4, :3], numbers(1, 4, 3, 24))
SMALL_SWIN = dict(img_size=16, patch_size=2, num_classes=3, embed_dim=8, depths=(1, 2))
SMALL_SWIN |= dict(num_heads=(1, 2), window_size=4)

SECOND |= {
    "flash.Ranges": Row(
        dict(first=FIRST, last=LAST, keys=6),
        dict(first=FIRST * 0, last=LAST.clamp(min=4), keys=7),
        lambda found: [found.by_query, found.by_key],
    ),
    "flash.flash_attention": Row(
        QKV,
        QKV_OTHERS
        | dict(mask=MASK, bias=BIAS, causal=True, scale=2.0)
        | dict(ranges=flash.Ranges(FIRST, LAST, 6)),
    ),
    "flash.flash_backend": Row(
        QKV | dict(mask=None, bias=None, scale=None, dropout_p=0.0),
        QKV_OTHERS | dict(mask=MASK, bias=BIAS, scale=2.0, dropout_p=0.5),
    ),
    "flash.flash_decode": Row(
        DECODE,
        dict(
            q=numbers(1, 2, 1, 4, seed=1),
            k=numbers(1, 2, 20, 4, seed=1),
            v=numbers(1, 2, 20, 4),
            splits=Fails(21, "splits"),
            scale=2.0,
        ),
    ),
    "flash.is_supported": Row(
        dict(x=TOKENS, width=64), dict(x=TOKENS.double(), width=300, widest=32)
    ),
    "flash.merge_partials": Row(
        dict(first=PARTIAL, second=PARTIAL), dict(first=OTHER_PARTIAL, second=OTHER_PARTIAL)
    ),
    "flash.tiling": Row(
        dict(kernel="forward", width=128, v_width=128, element_size=2),
        dict(kernel="key", width=64, v_width=64, element_size=4, extra=True),
    ),
    "flash.tiling, 2": Row(
        dict(kernel="forward", width=256, v_width=256, element_size=2),
        dict(shared=100 << 10),
    ),
    "windows.tiling": Row(
        dict(kernel="forward", window=(7, 7), width=32, element_size=2),
        dict(kernel="query", window=(16, 16), width=64, element_size=4),
    ),
    "windows.passes": Row(
        dict(window=(7, 7), width=32, element_size=2),
        dict(window=(16, 16), width=128, element_size=4),
    ),
    "windows.not_served": Row(
        dict(qkv=numbers(1, 8, 8, 240), num_heads=2, window=(4, 4)),
        dict(qkv=numbers(1, 8, 8, 240).double(), num_heads=1, window=(2**16, 4)),
    ),
    "windows.window_attention": Row(
        WINDOWS,
        WINDOWS_OTHERS,
    ),
    "windows.window_attention, 2": Row(
        WINDOWS | dict(qkv=numbers(1, 3, 3, 24), layout=swin.window_layout((3, 3), (2, 2))),
        dict(pad=numbers(24)),
    ),
    "windows._uses_kernel": Row(
        dict(layer=swin.WindowAttention(8, 1, 2, attn_drop=0.5).eval()),
        dict(layer=swin.WindowAttention(8, 1, 2, attn_drop=0.5)),
    ),
    "windows.FusedWindowAttention": Row(FUSED, FUSED_OTHERS, ON_SMALL_MAP),
    "windows.FusedWindowAttentionV2": Row(FUSED, FUSED_OTHERS, ON_SMALL_MAP),
    "windows.fuse_attention": Row(
        dict(layer=seeded(swin.WindowAttention, 12, 3, 2)),
        dict(layer=seeded(swinv2.WindowAttentionV2, 12, 3, 2)),
        frozen(MAP[:1, :4, :4]),
    ),
    "windows._sharing_copy": Row(
        dict(module=seeded(nn.Linear, 12, 6)),
        dict(module=seeded(nn.Linear, 12, 6, seed=1)),
        frozen(MAP),
    ),
    "windows.fused_linear": Row(
        dict(x=TOKENS, layer=seeded(nn.Linear, 12, 6).requires_grad_(False)),
        dict(
            x=2 * TOKENS,
            layer=seeded(nn.Linear, 12, 7).requires_grad_(False),
            norm=nn.LayerNorm(12).requires_grad_(False),
            gelu=True,
            residual=numbers(4, 16, 6),
        ),
    ),
    "windows._can_fuse": Row(
        dict(module=seeded(swin.SwinBlock, **SWIN_BLOCK)), dict(module=nn.Linear(2, 2))
    ),
    "windows._can_fuse_merging": Row(
        dict(module=swin.PatchMerging(12)), dict(module=swinv2.PatchMergingV2(12))
    ),
    "windows.FusedBlock": Row(
        dict(block=seeded(swin.SwinBlock, **SWIN_BLOCK)),
        dict(block=seeded(swin.SwinBlock, **SWIN_BLOCK, seed=1)),
        frozen(MAP[:1, :4, :4]),
    ),
    "windows.FusedMerging": Row(
        dict(merging=seeded(swin.PatchMerging, 12)),
        dict(merging=seeded(swin.PatchMerging, 12, seed=1)),
        frozen(MAP),
    ),
    "windows.fuse_swin": Row(
        dict(model=seeded(swin.SwinTransformer, **SMALL_SWIN)),
        dict(model=seeded(swin.SwinTransformer, **SMALL_SWIN, seed=1), trainable=True),
        lambda model: [type(model.blocks[0]).__name__, frozen(image(16)[:1])(model)],
    ),
}

# --- sequences --------------------------------------------------------------------------------

WRONG_PADDING = PADDED.flip(1)
SHARED = {"src_embed.weight": numbers(20, 12), "tgt_embed.weight": numbers(20, 12)}
APART = SHARED | {"tgt_embed.weight": numbers(20, 12, seed=1)}


def torch_transformer(seed=0, **options):
    return seeded(nn.Transformer, 12, 2, 1, 1, 24, batch_first=True, seed=seed, **options)


def torch_layer(seed=0):
    return seeded(nn.TransformerEncoderLayer, 12, 2, 24, batch_first=True, seed=seed)


SECOND |= {
    "seq2seq.can_read": Row(dict(x=TOKENS), dict(x=TOKENS.to("meta"))),
    "seq2seq.check_padding": Row(
        dict(name="src", tokens=PADDED, pad_id=0),
        dict(tokens=Fails(WRONG_PADDING, "padding"), pad_id=Fails(int(PADDED[0, 0]), "src")),
    ),
    "transformer._check_rows": Row(
        dict(tgt=PADDED, memory=numbers(3, 6, 12)),
        dict(tgt=Fails(PADDED[:2], "2 rows"), memory=Fails(TOKENS, "4 sources")),
    ),
    "seq2seq.check_token": Row(
        dict(name="eos_id", token=4, vocab_size=5),
        dict(token=Fails(5, "eos_id"), vocab_size=Fails(4, "from 0 to 3")),
    ),
    "seq2seq.check_some_tokens": Row(
        dict(name="src", tokens=torch.tensor([[3, 0], [4, 4]]), pad_id=0),
        dict(tokens=Fails(0 * PADDED, "nothing but padding"), pad_id=Fails(4, "row 1")),
    ),
    "transformer.check_tied": Row(
        dict(module=make_transformer(), state_dict=SHARED),
        dict(state_dict=Fails(APART, "state_dict")),
    ),
    "transformer.check_tied, 2": Row(
        dict(module=nn.Linear(2, 2), state_dict=APART, prefix=""),
        dict(module=Fails(make_transformer(), "state_dict")),
    ),
    "transformer.check_tied, 3": Row(
        dict(module=make_transformer(), state_dict=APART, prefix="model."),
        dict(prefix=Fails("", "state_dict")),
    ),
    "seq2seq.check_tokens": Row(
        dict(name="src", tokens=PADDED, vocab_size=20, max_length=8),
        dict(
            tokens=Fails(-PADDED, "token -"),
            vocab_size=Fails(5, "from 0 to 4"),
            max_length=Fails(5, "max_length"),
            offset=Fails(3, "ends at token 9"),
        ),
    ),
    "transformer.from_torch": Row(
        dict(module=torch_transformer(), src_vocab=20, max_length=8),
        dict(
            module=torch_transformer(1),
            src_vocab=21,
            tgt_vocab=22,
            max_length=9,
            pad_id=3,
            tie_weights=False,
            output_bias=True,
            position="learned",
        ),
        lambda model: [state(model), model.pad_id],
    ),
    "transformer._layer_from_torch": Row(
        dict(layer=torch_layer()), dict(layer=torch_layer(1), rotary=True), frozen(TOKENS)
    ),
    "translation._check_side": Row(dict(tag_on="source"), dict(tag_on=Fails("left", "tag_on"))),
    "translation.number_tokenizer": Row(
        dict(numbers=range(50), vocab_size=100),
        dict(numbers=range(20, 90), vocab_size=120, languages=("en", "de")),
        lambda tokenizer: sorted(tokenizer.get_vocab()),
    ),
    "translation.translation_loss": Row(
        dict(model=make_transformer(), batch=(PADDED, PADDED)),
        dict(model=make_transformer(norm_first=True), batch=(PADDED, PADDED.flip(0))),
    ),
    "translation.trim": Row(dict(tokens=PADDED[1:]), dict(tokens=PADDED)),
}

# --- faster layers ----------------------------------------------------------------------------

TINY_VIT = dict(img_size=8, patch_size=4, num_classes=3, embed_dim=8, depth=2, num_heads=2)
TINY_TNT = TINY_VIT | dict(inner_dim=8, num_heads_inner=2, num_heads_outer=2, first_stride=2)
TINY_TNT.pop("num_heads")
VIT = seeded(vit.VisionTransformer, **TINY_VIT)
OTHER_VIT = seeded(vit.VisionTransformer, **TINY_VIT, seed=1)
POOLED_VIT = seeded(vit.VisionTransformer, **TINY_VIT, global_pool="avg")
TINY_SWIN = seeded(swin.SwinTransformer, **SMALL_SWIN)
OTHER_SWIN = seeded(swin.SwinTransformer, **SMALL_SWIN, seed=1)
PICTURES = image(8)


def layers(make, *arguments, **options):
    """Two layers of a class with other weights."""
    return [seeded(make, *arguments, seed=seed, **options) for seed in (0, 1)]


def of_two(name, pair, *inputs):
    """A row for what is made of a layer, and called with these inputs."""
    return Row({name: pair[0]}, {name: pair[1]}, frozen(*inputs))


class Residual(nn.Module):
    """What a block of a ResNet has."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.downsample = None


def classes(module):
    return [type(part).__name__ for part in module.modules()]


CONV = seeded(nn.Conv2d, 3, 4, 3)
NORM = seeded(nn.BatchNorm2d, 4)
OTHER_NORM = seeded(nn.BatchNorm2d, 4)
OTHER_NORM.running_mean.add_(1)
WINDOW_PAIR = layers(swin.WindowAttention, 12, 3, (4, 4))

SECOND |= {
    "inference._FastBlock": of_two("block", layers(Residual), image(8)),
    "inference._FastCausalAttention": of_two(
        "layer", layers(gpt.CausalSelfAttention, config()), numbers(2, 5, 16)
    ),
    "inference._FastCrossAttention": of_two(
        "layer", layers(transformer.CrossAttention, 12, 3), TOKENS, TOKENS.flip(1)
    ),
    "inference._FastSelfAttention": of_two(
        "layer", layers(transformer.SelfAttention, 12, 3), TOKENS
    ),
    "inference.FastWindowAttention": of_two("layer", WINDOW_PAIR, MAP),
    "inference._PackedConv": Row(
        dict(conv=CONV, norm=NORM),
        dict(conv=seeded(nn.Conv2d, 3, 4, 3, seed=1), norm=OTHER_NORM, relu=False),
        frozen(image(8)),
    ),
    "inference.PackedLinear": Row(
        dict(weight=numbers(6, 12)),
        dict(weight=numbers(7, 12), bias=numbers(6), activation="gelu"),
        frozen(TOKENS),
    ),
    "inference.fast_attention": Row(QKV, QKV_OTHERS | dict(mask=MASK, bias=BIAS, scale=2.0)),
    "inference._can_pack": Row(dict(dtype=torch.float32), dict(dtype=torch.float64)),
    "backbone.is_as_built": Row(
        dict(
            module=transformer.SelfAttention(12, 3),
            parts={transformer.SelfAttention: dict(out_proj=[nn.Linear])},
        ),
        dict(module=nn.Conv2d(2, 2, 1), parts={}),
    ),
    "inference._can_shorten": Row(dict(model=VIT), dict(model=POOLED_VIT)),
    "inference._check_packed": Row(
        dict(x=TOKENS, weight=numbers(6, 12), channels=12, axis=-1),
        dict(
            x=Fails(TOKENS.double(), "dtype", TypeError),
            weight=Fails(numbers(6, 12).double(), "float64", TypeError),
            channels=Fails(13, "13 channels", TypeError),
            axis=Fails(-2, "axis -2", TypeError),
        ),
    ),
    "inference.devices": Row(
        dict(model=nn.Linear(2, 2)), dict(model=nn.Linear(2, 2, device="meta"))
    ),
    "inference._first_tokens": Row(
        dict(attn=seeded(vit.Attention, 12, 3), x=TOKENS, count=1),
        dict(attn=seeded(vit.Attention, 12, 3, seed=1), x=2 * TOKENS, count=2),
    ),
    "inference.forward_short": Row(
        dict(model=VIT, x=PICTURES),
        dict(model=OTHER_VIT, x=2 * PICTURES),
    ),
    "inference.forward_short, 2": Row(
        dict(model=seeded(tnt.TNT, **TINY_TNT), x=PICTURES),
        dict(model=seeded(tnt.TNT, **TINY_TNT, seed=1), x=2 * PICTURES),
    ),
    "inference.optimize_for_inference": of_two("model", (VIT, OTHER_VIT), PICTURES),
    "inference.pack": Row(
        dict(layer=seeded(nn.Linear, 12, 6)),
        dict(layer=seeded(nn.Linear, 12, 6, seed=1), activation="relu"),
        frozen(TOKENS),
    ),
    "inference._pack_all": of_two("model", (VIT, OTHER_VIT), PICTURES),
    "inference._pack_feed_forward": of_two(
        "layer", layers(transformer.FeedForward, 12, 24), TOKENS
    ),
    "inference._pack_gpt_mlp": of_two(
        "layer", layers(gpt.MLP, config(mlp="gelu")), numbers(2, 5, 16)
    ),
    "inference._pack_mlp": of_two("layer", layers(vit.Mlp, 12), TOKENS),
    "inference.replace_module": Row(
        dict(module=transformer.SelfAttention(12, 3)),
        dict(module=nn.Sequential(vit.Mlp(12))),
        classes,
    ),
}

# --- images -----------------------------------------------------------------------------------


def map_weights(rows=2, seed=0):
    return numbers(rows, 4, 2, 16, 16, seed=seed).softmax(-1)


TNT_BLOCK = dict(dim=8, dim_out=12, num_pixel=4, num_heads_in=2, num_heads_out=3)
MAPS = [numbers(2, 3, 5, 5, seed=i).softmax(-1) for i in range(2)]
TABLE_NAME = "attn.relative_position_bias_table"


def stage(seed=0):
    options = dict(dim=12, num_heads=3, window_size=(4, 4))
    return [seeded(swin.SwinBlock, **options, seed=seed + i) for i in range(2)]


def with_window(*window):
    return nn.ModuleDict(dict(attn=swin.WindowAttention(12, 3, window)))


SECOND |= {
    "vit_variants.RotaryAttention": Row(
        dict(
            patch_embed=vit.PatchEmbed(16, 4, 3, 12),
            num_prefix_tokens=0,
            dim=12,
            num_heads=3,
        ),
        dict(
            patch_embed=vit.PatchEmbed((32, 8), 4, 3, 12),
            num_prefix_tokens=1,
            dim=24,
            num_heads=1,
        ),
        ON_TOKENS,
    ),
    "vit_variants.apply_rotary_2d": Row(
        dict(x=numbers(2, 6, 8), rows=torch.arange(6), columns=torch.arange(6) % 3),
        dict(
            x=numbers(2, 6, 8, seed=1),
            rows=torch.arange(6) % 2,
            columns=torch.arange(6),
            base=10.0,
        ),
    ),
    "vit_variants.use_rotary": of_two("model", (VIT, OTHER_VIT), PICTURES),
    "swin.SwinStage": Row(
        dict(downsample=nn.Identity(), blocks=stage()),
        dict(downsample=nn.Sequential(swin.PatchMerging(6)), blocks=stage(2)),
        state,
    ),
    "swin._block_shift": Row(
        dict(number=1, window_size=(4, 4)), dict(number=2, window_size=(7, 4))
    ),
    "swin.cyclic_shift": Row(dict(x=MAP, layout=LAYOUT), dict(x=2 * MAP, layout=PLAIN_LAYOUT)),
    "swin.reverse_cyclic_shift": Row(
        dict(x=MAP, layout=LAYOUT), dict(x=2 * MAP, layout=PLAIN_LAYOUT)
    ),
    "swin.merge_patches": Row(dict(x=MAP), dict(x=MAP[:, :7])),
    "swin.pixel_maps": Row(
        dict(model=TINY_SWIN, x=image(16), pixel=(3, 4)),
        dict(model=OTHER_SWIN, x=2 * image(16), pixel=(4, 3)),
    ),
    "swin._resample_tables": Row(
        dict(state_dict={TABLE_NAME: numbers(49, 3)}, model=with_window(4, 4)),
        dict(state_dict={TABLE_NAME: numbers(49, 3, seed=1)}, model=with_window(5, 5)),
    ),
    "swin._resampling_matrix": Row(dict(old=7, new=9), dict(old=5, new=11)),
    "swin._source_window": Row(
        dict(rows=49, new_window=(5, 5)), dict(rows=25, new_window=(1, 25))
    ),
    "swin.stage_windows": Row(
        dict(
            window_size=(4, 3),
            reference_grid=(8, 8),
            grid_size=(8, 8),
            num_stages=3,
            small_maps="shrink",
        ),
        dict(
            window_size=(2, 2),
            reference_grid=(4, 4),
            grid_size=(16, 16),
            num_stages=2,
            small_maps="pad",
        ),
    ),
    "swin._token_map": Row(
        dict(weights=map_weights(), layout=LAYOUT, token=(3, 4)),
        dict(weights=map_weights(seed=1), layout=PLAIN_LAYOUT, token=(4, 3)),
    ),
    "swin.window_reverse": Row(
        dict(windows=numbers(2, 8, 16, 4), window_size=(4, 4), size=(8, 8)),
        dict(windows=numbers(2, 8, 16, 5), window_size=(2, 8), size=(4, 16)),
    ),
    "swinv2._check_pretrained_window": Row(dict(window_size=3), dict(window_size=(3, 4))),
    "tnt.Block": Row(
        TNT_BLOCK,
        dict(dim=16, dim_out=24, num_pixel=8, num_heads_in=4, num_heads_out=2, mlp_ratio=2.0)
        | dict(qkv_bias=True, proj_drop=0.5, attn_drop=0.5, drop_path=0.5, legacy=True)
        | META,
        either(*(((numbers(8, 4, 8), numbers(2, 5, dim)),) for dim in (12, 24))),
    ),
    "tnt.patchify": Row(dict(x=PICTURES, size=(4, 4)), dict(x=2 * PICTURES, size=(2, 8))),
    "tnt.unpatchify": Row(
        dict(x=numbers(6, 3, 2, 2), grid_size=(2, 3)),
        dict(x=numbers(6, 3, 2, 2, seed=1), grid_size=(3, 2)),
    ),
    "vit.attention_rollout": Row(dict(maps=MAPS), dict(maps=MAPS[:1])),
    "vit.check_divides": Row(
        dict(patch_size=(4, 4), img_size=(8, 8)),
        dict(patch_size=Fails((3, 4), "divide"), img_size=Fails((8, 9), "divide")),
    ),
    "vit.check_images": Row(
        dict(x=image(8), in_chans=3),
        dict(
            x=Fails(image(8).long(), "floating", TypeError),
            in_chans=Fails(1, "in_chans"),
            img_size=Fails((9, 9), "img_size"),
        ),
    ),
    "vit._learned_tokens": Row(dict(count=2, dim=12), dict(count=3, dim=8) | META),
    "vit.patch_shares": Row(
        dict(model=VIT, x=PICTURES), dict(model=POOLED_VIT, x=2 * PICTURES)
    ),
    "spatial._check_captions": Row(
        dict(tokens=PADDED, count=3, vocab_size=20, pad_id=0),
        dict(
            tokens=Fails(0 * PADDED, "padding"),
            count=Fails(2, "shape"),
            vocab_size=Fails(4, "numbers"),
        ),
    ),
    "spatial._check_captions, 2": Row(
        dict(tokens=torch.full((2, 3), 7), count=2, vocab_size=20, pad_id=0),
        dict(pad_id=Fails(7, "padding")),
    ),
    "spatial.draw_loss": Row(
        dict(
            drawing=spatial.DrawOutput(numbers(2, 3, 8, 8), numbers(2, 3), None),
            images=(image(8, 1, 2) > 0).float(),
        ),
        dict(
            drawing=spatial.DrawOutput(numbers(2, 3, 8, 8), 2 * numbers(2, 3), None),
            images=(image(8, 1, 2) < 0).float(),
        ),
    ),
}

# --- panoptic segmentation --------------------------------------------------------------------


def detector(num_classes=6):
    return detr.small_detr(num_classes)


def of_panoptic(model):
    norms = [norm.num_groups for norm in model.mask_head.norms]
    return [state(model), model.bbox_attention.joint_softmax, norms]


PREDICTION, OTHER_PREDICTION = SEGMENTS[0], OTHER_SEGMENTS[0]
INFOS = PREDICTION[1]
SPOTS = numbers(3, 4, 4)
BANDS = numbers(1, 2, 6, 6) > 1
INNER = torch.zeros(8, 8, dtype=torch.bool)
INNER[:6, :5] = True
TWO_CLASSES = {i: dict(pq=0.5 / (i + 1), sq=0.7, rq=0.6) for i in range(2)}
MASKED = [dict(labels=torch.tensor([1, 2]), masks=torch.ones(2, 4, 4))]
LABELED = dict(label=torch.tensor([[1, 2, -1]]), mask=torch.eye(3).view(1, 3, 1, 3) > 0)

SECOND |= {
    "panoptic.PanopticDETR": Row(
        dict(detr=detector(), num_groups=4),
        dict(detr=detector(7), joint_softmax=True, num_groups=2),
        of_panoptic,
    ),
    "panoptic.panoptic_detr": Row(
        dict(num_classes=6, num_queries=10, num_encoder_layers=1, num_decoder_layers=1)
        | dict(backbone=detector().backbone, embed_dim=128, num_heads=8),
        dict(joint_softmax=False, num_classes=7),
        of_panoptic,
    ),
    "panoptic._check_masks": Row(
        dict(targets=MASKED), dict(targets=Fails([dict(MASKED[0], masks=SPOTS)], "masks"))
    ),
    "panoptic._check_merge": Row(
        dict(logits=SURE, masks=numbers(4, 8, 8), kept=torch.ones(4) > 0),
        dict(
            logits=Fails(SURE[:3], "logits"),
            masks=Fails(numbers(3, 8, 8), "masks"),
        ),
    ),
    "panoptic._check_merge, 2": Row(
        dict(logits=SURE, masks=torch.full((4, 8, 8), -torch.inf), kept=torch.ones(4) < 0),
        dict(kept=Fails(torch.ones(4) > 0, "-inf")),
    ),
    "panoptic._check_segments": Row(
        dict(name="a", segments=PREDICTION[0], infos=INFOS),
        dict(
            segments=Fails(PREDICTION[0] + 1, "the map has"),
            infos=[dict(INFOS[0], category_id=3), INFOS[1]],
        ),
    ),
    "panoptic.cut_padding": Row(
        dict(maps=SPOTS, mask=INNER), dict(maps=2 * SPOTS, mask=INNER.T)
    ),
    "panoptic._join_stuff": Row(
        dict(
            score=torch.tensor([0.5, 0.6, 0.7]),
            label=torch.tensor([1, 1, 2]),
            masks=SPOTS,
            things=[2],
        ),
        dict(
            score=torch.tensor([0.8, 0.6, 0.7]),
            label=torch.tensor([1, 2, 2]),
            masks=2 * SPOTS,
            things=[1],
        ),
    ),
    "panoptic._match_segments": Row(
        dict(prediction=PREDICTION, truth=PREDICTION),
        dict(prediction=OTHER_PREDICTION, truth=OTHER_PREDICTION),
        dict,
    ),
    "panoptic.matched_queries": Row(
        dict(matched=[([0, 2], None)], logits=numbers(1, 4, 6)),
        dict(matched=[([1], None)], logits=numbers(1, 5, 6)),
    ),
    "panoptic._mean_quality": Row(
        dict(classes=TWO_CLASSES), dict(classes={0: dict(pq=0.1, sq=0.2, rq=0.3)})
    ),
    "panoptic.overlaps": Row(
        dict(a=PREDICTION[0], b=PREDICTION[0]),
        dict(a=OTHER_PREDICTION[0], b=OTHER_PREDICTION[0]),
        lambda found: sorted(found.items()),
    ),
    "panoptic._class_quality": Row(
        dict(counts=panoptic._Counts(3.0, 4, 2, 2)), dict(counts=panoptic._Counts(2.0, 5, 3, 1))
    ),
}

# --- training and practice --------------------------------------------------------------------


LABELS = torch.tensor([0, 1, 2, 1])
IMAGES = PICTURES.sigmoid()
PAIR = PICTURES, LABELS
OTHER_PAIR = 2 * PICTURES, LABELS.flip(0)
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
PADDING_VIT = seeded(vit.VisionTransformer, **TINY_VIT)
PADDING_VIT.patch_embed.proj.padding = (1, 1)
RECORDS = sorted(train.find_records())
HISTORY = [dict(step=1, loss=2.0, time=3.0), dict(step=2, loss=1.0, time=5.0)]


def of_training(history):
    return [{key: x for key, x in row.items() if "second" not in key} for row in history]


def drawn(figure):
    """The pixels of a figure."""
    file = io.BytesIO()
    figure.savefig(file, format="raw", dpi=50)
    plt.close(figure)
    return file.getvalue()


def dropping(rate):
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate))


def half_frozen():
    model = regressor().eval()
    model[0].requires_grad_(False)
    return model


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), 0.1)


def averaged():
    kept = train._Kept(regressor(), 0.9)
    kept.update_average()
    return kept


def stepped(seed=0):
    """An optimizer with moments."""
    model = regressor()
    optimizer = optimizer_of(model)
    model(numbers(8, 4, seed=seed)).sum().backward()
    optimizer.step()
    return optimizer


CLASSIFY = dict(model=VIT, train=PAIR, test=PAIR, steps=4, batch_size=2, log_every=1)
UNTIED = gpt.GPT(config(tied=False))
PARTS = {
    part: dict(numbers=[1, 2, 30], src=tokens(64), tgt=tokens(64, 7))
    for part in ("train", "valid")
}

SECOND |= {
    "plot.plot_attention": Row(
        dict(weights=numbers(2, 3, 3).softmax(-1)),
        dict(
            weights=numbers(2, 3, 3, seed=1).softmax(-1),
            queries=list("abc"),
            keys=list("def"),
            titles=list("gh"),
            vmax=2.0,
            values=False,
        ),
        drawn,
    ),
    "plot.plot_history": Row(
        dict(history=HISTORY), dict(history=HISTORY[:1], x="time", log=["loss"]), drawn
    ),
    "finetune._check_folding": Row(
        dict(model=VIT, mean=MEAN, std=STD),
        dict(
            model=Fails(PADDING_VIT, "pads"),
            mean=Fails((0.5,), "mean"),
            std=Fails((0.5, 0.5, 0.0), "std"),
        ),
    ),
    "finetune._check_pixels": Row(
        dict(name="train", images=IMAGES), dict(images=Fails(9 * IMAGES, "train"))
    ),
    "finetune.MixupCrossEntropy": Row(
        dict(num_classes=5, alpha=0.0),
        dict(num_classes=6, alpha=9.0, label_smoothing=0.3),
        lambda loss: loss(
            torch.nn.Flatten(), (numbers(4, loss.num_classes, 1, 1), torch.arange(4))
        ),
    ),
    "finetune.fold_normalization": Row(
        dict(model=VIT, mean=MEAN, std=STD),
        dict(model=OTHER_VIT, mean=MEAN[::-1], std=STD[::-1]),
        frozen(PICTURES),
    ),
    "finetune._folded_config": Row(
        dict(config=dict(mean=MEAN, std=STD), mean=MEAN, std=STD),
        dict(config=dict(mean=STD, std=MEAN), mean=MEAN[::-1], std=STD[::-1]),
    ),
    "finetune.gradient_map": Row(
        dict(model=VIT, x=PICTURES, patch_size=4),
        dict(model=OTHER_VIT, x=2 * PICTURES, patch_size=2),
    ),
    "finetune.layer_numbers": Row(dict(model=VIT), dict(model=TINY_SWIN)),
    "finetune.occlusion_map": Row(
        dict(model=VIT, x=PICTURES, patch_size=4),
        dict(model=OTHER_VIT, x=2 * PICTURES, patch_size=2),
    ),
    "finetune.rollout_map": Row(
        dict(model=VIT, x=PICTURES, patch_size=4), dict(model=OTHER_VIT, x=2 * PICTURES)
    ),
    "recipes.accuracy": Row(
        dict(model=VIT, data=PAIR),
        dict(model=OTHER_VIT, data=(PICTURES, LABELS * 0 + 1)),
    ),
    "recipes.classification_loss": Row(
        dict(model=VIT, batch=(PICTURES, LABELS)),
        dict(model=OTHER_VIT, batch=(2 * PICTURES, LABELS.flip(0))),
    ),
    "recipes.translation_accuracy": Row(
        dict(model=words()[1][0], tokenizer=words()[0], part=PARTS["train"]),
        dict(max_length=Fails(0, "max_length")),
    ),
    "recipes._small_run": Row(
        dict(model="vit", data="digits"),
        dict(model="swin", data=Fails("mnist", "data")),
        lambda found: [found[0].func.__name__, found[0].keywords, *found[1:]],
    ),
    "recipes.train_classifier": Row(
        CLASSIFY,
        dict(
            model=OTHER_VIT,
            train=OTHER_PAIR,
            test=(PICTURES, LABELS * 0 + 2),
            steps=5,
            batch_size=3,
            lr=0.01,
            loss_fn=lambda model, batch: (model(batch[0]).square().sum(), len(batch[0])),
            augment=torch.neg,
            log_every=2,
        ),
        of_training,
    ),
    "recipes.train_small": Row(
        dict(model="vit", steps=1),
        dict(model="swin", data=Fails("mnist", "data")),
        lambda pair: state(pair[0]),
    ),
    "recipes.train_translator": Row(
        dict(tokenizer=words()[0], parts=PARTS, steps=2, log_every=1, warmup=1),
        dict(
            parts=PARTS | dict(train=dict(PARTS["train"], tgt=tokens(64, 8))),
            steps=3,
            lr=0.1,
            seed=1,
            log_every=2,
        ),
        lambda pair: [state(pair[0]), of_training(pair[1])],
    ),
    "scaling.GPTStage": Row(
        dict(model=UNTIED, stage=0, stages=1),
        dict(model=gpt.GPT(config(tied=False, n_embd=32)), stage=Fails(1, "stage"), stages=2),
        state,
    ),
    "scaling._block_gradients": Row(
        QKV | dict(out=OTHER, lse=numbers(2, 2, 6), grad=numbers(2, 2, 6, 4, seed=3)),
        QKV_OTHERS
        | dict(lse=numbers(2, 2, 6, seed=1), grad=numbers(2, 2, 6, 4, seed=4), out=Q)
        | dict(causal=True),
    ),
    "scaling._has_dropout": Row(dict(module=dropping(0.0)), dict(module=dropping(0.5))),
    "scaling._possible_plans": Row(
        dict(config=gpt.GPTConfig(**MANY), cluster=CLUSTER, batch=8),
        dict(
            config=gpt.GPTConfig(**MANY | dict(n_layer=2, tied=False)),
            cluster=scaling.Cluster(8, memory=1e9),
            batch=16,
        ),
        lambda plans: [vars(plan) for plan in plans],
    ),
    "scaling._rank_order": Row(
        dict(units=[4, 2], rows=12, ranks=2), dict(units=[2, 4], rows=24, ranks=1)
    ),
    "scaling.unshard_sequence": Row(
        dict(shards=[numbers(2, 4, 6), numbers(2, 4, 6, seed=1)]),
        dict(shards=[numbers(2, 4, 6), numbers(2, 4, 6)], dim=-1, balanced=True),
    ),
    "train.frozen_in_evaluation": Row(
        dict(model=half_frozen()), dict(model=regressor().eval()), len
    ),
    "train.memory_levels": Row(
        dict(call=partial(torch.zeros, 1000)), dict(call=partial(torch.zeros, 2000)), max
    ),
    "train.peak_memory": Row(
        dict(call=partial(torch.zeros, 1000)),
        dict(call=partial(torch.zeros, 2000), device=NOWHERE),
    ),
    "train.read_record": Row(dict(name=RECORDS[0]), dict(name=RECORDS[1])),
    "train.seeded": Row(dict(seed=1), dict(seed=2), within(lambda: torch.rand(3))),
    "train._training_state": Row(
        dict(model=regressor(), optimizer=stepped(), kept=train._Kept(regressor(), 0.9)),
        dict(model=regressor(5), optimizer=stepped(1), kept=averaged()),
    ),
}

# --- what holds within a block, and whole runs ------------------------------------------------


def modes(model):
    return [part.training for part in model.modules()]


def mixed_modes():
    model = regressor()
    model[0].eval()
    return model


def other_modes(manager):
    """The modes of a model's parts within a block, and after it."""
    model = manager.kwds["model"]
    with manager:
        inside = modes(model)
        model.train(not model.training)
    return inside, modes(model)


def own_numbers(own):
    """Random numbers between two layers, and after the second."""
    module = regressor()
    own.begin(module)
    inside = torch.rand(3)
    own.end(module)
    return inside, torch.rand(3)


PHOTOS = image(32).sigmoid()

SECOND |= {
    "finetune.transfer": Row(
        dict(name="vit_tiny_patch16_224", img_size=32, pretrained=False)
        | dict(train=(PHOTOS, LABELS), test=(PHOTOS, LABELS), steps=2, lr=0.001, batch_size=2),
        dict(
            name="deit_tiny_patch16_224",
            train=(PHOTOS**2, LABELS),
            test=(PHOTOS, LABELS * 0 + 7),
            img_size=48,
            decay=0.1,
            alpha=3.0,
            steps=3,
            lr=0.002,
        ),
        lambda pair: [pair[0].pos_embed, pair[0].head.weight, pair[1]],
    ),
    "recipes.distill_small": Row(
        dict(steps=1),
        dict(data=Fails("mnist", "data"), kind="soft", steps=2),
        lambda found: [state(found[0]), state(found[1]), of_training(found[2])],
    ),
    "scaling._OwnRandomness": Row(dict(rank=0), dict(rank=1), own_numbers),
    "backbone.evaluation": Row(
        dict(model=regressor()), dict(model=mixed_modes(), parts=[]), other_modes
    ),
    "train.modes_restored": Row(
        dict(model=regressor()), dict(model=regressor().eval()), other_modes
    ),
}

UNKNOWING = "only a model that is trained for long names numbers right"
SPARED_SECOND = {
    "finetune.transfer": dict(pretrained="downloads"),
    "recipes.distill_small": dict(folder="of files that are downloaded"),
    "finetune._check_pixels": dict(name="stands in the error"),
    "finetune.rollout_map": dict(patch_size="not used: all maps are called alike"),
    "recipes.accuracy": dict(batch_size=SAME),
    "recipes.translation_accuracy": dict.fromkeys(("model", "tokenizer", "part"), UNKNOWING),
    "recipes._small_run": dict(folder="of files that are downloaded"),
    "recipes.train_small": dict(folder="of files that are downloaded"),
    "recipes.train_translator": dict(tokenizer=UNKNOWING),
    "seq2seq.check_padding": dict(name="stands in the error"),
    "seq2seq.check_tokens": dict(name="stands in the error"),
    "seq2seq.check_token": dict(name="stands in the error"),
    "seq2seq.check_some_tokens": dict(name="stands in the error"),
    "panoptic._check_segments": dict(name="stands in the error"),
}
ON_CPU = set(  # kernels that are interpreted without a GPU, and runs that a GPU does not repeat
    """
    flash.flash_attention flash.flash_backend flash.flash_decode flash.is_supported
    recipes.distill_small recipes.train_classifier recipes.train_small
    recipes.train_translator
    windows.FusedBlock windows.FusedMerging windows.fuse_swin windows.fused_linear
    windows.fuse_attention windows.not_served windows.window_attention
    """.split()
)
