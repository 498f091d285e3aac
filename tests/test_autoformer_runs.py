"""The small supernet of the chapter, and its recorded experiments."""

import json
import sys

import pytest
import torch
import torch.nn.functional as F

from attnlib.autoformer import (
    Attention,
    ClassicalSharing,
    Subnet,
    extract,
    parameter_count,
)
from attnlib.models import load_pretrained
from attnlib.train import find_records, read_record
from benchmarks import autoformer, timing
from benchmarks.autoformer import page


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The networks are too small to gain from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- digits, losses ---------------------------------------------------------------------------


def test_a_digit_is_at_each_of_nine_places():
    images, labels = torch.rand(5, 1, 8, 8), torch.arange(5)
    placed, names = page.shifted_digits(images, labels)
    assert (
        placed.shape == (45, 1, 10, 10)
        and names.tolist() == labels.repeat_interleave(9).tolist()
    )
    for k in range(9):
        y, x = divmod(k, 3)
        found = placed[k::9]
        assert torch.allclose(found[..., y : y + 8, x : x + 8], 4 * images - 1)
        assert torch.allclose(found.sum((1, 2, 3)) + 100, 4 * images.sum((1, 2, 3)))
    few, names = page.shifted_digits(images, labels, every=4)
    assert torch.equal(few, placed.view(5, 9, 1, 10, 10)[:, ::4].flatten(0, 1))
    assert len(names) == 15


def test_the_small_space():
    model = page.small_supernet()
    assert model.space.count() == len(list(model.space.subnets())) == 22_140
    counted = sum(p.numel() for p in model.parameters())
    assert counted == parameter_count(model, model.space.largest()) == 117_770
    classical = sum(p.numel() for p in page.small_supernet(ClassicalSharing).parameters())
    assert classical > 9 * counted


def test_the_losses_are_those_of_their_subnets():
    torch.manual_seed(0)
    model, (x, y) = page.small_supernet(), (torch.randn(6, 1, 10, 10), torch.randint(10, (6,)))
    space = model.space

    def losses(*subnets):
        return sum(F.cross_entropy(model(x, s), y, reduction="sum") for s in subnets)

    torch.manual_seed(3)
    drawn = autoformer.sample_subnet(space, int(torch.randint(2**31, ())))
    torch.manual_seed(3)
    loss, count = page.uniform_loss(model, (x, y))
    assert torch.allclose(loss, losses(drawn)) and count == 6
    torch.manual_seed(3)
    wanted = losses(space.largest(), space.smallest(), drawn)
    loss, count = page.sandwich_loss(model, (x, y))
    assert torch.allclose(loss, wanted) and count == 6
    torch.manual_seed(4)  # another step, another subnet
    assert not torch.allclose(page.uniform_loss(model, (x, y))[0], losses(drawn))


def test_random_search_draws_distinct_networks():
    model = page.small_supernet()

    def score(subnet):
        return subnet.depth

    best, history = page.random_search(score, model, 48, seed=1, max_params=20_000)
    assert (best, history) == page.random_search(score, model, 48, seed=1, max_params=20_000)
    assert len(history) == len(dict(history)) == 48
    assert score(best) == max(dict(history).values())
    assert all(parameter_count(model, subnet) <= 20_000 for subnet, _ in history)


# --- the runs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder in which all parts have left their tiny records."""
    folder = tmp_path_factory.mktemp("autoformer")
    with pytest.MonkeyPatch.context() as patch:
        for part in ("supernets", "ranking", "repeats", "scenes", "search"):
            patch.setattr(sys, "argv", ["x", part, "--tiny", "--out", str(folder)])
            autoformer.main()
    return folder


def record(folder, part):
    return json.loads((folder / f"autoformer_{part}.json").read_text())


@pytest.mark.slow
def test_supernets_are_recorded(tiny):
    runs = record(tiny, "supernets")["runs"]
    assert {run["kind"] for run in runs} == {"uniform", "sandwich", "classical"}
    for run in runs:
        assert len(run["cloud"]) == 4 and 0 <= run["valid"] <= 1
        assert {"mean", "smallest", "largest", "seconds"} <= set(run["history"][-1])
    assert max(run["steps"] for run in runs) == 4 * min(run["steps"] for run in runs)
    load_pretrained(page.small_supernet(), tiny / "autoformer_digits.safetensors")


@pytest.mark.slow
def test_supernets_of_scenes_are_recorded(tiny):
    runs = record(tiny, "scenes")["runs"]
    assert {run["kind"] for run in runs} == {"uniform", "classical"}
    for run in runs:  # a larger image, three channels and 24 classes make larger networks
        assert min(row["parameters"] for row in run["cloud"]) > 4000 and 0 <= run["test"] <= 1
    images, labels = autoformer.scene_parts(tiny=True)["test"]
    assert images.shape == (10, 3, 32, 32) and labels.max() < 24


@pytest.mark.slow
def test_ranking_is_recorded(tiny):
    found, more = record(tiny, "ranking"), record(tiny, "repeats")
    assert [(row["kind"], row["times"]) for row in found["inherited"] + more["inherited"]] == [
        ("uniform", 1),
        ("sandwich", 1),
        ("uniform", 4),
    ]
    for rows in found["inherited"] + more["inherited"]:
        assert len(rows["spread"]) == 3 and len(rows["equal"]) == 2
    assert {(row["seed"], row["steps"]) for row in found["alone"]} == {(0, 4)}
    assert {(row["seed"], row["steps"]) for row in more["alone"]} == {(0, 8), (1, 4)}
    low, high = autoformer.SAME_SIZE
    same = [row["parameters"] for row in found["alone"] if row["group"] == "equal"]
    assert same and all(low <= count <= high for count in same)
    for row in found["alone"]:
        model = extract(page.small_supernet(), autoformer.read(row["subnet"]))
        assert sum(p.numel() for p in model.parameters()) == row["parameters"]


@pytest.mark.slow
def test_searches_keep_to_their_budget_and_have_equal_chances(tiny):
    found = record(tiny, "search")
    pairs = {}
    for row in found["searches"]:
        assert row["parameters"] <= row["budget"] and row["valid"] == max(row["scores"])
        key = row["supernet"], row["budget"], row["seed"]
        pairs.setdefault(key, {})[row["method"]] = len(row["scores"])
    assert len(pairs) == len(autoformer.BUDGETS)
    assert all(pair["evolution"] == pair["random"] for pair in pairs.values())
    (everything,) = found["everything"]
    assert everything["scores"] == sorted(everything["scores"], reverse=True)
    assert max(everything["parameters"]) <= everything["budget"]


@pytest.mark.slow
def test_what_is_recorded_is_not_run_again(tiny, monkeypatch, capsys):
    before = (tiny / "autoformer_supernets.json").read_text()
    monkeypatch.setattr(autoformer, "fit", None)
    monkeypatch.setattr(sys, "argv", ["x", "supernets", "--tiny", "--out", str(tiny)])
    autoformer.main()
    assert "7 runs, recorded" in capsys.readouterr().out
    assert (tiny / "autoformer_supernets.json").read_text() == before


def test_a_part_needs_the_one_before(tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(autoformer, "fit", None)
    monkeypatch.setattr(sys, "argv", ["x", "ranking", "--tiny", "--out", str(tmp_path)])
    autoformer.main()
    assert "0 runs so far" in capsys.readouterr().out


def test_a_description_is_read_back():
    subnet = Subnet(32, (1, 3), (4, 2))
    kept = json.loads(json.dumps(autoformer.described(subnet)))
    assert autoformer.read(kept) == subnet


@pytest.mark.slow
def test_the_longer_run(tmp_path):
    found = autoformer.longer(tmp_path, tiny=True)
    assert len(found["subnets"]) == 4 and found["history"][-1]["step"] == 2
    again = autoformer.longer(tmp_path, tiny=True)  # from its checkpoint
    assert again["subnets"] == found["subnets"]


@pytest.mark.slow
def test_the_longer_run_on_photographs(tmp_path, monkeypatch):
    some = torch.randn(40, 3, 32, 32), torch.randint(10, (40,))
    monkeypatch.setattr(autoformer, "small_images", lambda name: (some, some))
    found = autoformer.longer(tmp_path, tiny=True, data="cifar10")
    assert found["data"] == "cifar10" and len(found["subnets"]) == 4


# --- speed ------------------------------------------------------------------------------------


def test_both_forms_of_relative_positions_agree():
    torch.manual_seed(0)
    attn = Attention(32, 2, head_dim=16, grid_size=(3, 5), max_distance=2).double()
    for p in attn.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(2, 16, 32).double()
    assert torch.allclose(attn(x), autoformer.dense(attn, x), atol=1e-9)


@pytest.mark.slow
def test_the_speed_is_recorded(tmp_path, monkeypatch):
    argv = ["x", "speed", "--tiny", "--repeats", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(timing.torch, "set_num_threads", lambda count: None)
    autoformer.main()
    found = json.loads((tmp_path / "autoformer_speed_cpu.json").read_text())
    assert {row["group"] for row in found["rows"]} == {"training step", "forward", "attention"}


@pytest.mark.skipif("autoformer_ranking" not in find_records(), reason="not recorded")
def test_the_records_say_what_the_chapter_says():
    runs = read_record("autoformer_supernets")["runs"]

    def means(kind):
        same = [run for run in runs if run["kind"] == kind]
        steps = min(run["steps"] for run in same)
        best = max(
            (run for run in same if run["seed"] == 0 and run["steps"] == steps),
            key=lambda run: run["valid"],
        )
        return [r["valid"] for r in same if (r["lr"], r["steps"]) == (best["lr"], steps)]

    assert len(means("uniform")) == len(means("classical")) == 3
    assert min(means("uniform")) > max(means("classical")) + 0.2
