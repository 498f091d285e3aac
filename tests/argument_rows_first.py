"""Rows of the table of tests/test_arguments.py, for modules from attention to models."""

import random
from functools import partial
from hashlib import sha256
from importlib import import_module
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn as nn
from argument_rows import (
    META,
    SAME,
    SEARCH,
    SEARCH_OTHERS,
    SPACE,
    TARGETS,
    TOKENS,
    Fails,
    Row,
    called,
    config,
    image,
    numbers,
    of_output,
    state,
    tokens,
    trained,
    words,
)
from small_models import small_supernet

from attnlib import (
    autoformer,
    backbone,
    beit,
    data,
    detr,
    gpt,
    mae,
    models,
    swin,
    vit,
)

attention = import_module("attnlib.attention")  # `attnlib.attention` is the function

SMALL = dict(img_size=16, patch_size=4, embed_dim=12, depth=2, num_heads=3)


def seeded(make, *arguments, seed=0, **options):
    """A module whose first weights are always the same."""
    torch.manual_seed(seed)
    return make(*arguments, **options)


def small_vit(**options):
    return seeded(vit.VisionTransformer, **SMALL | dict(num_classes=5) | options)


def small_beit(**options):
    return seeded(beit.Beit, **SMALL | dict(num_classes=5) | options)


def small_masked(**options):
    return seeded(beit.BeitForMaskedImageModeling, **SMALL | dict(vocab_size=9) | options)


def small_mae(**options):
    decoder = dict(decoder_embed_dim=8, decoder_depth=1, decoder_num_heads=2)
    return seeded(mae.MaskedAutoencoder, **SMALL | decoder | options)


def small_swin(**options):
    sizes = dict(img_size=32, patch_size=4, num_classes=5, embed_dim=8, window_size=4)
    sizes |= dict(depths=(1, 1), num_heads=(1, 2))
    return seeded(swin.SwinTransformer, **sizes | options).eval()


def linear(inputs=12, outputs=6, **options):
    return seeded(nn.Linear, inputs, outputs, **options)


def changed(name):
    """How an argument that a call changes is looked at afterwards: a module by its tensors."""

    def after(arguments):
        x = arguments[name]
        return state(x) if isinstance(x, nn.Module) else x

    return after


def with_config(model):
    """A model that says what images it wants."""
    model.data_config = models.data_config("vit_tiny_patch16_224", 16)
    return model.eval()


def picture(value=9):
    return np.arange(40 * 48 * 3, dtype=np.uint8).reshape(40, 48, 3) // 2 + value


def photograph(value=9):
    return models.open_picture(picture(value))


# --- backends and weights ---------------------------------------------------------------------


def inside(context):
    """The backend that is in force in a block."""
    with context:
        return attention.current_backend()


def one(x):
    return x + 1


def two(x):
    return x + 2


def taken_back(_):
    """The backends of a test, which are removed again, by name."""
    own = [key for key in attention.BACKENDS if key.startswith("test")]
    return {key: attention.BACKENDS.pop(key)(0) for key in own}


def unregistered(_):
    """The models of a test, which are removed again, by name."""
    own = [key for key in models.MODELS if key.startswith("test")]
    found = {key: models.MODELS.pop(key) for key in own}
    return {key: [cls.__name__, *others] for key, (cls, *others) in found.items()}


class Page(BytesIO):
    """A file in memory, whose name says the format."""

    name = "page.png"


FUSED = {f"a.attn.{part}.weight": numbers(3, 4, seed=i) for i, part in enumerate("qkv")}
BIAS_KEY = "layers.0.blocks.0.attn.qkv.bias"
ROWS = {"a.relative_position_bias_table": numbers(84, 2)}
OTHER_ROWS = {"a.relative_position_bias_table": numbers(84, 2, seed=1)}
RECORDS = Path(__file__).parents[1] / "benchmarks" / "results"
ASKED = dict(name="vit_collages", pictures=[picture()], map=None)
COLLAGES = seeded(models.create_model, "vit_collages").state_dict()
OTHER_COLLAGES = seeded(models.create_model, "vit_collages", seed=1).state_dict()
DATA_CONFIG = models.data_config("vit_tiny_patch16_224")

FIRST = {
    "attention._SameTensors": Row(
        dict(block=linear()), dict(block=linear(12, 7)), called(TOKENS)
    ),
    "attention.attention_backend": Row(dict(name="reference"), dict(name="sdpa"), inside),
    "attention.checkpoint_block": Row(
        dict(block=nn.Tanh(), input=TOKENS), dict(block=nn.Sigmoid(), input=2 * TOKENS)
    ),
    "attention.float32_products": Row(
        dict(device="cpu"), dict(device=Fails("nowhere", "device", RuntimeError))
    ),
    "attention.register_backend": Row(
        dict(name="test", function=one),
        dict(name="test 2", function=two),
        taken_back,
    ),
    "backbone.FeatureInfo": Row(
        dict(infos=[dict(num_chs=3), dict(num_chs=4)], out_indices=(0,)),
        dict(infos=[dict(num_chs=5), dict(num_chs=4)], out_indices=(1,)),
        lambda info: info.channels(),
    ),
    "backbone.FeatureExtractor": Row(
        dict(model=small_vit(depth=2), out_indices=(0,)),
        dict(model=small_beit(), out_indices=(1,)),
        lambda features: [state(features), features.feature_info.channels()],
    ),
    "backbone._SameParameters": Row(
        dict(model=linear()),
        dict(model=linear(bias=False)),
        lambda hook: [name for _, name, _ in hook.owners],
    ),
    "backbone.resize": Row(
        dict(model=small_vit(), hook=backbone._SameParameters(linear()), img_size=16),
        dict(model=small_vit(depth=1), img_size=24),
        after=lambda arguments: [
            state(arguments["model"]),
            [tuple(x.shape) for _, _, x in arguments["hook"].owners],
        ],
    ),
    "backbone.frozen_copy": Row(dict(model=linear()), dict(model=linear(12, 7)), state),
    "backbone.guard": Row(dict(model=linear()), dict(model=linear(12, 7)), state),
    "backbone.init_weights": Row(
        dict(module=linear()), dict(module=linear(12, 7)), after=changed("module")
    ),
    "backbone._keep_evaluation": Row(
        dict(model=linear(), mode=False),
        dict(model=linear(12, 7), mode=Fails(True, "mode", RuntimeError)),
        state,
    ),
    "backbone.resample_parameter": Row(
        dict(pos_embed=nn.Parameter(numbers(1, 17, 6)), new_size=(3, 5), old_size=(4, 4)),
        dict(
            pos_embed=nn.Parameter(numbers(1, 17, 6, seed=1)),
            new_size=(5, 3),
            old_size=(2, 8),
            num_prefix_tokens=Fails(2, "old_size"),
        ),
    ),
    "convert.convert_state_dict": Row(
        dict(state_dict={BIAS_KEY: numbers(12)}, family="vit"),
        dict(state_dict={BIAS_KEY: numbers(12, seed=1)}, family="swinv2"),
    ),
    "convert._drop_key_bias": Row(
        dict(named={BIAS_KEY: numbers(12)}), dict(named={BIAS_KEY: numbers(12, seed=1)})
    ),
    "convert.fuse_qkv": Row(
        dict(state_dict=FUSED),
        dict(
            state_dict={key: 2 * x for key, x in FUSED.items()},
            pattern=r"(b\.attn)\.([qkv])\.(weight|bias)",
            fused="{}.all.{}",
            parts=("v", "k", "q"),
        ),
    ),
    "models.adapt_channels": Row(
        dict(weight=numbers(4, 3, 2, 2), in_chans=1),
        dict(weight=numbers(4, 3, 2, 2, seed=1), in_chans=4),
    ),
    "models.check_classifies": Row(
        dict(model=small_vit()), dict(model=Fails(small_vit(num_classes=0), "classifier"))
    ),
    "models.class_names": Row(dict(name="vit_tiny_patch16_224"), dict(name="vit_collages")),
    "models.load_pretrained": Row(
        dict(model=small_vit(), source=small_vit(seed=1).state_dict()),
        dict(
            model=small_vit(img_size=24),
            source=small_vit(seed=2).state_dict(),
            img_size=Fails(0, "img_size"),
        ),
        after=changed("model"),
    ),
    "models.open_picture": Row(
        dict(picture=picture()), dict(picture=picture(10)), lambda found: found.tobytes()
    ),
    "models.input_box": Row(
        dict(config=DATA_CONFIG, width=640, height=480),
        dict(config=DATA_CONFIG | dict(crop_pct=0.5), width=500, height=400),
    ),
    "models.preprocess": Row(
        dict(config=DATA_CONFIG),
        dict(config=DATA_CONFIG | dict(input_size=(3, 64, 64))),
        called(picture()),
    ),
    "models.pretrained_cfg": Row(
        dict(name="vit_tiny_patch16_224"),
        dict(name="vit_collages", num_classes=5, img_size=64, in_chans=1),
    ),
    "models.read_weights": Row(
        dict(path=RECORDS / "autoformer_digits.safetensors"),
        dict(path=RECORDS / "autoformer_reference.safetensors"),
    ),
    "models.register_model": Row(
        dict(name="test", cls=vit.VisionTransformer),
        dict(name="test_2", cls=beit.Beit, hub="nobody/test", depth=3),
        unregistered,
    ),
    "models.state_dict_of": Row(
        dict(source=dict(model=dict(a=TOKENS))), dict(source=dict(model=dict(b=TOKENS)))
    ),
    "models.unwrap_state_dict": Row(
        dict(source=dict(model=dict(a=TOKENS))), dict(source=dict(model=dict(b=TOKENS)))
    ),
    "cli.predict": Row(
        dict(name="vit_collages", picture=picture(), weights=COLLAGES),
        dict(
            name=Fails("tnt_collages", "missing"),
            picture=picture(100),
            weights=OTHER_COLLAGES,
            k=3,
            map=Fails("map.nowhere", "unknown file extension"),
        ),
    ),
    "cli.describe": Row(dict(name="vit_collages"), dict(name="tnt_collages")),
    "cli._draw_map": Row(
        dict(model=with_config(small_vit()), image=photograph(), path=Page()),
        dict(
            model=with_config(small_vit(depth=1)),
            image=photograph(100),
            path=Fails("page.nowhere", "unknown file extension"),
        ),
        after=lambda arguments: arguments["path"].getvalue(),
    ),
    "cli._last_window": Row(
        dict(model=small_swin(), x=image(32, n=1)),
        dict(model=small_swin(seed=1), x=-image(32, n=1)),
    ),
    "cli._attention_map": Row(
        dict(model=small_vit().eval(), x=image(n=1)),
        dict(model=small_vit(depth=1).eval(), x=-image(n=1)),
    ),
    "cli.main": Row(
        dict(arguments=["models", "vit_collages"]),
        dict(arguments=Fails(["show", "nothing"], "nothing", SystemExit)),
    ),
    "cli._print_classes": Row(
        dict(options=SimpleNamespace(**ASKED, weights=COLLAGES)),
        dict(
            options=Fails(
                SimpleNamespace(**ASKED | dict(name="none"), weights=COLLAGES), "none"
            )
        ),
    ),
    "cli._print_facts": Row(
        dict(options=SimpleNamespace(name="vit_collages")),
        dict(options=Fails(SimpleNamespace(name="nothing"), "nothing")),
    ),
    "cli._print_models": Row(
        dict(options=SimpleNamespace(pattern="vit_c*")),
        dict(options=Fails(SimpleNamespace(pattern="nothing"), "pattern")),
    ),
    "cli._median_iqr": Row(dict(numbers=[1, 2, 4]), dict(numbers=[1, 3, 4], unit=2.0)),
}


# --- supernets --------------------------------------------------------------------------------

DIGITS = image(10, 1)
SUBNET = autoformer.Subnet(16, (1, 2), (1, 2))
OTHER_SUBNET = autoformer.Subnet(32, (2, 1, 3), (1, 2, 2))
DRAWN = [autoformer.sample_subnet(SPACE, seed) for seed in range(30)]
LABELS = torch.tensor([1, 2, 3, 0])
OF_SUBNET = partial(autoformer.parameter_count, small_supernet())


def supernet(seed=0, **options):
    """Of the same space as `SPACE`."""
    sizes = dict(img_size=10, patch_size=2, num_classes=5, head_dim=8, in_chans=1)
    return seeded(autoformer.SuperTransformer, SPACE, seed=seed, **sizes | options)


def with_plain_norm():
    model = supernet()
    model.norm = nn.LayerNorm(48)
    return model


def draw_one(rng):
    return autoformer.sample_subnet(SPACE, rng.randrange(1000))


def without_indices(layer):
    """A layer whose buffers are lost, as after `to_empty`."""
    for x in layer.buffers():
        x.zero_()
    return layer


def elastic_attention(grid_size=(3, 5)):
    sizes = dict(head_dim=4, grid_size=grid_size, max_distance=2)
    return without_indices(seeded(autoformer.Attention, 12, 3, **sizes))


def middle_of(count):
    return sorted(count(supernet(), one) for one in DRAWN)[15]


def buffers_of(name):
    return lambda arguments: dict(arguments[name].named_buffers())


FIRST |= {
    "autoformer.ClassicalSharing": Row(
        dict(space=autoformer.Space((8,), (1,), (1, 2), (1,)), img_size=8, patch_size=4),
        dict(space=autoformer.Space((8,), (2,), (1,), (1,)), img_size=16),
        state,
    ),
    "autoformer.Space": Row(
        dict(embed_dim=(8, 16), depth=(1, 2), num_heads=(1, 2), mlp_ratio=(1, 2)),
        dict(embed_dim=(8,), depth=(1, 3), num_heads=(1, 3), mlp_ratio=(2, 3)),
        lambda space: [space.count(), space.smallest(), space.largest()],
    ),
    "autoformer.Subnet": Row(
        dict(embed_dim=16, num_heads=(1, 2), mlp_ratio=(1, 2)),
        dict(embed_dim=32, num_heads=(2, 2), mlp_ratio=(2, 2)),
        OF_SUBNET,
    ),
    "autoformer.budget": Row(
        dict(supernet=supernet(), max_params=middle_of(autoformer.parameter_count)),
        dict(
            supernet=supernet(num_classes=300),
            max_params=middle_of(autoformer.parameter_count) // 2,
            min_params=middle_of(autoformer.parameter_count) // 2,
            max_operations=middle_of(autoformer.operations) // 2,
        ),
        lambda fits: [fits(one) for one in DRAWN],
    ),
    "autoformer._check_elastic": Row(
        dict(supernet=supernet()), dict(supernet=Fails(with_plain_norm(), "norm", TypeError))
    ),
    "autoformer._best_subnet": Row(
        dict(scores={SUBNET: 1.0, OTHER_SUBNET: 2.0}, limits=dict(max_params=9)),
        dict(scores={SUBNET: 3.0, OTHER_SUBNET: 2.0}),
    ),
    "autoformer.crossover": Row(
        dict(one=SUBNET, other=OTHER_SUBNET, rng=random.Random(0)),
        dict(
            one=autoformer.Subnet(48, (3,) * 4, (3,) * 4),
            other=autoformer.Subnet(48, (3,) * 4, (3,) * 4),
            rng=random.Random(2),
        ),
    ),
    "autoformer.sample_distinct": Row(
        dict(make=partial(draw_one, random.Random(0)), count=3, seen=[])
        | dict(fits=lambda subnet: subnet.depth == 1),
        dict(
            make=partial(draw_one, random.Random(1)),
            count=4,
            fits=lambda subnet: subnet.depth == 2,
            seen=[one for one in SPACE.subnets() if one.embed_dim == 16],
            tries=1,
        ),
    ),
    "autoformer.extract": Row(
        dict(supernet=supernet(), subnet=SUBNET),
        dict(supernet=supernet(seed=1), subnet=OTHER_SUBNET),
        state,
    ),
    "autoformer._first_outputs": Row(
        dict(layer=seeded(autoformer.Linear, 12, 6), x=TOKENS, count=4, full=6),
        dict(
            layer=seeded(autoformer.Linear, 12, 6, seed=1),
            x=2 * TOKENS,
            count=5,
            full=4,
        ),
    ),
    "autoformer.operations": Row(
        dict(model=supernet(), subnet=SUBNET),
        dict(model=supernet(img_size=12), subnet=OTHER_SUBNET),
    ),
    "autoformer.parameter_count": Row(
        dict(model=supernet(), subnet=SUBNET),
        dict(model=supernet(img_size=12), subnet=OTHER_SUBNET),
    ),
    "autoformer._renew_grid": Row(
        dict(layer=elastic_attention()),
        dict(layer=elastic_attention((5, 3))),
        after=buffers_of("layer"),
    ),
    "autoformer._scores_of": Row(
        dict(subnets=[SUBNET], score=OF_SUBNET),
        dict(subnets=[OTHER_SUBNET], score=lambda subnet: -1.0),
    ),
}


# --- masked images ----------------------------------------------------------------------------

HIDDEN = torch.arange(32).view(2, 16) % 3 == 0
OTHER_HIDDEN = torch.arange(32).view(2, 16) % 4 == 0
CODES = torch.arange(32).view(2, 4, 4) % 9
NOISE = numbers(4, 16)


def beit_attention(window_size=(3, 5)):
    return without_indices(seeded(beit.BeitAttention, 12, 3, window_size=window_size))


def block(**options):
    return seeded(vit.Block, 12, 3, **options)


def emptied(mask, rows):
    mask = mask.clone()
    mask[:rows] = True
    return mask


FIRST |= {
    "beit.FeatureEncoder": Row(
        dict(backbone=small_beit(), out_dim=4),
        dict(backbone=small_beit(depth=1), out_dim=5),
        trained(image()),
    ),
    "beit.VQAutoencoder": Row(
        dict(
            encoder=seeded(beit.conv_encoder, 3, 8, 4, 4),
            quantizer=seeded(beit.VectorQuantizer, 5, 4, kmeans_steps=0),
            decoder=seeded(beit.conv_decoder, 4, 8, 3, 4),
        ),
        dict(
            encoder=seeded(beit.conv_encoder, 3, 6, 4, 4),
            quantizer=seeded(beit.VectorQuantizer, 6, 4, kmeans_steps=0),
            decoder=seeded(beit.conv_decoder, 4, 6, 3, 4),
        ),
        trained(image()),
    ),
    "beit._adapt_tables": Row(
        dict(state_dict=ROWS, model=small_beit()),
        dict(state_dict=OTHER_ROWS, model=small_beit(img_size=24), old_grid=(2, 14)),
    ),
    "beit._bias_table": Row(
        dict(window_size=(3, 5), num_heads=2), dict(window_size=(5, 5), num_heads=3) | META
    ),
    "beit._check_masked": Row(
        dict(masked=HIDDEN, shape=(2, 16)),
        dict(masked=Fails(emptied(HIDDEN, 1), "masked"), shape=Fails((2, 15), "shape")),
    ),
    "beit._check_num_masked": Row(
        dict(num_masked=3, num_patches=16),
        dict(num_masked=Fails(16, "num_masked"), num_patches=Fails(3, "num_masked")),
    ),
    "beit._check_vocabulary": Row(
        dict(num_embeddings=3), dict(num_embeddings=Fails(1, "num_embeddings"))
    ),
    "beit._mask_rectangle": Row(
        dict(masked=torch.zeros(6, 6, dtype=torch.bool), height=2, width=3, most=9)
        | dict(rng=random.Random(0)),
        dict(
            masked=torch.ones(6, 6, dtype=torch.bool),
            height=3,
            width=2,
            most=1,
            rng=random.Random(1),
        ),
        after=changed("masked"),
    ),
    "beit._init_beit": Row(
        dict(model=small_beit()), dict(model=small_beit(depth=1)), after=changed("model")
    ),
    "beit.masked_loss": Row(
        dict(model=small_masked(), batch=(image(n=2), CODES, HIDDEN.view(2, 4, 4))),
        dict(
            model=small_masked(depth=1),
            batch=(2 * image(n=2), CODES.flip(1), OTHER_HIDDEN.view(2, 4, 4)),
        ),
    ),
    "beit.position_bias": Row(
        dict(table=numbers(9, 2), index=torch.arange(9).view(3, 3)),
        dict(table=numbers(9, 2, seed=1), index=torch.arange(8, -1, -1).view(3, 3)),
    ),
    "beit._renew_index": Row(
        dict(module=beit_attention()),
        dict(module=beit_attention((5, 5))),
        after=buffers_of("module"),
    ),
    "beit._without_pretraining": Row(
        dict(state_dict=small_masked().state_dict(), model=small_beit()),
        dict(state_dict=small_masked(seed=1).state_dict(), model=small_beit(depth=1)),
    ),
    "mae.check_encoder_options": Row(
        dict(options=dict(depth=2), trained=dict(depth=2)),
        dict(options=Fails(dict(depth=3), "depth"), trained=Fails(dict(depth=3), "depth")),
    ),
    "mae._check_noise": Row(
        dict(noise=NOISE, shape=(4, 16)),
        dict(noise=Fails(NOISE[1:], "noise"), shape=Fails((4, 15), "noise")),
    ),
    "mae._init_weights": Row(
        dict(module=linear()), dict(module=linear(12, 7)), after=changed("module")
    ),
    "mae.load_encoder": Row(
        dict(model=small_vit(), stored=small_vit(seed=1).state_dict()),
        dict(
            model=Fails(small_vit(depth=3), "untrained"), stored=small_vit(seed=2).state_dict()
        ),
        after=changed("model"),
    ),
    "mae.masked_loss": Row(
        dict(model=small_mae(), batch=(image(),)),
        dict(model=small_mae(depth=1), batch=(2 * image(),), mask_ratio=0.5),
    ),
    "mae.normalize_patches": Row(dict(patches=TOKENS), dict(patches=TOKENS.square())),
    "mae.unpatchify": Row(
        dict(patches=numbers(2, 6, 24), grid_size=(2, 3), patch_size=(2, 4)),
        dict(patches=numbers(2, 6, 24, seed=1), grid_size=(3, 2), patch_size=(4, 2)),
    ),
}


# --- detection --------------------------------------------------------------------------------

BOXES = torch.tensor([[0.5, 0.5, 0.2, 0.4], [0.3, 0.4, 0.2, 0.2]])
FILL = torch.ones(4, 16, 16, dtype=torch.bool)


def conv(**options):
    return seeded(nn.Conv2d, 3, 4, 3, **options)


def frozen_norm(scale=1.0):
    norm = detr.FrozenBatchNorm2d(4)
    norm.weight.mul_(scale)
    return norm


def residual(seed=0):
    return seeded(detr.ResNet, "resnet18", seed=seed).layer1[0]


FIRST |= {
    "detr._sine_box_embedding": Row(
        dict(boxes=BOXES[None], dim=8, temperature=20),
        dict(boxes=BOXES[None].flip(1), dim=12, temperature=10000),
    ),
    "detr.check_images": Row(
        dict(images=image(), mask=FILL),
        dict(images=Fails(image()[0], "images"), mask=Fails(FILL[1:], "mask")),
    ),
    "detr.check_targets": Row(
        dict(targets=TARGETS, batch=1, num_queries=2, num_classes=5),
        dict(
            targets=Fails([dict(labels=torch.tensor([1, 2]))], "boxes"),
            batch=Fails(2, "targets"),
            num_queries=Fails(1, "num_queries"),
            num_classes=Fails(2, "num_classes"),
        ),
    ),
    "detr._check_values": Row(
        dict(name="target", labels=torch.tensor([1, 2]), boxes=BOXES, num_classes=3),
        dict(
            labels=Fails(torch.tensor([1, 3]), "labels"),
            boxes=Fails(2 * BOXES, "boxes"),
            num_classes=Fails(2, "labels"),
        ),
    ),
    "detr._frozen_conv": Row(
        dict(conv=conv(), norm=frozen_norm(), x=image()),
        dict(conv=conv(stride=2), norm=frozen_norm(2.0), x=2 * image()),
    ),
    "detr._pad_targets": Row(
        dict(targets=TARGETS, like=BOXES),
        dict(
            targets=[*TARGETS, dict(labels=torch.tensor([1]), boxes=BOXES[:1])],
            like=BOXES.double(),
        ),
    ),
    "detr._residual_block": Row(
        dict(block=residual(), x=numbers(1, 64, 8, 8)),
        dict(block=residual(1), x=numbers(1, 64, 8, 8, seed=1)),
    ),
    "detr._safe_ratio": Row(
        dict(part=torch.tensor([1.0, 0.0]), whole=torch.tensor([2.0, 0.0])),
        dict(part=torch.tensor([2.0, 0.0]), whole=torch.tensor([4.0, 0.0])),
    ),
    "detr.small_detr": Row(
        dict(num_classes=5),
        dict(num_classes=6, detector=detr.BoxQueryDETR, temperature=20),
        trained(image(48), call=of_output),
    ),
    "detr.upcast": Row(dict(x=BOXES.half()), dict(x=BOXES.double())),
}


# --- texts ------------------------------------------------------------------------------------

MASK = torch.tensor([[0, 1, 1, 1, 1, 1]]).repeat(3, 1)
TURN = gpt.rope_cos_sin(config(), torch.arange(1, 6))
TEXTS = ["one two three", "three four five two", "four five six"]
TEXT = "one two three four five"
HERE = Path(__file__)


def wrong(**entries):
    """A configuration that could not be made so."""
    found = config()
    for name, value in entries.items():
        object.__setattr__(found, name, value)
    return found


def published(**entries):
    """A configuration of GPT-2 as the library transformers has it."""
    known = dict(model_type="gpt2", tie_word_embeddings=True, vocab_size=20, n_positions=8)
    known |= dict(n_layer=1, n_head=2, n_embd=8, n_inner=None, layer_norm_epsilon=1e-5)
    return SimpleNamespace(**known | entries)


def small_gpt(**options):
    return seeded(gpt.GPT, config(**options))


def of_transformers(seed=0):
    """A model as the library transformers has it, with one weight."""
    weights = {"transformer.wte.weight": numbers(20, 8, seed=seed)}
    return SimpleNamespace(
        config=published(),
        get_output_embeddings=lambda: True,
        state_dict=lambda: dict(weights),
    )


def untied():
    """A model that is to share its weights, and does not."""
    model = small_gpt()
    model.lm_head.weight = nn.Parameter(numbers(20, 16))
    return model


def most_probable(log_probs):
    return log_probs.argmax(-1)


def least_probable(log_probs):
    return log_probs.argmin(-1)


FIRST |= {
    "data.decode": Row(
        dict(tokenizer=words()[0], tokens=torch.arange(8, 20).view(2, 6)),
        dict(tokenizer=data.train_bpe(TEXTS, 40), tokens=torch.arange(9, 21).view(2, 6)),
    ),
    "data.draw_scenes": Row(
        dict(description=data.describe_scenes(3), size=12),
        dict(description=data.describe_scenes(3, seed=1), size=16),
    ),
    "data.fetch": Row(
        dict(name=HERE.name, folder=HERE.parent)
        | dict(sources={"": sha256(HERE.read_bytes()).hexdigest()}),
        dict(
            name=Fails("world.py", "SHA-256"),
            sources=Fails({"": "0"}, "SHA-256"),
            folder=Fails(HERE / "none", "argument_rows_first", OSError),
        ),
        str,
    ),
    "data.train_bpe": Row(
        dict(texts=[*TEXTS, "two, two, two, two,"], vocab_size=35),
        dict(texts=TEXTS[1:], vocab_size=25, extra=["<de>"], punctuation=True),
        lambda tokenizer: tokenizer.get_vocab(),
    ),
    "data.train_tokenizer": Row(
        dict(text=TEXT, vocab_size=260),
        dict(text=TEXT[6:], vocab_size=259),
        lambda tokenizer: tokenizer.get_vocab(),
    ),
    "decoding.generate": Row(
        SEARCH | dict(choose=most_probable),
        SEARCH_OTHERS | dict(choose=least_probable, eos_id=Fails(0, "eos_id")),
    ),
    "efficient._check_grid": Row(
        dict(x=TOKENS, grid=(4, 4)),
        dict(x=Fails(TOKENS[:, 1:], "grid"), grid=Fails((4, 5), "grid")),
    ),
    "efficient._check_lengths": Row(
        dict(q=TOKENS, k=TOKENS, v=TOKENS),
        dict(
            q=Fails(TOKENS[:, 1:], "equally many"),
            k=Fails(TOKENS[:, 1:], "k"),
            v=Fails(TOKENS[:, 1:], "v"),
        ),
    ),
    "efficient.elu_features": Row(dict(x=TOKENS), dict(x=2 * TOKENS)),
    "gpt._boolean_mask": Row(
        dict(attention_mask=MASK), dict(attention_mask=Fails(2 * MASK, "attention_mask"))
    ),
    "gpt._check_config": Row(
        dict(config=config()), dict(config=Fails(wrong(n_embd=17), "n_embd"))
    ),
    "gpt._check_input": Row(
        dict(tokens=tokens(), attention_mask=MASK, config=config()),
        dict(
            tokens=Fails(tokens(low=20, high=21), "tokens"),
            attention_mask=Fails(MASK[:, 1:], "attention_mask"),
            config=Fails(config(block_size=5), "block_size"),
            past=Fails(3, "block_size"),
            more=Fails(3, "block_size"),
        ),
    ),
    "gpt._check_generation": Row(
        dict(tokens=tokens(), max_new_tokens=2, attention_mask=MASK, config=config()),
        dict(
            tokens=Fails(tokens(low=20, high=21), "tokens"),
            max_new_tokens=Fails(4, "block_size"),
            attention_mask=Fails(MASK.flip(1), "padded on the left"),
            config=Fails(config(block_size=5), "block_size"),
            eos_id=Fails(20, "eos_id"),
        ),
    ),
    "gpt._check_published": Row(
        dict(source=published(), n_layer=(1, 2)),
        dict(source=Fails(published(n_layer=3), "n_layer"), n_layer=Fails((2,), "n_layer")),
    ),
    "gpt.config_from_transformers": Row(
        dict(source=published()), dict(source=published(n_layer=2)), vars
    ),
    "gpt._for_groups": Row(
        dict(x=numbers(2, 4, 1, 6), groups=2), dict(x=numbers(2, 4, 1, 6, seed=1), groups=4)
    ),
    "gpt.init_weights": Row(
        dict(model=small_gpt()), dict(model=small_gpt(n_layer=1)), after=changed("model")
    ),
    "gpt.layer_inputs": Row(
        dict(config=config(), x=numbers(2, 5, 16), rope=None, mask="causal", past=2),
        dict(
            config=config(rope_base=100.0),
            x=numbers(2, 4, 16),
            rope=TURN,
            mask=None,
            past=3,
        ),
    ),
    "gpt._read_transformers": Row(
        dict(source=of_transformers()),
        dict(source=of_transformers(seed=1)),
        lambda pair: [vars(pair[0]), pair[1]],
    ),
    "gpt.text_loss": Row(
        dict(model=small_gpt(), batch=(tokens(),)),
        dict(model=small_gpt(n_layer=1), batch=(tokens().flip(1),)),
    ),
    "gpt._tie_weights": Row(
        dict(model=untied()), dict(model=small_gpt(vocab_size=21)), after=changed("model")
    ),
}

HOOK = "PyTorch passes it to a hook, which does not use it"
ERROR = "stands in the error"
SPARED_FIRST = {  # arguments without another value here, and why
    "autoformer._best_subnet": dict(limits=ERROR),
    "autoformer._renew_grid": dict(incompatible_keys=HOOK),
    "backbone.resize": dict(hook="it forgets what it has known"),
    "beit._renew_index": dict(incompatible_keys=HOOK),
    "decoding.generate": dict(use_cache=SAME),
    "detr._check_values": dict(name=ERROR),
    "gpt._tie_weights": dict(incompatible_keys=HOOK),
}
