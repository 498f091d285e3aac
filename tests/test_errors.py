"""The table of documented errors: a call, the exception, and the argument that it names.

A row is added for each error that a docstring documents. The call is made as a reader would
make it, and the message has to name the argument.
"""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from small_models import small_supernet
from torch import nn

import attnlib
from attnlib import (
    autoformer,
    beit,
    deit,
    detr,
    efficient,
    finetune,
    inference,
    mae,
    models,
    panoptic,
    position,
    seq2seq,
    spatial,
    swin,
    swinv2,
    tnt,
    transformer,
    vit,
)
from attnlib.attention import (
    AdditiveAttention,
    attention,
    attention_backend,
    attention_weights,
    causal_mask,
    padding_mask,
)
from attnlib.backbone import resample_abs_pos_embed
from attnlib.cost import count_operations
from attnlib.data import number_words
from attnlib.decoding import min_p_filter, next_token, top_p_filter
from attnlib.gpt import (
    GPT,
    GPTConfig,
    _boolean_mask,
    _token_positions,
    decoder_mask,
    grouped_attention,
    pad_left,
    rope_scaling_factors,
    text_batches,
    text_bits,
)
from attnlib.multihead import MultiHeadAttention
from attnlib.recipes import distill_small, train_small
from attnlib.train import fit, learning_rate, save_checkpoint, shuffled_batches
from attnlib.transformer import (
    Positions,
    Transformer,
    _check_rows,
    _layer_from_torch,
    from_torch,
)
from attnlib.translation import translate_numbers
from attnlib.vit_variants import SwiGLU

q = torch.zeros(2, 3, 4, 8)
k = torch.zeros(2, 3, 5, 8)
bytes_of_images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
images = torch.zeros(2, 3, 8, 8)
labels = torch.arange(2)
TINY_MAE = dict(img_size=8, patch_size=4, embed_dim=8, depth=2, num_heads=2)
TINY_MAE |= dict(decoder_embed_dim=8, decoder_depth=1, decoder_num_heads=2)
TINY_BEIT = dict(img_size=8, patch_size=4, embed_dim=8, depth=2, num_heads=2, vocab_size=5)
TINY_VIT = dict(img_size=8, patch_size=4, num_classes=3, embed_dim=8, depth=1, num_heads=2)
TINY_TNT = dict(img_size=8, patch_size=4, embed_dim=8, inner_dim=4, depth=1)
TINY_TNT |= dict(num_heads_inner=2, num_heads_outer=2, first_stride=2)
TINY_SWIN = dict(img_size=16, patch_size=4, embed_dim=4, depths=(1, 1), num_heads=(1, 2))
TINY_SWIN |= dict(window_size=2)
TINY_AUTOFORMER = dict(img_size=8, patch_size=4, embed_dim=8, num_heads=(2,), mlp_ratio=(2.0,))
TINY_AUTOFORMER |= dict(head_dim=4)
TINY_GPT = dict(vocab_size=5, block_size=8, n_layer=1, n_head=2, n_embd=8)
LLAMA = dict(rope_type="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0)
LLAMA |= dict(original_max_position_embeddings=64)
NAN = float("nan")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tiny_gpt():
    return GPT(GPTConfig(**TINY_GPT))


def generate(**options):
    return tiny_gpt().generate(torch.tensor([[1, 2]]), **dict(max_new_tokens=1) | options)


def backend(name):
    with attention_backend(name):
        pass


def transfer(train, test):
    return finetune.transfer("vit_collages", train, test, pretrained=False, steps=1, lr=0.1)


def linear():
    return nn.Linear(5, 3)


def tiny_vit(**options):
    return vit.VisionTransformer(**TINY_VIT | options)


def without_token():
    weights = tiny_vit().state_dict()
    del weights["cls_token"]
    return weights


def tiny_swin():
    return swin.SwinTransformer(**TINY_SWIN)


def classify(name="vit_collages", **options):
    picture = Image.new("RGB", (64, 64))
    return models.classify(models.create_model(name).eval(), picture, **options)


def preprocess(**entries):
    return models.preprocess(models.data_config("vit_collages") | entries)


def reinforce_loss(baseline):
    logits, numbers = torch.zeros(1, 4, 9), torch.zeros(1, 4)
    targets = torch.ones(1, 4, dtype=torch.int64)
    return spatial.reinforce_loss(logits, targets, numbers, numbers, baseline)


def merge(**options):
    return panoptic.panoptic_postprocess(
        9 * torch.eye(2, 3), torch.zeros(2, 4, 4), {0}, **options
    )


def with_adapter():
    supernet = small_supernet()
    supernet.blocks[0].fc1 = nn.Linear(48, 192)
    return supernet


def frozen():
    return inference.optimize_for_inference(tiny_vit())


def packed_conv(x, **options):
    conv, norm = nn.Conv2d(3, 4, 1).eval(), nn.BatchNorm2d(4).eval()
    return inference._PackedConv(conv, norm)(x, **options)


def fused_linear(x, layer=None, grad=False, **options):
    pytest.importorskip("triton")
    from attnlib import windows

    with torch.set_grad_enabled(grad):
        layer = nn.Linear(4, 4, device=DEVICE) if layer is None else layer
        return windows.fused_linear(x.to(DEVICE), layer, **options)


def fuse_swin(model, **options):
    pytest.importorskip("triton")
    from attnlib import windows

    return windows.fuse_swin(model, **options)


def fuse_attention(layer):
    pytest.importorskip("triton")
    from attnlib import windows

    return windows.fuse_attention(layer)


def loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets)


def batches(step):
    return torch.zeros(8, 5), torch.zeros(8, dtype=torch.int64)


def nan(*_):
    return float("nan")


ATTENTION = [
    (lambda: attention(q, k, k, bias=[[0.0]]), TypeError, "bias"),
    (lambda: attention(q, k, k, bias=torch.zeros(4, 5, dtype=torch.long)), TypeError, "bias"),
    (lambda: attention(q, k, k, bias=torch.zeros(4, 6)), ValueError, "bias"),
    (lambda: attention(q, k, k, bias=torch.zeros(1, 1, 1, 4, 5)), ValueError, "bias"),
    (lambda: attention(q, k, k, mask=[[True]]), TypeError, "mask"),
    (lambda: attention(q, k, k, mask=torch.zeros(4, 5)), TypeError, "mask"),
    (lambda: attention(q, k, k, mask=torch.ones(3, 5, dtype=torch.bool)), ValueError, "mask"),
    (lambda: attention(q, k, k, mask="casual"), ValueError, "mask"),
    (lambda: attention(k, q, q, mask="causal"), ValueError, "mask"),
    (lambda: attention(q, k, q), ValueError, "v"),
    (lambda: attention(q, k[..., :7], k), ValueError, "q"),
    (lambda: attention(q, k, k, dropout_p=1.0), ValueError, "dropout_p"),
    (lambda: attention_weights(q, k[..., :7]), ValueError, "k"),
    (lambda: attention_weights(q, k, bias=0.0), TypeError, "bias"),
    (lambda: AdditiveAttention(8, 8, 4)(q, k, k, mask=torch.zeros(4, 5)), TypeError, "mask"),
    (lambda: causal_mask(4, 3), ValueError, "m"),
    (lambda: padding_mask(torch.tensor([2, 3]), 2), ValueError, "m"),
    (lambda: padding_mask(torch.tensor(2)), ValueError, "lengths"),
    (lambda: backend("flash"), ValueError, "name"),
]
GENERATION = [
    (lambda: grouped_attention(q, k[:, :2], k[:, :2]), ValueError, "k"),
    (lambda: generate(max_new_tokens=0), ValueError, "max_new_tokens"),
    (lambda: generate(max_new_tokens=99), ValueError, "block_size"),
    (lambda: generate(temperature=-1.0), ValueError, "temperature"),
    (lambda: generate(top_k=0), ValueError, "top_k"),
    (lambda: generate(top_p=0.0), ValueError, "top_p"),
    (lambda: generate(min_p=2.0), ValueError, "min_p"),
    (lambda: generate(eos_id=5), ValueError, "eos_id"),
    (lambda: generate(eos_id=[1, 2]), ValueError, "eos_id"),
    (lambda: generate(eos_id=1.5), ValueError, "eos_id"),
    (lambda: generate(temperature="1"), TypeError, "temperature"),
    (lambda: generate(top_p="1"), TypeError, "top_p"),
    (lambda: generate(min_p=[0.1]), TypeError, "min_p"),
    (lambda: text_bits(tiny_gpt(), torch.ones(9).long(), 4, stride=5), ValueError, "stride"),
    (lambda: tiny_gpt()(torch.tensor([[5]])), ValueError, "tokens"),
    (lambda: GPTConfig(n_head=3, n_embd=8), ValueError, "n_embd"),
    (lambda: GPTConfig(norm="batch"), ValueError, "norm"),
    (
        lambda: next_token(torch.zeros(1, 5), temperature=float("inf")),
        ValueError,
        "temperature",
    ),
    (lambda: pad_left([[1], []]), ValueError, "prompts"),
    (lambda: text_batches(torch.arange(4), 4, 1), ValueError, "tokens"),
    (lambda: _boolean_mask(torch.tensor([[0, 2]])), ValueError, "attention_mask"),
    (
        lambda: _token_positions(2, 0, torch.tensor([[0, 2]])),
        ValueError,
        "attention_mask",
    ),
    (
        lambda: decoder_mask(2, 2, attention_mask=torch.tensor([[0.0, -1e9]])),
        ValueError,
        "attention_mask",
    ),
    (lambda: top_p_filter(torch.zeros(3), 0.0), ValueError, "top_p"),
    (lambda: min_p_filter(torch.zeros(3), 2.0), ValueError, "min_p"),
]
TRANSLATION = [
    (
        lambda: Transformer(20, d_model=16, nhead=2)(
            torch.tensor([[0, 4]]), torch.tensor([[1]])
        ),
        ValueError,
        "src",
    ),
    (lambda: seq2seq.check_padding("src", torch.tensor([[0, 4]]), 0), ValueError, "src"),
    (lambda: _check_rows(torch.ones(2, 1), torch.ones(3, 4, 8)), ValueError, "tgt"),
    (
        lambda: Positions("sinusoidal", 8, 2, 10).add(torch.zeros(1, 3, 8), 9),
        ValueError,
        "x",
    ),
    (
        lambda: from_torch(
            nn.Transformer(8, 2, 1, 1, 8, batch_first=True), 20, norm_first=True
        ),
        TypeError,
        "norm_first",
    ),
    (lambda: _layer_from_torch(nn.Linear(8, 8)), TypeError, "layer"),
    (lambda: translate_numbers(None, None, "one", "de"), TypeError, "texts"),
    (lambda: translate_numbers(None, None, ["one", "two"], ["de"]), ValueError, "language"),
    (lambda: translate_numbers(None, None, ["one"], "de", tag_on="both"), ValueError, "tag_on"),
]
VISION = [
    (lambda: finetune._check_pixels("images", bytes_of_images), TypeError, "images"),
    (lambda: finetune._check_pixels("images", images + 9), ValueError, "images"),
    (lambda: finetune.normalize_for(bytes_of_images, "vit_collages"), TypeError, "images"),
    (lambda: finetune.normalize_for(images + 9, "vit_collages"), ValueError, "images"),
    (lambda: transfer((bytes_of_images, labels), (images, labels)), TypeError, "train"),
    (lambda: transfer((images, labels), (images + 9, labels)), ValueError, "test"),
    (lambda: models.open_picture(Image.new("F", (4, 4))), ValueError, "picture"),
    (lambda: models.open_picture(Image.new("I", (4, 4))), ValueError, "picture"),
    (lambda: models.open_picture(np.zeros((4, 4))), ValueError, "picture"),
    (lambda: detr.SetCriterion(3, weights={"bbox": 100}), ValueError, "weights"),
    (
        lambda: detr.SetCriterion(3).loss_labels(
            torch.zeros(1, 1, 2, 6), torch.zeros(1, 1, 2, dtype=torch.long)
        ),
        ValueError,
        "num_classes",
    ),
    (
        lambda: autoformer.evolutionary_search(nan, small_supernet()),
        ValueError,
        "score",
    ),
    (lambda: mae.check_encoder_options(dict(depth=3), dict(depth=2)), ValueError, "depth"),
    (lambda: mae.load_encoder(nn.Linear(2, 2), {}), ValueError, "options"),
    (lambda: mae.MaskedAutoencoder(**TINY_MAE).encoder(qkv_bias=False), ValueError, "qkv_bias"),
    (lambda: mae.MaskedAutoencoder(**TINY_MAE).encoder(depth=3), ValueError, "depth"),
    (
        lambda: beit.BeitForMaskedImageModeling(**TINY_BEIT).encoder(depth=3),
        ValueError,
        "depth",
    ),
]
TRAINING = [
    (lambda: fit(linear(), batches, loss_fn=3, steps=1), TypeError, "loss_fn"),
    (
        lambda: fit(linear(), batches, loss_fn=lambda m, b: m(b[0]), steps=1),
        TypeError,
        "loss_fn",
    ),
    (
        lambda: fit(linear(), batches, loss_fn=lambda m, b: (m(b[0]), 8), steps=1),
        TypeError,
        "loss_fn",
    ),
    (
        lambda: fit(linear(), batches, loss_fn=lambda m, b: (m(b[0]).sum(), 0), steps=1),
        ValueError,
        "loss_fn",
    ),
    (lambda: fit(linear(), [1, 2], loss_fn=loss, steps=1), TypeError, "train"),
    (lambda: fit(linear(), batches, loss_fn=loss, steps=0), ValueError, "steps"),
    (lambda: fit(linear(), batches, loss_fn=loss, steps=1, lr=0.0), ValueError, "lr"),
    (lambda: fit(linear(), batches, loss_fn=loss, steps=1, warmup=2), ValueError, "warmup"),
    (
        lambda: fit(linear(), batches, loss_fn=loss, steps=1, max_grad_norm=-1.0),
        ValueError,
        "max_grad_norm",
    ),
    (
        lambda: fit(linear(), batches, loss_fn=loss, steps=1, log_every=0),
        ValueError,
        "log_every",
    ),
    (
        lambda: fit(linear(), batches, loss_fn=loss, steps=9, log_every=2, stop_after=3),
        ValueError,
        "stop_after",
    ),
    (
        lambda: fit(linear(), batches, loss_fn=loss, steps=1, schedule="linear"),
        ValueError,
        "schedule",
    ),
    (
        lambda: fit(linear(), batches, loss_fn=loss, steps=1, parallel="zero"),
        ValueError,
        "parallel",
    ),
    (
        lambda: fit(linear(), batches, loss_fn=loss, steps=1, lr_scale={"no": 1.0}),
        ValueError,
        "lr_scale",
    ),
    (
        lambda: fit(linear(), batches, loss_fn=loss, steps=1, evaluate=lambda m: 3),
        ValueError,
        "evaluate",
    ),
    (
        lambda: fit(linear(), batches, loss_fn=loss, steps=1, checkpoint="a.txt"),
        ValueError,
        "path",
    ),
    (lambda: save_checkpoint("a.txt", {}, {"step": 1}), ValueError, "path"),
    (lambda: shuffled_batches(torch.zeros(3), batch_size=4), ValueError, "batch_size"),
    (
        lambda: learning_rate(0, steps=1, warmup=0, schedule="linear"),
        ValueError,
        "schedule",
    ),
    (lambda: number_words([1], "xx"), ValueError, "language"),
    (lambda: number_words([10**9], "en"), ValueError, "numbers"),
    (lambda: train_small("resnet"), ValueError, "model"),
    (lambda: train_small("vit", "imagenet"), ValueError, "data"),
    (lambda: distill_small("cats"), ValueError, "data"),
]
MODELS = [
    (lambda: models.load_pretrained(tiny_vit(), "none.safetensors"), FileNotFoundError, "none"),
    (lambda: models.load_pretrained(tiny_vit(), None), TypeError, "source"),
    (lambda: models.load_pretrained(tiny_vit(), {"a": 3}), ValueError, "source"),
    (lambda: models.load_pretrained(tiny_vit(), {3: images}), ValueError, "source"),
    (lambda: models.load_pretrained(tiny_vit(), without_token()), ValueError, "missing"),
    (
        lambda: models.load_pretrained(tiny_vit(), tiny_vit().state_dict() | {"a": images}),
        ValueError,
        "unexpected",
    ),
    (
        lambda: models.load_pretrained(tiny_vit(), tiny_vit(embed_dim=6).state_dict()),
        ValueError,
        "of another shape",
    ),
    (
        lambda: models.load_pretrained(tiny_vit(device="meta"), tiny_vit().state_dict()),
        ValueError,
        "model",
    ),
    (
        lambda: models.load_pretrained(tiny_swin(), tiny_swin().state_dict(), -1),
        ValueError,
        "img_size",
    ),
    (lambda: resample_abs_pos_embed(torch.zeros(1, 7, 4), (3, 3)), ValueError, "old_size"),
    (
        lambda: resample_abs_pos_embed(torch.zeros(1, 5, 4), (3, 3), (3, 2)),
        ValueError,
        "old_size",
    ),
    (
        lambda: resample_abs_pos_embed(torch.zeros(1, 5, 4), (3, 3), (-2, -2)),
        ValueError,
        "old_size",
    ),
    (lambda: resample_abs_pos_embed(torch.zeros(1, 5, 4), (0, 3)), ValueError, "new_size"),
    (lambda: resample_abs_pos_embed(torch.zeros(1, 5, 4), (2.5, 3)), ValueError, "new_size"),
    (lambda: resample_abs_pos_embed(torch.zeros(5, 4), (3, 3)), ValueError, "pos_embed"),
    (
        lambda: swin.resize_rel_pos_bias_table(torch.zeros(10, 2), (3, 3)),
        ValueError,
        "old_window",
    ),
    (
        lambda: swin.resize_rel_pos_bias_table(torch.zeros(9, 2), (3, 3), (3, 3)),
        ValueError,
        "old_window",
    ),
    (
        lambda: swin.resize_rel_pos_bias_table(torch.zeros(9, 2), (0, 3)),
        ValueError,
        "new_window",
    ),
    (lambda: swin.resize_rel_pos_bias_table(torch.zeros(9), (3, 3)), ValueError, "table"),
    (lambda: swin.check_window(0), ValueError, "window_size"),
    (lambda: swin.check_window(2.0), ValueError, "window_size"),
    (lambda: swin.check_window(4, 4), ValueError, "shift_size"),
    (lambda: swin.check_window(4, 2, "crop"), ValueError, "small_maps"),
    (lambda: tiny_vit().reset_classifier(-1), ValueError, "num_classes"),
    (lambda: tiny_swin().reset_classifier(-1), ValueError, "num_classes"),
    (lambda: tiny_vit().reset_classifier(3, "max"), ValueError, "global_pool"),
    (lambda: models.preprocess(None), TypeError, "config"),
    (lambda: models.preprocess({}), ValueError, "input_size"),
    (lambda: preprocess(input_size=(1, 64, 64)), ValueError, "channels"),
    (lambda: preprocess(input_size=(3, 64)), ValueError, "input_size"),
    (lambda: preprocess(mean=(0.5,)), ValueError, "mean"),
    (lambda: preprocess(std=(0.5, 0.5, 0.0)), ValueError, "std"),
    (lambda: preprocess(crop_pct=0.0), ValueError, "crop_pct"),
    (lambda: preprocess(interpolation="nearest"), ValueError, "interpolation"),
    (lambda: classify("mae_photographs"), ValueError, "model"),
    (lambda: models.classify(tiny_vit().eval(), Image.new("RGB", (8, 8))), ValueError, "model"),
    (lambda: classify(names=["one"]), ValueError, "names"),
    (lambda: classify(k=0), ValueError, "k"),
    (
        lambda: finetune.rollout_map(tiny_swin(), torch.zeros(1, 3, 16, 16), 4),
        ValueError,
        "model",
    ),
    (lambda: finetune.rollout_map(linear(), images, 4), TypeError, "model"),
    (lambda: vit.attention_rollout([]), ValueError, "maps"),
    (
        lambda: vit.attention_rollout([torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 4, 4)]),
        ValueError,
        "maps",
    ),
    (
        lambda: vit.attention_rollout([torch.zeros(2, 1, 3, 3), torch.zeros(3, 1, 3, 3)]),
        ValueError,
        "maps",
    ),
]
TASKS = [
    (lambda: beit.block_mask((4, 4), 0), ValueError, "num_masked"),
    (lambda: beit.block_mask((4, 4), 16), ValueError, "num_masked"),
    (lambda: beit.block_mask((4, 4), 4, min_patches=0), ValueError, "min_patches"),
    (lambda: beit.block_mask((4, 4), 4, min_aspect=0.0), ValueError, "min_aspect"),
    (lambda: beit.block_mask((4.0, 4), 4), ValueError, "grid_size"),
    (lambda: beit.block_mask((4, 4), 4, rng=torch.Generator()), TypeError, "rng"),
    (lambda: merge(mask=[[True]]), ValueError, "mask"),
    (lambda: merge(mask=torch.ones(4, 4)), ValueError, "mask"),
    (lambda: merge(mask=torch.eye(4).bool()), ValueError, "mask"),
    (lambda: merge(mask=torch.zeros(4, 4, dtype=torch.bool)), ValueError, "mask"),
    (lambda: merge(size=(0, 4)), ValueError, "size"),
    (lambda: merge(threshold=1.5), ValueError, "threshold"),
    (lambda: merge(smallest=-1), ValueError, "smallest"),
    (lambda: merge(smallest=NAN), ValueError, "smallest"),
    (
        lambda: panoptic.cut_padding(torch.zeros(4, 4), torch.ones(4, 4, dtype=torch.bool)),
        ValueError,
        "maps",
    ),
    (
        lambda: panoptic.cut_padding(torch.zeros(1, 4, 4), torch.eye(4, dtype=torch.bool)),
        ValueError,
        "mask",
    ),
    (lambda: panoptic.focal_loss(images, images, alpha=-1), ValueError, "alpha"),
    (lambda: panoptic.focal_loss(images, images, gamma=NAN), ValueError, "gamma"),
    (lambda: panoptic.PanopticDETR(linear()), TypeError, "detr"),
    (lambda: panoptic.MaskHead(4, 4, [3, 3], num_groups=1), ValueError, "num_groups"),
    (lambda: spatial.RewardBaseline(3)(4), ValueError, "max_length"),
    (lambda: reinforce_loss(0.0), TypeError, "baseline"),
    (lambda: reinforce_loss(spatial.RewardBaseline(3)), ValueError, "max_length"),
    (
        lambda: spatial.caption_loss(
            torch.zeros(1, 4, 9), torch.ones(1, 4).long(), penalty=1.0
        ),
        ValueError,
        "weights",
    ),
    (
        lambda: spatial.caption_loss(torch.zeros(1, 4, 9), torch.ones(1, 4).long(), penalty=-1),
        ValueError,
        "penalty",
    ),
    (lambda: spatial.Captioner(9, linear()), TypeError, "encoder"),
    (lambda: spatial.Captioner(9, attention="soft"), TypeError, "attention"),
    (
        lambda: autoformer.extract(small_supernet(), autoformer.Subnet(5, (1,), (1,))),
        ValueError,
        "subnet",
    ),
    (lambda: autoformer.extract(small_supernet(), None), ValueError, "subnet"),
    (lambda: autoformer._check_elastic(with_adapter()), TypeError, "fc1"),
    (lambda: autoformer.extract(with_adapter(), None), TypeError, "fc1"),
    (lambda: detr.DETR(3, backbone=linear()), TypeError, "backbone"),
    (
        lambda: seq2seq.RecurrentEncoder(5, 4, 3)(torch.zeros(1, 3)),
        TypeError,
        "src",
    ),
    (
        lambda: seq2seq.RecurrentEncoder(5, 4, 3)(torch.tensor([[0, 0]])),
        ValueError,
        "src",
    ),
    (
        lambda: seq2seq.RecurrentEncoder(5, 4, 3)(torch.tensor([[5]])),
        ValueError,
        "src",
    ),
]
SPEED = [
    (lambda: fused_linear(torch.zeros(2, 4).double()), TypeError, "dtype"),
    (lambda: fused_linear(torch.zeros(2, 4), nn.ReLU()), TypeError, "layer"),
    (lambda: fused_linear(torch.zeros(2, 5)), ValueError, "x"),
    (
        lambda: fused_linear(torch.zeros(2, 4), residual=torch.zeros(2, 5, device=DEVICE)),
        ValueError,
        "residual",
    ),
    (lambda: fused_linear(torch.zeros(2, 4), norm=nn.LayerNorm(5)), ValueError, "norm"),
    (lambda: fused_linear(torch.zeros(2, 4), grad=True), RuntimeError, "gradients"),
    (lambda: fuse_swin(tiny_vit()), TypeError, "model"),
    (lambda: fuse_swin(tiny_vit(), trainable=True), TypeError, "model"),
    (lambda: fuse_attention(nn.Linear(2, 2)), TypeError, "layer"),
    (lambda: inference.optimize_for_inference(3), TypeError, "model"),
    (lambda: inference.optimize_for_inference(tiny_vit(device="meta")), ValueError, "model"),
    (lambda: frozen().train(), RuntimeError, "mode"),
    (lambda: frozen().load_state_dict(tiny_vit().state_dict()), RuntimeError, "state_dict"),
    (lambda: frozen().blocks[0].load_state_dict({}), RuntimeError, "state_dict"),
    (lambda: frozen().attention_maps(images), RuntimeError, "maps"),
    (lambda: frozen()(images.clone().requires_grad_()), RuntimeError, "gradient"),
    (lambda: inference.PackedLinear(torch.zeros(3, 4))(torch.zeros(2, 5)), TypeError, "x"),
    (lambda: inference.PackedLinear(torch.zeros(3, 4))(torch.zeros(4).half()), TypeError, "x"),
    (
        lambda: inference.PackedLinear(torch.zeros(3, 4))(torch.zeros(4, requires_grad=True)),
        RuntimeError,
        "x",
    ),
    (
        lambda: inference.PackedLinear(torch.zeros(3, 4), activation="tanh"),
        ValueError,
        "activation",
    ),
    (lambda: packed_conv(torch.zeros(1, 2, 4, 4)), TypeError, "x"),
    (lambda: packed_conv(images, shortcut=images), TypeError, "x"),
    (lambda: packed_conv(images.clone().requires_grad_()), RuntimeError, "x"),
    (
        lambda: inference._PackedConv(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4).eval()),
        ValueError,
        "conv",
    ),
    (lambda: count_operations(3), TypeError, "call"),
]
EFFICIENT = [
    (lambda: efficient.sparse_mask(6, window=0), ValueError, "window"),
    (
        lambda: efficient.sparse_mask(6, window=2, global_tokens=1.5),
        ValueError,
        "global_tokens",
    ),
    (lambda: efficient.sparse_mask(6, window=2, random_keys=7), ValueError, "random_keys"),
    (lambda: efficient.local_attention(q, q, q, 2.0), ValueError, "window"),
    (lambda: efficient.axial_attention(q, q, q, (-2, -2), 0), ValueError, "grid"),
    (lambda: efficient.axial_attention(q, q, q, (2, 2), 2), ValueError, "axis"),
    (lambda: efficient.pooled_attention(q, q, q, (2.0, 2.0), 2), ValueError, "grid"),
    (lambda: efficient.pooled_attention(q, q, q, (2, 2), 2.0), ValueError, "ratio"),
    (
        lambda: efficient.linformer_attention(q, q, q, torch.ones(2, 5), torch.ones(2, 4)),
        ValueError,
        "e",
    ),
    (
        lambda: efficient.linformer_attention(q, q, q, torch.ones(2, 4), torch.ones(3, 4)),
        ValueError,
        "f",
    ),
    (lambda: efficient._segment_means(q, 0), ValueError, "count"),
    (lambda: efficient._iterated_inverse(torch.eye(2), -1), ValueError, "steps"),
    (lambda: efficient.nystrom_attention(q, q, q, 5), ValueError, "landmarks"),
    (lambda: efficient.nystrom_attention(q, q, q, 2, iterations=-1), ValueError, "iterations"),
    (lambda: efficient.random_features(0, 4), ValueError, "m"),
    (lambda: efficient.linear_attention(q, q, q, chunk=0), ValueError, "chunk"),
    (
        lambda: efficient.linear_attention(q, q, q, mask=torch.ones(1, 5, dtype=torch.bool)),
        ValueError,
        "mask",
    ),
    (lambda: efficient.linear_attention(q, q, q, mask=torch.ones(1, 4)), TypeError, "mask"),
    (lambda: efficient.performer_attention(q, q, q, torch.ones(3, 5)), ValueError, "w"),
    (lambda: efficient.delta_attention(q, q, q, torch.ones(4)), ValueError, "beta"),
    (lambda: efficient.lsh_attention(q, q, q, 3), ValueError, "buckets"),
    (lambda: efficient.lsh_attention(q, q, q, 2.0), ValueError, "buckets"),
    (lambda: efficient.lsh_attention(q, q, q, 2, mask=torch.ones(4, 4)), TypeError, "mask"),
    (lambda: rope_scaling_factors(torch.ones(4), "yarn", 2.0), ValueError, "rope_type"),
    (lambda: decoder_mask(3, 4, window=0), ValueError, "window"),
    (lambda: pad_left([[1], [2, 3]], pad_id=1.5), ValueError, "pad_id"),
    (lambda: text_batches(torch.arange(9), 4, 0), ValueError, "batch_size"),
    (lambda: GPTConfig(**TINY_GPT | dict(n_head=3)), ValueError, "n_head"),
    (lambda: GPTConfig(**TINY_GPT, rope_scaling=LLAMA), ValueError, "low_freq_factor"),
    (lambda: position.sincos_2d(2.5, 2, 8), ValueError, "height"),
    (lambda: position.sincos_2d(2, 2, 8.0), ValueError, "dim"),
    (lambda: position.sinusoidal_encoding(-1, 4), ValueError, "length"),
    (lambda: position.position_angles(torch.arange(3), 4, base=NAN), ValueError, "base"),
    (lambda: position.alibi_slopes(2.5), ValueError, "num_heads"),
]
COUNT = (-1, 0, 2.0, "2", None, True)  # none of them is an integer of at least 1
NATURAL = (-1, 2.0, "2", True)  # none is an integer of at least 0
RATE = (-0.1, 1.5, NAN, "0.1", None)  # none is in [0, 1)
RATIO = (-1, 0, 0.01, NAN, "4")  # none gives a hidden layer of 8 channels a unit
SIZE = (-1, 0, 32.0, "32", (32,), (32, 32, 32), (32, 0))  # none is a height and width
POSITIVE = (-1.0, 0.0, NAN, float("inf"), "1", None)  # none is positive and finite
IMAGES = dict(img_size=SIZE, patch_size=SIZE, in_chans=COUNT, embed_dim=COUNT)
CLASSES = dict(num_classes=NATURAL, drop_rate=RATE, drop_path_rate=RATE, global_pool=("max",))
BLOCKS = dict(depth=COUNT, num_heads=(*COUNT, 3), mlp_ratio=RATIO)
RATES = dict(pos_drop_rate=RATE, proj_drop_rate=RATE, attn_drop_rate=RATE)
VOCABULARY = dict(embed_dim=COUNT, hidden_dim=COUNT, pad_id=(-1, 5, 1.5, "0", None))
SCALINGS = (3, "linear", dict(rope_type=["linear"]), dict(rope_type="linear", factor="4"))
SCALINGS += (dict(rope_type="linear", factor=NAN), dict(rope_type="yarn", factor=2.0))
CHANNELS = dict(channels=COUNT, rd_ratio=POSITIVE, rd_divisor=COUNT)
SWEPT = [  # a constructor, arguments that it accepts, and values that it must refuse by name
    (
        vit.VisionTransformer,
        TINY_VIT,
        IMAGES | CLASSES | BLOCKS | RATES | dict(reg_tokens=NATURAL),
    ),
    (deit.DistilledVisionTransformer, TINY_VIT, IMAGES | CLASSES | BLOCKS | RATES),
    (beit.Beit, TINY_VIT, IMAGES | CLASSES | BLOCKS | RATES),
    (
        beit.BeitForMaskedImageModeling,
        TINY_BEIT,
        IMAGES | BLOCKS | dict(vocab_size=(*COUNT, 1)),
    ),
    (
        swin.SwinTransformer,
        TINY_SWIN,
        IMAGES | CLASSES | dict(window_size=(0, 2.0), mlp_ratio=RATIO, depths=((0, 1), (1,))),
    ),
    (
        swin.SwinTransformer,
        TINY_SWIN,
        dict(num_heads=((0, 2), (3, 2)), proj_drop_rate=RATE, attn_drop_rate=RATE),
    ),
    (swinv2.SwinTransformerV2, TINY_SWIN, IMAGES | CLASSES | dict(mlp_ratio=RATIO)),
    (
        tnt.TNT,
        TINY_TNT,
        IMAGES | CLASSES | RATES | dict(inner_dim=COUNT, depth=COUNT, mlp_ratio=RATIO),
    ),
    (
        tnt.TNT,
        TINY_TNT,
        dict(num_heads_inner=COUNT, num_heads_outer=COUNT, first_stride=(0, 3)),
    ),
    (
        autoformer.AutoFormer,
        TINY_AUTOFORMER,
        IMAGES | CLASSES | dict(head_dim=COUNT, max_distance=COUNT),
    ),
    (
        mae.MaskedAutoencoder,
        TINY_MAE,
        IMAGES | BLOCKS | dict(decoder_embed_dim=(*COUNT, 6), decoder_depth=COUNT),
    ),
    (mae.MaskedAutoencoder, TINY_MAE, dict(decoder_num_heads=COUNT)),
    (
        detr.DETR,
        dict(num_classes=3, backbone=detr.SmallBackbone((4, 4)), embed_dim=8, num_heads=2),
        dict(num_classes=COUNT, num_queries=COUNT, num_encoder_layers=NATURAL, dropout=RATE)
        | dict(num_decoder_layers=COUNT, embed_dim=(*COUNT, 6), num_heads=(*COUNT, 3))
        | dict(dim_feedforward=COUNT, temperature=POSITIVE, in_chans=COUNT),
    ),
    (
        transformer.Transformer,
        dict(src_vocab=5, tgt_vocab=5, d_model=8, nhead=2),
        dict(src_vocab=COUNT, tgt_vocab=COUNT[:4], d_model=COUNT, nhead=COUNT, dropout=RATE)
        | dict(num_encoder_layers=NATURAL, num_decoder_layers=NATURAL, dim_feedforward=COUNT)
        | dict(max_length=COUNT, pad_id=(-1, 5, 1.5, "0", None), activation=("tanh", ["relu"]))
        | dict(position=("absolute", None)),
    ),
    (transformer.EncoderLayer, dict(d_model=8, nhead=2), dict(dropout=RATE)),
    (transformer.DecoderLayer, dict(d_model=8, nhead=2), dict(dropout=RATE)),
    (
        GPTConfig,
        TINY_GPT,
        dict(
            vocab_size=COUNT, block_size=COUNT, n_layer=COUNT, n_head=COUNT, n_embd=(*COUNT, 7)
        )
        | dict(n_kv_head=(*COUNT[:4], 3), head_dim=(*COUNT[:4], 3), n_inner=COUNT[:4])
        | dict(window=COUNT[:4], rope_base=POSITIVE, norm_eps=POSITIVE, dropout=RATE)
        | dict(norm=("batch", None), position=("alibi", None), mlp=("relu", None))
        | dict(rope_scaling=SCALINGS),
    ),
    (
        MultiHeadAttention,
        dict(embed_dim=8, num_heads=2),
        dict(embed_dim=COUNT, num_heads=(*COUNT, 3), kdim=COUNT[:4], dropout=RATE),
    ),
    (
        AdditiveAttention,
        dict(query_dim=4, key_dim=4, hidden_dim=4),
        dict(query_dim=COUNT, key_dim=COUNT, hidden_dim=COUNT),
    ),
    (vit.Mlp, dict(in_features=8), dict(in_features=COUNT, hidden_features=COUNT[:4])),
    (vit.Mlp, dict(in_features=8), dict(out_features=COUNT[:4], drop=RATE)),
    (
        SwiGLU,
        dict(in_features=8),
        dict(in_features=COUNT, hidden_features=(0, 3, 2.0), drop=RATE),
    ),
    (
        panoptic.AttentionMaps,
        dict(embed_dim=8, num_heads=2),
        dict(embed_dim=COUNT, num_heads=(*COUNT, 3)),
    ),
    (
        panoptic.MaskHead,
        dict(embed_dim=16, num_heads=8, channels=[6], num_groups=4),
        dict(embed_dim=COUNT, num_heads=COUNT, num_groups=(*COUNT, 3), channels=([0], ["6"])),
    ),
    (
        spatial.HardAttention,
        dict(feature_dim=4, hidden_dim=4, attention_dim=4),
        dict(feature_dim=COUNT, hidden_dim=COUNT, attention_dim=COUNT, soft_share=RATE),
    ),
    (spatial.ConvEncoder, dict(dim=8), dict(dim=(*COUNT, 1), img_size=(*COUNT, 30))),
    (
        spatial.Captioner,
        dict(vocab_size=5),
        dict(vocab_size=COUNT, hidden_dim=COUNT, max_length=COUNT, pad_id=(-1, 5, 1.5, "0")),
    ),
    (spatial.RewardBaseline, dict(max_length=4), dict(max_length=COUNT, decay=(*RATE, 1.0))),
    (spatial.AttentionGate, dict(dim=4), dict(dim=COUNT, score=("cosine", None))),
    (
        spatial.AttentiveConvnet,
        dict(num_classes=3),
        dict(num_classes=COUNT, questions=NATURAL, img_size=(*COUNT, 24), dim=COUNT),
    ),
    (spatial.FilterBank, dict(img_size=8, glimpse=3), dict(img_size=SIZE, glimpse=COUNT)),
    (
        spatial.Draw,
        dict(img_size=8, glimpse=None),
        dict(img_size=SIZE, steps=COUNT, glimpse=(0, 9), hidden_dim=COUNT, latent_dim=COUNT),
    ),
    (spatial.SqueezeExcite, dict(channels=16), CHANNELS),
    (spatial.EfficientChannelAttention, {}, dict(kernel_size=(*COUNT, 4))),
    (
        spatial.ChannelSpatialAttention,
        dict(channels=16),
        CHANNELS | dict(kernel_size=(*COUNT, 4), first=("min", None)),
    ),
    (
        position.LearnedPositionalEmbedding,
        dict(max_length=4, embed_dim=4),
        dict(max_length=COUNT, embed_dim=COUNT),
    ),
    (
        position.RelativePositionBias,
        dict(num_heads=2),
        dict(num_heads=COUNT, num_buckets=(*COUNT, 3, 8.0), max_distance=(*COUNT, 8, NAN)),
    ),
    (
        seq2seq.RecurrentEncoder,
        dict(vocab_size=5, embed_dim=4, hidden_dim=3),
        VOCABULARY | dict(vocab_size=COUNT),
    ),
    (
        seq2seq.RecurrentDecoder,
        dict(vocab_size=5, embed_dim=4, hidden_dim=3),
        VOCABULARY | dict(vocab_size=COUNT),
    ),
    (
        seq2seq.Seq2Seq,
        dict(src_vocab=5, tgt_vocab=6),
        VOCABULARY | dict(src_vocab=COUNT, tgt_vocab=COUNT),
    ),
    (
        beit.DiscreteVAE,
        dict(num_embeddings=5),
        dict(num_embeddings=(*COUNT, 1), in_chans=COUNT, patch_size=SIZE, dim=COUNT),
    ),
    (
        beit.VectorQuantizer,
        dict(num_embeddings=5, embedding_dim=4),
        dict(num_embeddings=(*COUNT, 1), embedding_dim=COUNT, decay=RATE, kmeans_steps=NATURAL),
    ),
]
CONSTRUCTORS = [
    (partial(make, **accepted | {name: value}), ValueError, name)
    for make, accepted, refused in SWEPT
    for name, values in refused.items()
    for value in values
]
COMPARISONS = [
    (lambda: attnlib.reference("multi_head"), ValueError, "name"),
    (lambda: attnlib.reference("multihead", dim=8), TypeError, "dim"),
    (lambda: attnlib.reference("patch_merging", version=3), ValueError, "version"),
    (lambda: attnlib.reference("mlp", act="tanh"), ValueError, "act"),
    (lambda: attnlib.compare(nn.LayerNorm(4), "layer_norm"), TypeError, "reference"),
    (lambda: attnlib.compare(nn.Linear(4, 4), nn.Linear(4, 4)), ValueError, "inputs"),
    (lambda: compare_norms(rename={"gain": "norm.weight"}), ValueError, "rename"),
    (lambda: compare_norms(rename={"weight": "norm.gain"}), ValueError, "rename"),
]


def compare_norms(**options):
    return attnlib.compare(nn.LayerNorm(4), attnlib.reference("layer_norm", dim=4), **options)


ROWS = [*ATTENTION, *GENERATION, *TRANSLATION, *VISION, *TRAINING]
ROWS += [*MODELS, *TASKS, *SPEED, *EFFICIENT, *CONSTRUCTORS, *COMPARISONS]


@pytest.mark.parametrize(
    ("call", "exception", "argument"), ROWS, ids=[f"{i}-{row[2]}" for i, row in enumerate(ROWS)]
)
def test_the_error_is_the_documented_one(call, exception, argument):
    with pytest.raises(exception, match=rf"\b{argument}\b"):
        call()


def test_a_row_that_raises_nothing_is_found():
    with pytest.raises(pytest.fail.Exception):
        test_the_error_is_the_documented_one(lambda: attention(q, k, k), TypeError, "bias")


@pytest.mark.parametrize(
    ("make", "accepted"), [row[:2] for row in SWEPT], ids=[row[0].__name__ for row in SWEPT]
)
def test_the_other_arguments_are_accepted(make, accepted):
    make(**accepted)
