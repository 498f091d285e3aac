"""Unusual calls of `attnlib.panoptic`: loops over pixels, torchvision, formulas in float64."""

import copy
import math
from dataclasses import astuple

import pytest
import torch
import torch.nn.functional as F
import torchvision
from draws import (
    batches,
    counts,
    drawn,
    dtypes,
    layouts,
    map_sizes,
    normal,
    seeds,
    tolerance,
)
from hypothesis import example
from hypothesis import strategies as st
from pycocotools import mask as coco

from attnlib import panoptic
from attnlib.data import detection_scenes
from attnlib.detr import DETR, HungarianMatcher, SmallBackbone
from benchmarks.panoptic import label_maps as label_maps_of
from benchmarks.panoptic import page, panoptic_scenes, small_panoptic
from helpers import close

numbers = st.integers(min_value=0, max_value=5)
floats = st.sampled_from((torch.float64, torch.float32))


# --- scenes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count, split, seed", [(1, "train", 3), (12, "test", 0)])
def test_scenes(count, split, seed):
    found = panoptic_scenes(count, split, seed=seed)
    other = detection_scenes(count, split, photographs=2, seed=seed)
    assert found["image"].shape == (count, 3, 48, 48)
    close(found["image"], 2 * other["image"] - 1, 1e-6)
    assert found["mask"].dtype == torch.bool and (found["mask"].sum(1) == 1).all()
    for label, mask, box in zip(found["label"], found["mask"], found["box"]):
        assert torch.equal(label >= 0, mask.flatten(1).any(1))
        there = label >= 0
        wanted = torchvision.ops.masks_to_boxes(mask[there])
        wanted[:, 2:] += 1  # torchvision's last pixel is inside
        assert torch.equal(box[there], wanted)
        assert not box[~there].any()
    maps = label_maps_of(found)
    assert len(maps) == count
    for (segments, infos), label, mask in zip(maps, found["label"], found["mask"]):
        assert [i["category_id"] for i in infos] == label[label >= 0].tolist()
        for info, own in zip(infos, mask[label >= 0]):
            assert torch.equal(segments == info["id"], own)


@drawn(batches, numbers, map_sizes(), seeds, st.sampled_from((0.5, 0.1, 0.0, 1.0)))
@example(1, 1, (3, 4), 0, 0.0)
def test_bounds(batch, count, size, seed, share):
    found = torch.rand(batch, count, *size, generator=torch.Generator().manual_seed(seed))
    mask = found < share
    boxes = page.masks_to_boxes(mask)
    assert boxes.shape == (batch, count, 4) and boxes.dtype == torch.float32
    for own, box in zip(mask.flatten(0, 1), boxes.flatten(0, 1)):
        wanted = torch.zeros(4)
        if own.any():
            wanted = torchvision.ops.masks_to_boxes(own[None])[0] + torch.tensor([0, 0, 1, 1])
        assert torch.equal(box, wanted)
        encoded = coco.encode(own.numpy().astype("uint8").copy(order="F"))
        left, top, width, height = coco.toBbox(encoded)
        assert box.tolist() == [left, top, left + width, top + height] or not own.any()


# --- the model --------------------------------------------------------------------------------


def exact_maps(module, queries, memory, mask):
    """Weights in float64, in loops over images, queries and heads."""
    size, h = memory.shape[2:], module.num_heads
    q = queries @ module.q_linear.weight.T + module.q_linear.bias
    k = memory.flatten(2).mT @ module.k_linear.weight.T + module.k_linear.bias
    d = q.shape[-1] // h
    q, k = q.unflatten(-1, (h, d)), k.unflatten(-1, (h, d))
    logits = torch.einsum("bqhd,bnhd->bqhn", q, k) / math.sqrt(d)
    seen = torch.ones(len(q), 1, 1, k.shape[1]).double()
    seen = seen if mask is None else mask.flatten(1)[:, None, None].double()
    weights = logits.exp() * seen
    axes = (2, 3) if module.joint_softmax else (3,)
    total = weights.sum(axes, keepdim=True)
    return (weights / torch.where(total == 0, 1, total)).unflatten(3, size)


@drawn(
    *(batches, counts, map_sizes(5), st.booleans(), dtypes(), seeds, layouts),
    st.sampled_from((None, 0.6, 0.0)),
)
@example(2, 3, (2, 3), True, torch.float16, 0, "contiguous", 0.0)
def test_attention_maps(batch, queries, size, joint, dtype, seed, layout, share):
    torch.manual_seed(seed)
    module = panoptic.AttentionMaps(8, 2, joint).to(dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.2 * torch.randn_like(p))
    exact = copy.deepcopy(module).double()
    x = normal((batch, queries, 8), dtype, seed, layout)
    memory = normal((batch, 8, *size), dtype, seed + 1, layout)
    mask = None
    if share is not None:
        mask = normal((batch, *size), seed=seed).abs() < 2 * share
    inputs = [t.detach().requires_grad_() for t in (x, memory)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    found, wanted = module(*inputs, mask), exact_maps(exact, *wide, mask)
    assert found.shape == (batch, queries, 2, *size) and found.dtype == dtype
    close(found.double(), wanted, tolerance(dtype))
    slope = normal(wanted.shape, dtype, seed)
    slopes = torch.autograd.grad(found, inputs, slope)
    for a, b in zip(slopes, torch.autograd.grad(wanted, wide, slope.double())):
        close(a.double(), b, tolerance(dtype, 32) * max(1, largest(b)))


def largest(x):
    return x.abs().max().item() if x.numel() else 0.0


def exact_head(head, x, maps, finer, image):
    """Mask by mask: each step is a convolution of what is beside each other."""
    found = []
    for row, b in zip(maps, image.tolist()):
        y = torch.cat([x[b], row])[None]
        for layer, norm in zip(head.layers[:2], head.norms[:2]):
            y = norm(layer(y)).clamp(min=0)
        for i, fine in enumerate(finer):
            height, width = fine.shape[2:]
            rows = [j * y.shape[2] // height for j in range(height)]
            columns = [j * y.shape[3] // width for j in range(width)]
            y = head.adapters[i](fine[b : b + 1]) + y[:, :, rows][:, :, :, columns]
            y = head.norms[i + 2](head.layers[i + 2](y)).clamp(min=0)
        found.append(head.output(y)[0, 0])
    return torch.stack(found) if found else x.new_zeros(0, *finer[-1].shape[2:])


@drawn(
    *(st.integers(1, 2), st.integers(0, 4), map_sizes(4), map_sizes(9)),
    *(dtypes(torch.float64, torch.float32, torch.bfloat16), seeds, layouts),
)
@example(2, 0, (2, 3), (5, 4), torch.float32, 0, "contiguous")
def test_mask_head(batch, count, size, fine, dtype, seed, layout):
    torch.manual_seed(seed)
    head = panoptic.MaskHead(16, 2, [5, 3], num_groups=1)
    with torch.no_grad():
        for p in head.parameters():
            p.add_(0.1 * torch.randn_like(p))
    head = head.to(dtype)
    x = normal((batch, 16, *size), dtype, seed, layout)
    maps = normal((count, 2, *size), dtype, seed + 1).sigmoid()
    middle = tuple((a + b + 1) // 2 for a, b in zip(size, fine))
    finer = [normal((batch, 5, *middle), dtype, seed), normal((batch, 3, *fine), dtype, seed)]
    image = torch.arange(count) * 7 % batch
    found = head(x, maps, finer, image)
    wide = [t.double() for t in finer]
    exact = copy.deepcopy(head).double()
    wanted = exact_head(exact, x.double(), maps.double(), wide, image)
    assert found.shape == (count, *fine)
    close(found.double(), wanted, tolerance(dtype, 64) * max(1, largest(wanted)))
    inside = torch.cat([x[image], maps], 1)
    together = exact.layers[0](inside.double())
    close(head.first_layer(x, maps, image).double(), together, tolerance(dtype, 64))


def small_model(seed=0):
    torch.manual_seed(seed)
    backbone = SmallBackbone((4, 6, 8))
    detr = DETR(3, 4, 1, 2, backbone, 16, 2, 16, 0.0)
    return panoptic.PanopticDETR(detr, num_groups=1).double().eval()


@drawn(batches, st.sampled_from(((17, 24), (8, 8), (9, 40))), seeds, st.booleans())
@example(2, (17, 24), 0, True)
@example(0, (17, 24), 0, True)
def test_chosen_masks(batch, size, seed, padded):
    model, x = small_model(seed), normal((batch, 3, *size), seed=seed)
    mask = None
    if padded:
        mask = torch.zeros(batch, *size, dtype=torch.bool)
        mask[:, : size[0] - 3, : size[1] // 2] = True
        mask[1:] = False  # a batch may be filled up with nothing
    chosen = normal((batch, 4), seed=seed) > 0
    with torch.no_grad():
        every, some = model(x, mask), model(x, mask, lambda found: chosen)
        features = model.detr.forward_features(x, mask)
        detected = model.detr(x, mask)
        maps = exact_maps(
            model.bbox_attention, features.decoded[-1], features.memory, features.mask
        )
        image = torch.arange(batch).repeat_interleave(4)
        wanted = exact_head(
            model.mask_head,
            features.projected,
            maps.flatten(0, 1),
            features.maps[-2::-1],
            image,
        )
    assert type(every) is panoptic.PanopticOutput
    close(every.masks.flatten(0, 1), wanted, 1e-9 * max(1, largest(wanted)))
    close(some.masks[chosen], every.masks[chosen], 1e-9 * max(1, largest(wanted)))
    assert some.masks[~chosen].isneginf().all()
    close(every.logits, detected.logits)
    close(every.boxes, detected.boxes)


def test_models_that_are_made():
    model = small_panoptic(joint_softmax=True)
    assert model.bbox_attention.joint_softmax and model.detr.class_embed.out_features == 7
    with torch.device("meta"):
        model = panoptic.panoptic_detr(backbone="resnet18", num_queries=3)
    assert model.bbox_attention.joint_softmax and model.detr.class_embed.out_features == 251
    assert model.detr.num_queries == 3


# --- which queries ----------------------------------------------------------------------------


@drawn(batches, counts, dtypes(), seeds, layouts, st.sampled_from((0.4, 0.0, 0.99)))
def test_confidence(batch, queries, dtype, seed, layout, threshold):
    logits = 3 * normal((batch, queries, 4), dtype, seed, layout)
    if batch:
        logits = logits.clone()
        logits[0, 0, 1] = math.nan
    found = panoptic.confident_queries(logits, threshold)
    assert found.dtype == torch.bool and found.shape == (batch, queries)
    for b in range(batch):
        for q in range(queries):
            p = logits[b, q].double().softmax(0).tolist()
            near = abs(max(p) - threshold) < 1e-6
            known = max(range(4), key=p.__getitem__) < 3 and max(p) > threshold
            assert near or found[b, q] == (known and not any(map(math.isnan, p)))


@drawn(batches, seeds)
def test_queries_that_are_matched(batch, seed):
    targets = []
    for i in range(batch):
        n = (seed + i) % 4
        boxes = torch.tensor([[0.5, 0.5, 0.2, 0.2]]).repeat(n, 1)
        targets.append(dict(labels=torch.zeros(n).long(), boxes=boxes))
    logits = normal((batch, 5, 3), torch.float32, seed)
    boxes = normal((batch, 5, 4), torch.float32, seed).sigmoid()
    matched = HungarianMatcher()(logits, boxes, targets)
    found = panoptic.matched_queries(matched, logits)
    assert found.shape == (batch, 5)
    for row, (i, _) in zip(found, matched):
        assert [q for q in range(5) if row[q]] == sorted(i.tolist())


# --- losses -----------------------------------------------------------------------------------


def targets_like(shape, seed, dtype):
    return (normal(shape, seed=seed + 1) > 0.3).to(dtype)


@drawn(
    *(numbers, map_sizes(), dtypes(), seeds, layouts),
    st.sampled_from((torch.float32, torch.bool, torch.uint8, torch.float16)),
)
def test_dice(n, size, dtype, seed, layout, kind):
    logits = (4 * normal((n, *size), dtype, seed, layout)).detach().requires_grad_()
    t, x = targets_like((n, *size), seed, kind), logits.detach().double().requires_grad_()
    found = panoptic.dice_loss(logits, t)
    assert found.dtype == torch.promote_types(dtype, torch.float32) and found.shape == (n,)
    p, t = 1 / (1 + (-x).exp()), t.double()
    both, total = (p * t).sum((1, 2)), p.sum((1, 2)) + t.sum((1, 2))
    wanted = 1 - (2 * both + 1) / (total + 1)
    close(found.double(), wanted, 1e-6)
    slopes = torch.autograd.grad(found.sum(), logits)[0]
    wanted = torch.autograd.grad(wanted.sum(), x)[0]
    close(slopes.double(), wanted, tolerance(dtype) + 1e-10)


@drawn(
    *(numbers, map_sizes(), dtypes(), seeds),
    st.sampled_from((0.25, 0.7)),
    st.sampled_from((2.0, 0.0, 0.5, 1.0, 5)),
    st.sampled_from((3.0, 30.0, 300.0)),
)
@example(1, (2, 2), torch.float32, 0, 0.25, 0.5, 30.0)
@example(1, (2, 2), torch.float64, 0, 0.25, 0.5, 300.0)
def test_focal(n, size, dtype, seed, alpha, gamma, scale):
    """Torchvision's, and by a formula that is exact where a pixel is sure: γ below 1 too."""
    logits = (scale * normal((n, *size), seed=seed)).to(dtype).requires_grad_()
    t = targets_like((n, *size), seed, torch.uint8)
    found = panoptic.focal_loss(logits, t, alpha, gamma)
    assert found.dtype == torch.promote_types(dtype, torch.float32) and found.shape == (n,)
    x, t = logits.detach().double().requires_grad_(), t.double()
    signed = torch.where(t > 0, x, -x)  # log p_t and log (1 - p_t) are those of its sign
    weight = (alpha * t + (1 - alpha) * (1 - t)) * (gamma * F.logsigmoid(-signed)).exp()
    wanted = (-weight * F.logsigmoid(signed)).mean((1, 2))
    close(found.double(), wanted, 1e-6 * max(1, largest(wanted)))
    theirs = torchvision.ops.sigmoid_focal_loss(x, t, alpha, gamma).mean((1, 2))
    close(wanted, theirs, 1e-12 * max(1, largest(theirs)) + 1e-7 * (0 < gamma < 1))
    slopes = torch.autograd.grad(found.sum(), logits)[0]
    exact = torch.autograd.grad(wanted.sum(), x)[0]
    close(slopes.double(), exact, (tolerance(dtype, 4) + 1e-9) * max(1, largest(exact)))


def resized(x, size):
    """Bilinear interpolation of (H', W') to (H, W), pixel by pixel."""
    found = torch.zeros(size, dtype=torch.float64)
    sides = []
    for old, new in zip(x.shape, size):
        side = []
        for i in range(new):
            at = min(max((i + 0.5) * old / new - 0.5, 0), old - 1)
            low = min(int(at), old - 1)
            side.append((low, min(low + 1, old - 1), at - low))
        sides.append(side)
    for i, (top, bottom, down) in enumerate(sides[0]):
        for j, (left, right, over) in enumerate(sides[1]):
            upper = (1 - over) * x[top, left] + over * x[top, right]
            lower = (1 - over) * x[bottom, left] + over * x[bottom, right]
            found[i, j] = (1 - down) * upper + down * lower
    return found


@drawn(
    *(st.lists(st.integers(0, 3), max_size=3), map_sizes(5), map_sizes(7), dtypes(), seeds),
    st.sampled_from((None, 0.5, 4)),
)
@example([], (2, 3), (4, 5), torch.float32, 0, None)
@example([0, 0], (2, 3), (4, 5), torch.float16, 0, None)
def test_mask_loss(counts, small, large, dtype, seed, num_boxes):
    masks = (3 * normal((len(counts), 4, *small), dtype, seed)).requires_grad_()
    targets, matched, total = [], [], {"mask": 0.0, "dice": 0.0}
    for b, n in enumerate(counts):
        own = targets_like((n, *large), seed + b, torch.bool)
        targets.append(dict(labels=torch.zeros(n).long(), masks=own))
        i, j = torch.randperm(4, generator=torch.Generator().manual_seed(seed))[:n], range(n)
        matched.append((i, torch.tensor(list(j)[::-1], dtype=torch.long)))
        for query, number in zip(*(x.tolist() for x in matched[-1])):
            x = resized(masks[b, query].detach().double(), large)[None]
            t = own[number : number + 1].double()
            total["mask"] += torchvision.ops.sigmoid_focal_loss(x, t).mean().item()
            p = x.sigmoid()
            total["dice"] += (1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)).item()
    found = panoptic.mask_loss(masks, targets, matched, num_boxes)
    count = max(1, sum(counts) if num_boxes is None else num_boxes)
    for name, value in total.items():
        assert found[name].shape == ()
        assert found[name].item() == pytest.approx(value / count, abs=1e-5)
    slopes = torch.autograd.grad(sum(found.values()), masks)[0]
    assert slopes.isfinite().all() and slopes.any() == (sum(counts) > 0)


@pytest.mark.parametrize(
    "target, message",
    [
        (dict(label=[1]), r"targets\[0\] with the names \['label'\] must have 'labels'"),
        (
            dict(labels=[1], mask=2),
            r"\[0\]\['masks'\] of shape \(\) must be \(1, H, W\)",
        ),
        (dict(labels=[1], masks=torch.zeros(0, 2, 2)), r"\(0, 2, 2\) must be \(1, H, W\)"),
    ],
)
def test_bad_masks(target, message):
    with pytest.raises(ValueError, match=message):
        panoptic._check_masks([target])
    two = [dict(labels=[], masks=torch.zeros(0, n, 3)) for n in (2, 4)]
    with pytest.raises(ValueError, match=r"of the sizes \[\(2, 3\), \(4, 3\)\]"):
        panoptic._check_masks(two)


# --- one map ----------------------------------------------------------------------------------


def exact_merge(logits, masks, things, size, threshold, smallest, mask):
    """The owner of each pixel, or None, and what is said of each: query by query."""
    kept = []
    for q, row in enumerate(logits.double().softmax(-1).tolist()):
        if max(row[:-1]) > max(threshold, row[-1]):
            x = masks[q].double()
            if mask is not None:
                rows = [i for i in range(mask.shape[0]) if mask[i].any()]
                columns = [j for j in range(mask.shape[1]) if mask[:, j].any()]
                x = resized(x, mask.shape)[rows][:, columns]
            x = x if size is None else resized(x, size)
            label = row.index(max(row[:-1]))
            kept.append([label, max(row), x])
    groups = []
    for label, score, x in kept:
        same = [g for g in groups if g[0] == label and label not in things]
        if same:
            same[0][1], same[0][2] = max(same[0][1], score), torch.maximum(same[0][2], x)
        else:
            groups.append([label, score, x])
    while groups:
        owner = torch.stack([g[2] for g in groups]).argmax(0)
        area = [int((owner == i).sum()) for i in range(len(groups))]
        large = [g for g, n in zip(groups, area) if n > smallest]
        if len(large) == len(groups):
            return owner + 1, [(g[0], g[1], n) for g, n in zip(groups, area)]
        groups = large
    return None, []


@drawn(
    *(st.integers(0, 6), map_sizes(5), st.none() | map_sizes(7), dtypes(), seeds),
    *(st.sampled_from((0.3, 0.85)), st.sampled_from((4, 0, 20)), st.booleans()),
)
@example(0, (2, 3), (4, 5), torch.float16, 0, 0.3, 4, False)
@example(3, (2, 3), None, torch.float32, 0, 0.3, 0, True)
def test_merge(queries, small, size, dtype, seed, threshold, smallest, padded):
    logits = (2 * normal((queries, 5), dtype, seed)).clone()
    masks = normal((queries, *small), dtype, seed + 1)
    mask = None
    if padded:
        mask = torch.zeros(3 * small[0], 2 * small[1], dtype=torch.bool)
        mask[seed % 2 : 2 * small[0], : 2 * small[1] - seed % 2] = True
    things = {0, 1}
    arguments = logits, masks, things, size, threshold, smallest
    segments, infos = panoptic.panoptic_postprocess(*arguments, mask=mask)
    owner, wanted = exact_merge(*arguments, mask)
    assert segments.dtype == torch.int64
    if owner is None:
        shape = small if mask is None else (mask.any(1).sum(), mask.any(0).sum())
        assert infos == [] and not segments.any() and segments.shape == (size or shape)
        return
    assert segments.shape == owner.shape and len(infos) == len(wanted)
    assert (segments == owner).double().mean() > 0.999  # ties are broken by rounding
    for i, (info, (label, score, area)) in enumerate(zip(infos, wanted), 1):
        assert info["id"] == i and info["category_id"] == label
        assert info["isthing"] == (label in things) and info["area"] == area
        assert info["score"] == pytest.approx(score, abs=1e-6)
    assert panoptic._check_segments("it", segments, infos).keys() == set(range(1, i + 1))


@drawn(numbers, map_sizes(5), floats, seeds, st.booleans())
def test_padding_is_cut(n, small, dtype, seed, everything):
    maps = normal((n, *small), dtype, seed)
    mask = torch.zeros(2 * small[0] + 1, 3 * small[1], dtype=torch.bool)
    top, left = (0, 0) if everything else (seed % 2, seed % 3)
    bottom, right = mask.shape if everything else (top + small[0], left + small[1])
    mask[top:bottom, left:right] = True
    found = panoptic.cut_padding(maps, mask)
    assert found.shape == (n, bottom - top, right - left)
    for own, x in zip(found, maps):
        wanted = resized(x.double(), mask.shape)[top:bottom, left:right]
        close(own.double(), wanted, tolerance(dtype))


@drawn(numbers, map_sizes(4), floats, seeds)
def test_stuff_is_joined(n, size, dtype, seed):
    score, masks = normal((n,), dtype, seed).sigmoid(), normal((n, *size), dtype, seed)
    label = (normal((n,), seed=seed).abs() * 7).long() % 3
    found = panoptic._join_stuff(score, label, masks, [0])
    rows = []
    for i, c in enumerate(label.tolist()):
        rows += [[i]] if c == 0 or c not in label[:i] else []
        if c and c not in label[:i].tolist():
            rows[-1] = [j for j in range(n) if label[j] == c]
    assert found[1].tolist() == [label[own[0]].item() for own in rows]
    assert found[0].tolist() == [max(score[own].tolist()) for own in rows]
    for x, own in zip(found[2], rows):
        assert torch.equal(x, masks[own].amax(0))
    assert len(found[2]) == len(rows)


def test_masks_that_were_not_asked_for():
    logits, masks = torch.zeros(2, 3), torch.zeros(2, 4, 5)
    panoptic._check_merge(logits, masks, torch.tensor([True, False]))
    masks[1] = -math.inf
    panoptic._check_merge(logits, masks, torch.tensor([True, False]))
    with pytest.raises(ValueError, match="masks of queries above the threshold are -inf"):
        panoptic._check_merge(logits, masks, torch.tensor([True, True]))
    with pytest.raises(ValueError, match=r"logits \(3,\) and masks \(2, 4, 5\)"):
        panoptic._check_merge(logits[0], masks, torch.tensor([True, False]))


# --- its quality ------------------------------------------------------------------------------

integers = st.sampled_from((torch.int64, torch.int32, torch.uint8))


@drawn(map_sizes(6), seeds, integers, integers, st.sampled_from((3, 100, 2**40)))
@example((1, 2), 0, torch.int64, torch.int64, 2**40)
def test_overlapping_pixels(size, seed, one, other, factor):
    a, b = ((normal(size, seed=seed + i).abs() * 3).long() for i in (0, 1))
    a = a * (factor if one == torch.int64 else 20)
    b = b * (factor if other == torch.int64 else 20)
    found = panoptic.overlaps(a.to(one), b.to(other))
    wanted = {}
    for pair in zip(a.flatten().tolist(), b.flatten().tolist()):
        wanted[pair] = wanted.get(pair, 0) + 1
    assert found == wanted


def test_a_map_without_pixels():
    none = torch.zeros(0, 3).long()
    assert panoptic.overlaps(none, none) == {}
    found = panoptic.panoptic_quality([(none, [])], [(none, [])])
    assert found["classes"] == {} and found["all"]["n"] == 0


@st.composite
def label_maps(draw, size, crowds=False):
    """A map with void, and its segments of three classes, some of them crowds."""
    seed = draw(seeds)
    number = draw(st.integers(0, 5))
    x = normal(size, seed=seed).abs() * 2
    segments = x.long().clamp(max=number) * draw(st.sampled_from((1, 7, 1000)))
    infos = []
    for i in sorted(set(segments.flatten().tolist()) - {0}):
        info = dict(id=i, category_id=draw(st.integers(0, 2)))
        if crowds:
            info["iscrowd"] = draw(st.sampled_from((0, 0, 1)))
        infos.append(info)
    return segments, infos


def exact_quality(predictions, truths):
    """[IoU, TP, FP, FN] of each class, with sets of pixels (Kirillov et al. 2019, 4.1)."""
    table = {}
    for (said, infos), (true, true_infos) in zip(predictions, truths):
        pixels = [{}, {}]
        for side, segments in zip(pixels, (said, true)):
            for place, i in enumerate(segments.flatten().tolist()):
                side.setdefault(i, set()).add(place)
        void, used, found = pixels[1].get(0, set()), set(), set()
        for t in true_infos:
            row = table.setdefault(t["category_id"], [0.0, 0, 0, 0])
            if t.get("iscrowd"):
                continue
            for p in infos:
                a, b = pixels[0][p["id"]] - void, pixels[1][t["id"]]
                iou = len(a & b) / len(a | b)
                if p["category_id"] == t["category_id"] and iou > 0.5:
                    row[0], row[1] = row[0] + iou, row[1] + 1
                    used.add(p["id"])
                    found.add(t["id"])
            row[3] += t["id"] not in found
        for p in infos:
            row = table.setdefault(p["category_id"], [0.0, 0, 0, 0])
            ignored = set(void)
            for t in true_infos:
                if t.get("iscrowd") and t["category_id"] == p["category_id"]:
                    ignored |= pixels[1][t["id"]]
            own = pixels[0][p["id"]]
            row[2] += p["id"] not in used and len(own & ignored) <= len(own) / 2
    return {c: row for c, row in table.items() if any(row)}


@drawn(st.integers(0, 3), map_sizes(7), st.data())
def test_quality(count, size, data):
    predictions = [data.draw(label_maps(size)) for _ in range(count)]
    truths = [data.draw(label_maps(size, True)) for _ in range(count)]
    for i in range(0, count, 2):  # near one another, as they are after training
        segments, infos = truths[i]
        said = segments.clone()
        said[: size[0] // 4] = segments.max()
        there = set(said.unique().tolist())
        predictions[i] = said, [info for info in infos if info["id"] in there]
    table = exact_quality(predictions, truths)
    if count == 1:
        found = panoptic._match_segments(predictions[0], truths[0])
        assert found.keys() == table.keys()
        assert all(list(astuple(found[c])) == pytest.approx(row) for c, row in table.items())
    found = panoptic.panoptic_quality(predictions, truths, things=[0, 1])
    wanted = {}
    for c, (iou, tp, fp, fn) in table.items():
        sq, rq = iou / tp if tp else 0.0, 2 * tp / (2 * tp + fp + fn)
        wanted[c] = dict(pq=sq * rq, sq=sq, rq=rq)
        counts = panoptic._Counts(iou, tp, fp, fn)
        assert panoptic._class_quality(counts) == pytest.approx(wanted[c])
    assert found["classes"].keys() == wanted.keys()
    for c, row in wanted.items():
        assert found["classes"][c] == pytest.approx(row)
    for name, kept in (("all", {0, 1, 2}), ("things", {0, 1}), ("stuff", {2})):
        rows = [row for c, row in wanted.items() if c in kept]
        mean = dict.fromkeys(("pq", "sq", "rq"), math.nan)
        if rows:
            mean = {key: sum(row[key] for row in rows) / len(rows) for key in mean}
        assert found[name] == pytest.approx(mean | {"n": len(rows)}, nan_ok=True)
        own = {c: row for c, row in wanted.items() if c in kept}
        assert panoptic._mean_quality(own) == pytest.approx(found[name], nan_ok=True)


ONES = torch.ones(2, 3).long()


@pytest.mark.parametrize(
    "infos, message",
    [
        (
            [dict(id=1, category=0)],
            r"truth: a segment with the names \['id', 'category'\]",
        ),
        ([dict(number=1, category_id=0)], r"must have 'id' and 'category_id'"),
        ([dict(id=2, category_id=0)], r"truth: the map has the segments \[1\], and the list"),
        ([], r"truth: the map has the segments \[1\], and the list \[\]"),
    ],
)
def test_bad_segments(infos, message):
    with pytest.raises(ValueError, match=message):
        panoptic._check_segments("truth", ONES, infos)
    with pytest.raises(ValueError, match=message):
        panoptic.panoptic_quality([(ONES, [dict(id=1, category_id=0)])], [(ONES, infos)])


# --- all of them ------------------------------------------------------------------------------

ORACLES = {
    "AttentionMaps": test_attention_maps,
    "MaskHead": test_mask_head,
    "PanopticDETR": test_chosen_masks,
    "PanopticOutput": test_chosen_masks,
    "confident_queries": test_confidence,
    "matched_queries": test_queries_that_are_matched,
    "panoptic_detr": test_models_that_are_made,
    "dice_loss": test_dice,
    "focal_loss": test_focal,
    "mask_loss": test_mask_loss,
    "_check_masks": test_bad_masks,
    "panoptic_postprocess": test_merge,
    "cut_padding": test_padding_is_cut,
    "_join_stuff": test_stuff_is_joined,
    "_check_merge": test_masks_that_were_not_asked_for,
    "overlaps": test_overlapping_pixels,
    "_match_segments": test_quality,
    "panoptic_quality": test_quality,
    "_class_quality": test_quality,
    "_mean_quality": test_quality,
    "_check_segments": test_bad_segments,
}
NOT_HERE = {}


def test_everything_has_an_oracle():
    names = ORACLES.keys() | NOT_HERE.keys()
    assert {name for name in names if name[0] != "_"} == set(panoptic.__all__)
