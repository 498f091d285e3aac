"""The table of documented errors: a call, the exception, and the argument that it names.

A row is added for each error that a docstring documents. The call is made as a reader would
make it, and the message has to name the argument.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from attnlib import autoformer, beit, detr, mae, models, practice, spatial
from attnlib.attention import (
    AdditiveAttention,
    attention,
    attention_backend,
    attention_weights,
    causal_mask,
    padding_mask,
)
from attnlib.data import number_words
from attnlib.decoding import top_p_filter
from attnlib.gpt import (
    GPT,
    GPTConfig,
    boolean_mask,
    decoder_mask,
    grouped_attention,
    min_p_filter,
    next_token,
    pad_left,
    text_batches,
    text_bits,
    token_positions,
)
from attnlib.recipes import distill_small, train_small
from attnlib.train import epochs, fit, learning_rate, save_checkpoint
from attnlib.transformer import (
    Positions,
    Transformer,
    check_padding,
    check_rows,
    from_torch,
    layer_from_torch,
)
from attnlib.translation import direction_accuracy, number_scores, translate_numbers

q = torch.zeros(2, 3, 4, 8)
k = torch.zeros(2, 3, 5, 8)
bytes_of_images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
images = torch.zeros(2, 3, 8, 8)
labels = torch.arange(2)
TINY_MAE = dict(img_size=8, patch_size=4, embed_dim=8, depth=2, num_heads=2)
TINY_MAE |= dict(decoder_embed_dim=8, decoder_depth=1, decoder_num_heads=2)
TINY_BEIT = dict(img_size=8, patch_size=4, embed_dim=8, depth=2, num_heads=2, vocab_size=5)


def tiny_gpt():
    return GPT(GPTConfig(vocab_size=5, block_size=8, n_layer=1, n_head=2, n_embd=8))


def generate(**options):
    return tiny_gpt().generate(torch.tensor([[1, 2]]), **dict(max_new_tokens=1) | options)


def backend(name):
    with attention_backend(name):
        pass


def transfer(train, test):
    return practice.transfer("vit_collages", train, test, pretrained=False, steps=1, lr=0.1)


def linear():
    return nn.Linear(5, 3)


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
    (lambda: boolean_mask(torch.tensor([[0, 2]])), ValueError, "attention_mask"),
    (
        lambda: token_positions(2, 0, torch.tensor([[0, 2]])),
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
    (lambda: check_padding("src", torch.tensor([[0, 4]]), 0), ValueError, "src"),
    (lambda: check_rows(torch.ones(2, 1), torch.ones(3, 4, 8)), ValueError, "tgt"),
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
    (lambda: layer_from_torch(nn.Linear(8, 8)), TypeError, "layer"),
    (lambda: translate_numbers(None, None, "one", "de"), TypeError, "texts"),
    (lambda: translate_numbers(None, None, ["one", "two"], ["de"]), ValueError, "language"),
    (lambda: translate_numbers(None, None, ["one"], "de", tag_on="both"), ValueError, "tag_on"),
    (
        lambda: direction_accuracy(None, None, [1], [("en", "de")], tag_on="both"),
        ValueError,
        "tag_on",
    ),
    (
        lambda: number_scores(None, None, [1], [("en", "de")], tag_on="both"),
        ValueError,
        "tag_on",
    ),
]
VISION = [
    (lambda: practice.check_pixels("images", bytes_of_images), TypeError, "images"),
    (lambda: practice.check_pixels("images", images + 9), ValueError, "images"),
    (lambda: practice.prepared(bytes_of_images, "vit_collages"), TypeError, "images"),
    (lambda: practice.prepared(images + 9, "vit_collages"), ValueError, "images"),
    (lambda: transfer((bytes_of_images, labels), (images, labels)), TypeError, "train"),
    (lambda: transfer((images, labels), (images + 9, labels)), ValueError, "test"),
    (lambda: models.open_picture(Image.new("F", (4, 4))), ValueError, "picture"),
    (lambda: models.open_picture(Image.new("I", (4, 4))), ValueError, "picture"),
    (lambda: models.open_picture(np.zeros((4, 4))), ValueError, "picture"),
    (lambda: detr.SetLoss(3, weights={"bbox": 100}), ValueError, "weights"),
    (
        lambda: detr.SetLoss(3).class_loss(
            torch.zeros(1, 1, 2, 6), torch.zeros(1, 1, 2, dtype=torch.long), 1
        ),
        ValueError,
        "num_classes",
    ),
    (lambda: autoformer.search(nan, autoformer.small_supernet()), ValueError, "score"),
    (lambda: autoformer.random_search(nan, autoformer.small_supernet()), ValueError, "score"),
    (lambda: mae.check_encoder_options(dict(depth=3), dict(depth=2)), ValueError, "depth"),
    (lambda: mae.load_encoder(nn.Linear(2, 2), {}), ValueError, "options"),
    (lambda: mae.MaskedAutoencoder(**TINY_MAE).encoder(qkv_bias=False), ValueError, "qkv_bias"),
    (lambda: mae.MaskedAutoencoder(**TINY_MAE).encoder(depth=3), ValueError, "depth"),
    (
        lambda: beit.BeitForMaskedImageModeling(**TINY_BEIT).encoder(depth=3),
        ValueError,
        "depth",
    ),
    (
        lambda: spatial.changed_attention(
            spatial.Captioner(
                9, spatial.PlaceEncoder(16), attention=spatial.HardAttention, hidden_dim=12
            ),
            lambda w: w,
        ).__enter__(),
        ValueError,
        "model",
    ),
]
TRAINING = [
    (lambda: fit(linear(), 3, batches, steps=1), TypeError, "loss_fn"),
    (
        lambda: fit(linear(), lambda m, b: m(b[0]).mean(), batches, steps=1),
        TypeError,
        "loss_fn",
    ),
    (lambda: fit(linear(), lambda m, b: (m(b[0]), 8), batches, steps=1), TypeError, "loss_fn"),
    (
        lambda: fit(linear(), lambda m, b: (m(b[0]).sum(), 0), batches, steps=1),
        ValueError,
        "loss_fn",
    ),
    (lambda: fit(linear(), loss, [1, 2], steps=1), TypeError, "batches"),
    (lambda: fit(linear(), loss, batches, steps=0), ValueError, "steps"),
    (lambda: fit(linear(), loss, batches, steps=1, lr=0.0), ValueError, "lr"),
    (lambda: fit(linear(), loss, batches, steps=1, warmup=2), ValueError, "warmup"),
    (lambda: fit(linear(), loss, batches, steps=1, clip=-1.0), ValueError, "clip"),
    (lambda: fit(linear(), loss, batches, steps=1, every=0), ValueError, "every"),
    (
        lambda: fit(linear(), loss, batches, steps=9, every=2, stop_after=3),
        ValueError,
        "stop_after",
    ),
    (lambda: fit(linear(), loss, batches, steps=1, schedule="linear"), ValueError, "schedule"),
    (lambda: fit(linear(), loss, batches, steps=1, parallel="zero"), ValueError, "parallel"),
    (
        lambda: fit(linear(), loss, batches, steps=1, lr_scale={"no": 1.0}),
        ValueError,
        "lr_scale",
    ),
    (
        lambda: fit(linear(), loss, batches, steps=1, evaluate=lambda m: 3),
        ValueError,
        "evaluate",
    ),
    (lambda: fit(linear(), loss, batches, steps=1, checkpoint="a.txt"), ValueError, "path"),
    (lambda: save_checkpoint("a.txt", {}, {"step": 1}), ValueError, "path"),
    (lambda: epochs(torch.zeros(3), batch_size=4), ValueError, "batch_size"),
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
ROWS = [*ATTENTION, *GENERATION, *TRANSLATION, *VISION, *TRAINING]


@pytest.mark.parametrize(
    ("call", "exception", "argument"), ROWS, ids=[f"{i}-{row[2]}" for i, row in enumerate(ROWS)]
)
def test_the_error_is_the_documented_one(call, exception, argument):
    with pytest.raises(exception, match=rf"\b{argument}\b"):
        call()


def test_a_row_that_raises_nothing_is_found():
    with pytest.raises(pytest.fail.Exception):
        test_the_error_is_the_documented_one(lambda: attention(q, k, k), TypeError, "bias")
