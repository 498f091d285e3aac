"""Unusual calls of `attnlib.detr`: torchvision, SciPy, transformers, formulas in float64."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from draws import (
    DTYPES,
    batches,
    drawn,
    dtypes,
    layouts,
    map_sizes,
    masks,
    normal,
    seeds,
    tolerance,
)
from hypothesis import example
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import nn

from attnlib import detr
from attnlib.detr import BoxQueryDETR, HungarianMatcher, Output, SetCriterion, small_detr
from helpers import close

CLASSES = 4
kinds = st.sampled_from(("plain", "degenerate", "turned", "equal"))
numbers = st.integers(min_value=0, max_value=6)


def corners(shape, dtype, seed, kind="plain", layout="contiguous"):
    """Boxes (*shape, 4) by corners within [-1, 1], some of them without an area."""
    x = normal((*shape, 2, 2), torch.float64, seed).tanh()
    x = x if kind == "turned" else x.sort(-2).values
    x = x.flatten(-2)
    if kind == "degenerate":
        x[..., 2] = x[..., 0]  # no width
    if kind == "equal":
        x = x[..., :1].expand_as(x).clone()  # points
    x = x.to(dtype)
    if layout in ("transposed", "strided"):
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    return x


def objects(counts, seed, dtype=torch.float64):
    """Targets with so many objects each, their boxes inside the image."""
    found = []
    for i, count in enumerate(counts):
        box = normal((count, 4), torch.float64, seed + i).sigmoid()
        size = 0.05 + 0.9 * box[:, 2:]
        center = size / 2 + (1 - size) * box[:, :2]
        labels = (normal((count,), seed=seed + i).abs() * 10).long() % CLASSES
        found.append(dict(labels=labels, boxes=torch.cat([center, size], 1).to(dtype)))
    return found


def outputs(batch, queries, seed, dtype=torch.float64, layers=2):
    """What a model might say, with as many layers; leaves."""
    logits = normal((layers, batch, queries, CLASSES + 1), dtype, seed)
    boxes = normal((layers, batch, queries, 4), torch.float64, seed + 1).sigmoid().to(dtype)
    logits, boxes = logits.requires_grad_(), boxes.requires_grad_()
    made = [Output(logits[i], boxes[i], []) for i in range(layers)]
    return made[-1]._replace(aux_outputs=made[:-1]), logits, boxes


# --- boxes ------------------------------------------------------------------------------------


@drawn(numbers, dtypes(), seeds, kinds, layouts)
def test_conversion(count, dtype, seed, kind, layout):
    boxes = corners((count,), dtype, seed, kind, layout)
    exact = boxes.double()
    center = (exact[:, :2] + exact[:, 2:]) / 2
    found = detr.box_xyxy_to_cxcywh(boxes)
    wanted = torch.cat([center, exact[:, 2:] - exact[:, :2]], 1)
    assert found.dtype == dtype
    close(found.double(), wanted, tolerance(dtype, 2))
    found = detr.box_cxcywh_to_xyxy(boxes)
    wanted = torchvision.ops.box_convert(exact, "cxcywh", "xyxy")
    close(found.double(), wanted, tolerance(dtype, 2))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_conversion_of_integers(dtype):
    boxes = torch.tensor([[200, 100, 251, 200], [3, 0, 1, 255]]).to(dtype)
    wanted = torch.tensor([[225.5, 150, 51, 100], [2, 127.5, -2, 255]])
    close(detr.box_xyxy_to_cxcywh(boxes), wanted, 0)
    wanted = torch.tensor([[74.5, 0, 325.5, 200], [2.5, -127.5, 3.5, 127.5]])
    close(detr.box_cxcywh_to_xyxy(boxes), wanted, 0)


def overlap(a, b):
    """IoU, union and GIoU of two boxes of Python numbers."""
    widths = [max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1)]
    shared = widths[0] * widths[1]
    areas = [max(0.0, x[2] - x[0]) * max(0.0, x[3] - x[1]) for x in (a, b)]
    union = sum(areas) - shared
    sides = [max(0.0, max(a[i + 2], b[i + 2]) - min(a[i], b[i])) for i in (0, 1)]
    hull = sides[0] * sides[1]
    iou = shared / union if union else 0.0
    return iou, union, iou - ((hull - union) / hull if hull else 0.0)


@drawn(numbers, numbers, dtypes(), seeds, kinds, kinds, layouts)
def test_overlaps(n, m, dtype, seed, kind, other, layout):
    a = corners((n,), dtype, seed, kind, layout)
    b = corners((m,), dtype, seed + 1, other, layout)
    iou, union = detr.box_iou(a[:, None], b)
    giou, area = detr.generalized_box_iou(a[:, None], b), detr.box_area(a)
    wide = torch.promote_types(dtype, torch.float32)
    assert iou.dtype == union.dtype == giou.dtype == area.dtype == wide
    rows = [[overlap(p, q) for q in b.tolist()] for p in a.tolist()]
    wanted = torch.tensor(rows, dtype=torch.float64).view(n, m, 3)
    for k, found in enumerate((iou, union, giou)):
        assert found.shape == (n, m)
        # a ratio of areas of about 0.01 has a hundred times their rounding
        close(found.double(), wanted[..., k], 1e3 * torch.finfo(wide).eps)
    sides = (a[:, 2:] - a[:, :2]).double() if dtype == torch.float64 else None
    if sides is not None:
        close(area, sides.clamp(min=0).prod(1), 1e-14)
    if kind == other == "plain" and dtype == torch.float64:
        close(giou, torchvision.ops.generalized_box_iou(a, b), 1e-9)


@drawn(st.sampled_from((torch.float64, torch.float32)), seeds, kinds)
def test_gradients_of_overlaps_are_finite_and_torchvisions(dtype, seed, kind):
    a = corners((5,), dtype, seed, kind).requires_grad_()
    b = corners((5,), dtype, seed + 1)
    iou = detr.box_iou(a, b)[0]
    (found,) = torch.autograd.grad((iou + detr.generalized_box_iou(a, b)).sum(), a)
    assert found.isfinite().all()
    if kind == "plain":
        theirs = torchvision.ops.generalized_box_iou(a, b) + torchvision.ops.box_iou(a, b)
        (wanted,) = torch.autograd.grad(theirs.diag().sum(), a)
        close(found, wanted, tolerance(dtype, 1000) * max(1, wanted.abs().max().item()))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.int32])
def test_wide_dtypes(dtype):
    x = torch.tensor([3, 200], dtype=dtype)
    found = detr.upcast(x)
    integer = torch.int64 if not dtype.is_floating_point else torch.float32
    assert found.dtype == (torch.float64 if dtype == torch.float64 else integer)
    close(found.double(), torch.tensor([3.0, 200.0]).double(), 0)
    assert detr.box_area(torch.tensor([0, 0, 250, 250]).to(dtype)) == 62_500


@drawn(seeds, dtypes(torch.float64, torch.float32))
def test_ratio(seed, dtype):
    whole = normal((6,), dtype, seed).abs()
    whole[::2] = 0
    part = (whole * normal((6,), dtype, seed + 1)).requires_grad_()
    found = detr._safe_ratio(part, whole)
    p, w = part.tolist(), whole.tolist()
    wanted = torch.tensor([a / b if b else 0.0 for a, b in zip(p, w)], dtype=torch.float64)
    close(found.double(), wanted, tolerance(dtype))
    assert torch.autograd.grad(found.sum(), part)[0].isfinite().all()


# --- targets, matching, loss ------------------------------------------------------------------


@drawn(st.lists(numbers, max_size=4), seeds, dtypes())
@example([], 0, torch.float32)
@example([0, 0], 0, torch.float16)
def test_padded_targets(counts, seed, dtype):
    targets = objects(counts, seed)
    labels, boxes = detr._pad_targets(targets, torch.zeros(1, dtype=dtype))
    most = max(counts, default=0)
    assert labels.shape == (len(counts), most) and labels.dtype == torch.int64
    assert boxes.shape == (len(counts), most, 4) and boxes.dtype == dtype
    for i, (count, target) in enumerate(zip(counts, targets)):
        assert torch.equal(labels[i, :count], target["labels"]) and not labels[i, count:].any()
        assert torch.equal(boxes[i, :count], target["boxes"].to(dtype))
        rest = torch.tensor([[0.5, 0.5, 1, 1]], dtype=dtype).expand(most - count, 4)
        assert torch.equal(boxes[i, count:], rest)


def costs(logits, boxes, target, weights):
    """The costs (Q, n) of one image, pair by pair."""
    rows = []
    for logit, box in zip(logits.double(), boxes.double()):
        p, row = logit.softmax(0), []
        for label, other in zip(target["labels"].tolist(), target["boxes"].double()):
            x, y = (torchvision.ops.box_convert(z, "cxcywh", "xyxy") for z in (box, other))
            giou = overlap(x.tolist(), y.tolist())[2]
            terms = -p[label].item(), (box - other).abs().sum().item(), -giou
            row.append(sum(w * term for w, term in zip(weights, terms)))
        rows.append(row)
    return np.array(rows).reshape(len(boxes), len(target["labels"]))


@drawn(
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(4, 7),
    seeds,
    dtypes(),
    st.sampled_from(((1, 5, 2), (0, 1, 0), (2, 0, 0), (0, 0, 3))),
)
@example([], 4, 0, torch.float64, (1, 5, 2))
@example([0, 4], 4, 0, torch.float16, (1, 5, 2))
def test_matching(counts, queries, seed, dtype, weights):
    batch, layers = len(counts), 2
    output, logits, boxes = outputs(batch, queries, seed, dtype, layers)
    targets, matcher = objects(counts, seed, dtype), HungarianMatcher(*weights)
    labels, target_boxes = detr._pad_targets(targets, detr.upcast(boxes))
    cost = matcher.cost(detr.upcast(logits), detr.upcast(boxes), labels, target_boxes).detach()
    together = matcher(logits, boxes, targets)
    alone = matcher(output.logits, output.boxes, targets)
    assert len(together) == layers and len(alone) == batch
    for layer in range(layers):
        for b, target in enumerate(targets):
            wanted = costs(logits[layer, b], boxes[layer, b], target, weights)
            count = len(target["labels"])
            close(cost[layer, b, :, :count].double(), torch.from_numpy(wanted), 2e-5)
            i, j = together[layer][b]
            assert i.dtype == j.dtype == torch.int64 and len(i) == count
            assert sorted(j.tolist()) == list(range(count)) and len(set(i.tolist())) == count
            best = wanted[linear_sum_assignment(wanted)].sum()
            assert wanted[i, j].sum() == pytest.approx(best, abs=1e-4)
    for one, other in zip(together[-1], alone):
        assert all(torch.equal(a, b) for a, b in zip(one, other))


def exact_loss(logits, boxes, matched, targets, no_object, count):
    """The three terms of one layer in float64, image by image."""
    weight = torch.ones(CLASSES + 1).double()
    weight[-1] = no_object
    total, norm, box, giou = 0.0, 0.0, 0.0, 0.0
    for b, (i, j) in enumerate(matched):
        classes = torch.full((logits.shape[1],), CLASSES)
        for query, number in zip(i.tolist(), j.tolist()):
            classes[query] = targets[b]["labels"][number]
            p, t = boxes[b, query].double(), targets[b]["boxes"][number].double()
            x, y = (torchvision.ops.box_convert(z, "cxcywh", "xyxy") for z in (p, t))
            box += (p - t).abs().sum()
            giou += 1 - torchvision.ops.generalized_box_iou(x[None], y[None])[0, 0]
        nll = F.cross_entropy(logits[b].double(), classes, reduction="none")
        total, norm = total + (weight[classes] * nll).sum(), norm + weight[classes].sum()
    count = max(1, count)
    terms = [total / norm if norm else 0.0, box / count, giou / count]
    return [torch.as_tensor(x, dtype=torch.float64) for x in terms]


@drawn(
    st.lists(st.integers(0, 4), max_size=3),
    seeds,
    dtypes(),
    st.sampled_from((0.1, 0.0, 1.0)),
    st.sampled_from((None, 0.5, 7)),
)
@example([], 0, torch.float32, 0.1, None)
@example([0, 0], 0, torch.bfloat16, 0.0, None)
def test_loss(counts, seed, dtype, no_object, num_boxes):
    output, logits, boxes = outputs(len(counts), 5, seed, dtype)
    targets = objects(counts, seed)
    loss, weights = SetCriterion(CLASSES, dict(box=3, giou=0.5), no_object), (1, 3, 0.5)
    found = loss(output, targets, num_boxes)
    matched = HungarianMatcher()(logits, boxes, targets)
    rounded = [  # as the loss reads them
        dict(labels=t["labels"], boxes=t["boxes"].to(found["box"].dtype)) for t in targets
    ]
    count, total = sum(counts) if num_boxes is None else num_boxes, 0.0
    wide = torch.promote_types(dtype, torch.float32)
    small = 100 * torch.finfo(wide).eps
    for layer in range(2):
        wanted = exact_loss(
            logits[layer], boxes[layer], matched[layer], rounded, no_object, count
        )
        for name, value in zip(("class", "box", "giou"), wanted):
            assert found[name].dtype == wide
            close(found[name][layer].double(), value, small * max(1, value.item()))
        total = total + sum(w * value for w, value in zip(weights, wanted))
    close(found["total"].double(), torch.as_tensor(total), 10 * small * max(1, float(total)))
    slopes = torch.autograd.grad(found["total"], (logits, boxes))
    if counts and (sum(counts) or no_object):
        exact = torch.autograd.grad(total, (logits, boxes), allow_unused=True)
        for a, b in zip(slopes, exact):
            b = torch.zeros_like(a) if b is None else b
            close(a.double(), b.double(), tolerance(dtype) * max(1, b.abs().max().item()))
    nothing = torch.full(logits.shape[:-1], CLASSES)  # predictions that are matched to nothing
    terms = loss.loss_labels(logits, nothing)
    nothing = -logits.double().log_softmax(-1)[..., -1].mean((1, 2))
    if counts and no_object:
        close(terms.double(), nothing, tolerance(dtype, 64))


@drawn(batches, st.integers(1, 4), seeds)
def test_matching_in_order(batch, layers, seed):
    counts = [(seed + i) % 4 for i in range(batch)]
    output, logits, boxes = outputs(batch, 3, seed, layers=layers)
    targets = objects(counts, seed)
    found = detr.IdentityMatcher()(logits, boxes, targets)
    rows = [[(list(range(n)), list(range(n))) for n in counts]] * layers
    assert [[(i.tolist(), j.tolist()) for i, j in images] for images in found] == rows
    terms = SetCriterion(CLASSES, matcher=detr.IdentityMatcher())(output, targets)
    wanted = exact_loss(logits[-1], boxes[-1], found[-1], targets, 0.1, sum(counts))
    for name, value in zip(("class", "box", "giou"), wanted):
        close(terms[name][-1], value, 1e-12)


GOOD = dict(labels=torch.tensor([1]), boxes=torch.tensor([[0.5, 0.5, 0.2, 0.2]]))
MANY = dict(labels=torch.ones(4).long(), boxes=GOOD["boxes"].repeat(4, 1))


def renamed(old, new):
    return {new if key == old else key: x for key, x in GOOD.items()}


@pytest.mark.parametrize("matcher", [HungarianMatcher(), detr.IdentityMatcher()])
@pytest.mark.parametrize(
    "target, message",
    [
        (renamed("labels", "class_labels"), r"\['class_labels', 'boxes'\] must have 'labels'"),
        (renamed("boxes", "box"), r"targets\[0\] .*'box'\] must have 'boxes', a Tensor"),
        (GOOD | dict(labels=[1]), "must have 'labels', a Tensor"),
        (GOOD | dict(labels=torch.tensor([1.7])), r"labels'\] of dtype torch.float32 must be"),
        (GOOD | dict(labels=torch.tensor([True])), r"of dtype torch.bool must be integers"),
        (GOOD | dict(labels=torch.tensor([CLASSES])), "must be from 0 to 3"),
        (MANY, r"has 4 objects, more than num_queries \(3\)"),
        (GOOD | dict(boxes=torch.tensor([[0.5, 0.5, 0.2, math.inf]])), "inside it"),
    ],
)
def test_bad_targets(target, message, matcher):
    output, logits, boxes = outputs(1, 3, 0)
    with pytest.raises(ValueError, match=message):
        SetCriterion(CLASSES, matcher=matcher)(output, [target])
    with pytest.raises(ValueError, match=message):
        detr.check_targets([target], 1, 3, CLASSES)
    if target is not MANY:
        with pytest.raises(ValueError, match=message):
            detr.noised_targets([target], CLASSES)


def test_values_are_checked():
    check = detr._check_values
    check("it", GOOD["labels"], torch.tensor([[0.5, 0.5, 1.0, 1.0]]), 2)  # the whole image
    with pytest.raises(ValueError, match=r"it\['labels'\] from 1 to 1 must be from 0 to 0"):
        check("it", GOOD["labels"], GOOD["boxes"], 1)
    with pytest.raises(ValueError, match=r"it\['boxes'\] has \[0.5, 0.5, 0.2, nan\]"):
        check("it", GOOD["labels"], torch.tensor([[0.5, 0.5, 0.2, math.nan]]), 2)


@pytest.mark.parametrize("where", ["logits", "boxes"])
def test_nan_predictions_are_named(where):
    output, logits, boxes = outputs(2, 3, 0)
    with torch.no_grad():
        (logits if where == "logits" else boxes)[0, 1, 2, 0] = math.nan
    with pytest.raises(ValueError, match=r"logits or boxes \(NaN\)"):
        SetCriterion(CLASSES)(output, objects((1, 2), 0))


def test_a_class_that_is_ruled_out_has_a_finite_loss():
    """A logit of -inf is a probability of 0, as one may set it before the softmax."""
    output, logits, boxes = outputs(1, 3, 0)
    with torch.no_grad():
        logits[..., 2] = -math.inf
    targets = [GOOD | dict(boxes=GOOD["boxes"].double())]
    terms = SetCriterion(CLASSES)(output, targets)
    slopes = torch.autograd.grad(terms["total"], logits)[0]
    assert terms["total"].isfinite() and slopes.isfinite().all() and not slopes[..., 2].any()


# --- after the model --------------------------------------------------------------------------


@drawn(batches, st.integers(1, 5), seeds, dtypes())
def test_postprocessed(batch, queries, seed, dtype):
    output, _, _ = outputs(batch, queries, seed, dtype)
    sizes = [[7 + 13 * i, 400 - i] for i in range(batch)]
    for given_sizes in (sizes, torch.tensor(sizes).view(batch, 2)):
        found = detr.postprocess(output, given_sizes)
        assert len(found) == batch
        for b, (height, width) in enumerate(sizes):
            p = output.logits[b].double().softmax(-1)[:, :-1]
            close(found[b]["scores"].double(), p.amax(-1), 1e-6)
            taken = p.gather(1, found[b]["labels"][:, None])[:, 0]
            close(taken, p.amax(-1), 1e-6)
            wanted = torchvision.ops.box_convert(output.boxes[b].double(), "cxcywh", "xyxy")
            wanted = wanted * torch.tensor([width, height, width, height])
            close(found[b]["boxes"].double(), wanted, 400 * 4 * torch.finfo(torch.float32).eps)
            assert not any(x.requires_grad for x in found[b].values())


def test_a_score_that_is_no_number_stays_visible():
    output, logits, _ = outputs(1, 3, 0)
    with torch.no_grad():
        logits[-1, 0, 1, 0] = math.nan
    found = detr.postprocess(output, [[10, 20]])[0]
    assert found["scores"].isnan().tolist() == [False, True, False]


# --- positions --------------------------------------------------------------------------------


def fourths(dim, x, temperature):
    """dim sines and cosines of an angle x, in turns of the frequencies."""
    row = []
    for i in range(dim // 2):
        angle = x / temperature ** (2 * i / dim)
        row += [math.sin(angle), math.cos(angle)]
    return row


@drawn(
    batches,
    map_sizes(),
    st.sampled_from((4, 8, 12)),
    seeds,
    st.sampled_from((0.7, 1.0, 0.0)),
    st.sampled_from((10000, 20)),
)
def test_sines_of_places(batch, size, dim, seed, share, temperature):
    mask = normal((batch, *size), seed=seed).abs() < 3 * share
    found = detr.sine_position_embedding(mask, dim, temperature)
    assert found.dtype == torch.float64 and found.shape == (batch, size[0] * size[1], dim)
    height, width = size
    for b in range(batch):
        for y in range(height):
            for x in range(width):
                column, row = mask[b, :, x].tolist(), mask[b, y].tolist()
                wanted = []
                for line, place in ((column, y), (row, x)):
                    turn = 2 * math.pi * sum(line[: place + 1]) / (sum(line) + 1e-6)
                    wanted += fourths(dim // 2, turn, temperature)
                wanted = torch.tensor(wanted, dtype=torch.float64)
                close(found[b, y * width + x], wanted, 1e-12)


@drawn(batches, st.integers(1, 4), st.sampled_from((4, 8)), seeds, dtypes())
def test_sines_of_boxes(batch, queries, dim, seed, dtype):
    boxes = normal((batch, queries, 4), seed=seed).sigmoid().to(dtype)
    found = detr._sine_box_embedding(boxes, dim, 20)
    assert found.dtype == dtype and found.shape == (batch, queries, 2 * dim)
    for b in range(batch):
        for q in range(queries):
            x, y, w, h = (2 * math.pi * value for value in boxes[b, q].tolist())
            wanted = [value for turn in (y, x, h, w) for value in fourths(dim // 2, turn, 20)]
            wanted = torch.tensor(wanted, dtype=torch.float64)
            # an angle of up to 2 π is rounded to 4 units
            wide = torch.promote_types(dtype, torch.float32)
            close(found[b, q].double(), wanted, tolerance(wide, 8) + tolerance(dtype, 1))


@pytest.mark.parametrize("dim", [0, 2, 5, 6, 4.0])
def test_widths_that_have_no_fourths(dim):
    message = rf"\({dim}\) must be a positive multiple of 4"
    for call in (
        lambda: detr.sine_position_embedding(torch.ones(1, 2, 3).bool(), dim),
        lambda: detr._sine_box_embedding(torch.rand(1, 2, 4), dim, 20),
        lambda: detr._check_multiples_of_four(embed_dim=dim),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match="embed_dim .6. must be a positive multiple of 4"):
        detr.DETR(7, 5, 1, 1, detr.SmallBackbone(), 6, 2, 16)


# --- layers -----------------------------------------------------------------------------------


def exact_norm(layer, x):
    centered = x - x.mean(-1, keepdim=True)
    scale = (centered.square().mean(-1, keepdim=True) + layer.eps).sqrt()
    return centered / scale * layer.weight + layer.bias


def exact_mlp(layer, x):
    hidden = (x @ layer.linear1.weight.T + layer.linear1.bias).clamp(min=0)
    return hidden @ layer.linear2.weight.T + layer.linear2.bias


def exact_attention(layer, q, k, v, mask=None, near=None, far=None):
    """Multi-head attention in loops over the heads; a query without keys gets zeros."""
    weight, bias = layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3)
    q, k, v = (x @ w.T + b for x, w, b in zip((q, k, v), weight, bias))
    h, width = layer.num_heads, q.shape[-1] // layer.num_heads
    shape = (q.shape[0], h, q.shape[1], k.shape[1])
    seen = torch.ones(shape) if mask is None else mask.expand(shape).double()
    read = []
    for i in range(h):
        own = slice(i * width, (i + 1) * width)
        logits = q[..., own] @ k[..., own].mT
        if near is not None:
            logits = (logits + near[..., own] @ far[..., own].mT) / math.sqrt(2)
        weights = (logits / math.sqrt(width)).exp() * seen[:, i]
        total = weights.sum(-1, keepdim=True)
        read.append(weights / torch.where(total == 0, 1, total) @ v[..., own])
    return torch.cat(read, -1) @ layer.out_proj.weight.T + layer.out_proj.bias


def exact_encoder_layer(layer, x, positions, mask=None):
    q = x + positions
    x = exact_norm(layer.norm1, x + exact_attention(layer.self_attn, q, q, x, mask))
    return exact_norm(layer.norm2, x + exact_mlp(layer, x))


def exact_decoder_layer(layer, x, queries, keys, memory, mask=None):
    q = x + queries
    x = exact_norm(layer.norm1, x + exact_attention(layer.self_attn, q, q, x))
    read = exact_attention(layer.multihead_attn, x + queries, keys, memory, mask)
    x = exact_norm(layer.norm2, x + read)
    return exact_norm(layer.norm3, x + exact_mlp(layer, x))


def exact_anchor_layer(layer, x, queries, anchors, memory, places, mask=None, groups=None):
    q = x + queries
    x = exact_norm(layer.norm1, x + exact_attention(layer.self_attn, q, q, x, groups))
    first, _, last = layer.scale
    scale = (x @ first.weight.T + first.bias).clamp(min=0) @ last.weight.T + last.bias
    near, far = (
        (anchors * scale) @ layer.query_place.weight.T,
        places @ layer.key_place.weight.T,
    )
    read = exact_attention(layer.multihead_attn, x, memory, memory, mask, near, far)
    x = exact_norm(layer.norm2, x + read)
    return exact_norm(layer.norm3, x + exact_mlp(layer, x))


def layer_of(kind, dtype, seed):
    """A layer whose norms and biases are not one and zero, and the same in float64."""
    torch.manual_seed(seed)
    layer = kind(8, 2, 12, 0.0)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.2 * torch.randn_like(p))
    layer = layer.to(dtype)
    return layer, copy.deepcopy(layer).double()


def compare(layer, exact, formula, inputs, dtype, **options):
    """Outputs and the inputs' gradients of a layer are those of a formula in float64."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    kinks = []  # how near each hidden unit is to where a ReLU bends
    for name, part in layer.named_modules():
        if name in ("linear1", "scale.0"):
            part.register_forward_hook(lambda _, x, y: kinks.append(y.abs().flatten()))
    found, wanted = layer(*inputs, **options), formula(exact, *wide, **options)
    assert found.dtype == dtype and found.shape == wanted.shape
    close(found.double(), wanted, tolerance(dtype, 32))
    if kinks and (torch.cat(kinks) < tolerance(dtype)).any():
        return  # rounding may choose the other slope
    slope = normal(wanted.shape, seed=5)
    slopes = torch.autograd.grad(found, inputs, slope.to(dtype))
    exact_slopes = torch.autograd.grad(wanted, wide, slope.to(dtype).double())
    for a, b in zip(slopes, exact_slopes):
        size = max(1, b.abs().max().item()) if b.numel() else 1
        close(a.double(), b, tolerance(dtype, 64) * size)


@drawn(batches, st.integers(1, 5), dtypes(), seeds, layouts, st.data())
def test_encoder_layer(batch, tokens, dtype, seed, layout, data):
    layer, exact = layer_of(detr.EncoderLayer, dtype, seed)
    x = normal((batch, tokens, 8), dtype, seed, layout)
    positions = normal((data.draw(st.sampled_from((1, batch))), tokens, 8), dtype, seed + 1)
    mask = data.draw(st.none() | masks((batch, 2, tokens, tokens)))
    compare(layer, exact, exact_encoder_layer, (x, positions), dtype, mask=mask)


@drawn(batches, st.integers(1, 4), st.integers(1, 5), dtypes(), seeds, layouts, st.data())
def test_decoder_layer(batch, queries, tokens, dtype, seed, layout, data):
    layer, exact = layer_of(detr.DecoderLayer, dtype, seed)
    x = normal((batch, queries, 8), dtype, seed, layout)
    own = normal((queries, 8), dtype, seed + 1)
    keys, memory = (normal((batch, tokens, 8), dtype, seed + i, layout) for i in (2, 3))
    mask = data.draw(st.none() | masks((batch, 2, queries, tokens)))
    inputs = x, own, keys, memory
    compare(layer, exact, exact_decoder_layer, inputs, dtype, mask=mask)


def exact_placed(layer, x, memory, near, far, mask=None):
    return exact_attention(layer, x, memory, memory, mask, near, far)


@drawn(batches, st.integers(1, 4), st.integers(1, 5), dtypes(), seeds, layouts, st.data())
def test_attention_to_places(batch, queries, tokens, dtype, seed, layout, data):
    layer, exact = layer_of(lambda dim, h, _, p: detr._PlacedAttention(dim, h), dtype, seed)
    x, near = (normal((batch, queries, 8), dtype, seed + i, layout) for i in (0, 1))
    memory = normal((batch, tokens, 8), dtype, seed + 2, layout)
    far = normal((data.draw(st.sampled_from((1, batch))), tokens, 8), dtype, seed + 3)
    mask = data.draw(st.none() | masks((batch, 2, queries, tokens)))
    compare(layer, exact, exact_placed, (x, memory, near, far), dtype, mask=mask)


@drawn(batches, st.integers(1, 4), st.integers(1, 5), dtypes(), seeds, st.data())
def test_anchor_layer(batch, queries, tokens, dtype, seed, data):
    layer, exact = layer_of(detr.AnchorDecoderLayer, dtype, seed)
    x, own, anchors = (normal((batch, queries, 8), dtype, seed + i) for i in range(3))
    memory = normal((batch, tokens, 8), dtype, seed + 3)
    places = normal((data.draw(st.sampled_from((1, batch))), tokens, 8), dtype, seed + 4)
    mask = data.draw(st.none() | masks((batch, 2, queries, tokens)))
    groups = normal((queries, queries), seed=seed) > 0
    inputs = x, own, anchors, memory, places
    compare(layer, exact, exact_anchor_layer, inputs, dtype, mask=mask, groups=groups)


# --- the backbone -----------------------------------------------------------------------------


def norm_of(width, seed, dtype):
    norm = detr.FrozenBatchNorm2d(width)
    for i, (name, x) in enumerate(norm.named_buffers()):
        x.copy_(normal(x.shape, seed=seed + i))
        if name == "running_var":
            x.abs_().add_(0.5)
    return norm.to(dtype)


@drawn(
    st.tuples(st.integers(0, 2), st.sampled_from((2, 4)), st.integers(3, 7), st.integers(3, 9)),
    st.fixed_dictionaries(
        dict(
            bias=st.booleans(),
            groups=st.sampled_from((1, 2)),
            stride=st.sampled_from((1, 2, (1, 2))),
            padding=st.sampled_from((0, 1, (2, 1), "valid")),
            dilation=st.sampled_from((1, (1, 2))),
            padding_mode=st.sampled_from(("zeros", "reflect", "circular")),
        )
    ),
    seeds,
    dtypes(),
    layouts,
)
@example(
    (1, 2, 4, 5),
    dict(bias=True, groups=1, stride=1, padding=1, dilation=1, padding_mode="zeros"),
    *(0, torch.float64, "contiguous"),
)
@example(
    (1, 2, 4, 5),
    dict(bias=False, groups=1, stride=1, padding=1, dilation=1, padding_mode="reflect"),
    *(0, torch.float64, "contiguous"),
)
def test_convolution_and_frozen_norm(shape, options, seed, dtype, layout):
    if options["padding_mode"] != "zeros":
        options = options | dict(padding=1)
    if shape[3] < 5:
        options = options | dict(dilation=1)
    torch.manual_seed(seed)
    conv = nn.Conv2d(shape[1], 4, 3, **options).to(dtype)
    norm, x = norm_of(4, seed, dtype), normal(shape, dtype, seed, layout)
    wide = copy.deepcopy(conv).double()
    constants = {name: b.double()[:, None, None] for name, b in norm.named_buffers()}
    scale = constants["weight"] / (constants["running_var"] + 1e-5).sqrt()
    centered = wide(x.double()) - constants["running_mean"]
    wanted = centered * scale + constants["bias"]
    found = detr._frozen_conv(conv, norm, x)
    assert found.dtype == dtype
    close(found.double(), wanted, tolerance(dtype, 32))
    close(norm(conv(x)).double(), wanted, tolerance(dtype, 32))


def theirs_with(ours, name):
    """torchvision's ResNet with its own frozen norms and our weights."""
    norm = torchvision.ops.FrozenBatchNorm2d
    theirs = torchvision.models.get_model(name, weights=None, norm_layer=norm).double()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    return theirs


@pytest.fixture(scope="module")
def resnet():
    torch.manual_seed(0)
    ours = detr.ResNet("resnet18").double()
    for i, (name, x) in enumerate(ours.named_buffers()):
        x.copy_(0.3 * normal(x.shape, seed=i))
        if name.endswith(("running_var", "weight")):
            x.abs_().add_(0.5)
    return ours, theirs_with(ours, "resnet18")


@drawn(st.sampled_from((1, 0, 2)), st.sampled_from(((33, 65), (32, 1), (7, 40))), layouts)
def test_resnet(resnet, batch, size, layout):
    ours, theirs = resnet
    assert ours.num_channels == [64, 128, 256, 512]
    x = normal((batch, 3, *size), layout=layout)
    y = theirs.maxpool(theirs.relu(theirs.bn1(theirs.conv1(x))))
    with torch.no_grad():
        maps = ours(x)
        for i, found in enumerate(maps, 1):
            stage = getattr(theirs, f"layer{i}")
            for own, block in zip(getattr(ours, f"layer{i}"), stage):
                wanted = block(y)
                before = y.clone()
                close(detr._residual_block(own, y), wanted, 1e-9 * max(1, largest(wanted)))
                assert torch.equal(y, before)  # which is not written to
                y = wanted
            close(found, y, 1e-9 * max(1, largest(y)))


def largest(x):
    return x.abs().max().item() if x.numel() else 0.0


def test_resnets_of_other_images_and_names():
    model = detr.ResNet("resnet18", in_chans=1)
    assert model(torch.randn(1, 1, 40, 64))[-1].shape == (1, 512, 2, 2)
    for name in ("resnet19", "vgg16"):
        with pytest.raises(ValueError, match=name):
            detr.ResNet(name)


@drawn(batches, st.tuples(st.integers(1, 3), st.integers(1, 5)), seeds)
def test_small_backbone(batch, size, seed):
    widths = (2, 3, 4)
    model = detr.SmallBackbone(widths).double().train(seed % 2 == 0 and batch > 1)
    assert model.num_channels == list(widths)
    x = normal((batch, 3, *(8 * side for side in size)), seed=seed)
    maps = model(x)
    for i, (layer, found) in enumerate(zip(model, maps)):
        conv, norm, _ = layer
        x = F.conv2d(x, conv.weight, None, 2 if i < 2 else 1, 1)
        mean, var = norm.running_mean[:, None, None], norm.running_var[:, None, None]
        if model.training:
            mean = x.mean((0, 2, 3), keepdim=True)
            var = x.var((0, 2, 3), unbiased=False, keepdim=True)
        x = ((x - mean) / (var + norm.eps).sqrt()).clamp(min=0)  # weight 1, bias 0
        close(found, x, 1e-10)


# --- the models -------------------------------------------------------------------------------


def model_of(detector, seed, dtype):
    """A small model in evaluation mode, its parameters randomized; and the same in float64."""
    torch.manual_seed(seed)
    model = small_detr(CLASSES, detector, 20)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not name.startswith("backbone"):
                p.add_(0.1 * torch.randn_like(p))
    model = model.eval().to(dtype)
    return model, copy.deepcopy(model).double()


def exact_heads(model, decoded, anchors=None):
    logits = decoded @ model.class_embed.weight.T + model.class_embed.bias
    boxes = model.bbox_embed(decoded)
    if anchors is not None:
        inside = anchors.clamp(1e-3, 1 - 1e-3)
        boxes = boxes + (inside / (1 - inside)).log()
    return logits, 1 / (1 + (-boxes).exp())


def exact_memory(model, x, mask):
    """Memory (B, N, C), positions and mask (B, 1, 1, N) of images, in float64."""
    x = model.input_proj(model.backbone(x)[-1])
    height, width = x.shape[2:]
    if mask is None:
        mask = torch.ones(len(x), *x.shape[2:], dtype=torch.bool)
    else:
        rows = [y * mask.shape[1] // height for y in range(height)]
        columns = [y * mask.shape[2] // width for y in range(width)]
        mask = mask[:, rows][:, :, columns]
    positions = detr.sine_position_embedding(mask, x.shape[1], model.temperature)
    mask, x = mask.flatten(1)[:, None, None], x.flatten(2).mT
    for layer in model.encoder:
        x = exact_encoder_layer(layer, x, positions, mask)
    return x, positions, mask


def exact_detr(model, x, mask):
    memory, positions, mask = exact_memory(model, x, mask)
    queries = model.query_embed.weight
    y, found = torch.zeros(len(x), *queries.shape).double(), []
    for layer in model.decoder:
        y = exact_decoder_layer(layer, y, queries, memory + positions, memory, mask)
        found.append(exact_heads(model, exact_norm(model.norm, y)))
    return found


def exact_box_queries(model, x, mask, noised=None):
    memory, positions, mask = exact_memory(model, x, mask)
    boxes = model.query_embed.weight.sigmoid().expand(len(x), -1, -1)
    labels = torch.full(boxes.shape[:2], CLASSES)
    own, count = boxes.shape[1], 0
    if noised is not None:
        count = noised["labels"].shape[1] * noised["labels"].shape[2]
        labels = torch.cat([labels, noised["labels"].flatten(1)], 1)
        boxes = torch.cat([boxes, noised["boxes"].flatten(1, 2).double()], 1)
        size = noised["labels"].shape[2]
    seen = torch.zeros(own + count, own + count, dtype=torch.bool)
    for i in range(own + count):
        for j in range(own + count):
            same = i >= own and j >= own and (i - own) // size == (j - own) // size
            seen[i, j] = j < own or same
    y, found = model.label_embed.weight[labels], []
    width = y.shape[-1]
    for layer in model.decoder:
        sines = detr._sine_box_embedding(boxes, width, model.temperature)
        queries = model.query_mlp(sines)
        y = exact_anchor_layer(
            layer, y, queries, sines[..., :width], memory, positions, mask, seen
        )
        found.append(exact_heads(model, exact_norm(model.norm, y), boxes))
        boxes = found[-1][1].detach()
    return found


def same_output(found, wanted, dtype, own=slice(None)):
    layers = [*found.aux_outputs, found]
    assert len(layers) == len(wanted)
    for layer, (logits, boxes) in zip(layers, wanted):
        logits, boxes = logits[:, own], boxes[:, own]
        close(layer.logits.double(), logits, tolerance(dtype, 32) * max(1, largest(logits)))
        close(layer.boxes.double(), boxes, tolerance(dtype, 32))


precisions = st.sampled_from(("float64", "float32", "bfloat16", "autocast"))


def call(model, precision, *inputs, **options):
    """The model's outputs, and the dtype in which it computes."""
    dtype = torch.bfloat16 if precision == "autocast" else getattr(torch, precision)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        return model(*inputs, **options), dtype


@st.composite
def padded_batches(draw):
    """Images that are not square, and masks of smaller ones in them, or none."""
    batch, size = draw(batches), draw(st.sampled_from(((24, 40), (33, 17), (8, 8))))
    mask = None
    if draw(st.booleans()):
        mask = torch.zeros(batch, *size, dtype=torch.bool)
        for row in mask:
            height = draw(st.integers(0, size[0]))
            row[:height, : draw(st.integers(0, size[1]))] = True
    return normal((batch, 3, *size), torch.float32, draw(seeds)), mask


@drawn(padded_batches(), precisions, seeds)
@example((torch.zeros(2, 3, 24, 40), torch.zeros(2, 24, 40).bool()), "float64", 0)
def test_detr(images, precision, seed):
    x, mask = images
    dtype = torch.float32 if precision == "autocast" else getattr(torch, precision)
    model, exact = model_of(detr.DETR, seed, dtype)
    x = x.to(dtype)
    with torch.no_grad():
        wanted = exact_detr(exact, x.double(), mask)
        found, dtype = call(model, precision, x, mask)
        same_output(found, wanted, dtype)
        features = model.forward_features(x, mask)
        again = model.forward_head(features.decoded, features.anchors)
    assert type(found) is Output and type(features) is detr.Features
    if precision != "autocast":
        assert torch.equal(again.logits, found.logits)
    maps = model.attention_maps(x, mask)
    assert len(maps) == 3 and maps[0].shape == (len(x), 4, 10, *features.memory.shape[2:])
    if features.mask is not None:
        padding = ~features.mask[:, None, None].expand_as(maps[0])
        assert all(not m[padding].any() for m in maps)
        close(
            maps[-1].sum((3, 4)).double(),
            features.mask.flatten(1).any(1)[:, None, None].expand(-1, 4, 10).double(),
            tolerance(maps[-1].dtype),
        )


@drawn(padded_batches(), precisions, seeds, st.sampled_from((None, (1, 1), (2, 3))))
def test_box_queries(images, precision, seed, noise):
    x, mask = images
    dtype = torch.float32 if precision == "autocast" else getattr(torch, precision)
    model, exact = model_of(BoxQueryDETR, seed, dtype)
    x, noised = x.to(dtype), None
    if noise is not None:
        box = normal((len(x), *noise, 4), seed=seed).sigmoid()  # in float64 for every model
        labels = (10 * box[..., 0]).long() % CLASSES
        noised = dict(labels=labels, boxes=box.to(dtype).double())
    with torch.no_grad():
        wanted = exact_box_queries(exact, x.double(), mask, noised)
        found, dtype = call(model, precision, x, mask, noised=noised)
    same_output(found, wanted, dtype, slice(10))
    if noise is None:
        assert found.denoised is None
    else:
        same_output(found.denoised, wanted, dtype, slice(10, None))


@pytest.mark.parametrize("detector", [detr.DETR, BoxQueryDETR])
def test_gradients_of_a_padded_batch(detector):
    """Those of the formulas; an image that is nothing but padding gives finite ones."""
    model, exact = model_of(detector, 3, torch.float64)
    x, mask = normal((2, 3, 24, 40)), torch.zeros(2, 24, 40, dtype=torch.bool)
    mask[0, :20, :30] = True
    formula = exact_detr if detector is detr.DETR else exact_box_queries
    found = model(x, mask)
    (found.logits.square().sum() + found.boxes.sum()).backward()
    logits, boxes = formula(exact, x, mask)[-1]
    (logits.square().sum() + boxes.sum()).backward()
    for (name, p), q in zip(model.named_parameters(), exact.parameters()):
        if q.grad is None:
            assert p.grad is None or not p.grad.any(), name
        else:
            close(p.grad, q.grad, 1e-9 * max(1, largest(q.grad))), name


@pytest.mark.parametrize(
    "shape, mask, message",
    [
        ((3, 8, 8), None, r"images of shape \(3, 8, 8\) must be \(B, 3, H, W\)"),
        ((1, 3, 8, 9), torch.ones(1, 9, 8).bool(), r"must be torch.bool and \(1, 8, 9\)"),
        ((1, 3, 8, 9), torch.ones(1, 8, 9), r"mask of dtype torch.float32"),
        ((2, 3, 8, 9), torch.ones(1, 8, 9).bool(), r"and shape \(1, 8, 9\)"),
    ],
)
def test_images_are_checked(shape, mask, message):
    with pytest.raises(ValueError, match=message):
        detr.check_images(torch.zeros(shape), mask)
    detr.check_images(torch.zeros(0, 3, 8, 9), torch.ones(0, 8, 9).bool())


# --- noise ------------------------------------------------------------------------------------


@drawn(
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.integers(1, 3),
    seeds,
    st.sampled_from((0.4, 0.0, 1.0)),
    st.sampled_from((0.0, 1.0, 0.2)),
)
@example([0], 1, 0, 0.4, 0.2)
def test_noise(counts, copies, seed, shift, flip):
    targets = [
        t | dict(size=torch.tensor([3, 4]), id=i) for i, t in enumerate(objects(counts, seed))
    ]
    torch.manual_seed(seed)
    noised, wanted = detr.noised_targets(targets, CLASSES, copies, shift, flip)
    most = max(1, *counts)
    shape = (len(counts), copies, most)
    assert noised["labels"].shape == shape and noised["boxes"].shape == (*shape, 4)
    whole = torch.tensor([[0.5, 0.5, 1, 1]], dtype=torch.float64)
    for i, (count, target) in enumerate(zip(counts, targets)):
        turn = torch.arange(copies * most) % most % max(1, count)
        labels = target["labels"][turn] if count else torch.zeros(copies * most).long()
        boxes = target["boxes"][turn] if count else whole.expand(copies * most, 4)
        own = wanted[i]
        assert len(own["labels"]) == (copies * most if count else 0)
        if count:
            assert torch.equal(own["labels"], labels) and torch.equal(own["boxes"], boxes)
        center, size = noised["boxes"][i].flatten(0, 1).split(2, 1)
        assert ((center - boxes[:, :2]).abs() <= shift / 2 * boxes[:, 2:] + 1e-12).all()
        ratio = size / boxes[:, 2:]
        assert ((ratio - 1).abs() <= shift + 1e-12).all()
        found = noised["labels"][i].flatten()
        assert ((found >= 0) & (found < CLASSES)).all()
        assert flip or torch.equal(found, labels)


def test_the_share_of_noise():
    torch.manual_seed(0)
    noised, wanted = detr.noised_targets(objects((4, 4), 0), CLASSES, 5000, 0.4, 0.2)
    labels, boxes = (torch.stack([t[key] for t in wanted]) for key in ("labels", "boxes"))
    changed = (noised["labels"].flatten(1) != labels).double().mean()
    assert abs(changed - 0.2 * (1 - 1 / CLASSES)) < 4 * math.sqrt(0.25 / labels.numel())
    moved = (noised["boxes"].flatten(1, 2) - boxes)[..., :2] / boxes[..., 2:] / 0.4
    ratio = (noised["boxes"].flatten(1, 2) / boxes)[..., 2:] - 1
    for x, half in ((moved, 0.5), (ratio, 0.4)):  # both uniform
        assert abs(x.mean()) < 0.01 and abs(x.std() - half / math.sqrt(3)) < 0.01


def test_noise_needs_an_image():
    with pytest.raises(ValueError, match=r"targets \(0\)"):
        detr.noised_targets([], CLASSES)


# --- all of them ------------------------------------------------------------------------------

ORACLES = {
    "box_cxcywh_to_xyxy": test_conversion,
    "box_xyxy_to_cxcywh": test_conversion,
    "box_area": test_overlaps,
    "upcast": test_wide_dtypes,
    "_safe_ratio": test_ratio,
    "box_iou": test_overlaps,
    "generalized_box_iou": test_overlaps,
    "_pad_targets": test_padded_targets,
    "check_targets": test_bad_targets,
    "_check_values": test_values_are_checked,
    "HungarianMatcher": test_matching,
    "SetCriterion": test_loss,
    "_check_multiples_of_four": test_widths_that_have_no_fourths,
    "sine_position_embedding": test_sines_of_places,
    "EncoderLayer": test_encoder_layer,
    "DecoderLayer": test_decoder_layer,
    "FrozenBatchNorm2d": test_convolution_and_frozen_norm,
    "_frozen_conv": test_convolution_and_frozen_norm,
    "_residual_block": test_resnet,
    "ResNet": test_resnet,
    "Output": test_detr,
    "Features": test_detr,
    "DETR": test_detr,
    "check_images": test_images_are_checked,
    "postprocess": test_postprocessed,
    "SmallBackbone": test_small_backbone,
    "small_detr": test_detr,
    "_PlacedAttention": test_attention_to_places,
    "AnchorDecoderLayer": test_anchor_layer,
    "_sine_box_embedding": test_sines_of_boxes,
    "BoxQueryDETR": test_box_queries,
    "BoxQueryOutput": test_box_queries,
    "noised_targets": test_noise,
    "IdentityMatcher": test_matching_in_order,
}
NOT_HERE = {}


def test_everything_has_an_oracle():
    assert not ORACLES.keys() & NOT_HERE.keys()
    names = ORACLES.keys() | NOT_HERE.keys()
    assert {name for name in names if name[0] != "_"} == set(detr.__all__)
