"""What is given in float64 is computed in float64, and half precision has no wider range lost.

Each line of `SITES` calls a function whose code names a dtype, makes positions or constants, or
adds up long sums, and compares with the formula in float64. A detour through float32 would
leave errors of about 1e-7.
"""

import math
import traceback

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import log_softmax, logsumexp, softmax
from small_models import small_supernet
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnlib import (
    backbone,
    beit,
    decoding,
    deit,
    detr,
    efficient,
    gpt,
    mae,
    models,
    panoptic,
    position,
    scaling,
    seq2seq,
    spatial,
    swin,
    swinv2,
    train,
    transformer,
    vit,
    vit_variants,
)
from attnlib.attention import AdditiveAttention, attention, attention_backend
from helpers import BACKBONES, build, close, exact_log_coordinates, images

F64 = torch.float64


def numbers(*shape, seed=0):
    """Normal numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def tokens(*shape, low=1, high=11, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def array(x):
    return x.detach().numpy()


LOGITS, LABELS = numbers(3, 5, 11), tokens(3, 5, low=0)
QKV = q, k, v = numbers(3, 2, 2, 16, 8)
MAPS = numbers(2, 3, 17, 17, seed=1).softmax(-1)
LOG_P = log_softmax(array(LOGITS), -1)
PICKED = np.take_along_axis(LOG_P, LABELS.numpy()[..., None], -1)[..., 0]


def angles(places, dim, base=10000.0):
    """Equation of the sinusoids: a place times base^(-2i / dim)."""
    return np.asarray(places, float)[..., None] * base ** (-np.arange(0, dim, 2) / dim)


def turned(x, places, base=10000.0, halves=False):
    """Each pair of the last axis turned by its angle."""
    x, turn = array(x), np.exp(1j * angles(places, x.shape[-1], base))
    if halves:
        first, second = np.split(x, 2, -1)
        z = (first + 1j * second) * turn
        return np.concatenate([z.real, z.imag], -1)
    z = (x[..., ::2] + 1j * x[..., 1::2]) * turn
    return np.stack([z.real, z.imag], -1).reshape(x.shape)


def sines(x, dim, base=10000.0):
    found = angles(x, dim, base)
    return np.stack([np.sin(found), np.cos(found)], -1).reshape(*found.shape[:-1], dim)


def attended(logits, v):
    return softmax(logits, -1) @ array(v)


SCORES = array(q) @ array(k).swapaxes(-1, -2)
CAUSAL = np.tril(np.ones((16, 16)))


# --- positions --------------------------------------------------------------------------------


def slopes(heads):
    """For 6 heads: those of 4, and every second of those of 8."""
    assert heads == 6
    return np.array([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])


def offsets(n):
    return np.arange(n) - np.arange(n)[:, None]


def grid_sines():
    """MAE's encoding of a grid of 3 rows and 4 columns, in 8 channels."""
    rows, columns = np.divmod(np.arange(12), 4)
    x, y = angles(columns, 4), angles(rows, 4)
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], -1)


def transformer_positions():
    model = transformer.Transformer(
        11, d_model=8, nhead=2, num_encoder_layers=0, num_decoder_layers=0, max_length=32
    )
    return model.double().positions.add(torch.zeros(1, 9, 8, dtype=F64), 5)[0]


def transformer_alibi():
    positions = transformer.Positions("alibi", 8, 6, 32)
    return positions.bias("encoder", 7, 7, torch.device("cpu"), F64)


LLAMA = dict(
    rope_type="llama3",
    factor=3.0,
    low_freq_factor=1.1,
    high_freq_factor=4.3,
    original_max_position_embeddings=50,
)


def rotation():
    shape = dict(vocab_size=9, block_size=32, n_layer=1, n_head=1, n_embd=8)
    config = gpt.GPTConfig(**shape, rope_base=100.0, rope_scaling=LLAMA)
    return torch.stack(gpt.rope_cos_sin(config, torch.arange(9), F64))


def slow_rotation():
    """Llama 3.1's code: kept, divided, or between the two by the turns in 50 tokens."""
    frequencies = angles(1, 8, 100.0)
    turns = 50 * frequencies / (2 * math.pi)
    share = np.clip((turns - 1.1) / (4.3 - 1.1), 0, 1)
    slow = frequencies * (share + (1 - share) / 3.0)
    found = np.arange(9)[:, None] * slow
    return np.stack([np.cos(found), np.sin(found)])


def detr_sines():
    """Rows and columns counted from 1 and scaled, for a map of 3 rows and 5 columns."""
    rows, columns = np.divmod(np.arange(15), 5)
    rows = 2 * np.pi * (rows + 1) / (3 + 1e-6)
    columns = 2 * np.pi * (columns + 1) / (5 + 1e-6)
    return np.concatenate([sines(rows, 4), sines(columns, 4)], -1)


BOXES = numbers(2, 3, 4, seed=2).sigmoid()


def box_sines():
    """Those of y, x, height and width, 4 channels each."""
    return sines(2 * np.pi * array(BOXES)[..., [1, 0, 3, 2]], 4, 20.0).reshape(2, 3, 16)


ROWS, COLUMNS = torch.arange(16) // 4, torch.arange(16) % 4


def turned_2d():
    first, second = q.chunk(2, -1)
    parts = turned(first, ROWS, 100.0), turned(second, COLUMNS, 100.0)
    return np.concatenate(parts, -1)


def turn_pairs():
    return position.rotate_pairs(q, torch.from_numpy(angles(range(16), 8)))


POSITIONS = {
    "sinusoidal_encoding": (
        lambda: position.sinusoidal_encoding(9, 8, offset=1000, dtype=F64),
        lambda: sines(np.arange(1000, 1009), 8),
    ),
    "the table of a Transformer": (
        transformer_positions,
        lambda: sines(np.arange(5, 14), 8),
    ),
    "alibi_slopes": (lambda: position.alibi_slopes(6, dtype=F64), lambda: slopes(6)),
    "alibi_bias": (
        lambda: position.alibi_bias(6, 7, dtype=F64),
        lambda: -slopes(6)[:, None, None] * abs(offsets(7)),
    ),
    "the ALiBi of a Transformer": (
        transformer_alibi,
        lambda: -slopes(6)[:, None, None] * abs(offsets(7)),
    ),
    "sincos_2d": (lambda: position.sincos_2d(3, 4, 8, dtype=F64), grid_sines),
    "the positions of MAE": (
        lambda: mae._position_embeddings((3, 4), 8, dtype=F64)[0, 1:],
        grid_sines,
    ),
    "apply_rotary": (
        lambda: position.apply_rotary(q, torch.arange(16)),
        lambda: turned(q, range(16)),
    ),
    "apply_rotary of halves": (
        lambda: position.apply_rotary(q, torch.arange(16), interleaved=False),
        lambda: turned(q, range(16), halves=True),
    ),
    "rotate_pairs": (turn_pairs, lambda: turned(q, range(16))),
    "apply_rotary_2d": (lambda: vit_variants.apply_rotary_2d(q, ROWS, COLUMNS), turned_2d),
    "rotation": (rotation, slow_rotation),
    "sine_positions": (
        lambda: detr.sine_position_embedding(torch.ones(1, 3, 5, dtype=torch.bool), 8)[0],
        detr_sines,
    ),
    "_sine_box_embedding": (lambda: detr._sine_box_embedding(BOXES, 8, 20.0), box_sines),
    "log_coordinates": (
        lambda: swinv2.log_coordinates((3, 4), (7, 6), dtype=F64),
        lambda: exact_log_coordinates((3, 4), (7, 6)),
    ),
}


# --- tables and weights that are resampled ----------------------------------------------------

TABLE = numbers(7 * 7 + 3, 2, seed=3)


def resampled_table():
    """Linear in both axes, between the places that timm chooses."""
    rows, columns = (array(swin._resampling_matrix(7, new)) for new in (11, 9))
    grid = array(TABLE[:49]).reshape(7, 7, 2)
    return np.einsum("ya,xb,abh->yxh", rows, columns, grid).reshape(-1, 2)


def resampled_positions():
    grid = TABLE[:49].T.reshape(1, 2, 7, 7)
    grid = F.interpolate(grid, size=(5, 9), mode="bicubic", antialias=True)
    return np.concatenate([array(TABLE[49:50]), array(grid.flatten(2)[0].T)])


def positions_to_resample():
    stored = torch.cat([TABLE[49:50], TABLE[:49]])[None]
    return backbone.resample_abs_pos_embed(stored, (5, 9))[0]


WEIGHT = numbers(4, 3, 2, 2, seed=4)

RESAMPLED = {
    "resize_rel_pos_bias_table": (
        lambda: swin.resize_rel_pos_bias_table(TABLE[:49], (6, 5), (4, 4)),
        resampled_table,
    ),
    "resize_beit_table": (
        lambda: beit._resize_beit_table(TABLE, (6, 5), (4, 4)),
        lambda: np.concatenate([resampled_table(), array(TABLE[49:])]),
    ),
    "resample_abs_pos_embed": (positions_to_resample, resampled_positions),
    "adapt_input_conv to gray": (
        lambda: models.adapt_input_conv(WEIGHT, 1),
        lambda: array(WEIGHT).sum(1, keepdims=True),
    ),
    "adapt_input_conv to five": (
        lambda: models.adapt_input_conv(WEIGHT, 5),
        lambda: array(WEIGHT)[:, [0, 1, 2, 0, 1]] * 3 / 5,
    ),
}


# --- losses -----------------------------------------------------------------------------------


def fixed(logits):
    """A model that answers with the same logits, whatever it reads."""
    return lambda *inputs, **options: logits


def smoothed():
    """A tenth of each target is spread over the vocabulary; token 0 is padding."""
    terms = 0.9 * PICKED + 0.1 * LOG_P.mean(-1)
    return -(terms * (LABELS.numpy() != 0)).sum()


OTHER, TEACHER = numbers(5, 11, seed=5), numbers(5, 11, seed=6)


def hard_distilled():
    own, other = LOG_P[0], log_softmax(array(OTHER), -1)
    rows, best = np.arange(5), array(TEACHER).argmax(-1)
    return -(own[rows, LABELS[0]].mean() + other[rows, best].mean()) / 2


def soft_distilled():
    teacher, student = (log_softmax(array(x) / 3.0, -1) for x in (TEACHER, OTHER))
    divergence = 9 * (np.exp(teacher) * (teacher - student)).mean()
    return (-PICKED[0].mean() + divergence) / 2


def captions():
    weights = softmax(array(numbers(3, 5, 4, seed=7)), -1)
    words = LABELS.numpy() != 0
    coverage = (weights * words[..., None]).sum(1)
    return (-(PICKED * words).sum() + 0.3 * ((1 - coverage) ** 2).sum()) / 3


MASKS, TARGETS = numbers(3, 6, 6, seed=8), numbers(3, 6, 6, seed=9) > 0


def probabilities():
    return 1 / (1 + np.exp(-array(MASKS))), TARGETS.numpy().astype(float)


def dice():
    p, t = probabilities()
    shared, total = (p * t).sum((1, 2)), p.sum((1, 2)) + t.sum((1, 2))
    return 1 - (2 * shared + 1) / (total + 1)


def focal():
    p, t = probabilities()
    right = np.where(t > 0, p, 1 - p)
    return (-np.where(t > 0, 0.25, 0.75) * (1 - right) ** 2 * np.log(right)).mean((1, 2))


def corners(low=0, seed=2):
    center, size = numbers(4, 4, seed=seed).sigmoid().split(2, -1)
    return torch.cat([center - size, center + size], -1)


def overlap(a, b):
    """Intersection over union, and its generalized form."""
    a, b = array(a), array(b)
    area_a, area_b = ((x[:, 2:] - x[:, :2]).prod(-1) for x in (a, b))
    inner = np.minimum(a[:, 2:], b[:, 2:]) - np.maximum(a[:, :2], b[:, :2])
    hull = (np.maximum(a[:, 2:], b[:, 2:]) - np.minimum(a[:, :2], b[:, :2])).prod(-1)
    shared = inner.clip(0).prod(-1)
    union = area_a + area_b - shared
    return shared / union, shared / union - (hull - union) / hull


def divergence():
    log_q = log_softmax(array(LOGITS)[:, None, None], -1)
    terms = (np.exp(log_q) * log_q).sum(-1) + math.log(11)
    return terms.sum((1, 2, 3)).mean()


def dvae():
    x = torch.zeros(3, 1, 2, 2, dtype=F64)
    logits = LOGITS.mT[:, :, None]
    model = beit.DiscreteVAE(5)
    model.forward = lambda x, tau: (x, logits)
    loss, count = beit.dvae_loss(model, (x,), beta=1.0)
    return loss / count


COUNTS = torch.tensor([0] * 7 + [1] * 3 + [2])


def entropy_of_counts():
    share = np.array([7, 3, 1]) / 11
    return np.exp(-(share * np.log(share)).sum())


def history(dtype=F64):
    """The loss that `fit` records for a model that cannot learn it."""
    weight = torch.nn.Linear(1, 1, bias=False).to(dtype)

    def loss(model, batch):
        return 0.1 + 0 * model(batch[0]).sum(), 0.3

    batch = (torch.ones(1, 1, dtype=dtype),)
    found = train.fit(weight, lambda step: batch, loss_fn=loss, steps=4, log_every=2)
    return torch.tensor([row["loss"] for row in found], dtype=F64)


class Fixed(torch.nn.Module):
    def forward(self, tokens):
        return LOGITS[:1, : tokens.shape[1]]


LOSSES = {
    "text_loss": (
        lambda: gpt.text_loss(fixed(LOGITS), (F.pad(LABELS, (1, 0)),))[0],
        lambda: -PICKED.sum(),
    ),
    "text_bits": (
        lambda: gpt.text_bits(Fixed(), F.pad(LABELS[0], (1, 0)), 5, 5),
        lambda: -PICKED[0].sum() / math.log(2),
    ),
    "label_smoothing_loss": (
        lambda: transformer.label_smoothing_loss(LOGITS, LABELS)[0],
        smoothed,
    ),
    "hard_distillation_loss": (
        lambda: deit.hard_distillation_loss(LOGITS[0], OTHER, TEACHER, LABELS[0]),
        hard_distilled,
    ),
    "soft_distillation_loss": (
        lambda: deit.soft_distillation_loss(LOGITS[0], OTHER, TEACHER, LABELS[0]),
        soft_distilled,
    ),
    "caption_loss": (
        lambda: spatial.caption_loss(LOGITS, LABELS, numbers(3, 5, 4, seed=7).softmax(-1), 0.3),
        captions,
    ),
    "dice_loss": (lambda: panoptic.dice_loss(MASKS, TARGETS), dice),
    "focal_loss": (lambda: panoptic.focal_loss(MASKS, TARGETS), focal),
    "box_iou": (
        lambda: detr.box_iou(corners(), corners(seed=3))[0],
        lambda: overlap(corners(), corners(seed=3))[0],
    ),
    "generalized_box_iou": (
        lambda: detr.generalized_box_iou(corners(), corners(seed=3)),
        lambda: overlap(corners(), corners(seed=3))[1],
    ),
    "dvae_loss": (dvae, divergence),
    "perplexity": (lambda: beit.perplexity(COUNTS, 3), entropy_of_counts),
    "the history of fit": (history, lambda: np.array([0.1 / 0.3] * 2)),
}


# --- attention and what replaces it -----------------------------------------------------------


def by_backend(name):
    with attention_backend(name):
        return attention(*QKV, mask="causal", bias=-0.1 * q.new_tensor(abs(offsets(16))))


def biased():
    scores = SCORES / math.sqrt(8) - 0.1 * abs(offsets(16))
    return attended(np.where(CAUSAL > 0, scores, -np.inf), v)


def by_triton():
    pytest.importorskip("triton")
    return by_backend("triton")


def with_features(causal):
    """Katharopoulos et al.'s features: exp(x) below 0, and x + 1 above."""
    x, y = (np.where(array(t) > 0, array(t) + 1, np.exp(array(t))) for t in (q, k))
    weights = x @ y.swapaxes(-1, -2) * (CAUSAL if causal else 1)
    return weights / weights.sum(-1, keepdims=True) @ array(v)


VECTORS = numbers(12, 8, seed=10)


def with_random_features():
    """exp(w·x - |x|² / 2) of queries and keys times 8^(-1/4); their means cancel."""
    w = array(VECTORS)
    x, y = (array(t) * 8**-0.25 for t in (q, k))
    x, y = (np.exp(t @ w.T - (t**2).sum(-1, keepdims=True) / 2) for t in (x, y))
    weights = x @ y.swapaxes(-1, -2)
    return weights / weights.sum(-1, keepdims=True) @ array(v)


RATES = numbers(2, 2, 16, seed=11).sigmoid()


def delta_rule():
    """The state, token by token."""
    keys = array(F.normalize(k, dim=-1))
    state, out = np.zeros((2, 2, 8, 8)), []
    for t in range(16):
        key, query = keys[:, :, t, :, None], array(q)[:, :, t, None]
        old = (key.swapaxes(-1, -2) @ state)[..., 0, :]
        change = array(RATES)[:, :, t, None] * (array(v)[:, :, t] - old)
        state = state + key * change[..., None, :]
        out.append((query @ state)[..., 0, :])
    return np.stack(out, 2)


def additive():
    torch.manual_seed(0)
    layer = AdditiveAttention(8, 8, 6).double()
    return layer, layer(*QKV)


def tanh_scores():
    layer, _ = additive()
    x, y = array(layer.query_proj(q)), array(layer.key_proj(k))
    hidden = np.tanh(x[..., :, None, :] + y[..., None, :, :])
    return attended(hidden @ array(layer.score.weight)[0], v)


def distances():
    weights = array(MAPS)[:, :, 1:, 1:]
    weights = weights / weights.sum(-1, keepdims=True)
    rows, columns = np.divmod(np.arange(16), 4)
    apart = np.hypot(5 * offsets(4)[rows[:, None], rows], 7 * offsets(4)[:, columns][columns])
    return (weights * apart).sum(-1).mean((0, 2))


def rolled_out():
    first, second = ((array(x).mean(1) + np.eye(17)) / 2 for x in (MAPS, MAPS.flip(0)))
    return second @ first


def grid_filters():
    """Gaussians around 3 places along an axis of 9 pixels."""
    x, _, log_variance, log_stride, _ = array(BOUNDS)[0]
    places = 5 * (x + 1) + (np.arange(3) - 1) * 4 * np.exp(log_stride)
    apart = np.arange(1, 10) - places[:, None]
    return softmax(-(apart**2) / (2 * np.exp(log_variance)), -1)


BOUNDS = 0.1 * numbers(1, 5, seed=12)

ATTENTION = {
    "reference": (lambda: by_backend("reference"), biased),
    "sdpa": (lambda: by_backend("sdpa"), biased),
    "triton": (by_triton, biased),
    "linear_attention": (
        lambda: efficient.linear_attention(*QKV)[0],
        lambda: with_features(False),
    ),
    "causal linear_attention": (
        lambda: efficient.linear_attention(*QKV, causal=True, chunk=5)[0],
        lambda: with_features(True),
    ),
    "performer_attention": (
        lambda: efficient.performer_attention(*QKV, VECTORS),
        with_random_features,
    ),
    "delta_attention": (
        lambda: efficient.delta_attention(q, F.normalize(k, dim=-1), v, RATES, chunk=5)[0],
        delta_rule,
    ),
    "segment_means": (
        lambda: efficient._segment_means(v, 5)[0],
        lambda: np.stack([x.mean(-2) for x in np.split(array(v), [4, 7, 10, 13], -2)], -2),
    ),
    "block_attention": (
        lambda: scaling._block_attention(*QKV)[0],
        lambda: attended(SCORES / math.sqrt(8), v),
    ),
    "its log-sum-exp": (
        lambda: scaling._block_attention(*QKV)[1],
        lambda: logsumexp(SCORES / math.sqrt(8), -1),
    ),
    "AdditiveAttention": (lambda: additive()[1], tanh_scores),
    "normalize": (
        lambda: swinv2.normalize(q),
        lambda: array(q) / np.sqrt((array(q) ** 2).sum(-1, keepdims=True)),
    ),
    "attention_distance": (lambda: vit.attention_distance(MAPS, 4, (5, 7)), distances),
    "attention_rollout": (lambda: vit.attention_rollout([MAPS, MAPS.flip(0)]), rolled_out),
    "FilterBank": (lambda: spatial.FilterBank(9, 3).filters(BOUNDS)[1][0], grid_filters),
}


# --- probabilities and pixels -----------------------------------------------------------------


class Answers:
    """A decoder with fixed logits."""

    pad_id = 0

    def decode(self, *inputs):
        return LOGITS


def next_log_probs():
    found = decoding.next_log_probs(Answers(), LABELS, None)
    return found[:, 1:]


def class_probabilities():
    picture = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    model = build("vit").double().eval()
    model.data_config = models.data_config("vit_tiny_patch16_224") | dict(
        input_size=(3, 32, 32)
    )
    return model, picture, models.preprocess(model.data_config)(picture).double()


def classified():
    torch.manual_seed(0)
    model, picture, _ = class_probabilities()
    return torch.tensor([p for _, p in models.classify(model, picture, 5, "abcde")], dtype=F64)


def by_softmax():
    torch.manual_seed(0)
    model, _, x = class_probabilities()
    with torch.no_grad():
        return np.sort(softmax(array(model(x)), -1)[0])[::-1].copy()


def detections():
    output = detr.Output(LOGITS, numbers(3, 5, 4).sigmoid(), [])
    found = detr.postprocess(output, torch.tensor([[30, 40]] * 3))
    return torch.cat([torch.stack([x["scores"] for x in found])[..., None],
                      torch.stack([x["boxes"] for x in found])], -1)  # fmt: skip


def scaled_boxes():
    x, y, width, height = np.moveaxis(array(numbers(3, 5, 4).sigmoid()), -1, 0)
    edges = (
        40 * (x - width / 2),
        30 * (y - height / 2),
        40 * (x + width / 2),
        30 * (y + height / 2),
    )
    return np.stack([np.exp(LOG_P)[..., :-1].max(-1), *edges], -1)


def segment_scores():
    """Four queries that are sure of their class and one that is not."""
    logits = 9 * F.one_hot(torch.arange(5) % 4, 5).double() * torch.arange(5)[:, None]
    masks = 5 * F.one_hot(torch.arange(36).view(6, 6) % 5, 5).double().permute(2, 0, 1)
    infos = panoptic.panoptic_postprocess(logits, masks, range(4), threshold=0.5, smallest=0)[1]
    return torch.tensor([info["score"] for info in infos], dtype=F64)


def sure_scores():
    return np.array([1 / (1 + 4 * np.exp(-9 * i)) for i in range(1, 5)])


PIXELS = numbers(2, 3, 8, 8, seed=13)


def patch_norms():
    x = array(PIXELS).reshape(2, 3, 64)
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, ddof=1, keepdims=True) + 1e-6)


PROBABILITIES = {
    "next_log_probs": (next_log_probs, lambda: LOG_P[:, -1, 1:]),
    "classify": (classified, by_softmax),
    "postprocess": (detections, scaled_boxes),
    "merge": (segment_scores, sure_scores),
    "normalize_patches": (lambda: mae.normalize_patches(PIXELS.flatten(2)), patch_norms),
}

SITES = POSITIONS | RESAMPLED | LOSSES | ATTENTION | PROBABILITIES


@pytest.mark.parametrize("name", SITES)
def test_float64_is_kept(name):
    call, formula = SITES[name]
    found, wanted = call(), torch.as_tensor(formula(), dtype=F64)
    if isinstance(found, float):  # which Python itself keeps in float64
        found = torch.tensor(found, dtype=F64)
    assert found.dtype == F64
    close(found.detach(), wanted, 1e-12)


# --- whole models -----------------------------------------------------------------------------

SHAPE = dict(d_model=8, nhead=2, num_encoder_layers=1, num_decoder_layers=1, max_length=16)
GPT_SHAPE = dict(vocab_size=11, block_size=16, n_layer=1, n_head=2, n_embd=8)
PADDING = torch.ones(2, 48, 48, dtype=torch.bool)
PADDING[0, 30:] = False


def text(position):
    model = transformer.Transformer(11, dim_feedforward=8, position=position, **SHAPE)
    return model, (tokens(2, 6), tokens(2, 5))


def written(**options):
    return gpt.GPT(gpt.GPTConfig(**GPT_SHAPE, **options)), (tokens(2, 6),)


def rotary():
    model = build("vit", num_heads=2)
    vit_variants.use_rotary(model)
    return model, (images(),)


def masked():
    model = mae.MaskedAutoencoder(32, 8, 3, 24, 1, 3, 16, 1, 2, norm_pix_loss=True)
    return model, (images(), 0.75, numbers(2, 16))


def guessing():
    model = beit.BeitForMaskedImageModeling(32, 8, 3, 16, 24, 1, 3)
    return model, (images(), numbers(2, 4, 4) > 0)


WHOLE = {name: (lambda name=name: (build(name), (images(),))) for name in BACKBONES}
WHOLE |= {f"Transformer, {x}": (lambda x=x: text(x)) for x in transformer.POSITIONS}
WHOLE |= {
    "GPT": written,
    "GPT of 2019": lambda: written(position="learned", norm="layer", mlp="gelu"),
    "GPT with a window": lambda: written(window=3, qk_norm=True, n_kv_head=1),
    "GPT, slower": lambda: written(rope_scaling=dict(rope_type="linear", factor=3.0)),
    "DETR": lambda: (detr.small_detr(3), (numbers(2, 3, 48, 48), PADDING)),
    "BoxQueryDETR": lambda: (
        detr.small_detr(3, detr.BoxQueryDETR),
        (numbers(2, 3, 48, 48), PADDING),
    ),
    "PanopticDETR": lambda: (
        panoptic.PanopticDETR(detr.small_detr(6), num_groups=4),
        (numbers(2, 3, 48, 48), PADDING),
    ),
    "rotary ViT": rotary,
    "MAE": masked,
    "BEiT": guessing,
    "AutoFormer": lambda: (small_supernet(), (numbers(2, 1, 10, 10),)),
    "Seq2Seq": lambda: (seq2seq.Seq2Seq(11, 11), (tokens(2, 6), tokens(2, 5))),
    "Captioner": lambda: (spatial.Captioner(11), (numbers(2, 3, 32, 32), tokens(2, 5))),
    "Draw": lambda: (spatial.Draw(16, 2), (numbers(2, 1, 16, 16).sigmoid(),)),
    "VectorQuantizer": lambda: (beit.VectorQuantizer(4, 8), (numbers(32, 8).requires_grad_(),)),
}

EXACT = {  # what is computed in float32 without loss, by the name of the function
    "_restore_precision",  # the table of positions as it is stored, to be compared
    "rope_cos_sin",  # a one
    "position_angles",
    "_resize_mask",  # a mask, interpolated to its nearest
}


class Narrow(TorchDispatchMode):
    """Keeps the places where an operation gives numbers in less than float64."""

    def __init__(self):
        super().__init__()
        self.places = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        for x in tree_leaves(out):
            is_narrow = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != F64
            frames = [f for f in traceback.extract_stack() if "attnlib" in f.filename]
            place = frames[-1] if frames else traceback.FrameSummary("autograd", 0, "backward")
            if is_narrow and place.name not in EXACT:
                self.places.add(f"{place.filename}:{place.lineno} {place.line}")
        return out


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_in_float64_computes_in_float64(name):
    torch.manual_seed(0)
    model, inputs = WHOLE[name]()
    model.double()
    with Narrow() as narrow:
        out = [x for x in tree_leaves(model(*inputs)) if isinstance(x, torch.Tensor)]
        sum(x.sum() for x in out if x.requires_grad).backward()
    assert not narrow.places
    assert {x.dtype for x in out if x.is_floating_point()} == {F64}


# --- half precision ---------------------------------------------------------------------------

HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, F64])
def test_a_vector_of_length_zero_has_a_code_and_no_gradient(dtype):
    torch.manual_seed(0)
    quantizer = beit.VectorQuantizer(4, 8, kmeans_steps=0).to(dtype)
    z = torch.zeros(3, 8, dtype=dtype, requires_grad=True)
    codes, _, loss = quantizer(z)
    loss.backward()
    assert codes.isfinite().all() and loss.isfinite() and quantizer.embedding.isfinite().all()
    if dtype == torch.float16:
        assert not z.grad.any()


@pytest.mark.parametrize("length", [6e-8, 1e-5, 1.0, 3e4])
def test_codes_of_short_and_long_vectors_in_float16(length):
    torch.manual_seed(0)
    quantizer = beit.VectorQuantizer(8, 8, kmeans_steps=0).half().eval()
    z = (length * numbers(20, 8).sign()).half()
    codes, numbers_of_codes, loss = quantizer(z)
    unit = z.double() / z.double().norm(dim=-1, keepdim=True)
    wanted = quantizer.embedding.double()
    cosines = unit @ wanted.T
    chosen = cosines.gather(1, numbers_of_codes[:, None])[:, 0]
    close(chosen, cosines.amax(1), 2e-3)
    close(loss.double(), (unit - wanted[numbers_of_codes]).square().mean(), 2e-3)
    close(codes.double(), wanted[numbers_of_codes], 2e-3)


@pytest.mark.parametrize("dtype", HALVES)
def test_codes_follow_more_vectors_than_half_precision_counts(dtype):
    quantizer = beit.VectorQuantizer(2, 2, decay=0.5, kmeans_steps=0)
    start = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    quantizer.embedding.copy_(start)
    quantizer.to(dtype)
    z = torch.tensor([[0.6, 0.8]], dtype=dtype).expand(70_000, 2)
    quantizer(z)
    wanted = F.normalize(torch.tensor([1.6, 0.8]), dim=0)
    close(quantizer.embedding.float(), torch.stack([wanted, start[1]]), 5e-3)


@pytest.mark.parametrize("steps", [0, 3])
def test_autocast_leaves_the_codes_in_their_dtype(steps):
    torch.manual_seed(0)
    quantizer, layer = beit.VectorQuantizer(4, 8, kmeans_steps=steps), torch.nn.Linear(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        quantizer(layer(torch.randn(64, 8)))
    assert quantizer.embedding.dtype == torch.float32
    close(quantizer.embedding.norm(dim=-1), torch.ones(4), 5e-3)
    assert quantizer.eval()(torch.randn(3, 8))[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", HALVES)
def test_means_of_long_runs_in_half_precision(dtype):
    x = (20 * numbers(1, 4096, 8) + 40).to(dtype)
    found, wanted = (efficient._segment_means(y, 2)[0] for y in (x, x.double()))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("iterations", [None, 6])
@pytest.mark.parametrize("dtype", HALVES)
def test_nystrom_in_half_precision(dtype, iterations):
    inputs = [x.to(dtype) for x in numbers(3, 1, 2, 64, 8)]
    found, wanted = (
        efficient.nystrom_attention(*(x.to(wide) for x in inputs), 8, iterations=iterations)
        for wide in (dtype, F64)
    )
    assert found.dtype == dtype
    close(found.double(), wanted, 4 * torch.finfo(dtype).eps)
