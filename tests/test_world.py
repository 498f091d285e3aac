"""A call leaves models, random numbers and the settings of the process as it found them."""

import inspect
import random
import tempfile
from functools import cache, partial

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from small_models import small_supernet
from world import (
    changes,
    differences,
    function_named,
    public_functions,
    state_of,
    unchanged,
    world,
)

import attnlib
from attnlib import (
    autoformer,
    backbone,
    beit,
    cli,
    cost,
    data,
    decoding,
    deit,
    detr,
    efficient,
    finetune,
    gpt,
    inference,
    mae,
    mistakes,
    models,
    panoptic,
    recipes,
    scaling,
    spatial,
    swin,
    train,
    transformer,
    translation,
    vit,
    vit_variants,
)
from attnlib.attention import _SameTensors, checkpoint_block
from helpers import build

pytestmark = pytest.mark.usefixtures("quiet")


# --- models and inputs ------------------------------------------------------------------------


def image(size=32, chans=3, n=2):
    return torch.randn(n, chans, size, size, generator=torch.Generator().manual_seed(0))


def tokens(n=6, low=3, high=20, rows=2):
    return torch.randint(low, high, (rows, n), generator=torch.Generator().manual_seed(n))


def noise():
    return torch.rand(2, 16, generator=torch.Generator().manual_seed(0))


def hidden():
    return torch.arange(32).view(2, 4, 4) % 3 == 0


def labels():
    return torch.tensor([1, 3])


def make_transformer(**options):
    sizes = dict(num_encoder_layers=1, num_decoder_layers=2, dim_feedforward=24, max_length=16)
    return transformer.Transformer(20, d_model=16, nhead=2, dropout=0.0, **sizes | options)


def make_gpt(**options):
    shape = dict(vocab_size=20, block_size=16, n_layer=2, n_head=2, n_embd=16)
    return gpt.GPT(gpt.GPTConfig(**shape | options))


def make_detr():
    sizes = dict(num_encoder_layers=1, num_decoder_layers=1, embed_dim=16, num_heads=2)
    small = detr.SmallBackbone((8, 8, 8, 8))
    return detr.DETR(5, 4, backbone=small, dim_feedforward=24, dropout=0.0, **sizes)


def make_mae():
    shape = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)
    shape |= dict(decoder_embed_dim=20, decoder_depth=2, decoder_num_heads=5)
    return mae.MaskedAutoencoder(**shape)


def make_masked_beit():
    shape = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, vocab_size=11)
    return beit.BeitForMaskedImageModeling(**shape)


def make_named():
    """A model that `create_model` has made, which knows its name and its pixels."""
    shape = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)
    return models.create_model("vit_tiny_patch16_224", num_classes=5, **shape)


def make_torch_layer(kind=nn.TransformerDecoderLayer):
    return kind(16, 2, 24, dropout=0.0, batch_first=True)


def make_torch_norm():
    return nn.LayerNorm(8)


def make_resnet():
    return detr.ResNet("resnet18")


def make_pair():
    """A student and a teacher in one module."""
    return nn.ModuleDict(dict(student=build("vit"), teacher=recipes.small_convnet(3, 5, (4,))))


@cache
def number_tokenizer():
    return translation.number_tokenizer(range(200), 150)


def make_translator():
    return transformer.Transformer(150, None, 16, 2, 1, 1, 24, dropout=0.0, max_length=128)


@cache
def weights(name, **options):
    return build(name, **options).state_dict()


@cache
def pretrained():
    return make_masked_beit().state_dict()


def draw(model):
    picture = models.open_picture(np.zeros((40, 48, 3), np.uint8))
    with tempfile.TemporaryDirectory() as folder:
        cli._draw_map(model, picture, f"{folder}/map.png")


# --- every public function that takes a model -------------------------------------------------

SUBNET = autoformer.Subnet(16, (1, 1), (1, 2))
KEPT = {  # "module.function": (what makes the model, the call)
    "backbone.describe_model": (partial(build, "vit"), backbone.describe_model),
    "attention._SameTensors": (make_gpt, lambda m: _SameTensors(m)(tokens())),
    "attention.checkpoint_block": (
        make_gpt,
        lambda m: checkpoint_block(m, tokens()).sum(),
    ),
    "finetune._check_folding": (
        partial(build, "vit"),
        lambda m: finetune._check_folding(m, [0.5] * 3, [0.5] * 3),
    ),
    "autoformer._check_elastic": (small_supernet, autoformer._check_elastic),
    "autoformer.extract": (
        small_supernet,
        lambda m: autoformer.extract(m, m.space.smallest()),
    ),
    "autoformer._first_outputs": (
        lambda: autoformer.Linear(4, 6),
        lambda m: autoformer._first_outputs(m, torch.ones(2, 4), 3, 6),
    ),
    "autoformer.parameter_count": (
        small_supernet,
        lambda m: autoformer.parameter_count(m, SUBNET),
    ),
    "autoformer.operations": (
        small_supernet,
        lambda m: autoformer.operations(m, SUBNET),
    ),
    "autoformer.budget": (
        small_supernet,
        lambda m: autoformer.budget(m, max_params=50_000)(SUBNET),
    ),
    "autoformer.evolutionary_search": (
        small_supernet,
        lambda m: autoformer.evolutionary_search(
            lambda s: len(s.num_heads),
            m,
            population=4,
            generations=1,
            parents=2,
            crossovers=1,
            mutations=1,
        ),
    ),
    "backbone.is_unchanged": (
        partial(build, "vit"),
        lambda m: backbone.is_unchanged(m, vit.VisionTransformer),
    ),
    "backbone.is_plain": (
        partial(build, "vit"),
        lambda m: backbone.is_plain(m, vit.VisionTransformer),
    ),
    "backbone.evaluation": (partial(build, "vit"), lambda m: evaluate_inside(m)),
    "backbone.frozen_copy": (partial(build, "vit"), backbone.frozen_copy),
    "beit._adapt_tables": (
        partial(build, "beit"),
        lambda m: beit._adapt_tables(weights("beit", img_size=48), m),
    ),
    "beit._without_pretraining": (
        partial(build, "beit"),
        lambda m: beit._without_pretraining(pretrained(), m),
    ),
    "beit.masked_loss": (
        make_masked_beit,
        lambda m: beit.masked_loss(m, (image(), hidden().long(), hidden())),
    ),
    "beit.VQAutoencoder": (
        lambda: beit.conv_encoder(3, 8, 4, 8),
        lambda m: beit.VQAutoencoder(m, nn.Identity(), nn.Identity()),
    ),
    "beit.FeatureEncoder": (
        partial(build, "vit"),
        lambda m: beit.FeatureEncoder(m, 4)(image()),
    ),
    "cli._attention_map": (partial(build, "vit"), lambda m: cli._attention_map(m, image(n=1))),
    "cli._last_window": (
        partial(build, "swin", window_size=8),
        lambda m: cli._last_window(m, image(n=1)),
    ),
    "cli._draw_map": (make_named, lambda m: draw(m)),
    "cost.training_memory": (
        partial(build, "vit"),
        lambda m: cost.training_memory(m, image()),
    ),
    "decoding.next_log_probs": (
        make_transformer,
        lambda m: decoding.next_log_probs(m, tokens(), torch.ones(2, 5, 16)),
    ),
    "decoding.generate": (
        make_transformer,
        lambda m: decoding.generate(lambda x: x.argmax(-1), m, tokens(), 5),
    ),
    "decoding.greedy": (make_transformer, lambda m: decoding.greedy(m, tokens(), 5)),
    "decoding._vocabulary_size": (make_transformer, decoding._vocabulary_size),
    "decoding._check_decoding": (
        make_transformer,
        lambda m: decoding._check_decoding(m, tokens(), 5, 1, 2),
    ),
    "decoding.beam_search": (
        make_transformer,
        lambda m: decoding.beam_search(m, tokens(), 5, 2),
    ),
    "decoding.sample": (
        make_transformer,
        lambda m: decoding.sample(m, tokens(), 5, generator=torch.Generator()),
    ),
    "detr._frozen_conv": (
        make_resnet,
        lambda m: detr._frozen_conv(m.conv1, m.bn1, image()),
    ),
    "detr._residual_block": (
        make_resnet,
        lambda m: detr._residual_block(m.layer2[0], image(8, 64)),
    ),
    "detr.DETR": (
        lambda: detr.SmallBackbone((8, 8, 8, 8)),
        lambda m: detr.DETR(5, 4, 1, 1, m, 16, 2, 24),
    ),
    "gpt.text_loss": (make_gpt, lambda m: gpt.text_loss(m, (tokens(),))),
    "gpt.text_bits": (make_gpt, lambda m: gpt.text_bits(m, tokens(30, rows=1)[0], 8)),
    "inference.pack": (lambda: nn.Linear(4, 6), lambda m: inference.pack(m)(torch.ones(4))),
    "inference.optimize_for_inference": (
        partial(build, "swin"),
        lambda m: inference.optimize_for_inference(m)(image()),
    ),
    "inference.FastResNet": (make_resnet, lambda m: inference.FastResNet(m)),
    "inference._FastBlock": (make_resnet, lambda m: inference._FastBlock(m.layer2[0])),
    "inference._PackedConv": (make_resnet, lambda m: inference._PackedConv(m.conv1, m.bn1)),
    "inference._can_pack_resnet": (make_resnet, inference._can_pack_resnet),
    "inference.FastWindowAttention": (
        partial(build, "swin"),
        lambda m: inference.FastWindowAttention(m.blocks[1].attn),
    ),
    "inference._FastSelfAttention": (
        make_transformer,
        lambda m: inference._FastSelfAttention(m.encoder.layers[0].self_attn),
    ),
    "inference._FastCrossAttention": (
        make_transformer,
        lambda m: inference._FastCrossAttention(m.decoder.layers[0].multihead_attn),
    ),
    "inference._FastCausalAttention": (
        make_gpt,
        lambda m: inference._FastCausalAttention(m.h[0].attn),
    ),
    "inference._pack_gpt_mlp": (
        partial(make_gpt, mlp="gelu"),
        lambda m: inference._pack_gpt_mlp(m.h[0].mlp),
    ),
    "inference._pack_mlp": (
        partial(build, "vit"),
        lambda m: inference._pack_mlp(m.blocks[0].mlp),
    ),
    "inference._pack_feed_forward": (
        lambda: transformer.FeedForward(8, 16),
        inference._pack_feed_forward,
    ),
    "inference._first_tokens": (
        partial(build, "vit"),
        lambda m: inference._first_tokens(m.blocks[0].attn, torch.ones(1, 5, 24), 2),
    ),
    "inference.forward_short": (
        partial(build, "vit"),
        lambda m: inference.forward_short(m, image()),
    ),
    "inference._can_shorten": (partial(build, "vit"), inference._can_shorten),
    "backbone.is_as_built": (
        lambda: nn.Linear(4, 6),
        lambda m: backbone.is_as_built(m, {nn.Linear: {}}),
    ),
    "inference.devices": (partial(build, "vit"), inference.devices),
    "mae.masked_loss": (make_mae, lambda m: mae.masked_loss(m, (image(),))),
    "models.check_classifies": (partial(build, "vit"), models.check_classifies),
    "compare.compare": (
        make_torch_norm,
        lambda m: attnlib.compare(m, nn.LayerNorm(8, eps=1e-6)),
    ),
    "mistakes.Reference": (make_torch_norm, lambda m: mistakes.REFERENCES_OF[nn.LayerNorm](m)),
    "models.check_loadable": (partial(build, "vit"), models.check_loadable),
    "models.classify": (
        make_named,
        lambda m: models.classify(m, np.zeros((40, 40, 3), np.uint8), 2, list("abcde")),
    ),
    "vit_variants.RotaryAttention": (
        lambda: vit.PatchEmbed(32, 8, 3, 24),
        lambda m: vit_variants.RotaryAttention(m, 1, 24, 3)(torch.ones(1, 17, 24)),
    ),
    "panoptic.PanopticDETR": (make_detr, lambda m: panoptic.PanopticDETR(m, num_groups=1)),
    "finetune.fold_normalization": (
        partial(build, "vit"),
        lambda m: finetune.fold_normalization(m, (0.5,) * 3, (0.5,) * 3),
    ),
    "finetune.layer_numbers": (partial(build, "swin"), finetune.layer_numbers),
    "finetune.layer_scales": (partial(build, "swin"), finetune.layer_scales),
    "recipes.classification_loss": (
        partial(build, "vit"),
        lambda m: recipes.classification_loss(m, (image(), labels())),
    ),
    "recipes.accuracy": (
        partial(build, "vit"),
        lambda m: recipes.accuracy(m, (image(), labels()), 1),
    ),
    "recipes.translation_accuracy": (
        make_translator,
        lambda m: recipes.translation_accuracy(
            m, number_tokenizer(), dict(src=tokens(), numbers=[1, 2]), 6
        ),
    ),
    "scaling._has_dropout": (partial(build, "vit"), scaling._has_dropout),
    "scaling.GPTStage": (
        partial(make_gpt, tied=False),
        lambda m: scaling.GPTStage(m, 0, 2)(tokens()),
    ),
    "spatial.Captioner": (
        spatial.ConvEncoder,
        lambda m: spatial.Captioner(20, m, hidden_dim=8),
    ),
    "swin.SwinStage": (
        lambda: swin.SwinBlock(8, 2, 4),
        lambda m: swin.SwinStage(nn.Identity(), [m])(torch.ones(1, 4, 4, 8)),
    ),
    "swin._resample_tables": (
        partial(build, "swin"),
        lambda m: swin._resample_tables(weights("swin", window_size=2), m),
    ),
    "swin.pixel_maps": (
        partial(build, "swin"),
        lambda m: swin.pixel_maps(m, image(), (5, 9)),
    ),
    "train._without_decay": (partial(build, "vit"), train._without_decay),
    "train.adamw": (partial(build, "vit"), lambda m: train.adamw(m, 1e-3, (0.9, 0.99), 0.1)),
    "train._training_state": (
        partial(build, "vit"),
        lambda m: train._training_state(
            m, torch.optim.AdamW(m.parameters()), train._Kept(m, None)
        ),
    ),
    "train.frozen_in_evaluation": (partial(build, "vit"), train.frozen_in_evaluation),
    "train.modes_restored": (partial(build, "vit"), lambda m: turn_modes(m)),
    "transformer.check_tied": (
        make_transformer,
        lambda m: transformer.check_tied(m, m.state_dict()),
    ),
    "transformer.Encoder": (
        lambda: transformer.EncoderLayer(16, 2, 24, 0.0),
        lambda m: transformer.Encoder([m])(torch.ones(1, 3, 16)),
    ),
    "transformer.Decoder": (
        lambda: transformer.DecoderLayer(16, 2, 24, 0.0),
        lambda m: transformer.Decoder([m])(torch.ones(1, 3, 16), torch.ones(1, 4, 16)),
    ),
    "transformer._layer_from_torch": (make_torch_layer, transformer._layer_from_torch),
    "transformer.from_torch": (
        lambda: nn.Transformer(16, 2, 1, 1, 24, 0.0, batch_first=True),
        lambda m: transformer.from_torch(m, 20),
    ),
    "translation.translation_loss": (
        make_transformer,
        lambda m: translation.translation_loss(m, (tokens(), tokens())),
    ),
    "translation.translate_numbers": (
        make_translator,
        lambda m: translation.translate_numbers(
            m, number_tokenizer(), ["one"], "de", max_length=6
        ),
    ),
    "translation.translate": (
        make_translator,
        lambda m: translation.translate(
            m, number_tokenizer(), ["one"], beam_size=2, max_length=6
        ),
    ),
    "vit.patch_shares": (partial(build, "vit"), lambda m: vit.patch_shares(m, image())),
}


def turn_modes(model):
    with train.modes_restored(model):
        model.train(not model.training)


def evaluate_inside(model):
    with backbone.evaluation(model):
        assert not any(part.training for part in model.modules())


DRAWS = {  # functions that draw random numbers, and why
    "beit.FeatureEncoder": "the weights of its linear layer",
    "detr.DETR": "the weights of the transformer",
    "mae.masked_loss": "which patches are masked",
    "vit_variants.RotaryAttention": "its weights",
    "panoptic.PanopticDETR": "the weights of the mask head",
    "spatial.Captioner": "the weights of the decoder",
    "transformer.from_torch": "the embeddings",
}
HOOKS = {"_load_state_dict_pre_hooks", "_forward_pre_hooks"}
WEIGHTS = {"value", "gradient"}
CHANGED = {  # "module.function": (model, call, the kinds of changes, words of the docstring)
    "backbone.init_weights": (
        partial(build, "vit"),
        lambda m: m.apply(backbone.init_weights),
        WEIGHTS,
        "normal",
    ),
    "backbone.guard": (
        partial(build, "vit"),
        backbone.guard,
        {"methods"} | HOOKS,
        "is changed",
    ),
    "beit._init_beit": (partial(build, "beit"), beit._init_beit, WEIGHTS, "is changed"),
    "gpt.init_weights": (make_gpt, gpt.init_weights, WEIGHTS, ""),
    "gpt._tie_weights": (make_gpt, gpt._tie_weights, set(), "is changed"),
    "transformer.tie": (
        make_transformer,
        lambda m: transformer.tie(m.output, m.src_embed),
        set(),
        "is changed",
    ),
    "transformer._tie_embeddings": (
        make_transformer,
        transformer._tie_embeddings,
        set(),
        "is changed",
    ),
    "mae.load_encoder": (
        partial(build, "vit"),
        lambda m: mae.load_encoder(m, weights("vit")),
        WEIGHTS,
        "overwritten",
    ),
    "mae._init_weights": (
        partial(build, "vit"),
        lambda m: m.apply(mae._init_weights),
        WEIGHTS,
        "Initialize",
    ),
    "models.load_pretrained": (
        partial(build, "vit"),
        lambda m: models.load_pretrained(m, weights("vit")),
        WEIGHTS,
        "into a model",
    ),
    "finetune.rollout_map": (
        partial(build, "vit"),
        lambda m: finetune.rollout_map(m, image(), 8),
        {"training"},
        "put into evaluation mode",
    ),
    "finetune.gradient_map": (
        partial(build, "vit"),
        lambda m: finetune.gradient_map(m, image(), 8),
        {"training"},
        "put into evaluation mode",
    ),
    "finetune.occlusion_map": (
        partial(build, "vit"),
        lambda m: finetune.occlusion_map(m, image(), 8),
        {"training"},
        "put into evaluation mode",
    ),
    "deit.DistillationLoss": (
        make_pair,
        lambda m: train_with_teacher(m["student"], m["teacher"]),
        WEIGHTS,
        "no part of the student's checkpoint",
    ),
    "recipes.train_classifier": (
        partial(build, "vit"),
        lambda m: train_two_steps(m),
        WEIGHTS,
        "Train a model",
    ),
    "train.fit": (
        partial(build, "vit"),
        lambda m: train.fit(m, lambda step: (image(), labels()), loss_fn=loss_of, steps=2),
        WEIGHTS,
        "Trained in place",
    ),
}


def train_two_steps(model):
    pairs = image(), labels()
    recipes.train_classifier(model, pairs, pairs, steps=2, batch_size=2)


def train_with_teacher(student, teacher):
    loss_fn = deit.DistillationLoss(teacher)
    train.fit(student, (image(), labels()), loss_fn=loss_fn, steps=2, batch_size=2)


def loss_of(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


NO_MODEL = {  # functions whose argument only sounds like a model
    "gpt.GPTConfig": "norm is a name",
    "recipes._small_run": "model is a name",
    "recipes.train_small": "model is a name",
    "windows._compile_linear": "norm is a flag",
}
ELSEWHERE = {  # functions that are called nowhere here, and why
    "compare.assert_equal": "calls `compare`",
    "models.save_model": "writes files: tests/test_way_in.py",
    "beit.dvae_loss": "a loss of a batch: tests/test_beit.py",
    "autoformer._renew_grid": "a hook of load_state_dict that renews an index",
    "backbone.FeatureExtractor": "removes layers; its docstring says so",
    "backbone._SameParameters": "a hook of a guarded copy",
    "backbone._keep_evaluation": "the method train of a guarded copy",
    "backbone.resize": "the method set_input_size of a guarded copy",
    "beit._renew_index": "a hook of load_state_dict that renews an index",
    "inference.fuse": "needs a GPU",
    "inference._pack_all": "changes a copy that `optimize_for_inference` makes",
    "inference.replace_module": "changes a copy that `optimize_for_inference` makes",
    "vit_variants.use_rotary": "replaces the attention; its docstring says so",
    "scaling.shard_module": "needs processes, and changes the model",
    "scaling.copy_to_group": "a hook that needs processes",
    "scaling.tensor_parallel": "needs processes, and changes the model",
    "swinv2._restore_trained_window": "a hook of load_state_dict",
    "swinv2._store_trained_window": "a hook of state_dict",
    "train._prepare": "a part of `fit`",
    "train._resume": "a part of `fit`",
    "train.shard_blocks": "needs processes, and changes the model",
    "train._share_buffers": "needs processes, and changes the model",
    "train._train_step": "a part of `fit`",
    "windows.FusedBlock": "needs kernels",
    "windows.FusedMerging": "needs kernels",
    "windows._can_fuse": "needs kernels",
    "windows._can_fuse_merging": "needs kernels",
    "windows.fuse_attention": "needs kernels",
    "windows.fuse_swin": "needs kernels",
    "windows.fused_linear": "needs kernels",
    "windows._sharing_copy": "needs kernels",
    "windows._uses_kernel": "needs kernels",
}
ARGUMENTS = {"model", "module", "supernet", "student", "teacher", "detr", "backbone", "encoder"}
ARGUMENTS |= {
    "decoder",
    "quantizer",
    "block",
    "blocks",
    "layer",
    "layers",
    "downsample",
    "attn",
}
ARGUMENTS |= {"conv", "norm", "merging", "patch_embed", "mine"}


def public(names):
    """Those of "module.name" that a module exports."""
    return {name for name in names if "._" not in name}


def parameters_of(function):
    """The names of a function's arguments."""
    try:
        return inspect.signature(function).parameters
    except ValueError:  # a function of another library, written in C
        return {}


def test_tables_have_every_function_that_takes_a_model():
    taking = {
        name
        for name, function in public_functions().items()
        if ARGUMENTS & set(parameters_of(function))
    }
    taking -= {"vit.VisionTransformer"}  # block is a class
    tables = (KEPT, CHANGED, NO_MODEL, ELSEWHERE)
    listed = set().union(*tables)
    assert sum(map(len, tables)) == len(listed)  # no function is in two
    listed = public(listed)
    assert taking == listed, (sorted(taking - listed), sorted(listed - taking))


# --- modes ------------------------------------------------------------------------------------


def one_part(model):
    """The first block, or where there are none the first part, of a model."""
    for part in model.modules():
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) > 1:
            return part[0]
    return next(model.children(), model)


def put(model, mode):
    """A model in training mode, in evaluation mode, or with a part that is frozen and in it."""
    model.train(mode != "eval")
    if mode == "mixed":
        one_part(model).requires_grad_(False).eval()
    return model


def call(function, model):
    """Call a function; that it refuses training mode is an answer, too."""
    try:
        function(model)
    except (ValueError, AssertionError) as error:
        words = "model.eval()", "call eval()"
        if not any(one in str(error) for one in words):
            raise


MODES = pytest.mark.parametrize("mode", ["train", "eval", "mixed"])


@MODES
@pytest.mark.parametrize("name", KEPT)
def test_a_call_leaves_the_model_as_it_was(name, mode):
    make, function = KEPT[name]
    number_tokenizer(), pretrained(), weights("beit", img_size=48)
    weights("swin", window_size=2)
    torch.manual_seed(0)
    model = put(make(), mode)
    with unchanged(model, numbers=name not in DRAWS):
        call(function, model)


@MODES
@pytest.mark.parametrize("name", CHANGED)
def test_a_call_changes_only_what_it_says(name, mode):
    make, function, kinds, words = CHANGED[name]
    assert words in inspect.getdoc(function_named(name))
    torch.manual_seed(0)
    model = put(make(), mode)
    before, outside = state_of(model), world()
    call(function, model)
    assert not changes(outside, world())
    found = {one.split("(")[-1].rstrip(")") for one in differences(before, state_of(model))}
    assert found <= kinds


def test_a_change_is_found():
    """Control: `unchanged` sees what it is there for."""
    model = build("vit")
    block = model.blocks[0]
    changing = [
        model.eval,
        lambda: block.requires_grad_(False),
        lambda: setattr(model, "norm", nn.LayerNorm(24)),
        lambda: setattr(block.mlp.fc1, "weight", nn.Parameter(block.mlp.fc1.weight.detach())),
        lambda: nn.init.zeros_(model.head.weight),
        lambda: block.register_forward_hook(print),
        lambda: setattr(block, "forward", print),
        lambda: setattr(model, "num_classes", 3),
        lambda: model.head.bias.sum().backward(),
        lambda: torch.rand(1),
        lambda: np.random.rand(),
        random.random,
    ]
    for change in changing:
        with pytest.raises(AssertionError), unchanged(model):
            change()
    with unchanged(model):
        pass


# --- random numbers ---------------------------------------------------------------------------


def torch_generator():
    return torch.Generator().manual_seed(0)


def qkv():
    return torch.randn(3, 1, 2, 8, 4, generator=torch_generator()).unbind()


def tiny_parts():
    words = dict(numbers=[1, 2, 3], src=tokens(5, rows=3), tgt=tokens(5, rows=3))
    return dict(train=dict(src=tokens(5, rows=64), tgt=tokens(5, rows=64)), valid=words)


def search_twice(search, **options):
    """The history of a search; the weights of the supernet are drawn before."""
    with torch.device("meta"):
        supernet = small_supernet()
    return search(lambda s: len(s.num_heads), supernet, **options)[1]


def tuned():
    model = build("vit")
    model.load_state_dict(weights("vit"))
    x, y = image(n=4), torch.arange(4)
    loss_fn = finetune.MixupCrossEntropy(model.num_classes)
    train.fit(model, (x, y), loss_fn=loss_fn, steps=2, lr=1e-3, batch_size=2, ema=0.9)
    return model


def fitted():
    model = build("vit", proj_drop_rate=0.5)
    model.load_state_dict(weights("vit"))
    train.fit(model, lambda step: (image(), labels()), loss_fn=loss_of, steps=2)
    return model


SPACE = autoformer.Space((16, 32), (1, 2), (1, 2), (1, 2))
SMALL_RUN = dict(steps=2, seed=0)
SEEDED = {  # "module.function": a call that has numbers of its own
    "autoformer.sample_subnet": lambda: autoformer.sample_subnet(SPACE, 0),
    "autoformer.mutate": lambda: autoformer.mutate(SUBNET, SPACE, 0.5, 0.5, random.Random(0)),
    "autoformer.crossover": lambda: autoformer.crossover(
        SUBNET, autoformer.Subnet(32, (2,), (1,)), random.Random(0)
    ),
    "autoformer.evolutionary_search": lambda: search_twice(
        autoformer.evolutionary_search,
        population=4,
        generations=1,
        parents=2,
        crossovers=1,
        mutations=1,
    ),
    "mistakes.drawn": lambda: mistakes.drawn(2, 3, seed=1),
    "beit.block_mask": lambda: beit.block_mask((8, 8), 20, 4, rng=random.Random(0)),
    "beit._random_rectangle": lambda: beit._random_rectangle(9, 0.3, random.Random(0)),
    "beit._mask_rectangle": lambda: beit._mask_rectangle(
        torch.zeros(8, 8, dtype=torch.bool), 2, 3, 6, random.Random(0)
    ),
    "cost.take_turns": lambda: len(
        cost.take_turns({"a": lambda: None, "b": lambda: None}, rounds=2, least=1e-6)
    ),
    "data.draw_numbers": lambda: data.draw_numbers(5, 1000),
    "data.digits": lambda: data.digits(size=6),
    "data.describe_scenes": lambda: data.describe_scenes(3),
    "data.scenes": lambda: data.scenes(3),
    "data.collages": lambda: data.collages(3),
    "data.detection_scenes": lambda: data.detection_scenes(3),
    "data.caption_scenes": lambda: data.caption_scenes(3),
    "data.context_scenes": lambda: data.context_scenes(3),
    "decoding.sample": lambda: decoding.sample(
        known_transformer(), tokens(), 5, generator=torch_generator()
    ),
    "efficient.sparse_mask": lambda: efficient.sparse_mask(
        12, window=2, random_keys=2, generator=torch_generator()
    ),
    "efficient.random_features": lambda: efficient.random_features(
        6, 4, generator=torch_generator()
    ),
    "efficient.lsh_attention": lambda: efficient.lsh_attention(
        *qkv(), 4, generator=torch_generator()
    ),
    "decoding.next_token": lambda: decoding.next_token(
        torch.zeros(4, 20), generator=torch_generator()
    ),
    "gpt.text_batches": lambda: gpt.text_batches(torch.arange(50), 5, 3)(1),
    "recipes.train_translator": lambda: recipes.train_translator(
        number_tokenizer(), tiny_parts(), **SMALL_RUN, warmup=1
    )[0],
    "train.shuffled_batches": lambda: train.shuffled_batches(torch.arange(20), batch_size=4)(7),
    "train.seeded": lambda: seeded_numbers(),
    "train.fit": fitted,
    "translation.direction_batches": lambda: translation.direction_batches(
        number_tokenizer(), number_table(), [("en", "de")], batch_size=4
    )(1),
}
UNSEEDED = {  # functions that have a seed and stand in no row, and why
    "data.image_folder": "draws nothing from a global generator: tests/test_way_in.py",
    "train._train_step": "a part of `fit`, which holds the state",
}


@cache
def number_table():
    return translation.number_table(number_tokenizer(), range(50))


@cache
def known_transformer():
    return make_transformer().eval()


def seeded_numbers():
    with train.seeded(3):
        return torch.rand(4)


def compared(x):
    """What a call has returned, as something that can be compared."""
    if isinstance(x, nn.Module):
        return compared(x.state_dict())
    if isinstance(x, dict):
        return {key: compared(value) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return [compared(value) for value in x]
    return x.tolist() if isinstance(x, torch.Tensor) else x


def test_table_has_every_function_with_numbers_of_its_own():
    names = {"seed", "generator", "rng"}
    having = {
        name
        for name, function in public_functions().items()
        if names & set(parameters_of(function))
    }
    assert having == public(SEEDED.keys() | UNSEEDED.keys())


@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_decides_and_the_numbers_of_the_caller_go_on(name):
    number_tokenizer(), number_table(), weights("vit"), known_transformer(), data.digits()
    function, found = SEEDED[name], []
    for seed in range(2):
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        with unchanged(numbers=name != "train.fit"):
            found.append(compared(function()))
    assert found[0] == found[1]


@pytest.mark.parametrize("function", [tuned, fitted])
def test_training_does_not_draw_the_numbers_of_the_caller(function, monkeypatch):
    """The rows above build a model, which does."""
    built = build("vit", proj_drop_rate=0.5)
    monkeypatch.setitem(globals(), "build", lambda *_, **__: built)
    weights("vit")
    with unchanged():
        function()
