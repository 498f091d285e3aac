"""Scenes for detection, DETR with anchors, and the recorded experiments of its chapter."""

import itertools
import json
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib import data
from attnlib.data import box_targets, detection_scenes
from attnlib.detr import (
    DETR,
    BoxQueryDETR,
    IdentityMatcher,
    SetCriterion,
    SmallBackbone,
    _sine_box_embedding,
    box_cxcywh_to_xyxy,
    noised_targets,
    sine_position_embedding,
    small_detr,
)
from attnlib.models import load_pretrained
from attnlib.panoptic import PanopticDETR
from attnlib.train import find_records, read_record
from benchmarks import detr

# --- scenes -----------------------------------------------------------------------------------


@given(
    count=st.integers(1, 30),
    split=st.sampled_from(["train", "test"]),
    size=st.sampled_from([32, 48, 65]),
    kinds=st.sampled_from(["shapes", "digits"]),
    objects=st.integers(1, 5),
    photographs=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
@settings(max_examples=12, deadline=None)
def test_boxes_enclose_masks_and_masks_do_not_overlap(count, split, size, seed, **options):
    found = detection_scenes(count, split, size, seed=seed, **options)
    kind, box, mask = (found[key] for key in ("kind", "box", "mask"))
    assert found["image"].shape == (count, 3, size, size)
    assert 0 <= found["image"].min() and found["image"].max() <= 1
    assert (kind[:, 0] >= 0).all() and kind.max() < detr.CLASSES[options["kinds"]]
    assert (mask.sum(1) <= 1).all()  # no pixel is of two objects
    for i, k in torch.cartesian_prod(torch.arange(count), torch.arange(options["objects"])):
        if kind[i, k] < 0:
            assert not mask[i, k].any() and not box[i, k].any()
            continue
        y, x = mask[i, k].nonzero().T
        assert box[i, k].tolist() == [x.min(), y.min(), x.max() + 1, y.max() + 1]
    assert found["stuff"].unique().tolist() in ([0], [0, 1]) and (
        options["photographs"] == 2 or not found["stuff"].any()
    )
    again = detection_scenes(count, split, size, seed=seed, **options)
    assert all(torch.equal(found[key], again[key]) for key in found)


def test_two_photographs_meet_at_a_line():
    stuff = detection_scenes(200, photographs=2)["stuff"]
    shares = stuff.float().mean((1, 2))
    assert (shares > 0.1).all() and (shares < 0.9).all()
    # along a row, a line is crossed once at most
    assert (stuff.diff(dim=2).abs().sum(2) <= 1).all()


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_scene_is_made_of_its_own_split(split, monkeypatch):
    asked, digits, pieces = [], data.digits, data._pieces
    monkeypatch.setattr(data, "digits", lambda s: asked.append(s) or digits(s))

    def noted(lots, n, split, *rest, **options):
        asked.append(split)
        return pieces(lots, n, split, *rest, **options)

    monkeypatch.setattr(data, "_pieces", noted)
    detection_scenes(3, split, kinds="digits", photographs=2)
    assert len(asked) >= 3 and set(asked) == {split}


def test_the_photographs_of_a_split_are_those_of_the_collages():
    """Left and right parts have no column in common: 448 of 640 and the rest."""
    a, b = (detection_scenes(300, split, seed=4)["image"] for split in ("train", "test"))
    assert not torch.equal(a, b)
    rows = {tuple(row) for row in (a * 1e4).round()[:, :, 0].flatten(1).tolist()}
    assert not any(tuple(row) in rows for row in (b * 1e4).round()[:, :, 0].flatten(1).tolist())


def test_targets_are_the_boxes():
    found = detection_scenes(20, seed=3)
    for target, kind, box in zip(
        box_targets(found["kind"], found["box"], 48), *(found[key] for key in ("kind", "box"))
    ):
        assert target["labels"].tolist() == kind[kind >= 0].tolist()
        corners = 48 * box_cxcywh_to_xyxy(target["boxes"])
        assert torch.allclose(corners, box[kind >= 0], atol=1e-4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(count=0), r"count \(0\)"),
        (dict(count=2, split="dev"), r"split \('dev'\)"),
        (dict(count=2, size=1.5), r"size \(1.5\)"),
        (dict(count=2, objects=0), r"objects \(0\)"),
        (dict(count=2, kinds="cats"), r"kinds \('cats'\) must be 'shapes' or 'digits'"),
        (dict(count=2, photographs=3), r"photographs \(3\) must be 1 or 2"),
    ],
)
def test_scenes_refuse(arguments, message):
    with pytest.raises(ValueError, match=message):
        detection_scenes(**arguments)


# --- anchors and denoising --------------------------------------------------------------------


@pytest.fixture
def anchored():
    """A model in evaluation whose heads are not zero any more, images, and noised objects."""
    torch.manual_seed(0)
    model = small_detr(4, BoxQueryDETR, 20).eval()
    for p in model.bbox_embed[-1].parameters():
        torch.nn.init.normal_(p, std=0.3)
    targets = box_targets(*(detection_scenes(2, seed=1)[key] for key in ("kind", "box")), 48)
    return model, torch.rand(2, 3, 48, 48), noised_targets(targets, 4, copies=2)[0]


def test_the_small_detectors_have_the_shapes_they_say():
    maps = SmallBackbone()(torch.rand(2, 3, 48, 48))
    assert [tuple(x.shape[1:]) for x in maps] == [
        *((24, 24, 24), (48, 12, 12), (64, 6, 6), (64, 6, 6))
    ]
    for detector in DETR, BoxQueryDETR:
        output = small_detr(4, detector)(torch.rand(2, 3, 48, 48))
        assert output.logits.shape == (2, 10, 5) and output.boxes.shape == (2, 10, 4)
        assert len(output.aux_outputs) == 2


def test_the_first_answer_is_the_anchor_and_layers_refine():
    torch.manual_seed(0)
    model, images = small_detr(4, BoxQueryDETR, 20).eval(), torch.rand(2, 3, 48, 48)
    anchors = model.query_embed.weight.sigmoid()
    output = model(images)
    for layer in (*output.aux_outputs, output):  # the heads' last layers are zero
        assert torch.allclose(layer.boxes, anchors.expand(2, -1, -1), atol=1e-6)
    model.bbox_embed[-1].bias.data = torch.tensor([0.1, -0.2, 0.3, 0.4])
    output = model(images)
    for i, layer in enumerate((*output.aux_outputs, output)):  # each adds the same step
        wanted = (anchors.logit() + (i + 1) * model.bbox_embed[-1].bias).sigmoid()
        assert torch.allclose(layer.boxes, wanted.expand(2, -1, -1), atol=2e-3)


def test_no_gradient_passes_from_a_layers_boxes_to_those_before():
    torch.manual_seed(0)
    model = small_detr(4, BoxQueryDETR, 20)
    output = model(torch.rand(1, 3, 48, 48))
    for boxes, reached in ((output.aux_outputs[0].boxes, True), (output.boxes, False)):
        (found,) = torch.autograd.grad(
            boxes.sum(), model.query_embed.weight, retain_graph=True, allow_unused=True
        )
        # the first layer adds its step to the anchor; the last one's anchor is cut off
        direct = found is not None and found.abs().max() > 1e-2
        assert direct == reached


def test_matching_and_denoising_do_not_see_what_they_must_not(anchored, monkeypatch):
    model, images, noised = anchored
    with torch.no_grad():
        alone = model(images)
        assert alone.denoised is None
        output = model(images, noised=noised)
        restored = output.denoised
        assert torch.allclose(output.boxes, alone.boxes, atol=1e-5)
        assert torch.allclose(output.logits, alone.logits, atol=1e-5)
        other = {key: x.clone() for key, x in noised.items()}
        other["boxes"][:, 0] = 0.5  # the first copy is another
        changed = model(images, noised=other).denoised
        count = noised["labels"].shape[2]
        assert torch.allclose(changed.logits[:, count:], restored.logits[:, count:], atol=1e-5)
        assert (changed.logits - restored.logits)[:, :count].abs().max() > 5e-4
        # control: without groups the answers leak
        start = model.start
        monkeypatch.setattr(model, "start", lambda *a: (*start(*a)[:2], None))
        leaked = model(images, noised=other)
        seen = leaked.denoised
    assert (leaked.logits - alone.logits).abs().max() > 5e-4
    assert (seen.logits[:, count:] - restored.logits[:, count:]).abs().max() > 5e-4


def test_box_queries_have_all_that_a_detr_has(anchored):
    model, images, noised = anchored
    with torch.no_grad():
        output, features = model(images), model.forward_features(images)
        again = model.forward_head(features.decoded, features.anchors)
        assert torch.equal(again.boxes, output.boxes)
        assert torch.equal(
            features.anchors[0], model.query_embed.weight.sigmoid().expand(2, -1, -1)
        )
        for i, layer in enumerate(
            output.aux_outputs
        ):  # a layer starts where the last one ended
            assert torch.allclose(features.anchors[i + 1], layer.boxes, atol=1e-6)
        restored = model.forward_features(images, noised=noised)
        assert restored.decoded.shape[2] == 10 + noised["labels"][0].numel()
        maps = model.attention_maps(images)
        assert [tuple(x.shape) for x in maps] == [(2, 4, 10, 6, 6)] * 3
        assert torch.allclose(maps[0].sum((3, 4)), torch.ones(2, 4, 10), atol=1e-5)
        panoptic = PanopticDETR(model, num_groups=4).eval()(images)
    assert torch.equal(panoptic.boxes, output.boxes) and panoptic.masks.shape[:2] == (2, 10)


def test_padding_of_a_batch_is_not_seen_by_box_queries(anchored):
    model, images, _ = anchored
    wide = torch.cat([images, torch.full((2, 3, 48, 32), 9.0)], dim=3)
    mask = torch.zeros(2, 48, 80, dtype=torch.bool)
    mask[..., :48] = True
    with torch.no_grad():
        maps = model.attention_maps(wide, mask)
    assert maps[-1].shape[3:] == (6, 10) and (maps[-1][..., 6:] == 0).all()


def test_the_decoder_starts_as_that_of_a_detr():
    """All its matrices are Xavier-uniform; in the recorded runs they were not."""
    for detector, everywhere in (BoxQueryDETR, True), (detr.RecordedBoxQueryDETR, False):
        torch.manual_seed(0)
        model = small_detr(4, detector, 20)
        found = []
        for p in itertools.chain(model.encoder.parameters(), model.decoder.parameters()):
            if p.ndim > 1:
                bound = math.sqrt(6 / sum(p.shape))
                found.append(0.95 * bound < p.abs().max() <= bound)
        assert all(found) == everywhere


def test_the_recorded_start_is_what_it_was():
    """Sums of some weights, from the code with which the runs were recorded."""
    torch.manual_seed(0)
    model = small_detr(10, detr.RecordedBoxQueryDETR, 20)
    wanted = {
        "decoder.0.query_place.weight": 253.3536,
        "decoder.2.scale.2.weight": 259.6100,
        "decoder.1.multihead_attn.out_proj.weight": 259.2484,
        "decoder.2.multihead_attn.in_proj_weight": 936.2728,
        "decoder.2.linear1.weight": 513.7337,
        "query_embed.weight": 38.3975,
        "label_embed.weight": 561.6379,
        "query_mlp.2.weight": 256.6956,
    }
    for name, value in wanted.items():
        found = model.get_parameter(name).double().abs().sum().item()
        assert found == pytest.approx(value, rel=1e-6), name


def test_anchors_have_the_sines_of_the_places():
    """A box at the center of a place, counted as the memory counts, has that place's sines."""
    places = sine_position_embedding(
        torch.ones(1, 6, 6, dtype=torch.bool), 64, 20
    )  # rows from 1 to 6
    y, x = 1 + torch.cartesian_prod(torch.arange(6), torch.arange(6)).T
    boxes = torch.stack([x / 6, y / 6, x / 6, y / 6], 1)[None]
    found = _sine_box_embedding(boxes, 64, 20)
    assert found.shape == (1, 36, 128)
    assert torch.allclose(found[..., :64].double(), places.double(), atol=1e-4)


def test_noise_keeps_to_its_range():
    found = detection_scenes(50, seed=2)
    targets = box_targets(found["kind"], found["box"], 48)
    torch.manual_seed(0)
    noised, wanted = noised_targets(targets, 4, copies=3, shift=0.4, flip=0.25)
    most = max(len(t["labels"]) for t in targets)
    assert noised["labels"].shape == (50, 3, most)
    labels = torch.stack([w["labels"] for w in wanted]).view(50, 3, most)
    boxes = torch.stack([w["boxes"] for w in wanted]).view(50, 3, most, 4)
    size = boxes[..., 2:]
    assert ((noised["boxes"][..., :2] - boxes[..., :2]).abs() <= 0.2 * size + 1e-6).all()
    ratio = noised["boxes"][..., 2:] / size
    assert ratio.min() >= 0.6 - 1e-5 and ratio.max() <= 1.4 + 1e-5
    flipped = (noised["labels"] != labels).float().mean()  # a fourth, of which 3 in 4 differ
    assert 0.1 < flipped < 0.28
    for target, many in zip(targets, wanted):  # nothing is forgotten
        assert set(many["labels"].tolist()) == set(target["labels"].tolist())


def test_an_image_without_objects_is_trained():
    empty = dict(labels=torch.zeros(0, dtype=torch.long), boxes=torch.zeros(0, 4))
    one = dict(labels=torch.tensor([2]), boxes=torch.tensor([[0.5, 0.5, 0.2, 0.2]]))
    for targets in ([empty, one], [empty, empty]):
        noised, wanted = noised_targets(targets, 4)
        model = small_detr(4, BoxQueryDETR)
        restored = model(torch.rand(2, 3, 48, 48), noised=noised).denoised
        total = SetCriterion(4, matcher=IdentityMatcher())(restored, wanted)["total"]
        total.backward()
        assert torch.isfinite(total)


# --- scores and the pipeline without a network ------------------------------------------------


def test_average_precision_of_the_worked_example():
    truth = {
        "kind": torch.zeros(1, 3, dtype=torch.long),
        "box": torch.tensor([[[0, 0, 20, 20], [40, 0, 60, 20], [0, 40, 20, 60]]]).float(),
    }
    boxes = [[0, 0, 20, 20], [70, 70, 90, 90], [40, 0, 60, 15], [70, 0, 90, 20]]
    found = dict(
        scores=torch.tensor([0.9, 0.8, 0.7, 0.6]),
        labels=torch.zeros(4, dtype=torch.long),
        boxes=torch.tensor(boxes).float(),
    )
    assert detr.average_precision([found], truth) == {"ap": 0.4673, "ap50": 0.5545}
    nothing = {key: x[:0] for key, x in found.items()}
    assert detr.average_precision([nothing], truth) == {"ap": 0.0, "ap50": 0.0}


def test_crops_hold_their_object():
    scenes = detection_scenes(40, kinds="shapes", objects=1, seed=6)
    marked = {**scenes, "image": scenes["mask"].float().expand(-1, 3, -1, -1)}
    held = detr.crops(marked)[:, 0].sum((1, 2)) / scenes["mask"].sum((1, 2, 3))
    assert (held > 0.85).all() and (held == 1).float().mean() > 0.9


def test_bright_parts_are_found():
    image = torch.zeros(3, 48, 48)
    image[0, 5:15, 20:32] = 0.9
    image[2, 30:40, 3:9] = 0.8
    image[1, 45, 45] = 1.0  # too small
    assert detr.bright_parts(image, 0.6).tolist() == [[20, 5, 32, 15], [3, 30, 9, 40]]


# --- the runs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder in which all parts have left their tiny records."""
    folder = tmp_path_factory.mktemp("detr")
    with pytest.MonkeyPatch.context() as patch:
        for part in detr.PARTS:
            patch.setattr(sys, "argv", ["detr", part, "--tiny", "--out", str(folder)])
            detr.main()
    return folder


@pytest.mark.parametrize("part", detr.PARTS)
@pytest.mark.slow
def test_every_part_is_recorded(tiny, part):
    record = json.loads((tiny / f"detr_{part}.json").read_text())
    variants = detr.PARTS[part][1]
    assert {run["variant"] for run in record["runs"]} == set(variants)
    assert len({run["steps"] for run in record["runs"]}) == 1 + (part in detr.LONGER)
    for run in record["runs"]:
        last = run["history"][-1]
        assert 0 <= last["ap"] <= last["ap50"] <= 1 and 0 <= last["changed"] <= 1
        assert all(0 <= last[f"entropy{i}"] <= 1 for i in range(3))
    if part in detr.KEPT:
        detector = detr.VARIANTS[variants[0]][0]
        model = small_detr(detr.CLASSES[detr.PARTS[part][0]], detector)
        load_pretrained(model, tiny / f"detr_{part}.safetensors")


@pytest.mark.slow
def test_what_is_recorded_is_not_run_again(tiny, monkeypatch, capsys):
    before = (tiny / "detr_slow.json").read_text()
    monkeypatch.setattr(detr, "fit", None)
    monkeypatch.setattr(sys, "argv", ["detr", "slow", "--tiny", "--out", str(tiny)])
    detr.main()
    assert "2 runs, recorded" in capsys.readouterr().out
    assert (tiny / "detr_slow.json").read_text() == before


@pytest.mark.skipif("detr_digits" not in find_records(), reason="not recorded")
def test_the_records_say_what_the_chapter_says():
    def scores(part, variant):
        record, (_, _, _, steps) = read_record(f"detr_{part}"), detr.PARTS[part]
        runs = [r for r in record["runs"] if (r["variant"], r["steps"]) == (variant, steps)]
        tried = {r["lr"]: r["valid"]["ap50"] for r in runs if r["seed"] == 0}
        best = max(tried, key=tried.get)
        return [r["test"]["ap50"] for r in runs if r["lr"] == best]

    anchors, slow = scores("digits", "anchors"), scores("slow", "plain")
    assert min(anchors) > 0.7 and max(slow) < min(anchors) - 0.1
    assert min(scores("shapes", "plain")) > 0.8
