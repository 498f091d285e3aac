"""The ablations: they run, leave out what they say, and their record is complete."""

import pytest
import torch
import torch.nn.functional as F

from attnlib.train import read_record
from benchmarks import transformer as ablations


@pytest.mark.slow
def test_a_tiny_run_makes_a_record(tmp_path):
    ablations.main(["ablations", "--tiny", "--out", str(tmp_path)])
    assert (tmp_path / "ablations.json").exists()


def test_what_is_taken_away_is_gone():
    torch.manual_seed(0)
    x = torch.randn(2, 5, ablations.WIDTH)
    bare = ablations.Layer("post", skip=False, network=False)
    expected = F.layer_norm(bare.self_attn(x), x.shape[-1:])
    torch.testing.assert_close(bare(x), expected)
    whole = ablations.Layer("pre")
    for linear in (whole.self_attn.out_proj, whole.feed_forward.linear2):
        torch.nn.init.zeros_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
    torch.testing.assert_close(whole(x), x)  # nothing but skips is left
    variance = ablations.Layer("post")(x).var(-1, correction=0)
    torch.testing.assert_close(variance, torch.ones(2, 5), rtol=1e-3, atol=1e-3)


def test_the_record_has_three_seeds_of_every_variant():
    record = read_record("ablations")
    for part, variants in ablations.VARIANTS.items():
        for name in variants:
            runs = [x for x in record["runs"] if x["part"] == part and x["variant"] == name]
            first = [x for x in runs if (x["seed"], x["steps"]) == (0, ablations.STEPS[part])]
            best = min(first, key=lambda x: x["curve"][-1]["valid_loss"])
            assert {x["seed"] for x in runs if x["lr"] == best["lr"]} == {0, 1, 2}, (part, name)


@pytest.mark.parametrize("seed", [0, 1])
def test_data_are_new_and_repeat_with_the_seed(seed):
    same = torch.equal(ablations.digits(seed), ablations.digits(seed))
    assert same and not torch.equal(ablations.digits(seed), ablations.digits(seed + 1))
