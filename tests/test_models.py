"""Names, files and weights: what fits is loaded as timm loads it, what does not is listed."""

import argparse
import hashlib
import pickle
import re
import sys
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
import torch.nn as nn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from attnlib import models, train
from attnlib.models import (
    adapt_input_conv,
    create_model,
    fetch_weights,
    list_models,
    load_pretrained,
    read_weights,
    unwrap_state_dict,
)
from attnlib.vit import VisionTransformer

NAME = "vit_tiny_patch16_224"
SMALL = dict(depth=2, embed_dim=48, num_heads=3)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A small timm model with weights that are all different, and its files."""
    torch.manual_seed(0)
    model = timm.create_model(NAME, **SMALL).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.1)
    folder = tmp_path_factory.mktemp("published")
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(model.state_dict(), folder / "model.pth")
    return folder / "model.safetensors", model


def fresh(**changes):
    torch.manual_seed(1)
    return create_model(NAME, **{**SMALL, **changes}).eval()


def copy_of(model):
    return {key: x.clone() for key, x in model.state_dict().items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def refuses(model, source, error=ValueError):
    """The message with which the source is refused; the model must not have changed."""
    before = copy_of(model)
    with pytest.raises(error) as caught:
        load_pretrained(model, source)
    assert equal(before, copy_of(model))
    return str(caught.value)


# --- as timm, bit for bit ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(num_classes=10),
        dict(num_classes=0),
        dict(in_chans=1),
        dict(in_chans=3),
        dict(in_chans=4),
        dict(in_chans=6),
        dict(img_size=64),
        dict(img_size=384),
        dict(img_size=(96, 160)),
        dict(img_size=(112, 448)),
        dict(num_classes=7, in_chans=1, img_size=(160, 96)),
    ],
    ids=str,
)
def test_adapted_weights_equal_timms(published, changes):
    path, _ = published
    source = dict(file=str(path), custom_load=False)
    theirs = timm.create_model(
        NAME, pretrained=True, pretrained_cfg_overlay=source, **SMALL, **changes
    ).eval()
    ours = fresh(**changes)
    start = copy_of(ours)
    kept = load_pretrained(ours, path, img_size=224)
    assert kept == (["head.weight", "head.bias"] if changes.get("num_classes") else [])
    for key, x in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], start[key] if key in kept else x), key
    theirs.load_state_dict(ours.state_dict())
    size = changes.get("img_size", 224)
    x = torch.rand(
        2, changes.get("in_chans", 3), *(size if isinstance(size, tuple) else (size, size))
    )
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)


@given(channels=st.integers(1, 13), base=st.sampled_from([1, 3, 4]), half=st.booleans())
@settings(max_examples=40, deadline=None)
def test_channels_equal_timms(channels, base, half):
    weight = torch.randn(5, base, 4, 4).to(torch.bfloat16 if half else torch.float32)
    before = weight.clone()
    adapted = adapt_input_conv(weight, channels)
    assert adapted.dtype == weight.dtype and torch.equal(weight, before)
    assert torch.equal(
        adapted, timm.models.adapt_input_conv(channels, weight.clone(), base_chans=base)
    )


def tagged(name):
    """The name of the weights: CLIP's are OpenAI's, which are not always timm's default."""
    return f"{name}.openai" if "quickgelu" in name else name


def test_every_registered_name_has_timms_default_repository():
    ours = set(list_models("vit*")) - set(list_models("*_collages"))
    assert ours <= set(timm.list_models())
    for name, (_, hub, _) in models.MODELS.items():
        if timm.is_model(name):
            assert hub == timm.get_pretrained_cfg(tagged(name)).hf_hub_id, name


def test_torchvisions_file_loads(tmp_path):
    from torchvision.models import VisionTransformer as Other

    torch.manual_seed(0)
    theirs = Other(
        image_size=32,
        patch_size=16,
        num_layers=2,
        num_heads=3,
        hidden_dim=48,
        mlp_dim=192,
        num_classes=10,
    )
    nn.init.normal_(theirs.heads.head.weight)
    torch.save(theirs.eval().state_dict(), tmp_path / "theirs.pth")
    ours = create_model(
        NAME, tmp_path / "theirs.pth", num_classes=10, img_size=32, **SMALL
    ).eval()
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)
    adapted = create_model(
        NAME, tmp_path / "theirs.pth", num_classes=3, in_chans=1, img_size=64, **SMALL
    )
    assert torch.equal(
        adapted.patch_embed.proj.weight, ours.patch_embed.proj.weight.sum(1, keepdim=True)
    )


# --- sources ----------------------------------------------------------------------------------


def test_all_sources_give_the_same(published, tmp_path):
    path, model = published
    wanted = model.state_dict()
    prefixed = {f"module._orig_mod.{key}": x for key, x in wanted.items()}
    for wrapper in ("state_dict_ema", "model_ema", "state_dict", "model"):
        torch.save(
            {wrapper: prefixed, "args": argparse.Namespace(lr=0.1), "epoch": 3},
            tmp_path / f"{wrapper}.pth",
        )
        assert equal(unwrap_state_dict(tmp_path / f"{wrapper}.pth"), wanted)
    torch.save(wanted, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    files = (path, str(path), path.parent, path.with_suffix(".pth"), tmp_path / "old.pth")
    for source in (*files, wanted, {"model": wanted}):
        assert equal(unwrap_state_dict(source), wanted)


def test_the_averaged_weights_come_first(published):
    wanted = published[1].state_dict()
    assert equal(
        unwrap_state_dict({"model": {"x": torch.ones(1)}, "model_ema": wanted}), wanted
    )


def test_a_source_is_not_changed(published):
    source = dict(published[1].state_dict())
    before = {key: x.clone() for key, x in source.items()}
    load_pretrained(fresh(in_chans=6, img_size=96, num_classes=3), source)
    assert equal(source, before)


def test_half_precision_weights_load_into_float32(published):
    half = {key: x.half() for key, x in published[1].state_dict().items()}
    model = fresh()
    assert load_pretrained(model, half) == []
    assert model.norm.weight.dtype == torch.float32 and torch.equal(
        model.norm.weight, half["norm.weight"].float()
    )


def test_create_model_takes_a_file(published):
    path, theirs = published
    assert equal(
        create_model(NAME, pretrained=str(path), **SMALL).state_dict(), theirs.state_dict()
    )


# --- bad files --------------------------------------------------------------------------------


@given(
    share=st.floats(0, 1, exclude_max=True), ending=st.sampled_from([".safetensors", ".pth"])
)
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_truncated_file_is_refused_wherever_it_is_cut(published, tmp_path, share, ending):
    whole = published[0].with_suffix(ending).read_bytes()
    cut = tmp_path / f"cut{ending}"
    cut.write_bytes(whole[: int(share * len(whole))])
    message = refuses(fresh(), cut)
    assert str(cut) in message and ("truncated or no" in message or "refused" in message)


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_refused_and_not_run(published, tmp_path, zipped):
    weights = {**published[1].state_dict(), "head.bias": Trap(tmp_path / "run")}
    torch.save(weights, tmp_path / "trap.pth", _use_new_zipfile_serialization=zipped)
    assert "trap.pth is refused: a pickle may run code" in refuses(
        fresh(), tmp_path / "trap.pth"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("ending", [".pth", ".bin", ".safetensors"])
def test_a_bare_pickle_is_refused_and_not_run(tmp_path, protocol, ending):
    path = tmp_path / f"bare{ending}"
    path.write_bytes(pickle.dumps({"head.bias": Trap(tmp_path / "run")}, protocol=protocol))
    with pytest.raises(ValueError, match="refused|truncated or no"):
        read_weights(path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", [b"", b"not weights", b"PK\x03\x04", b"\x80\x02."])
@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_another_file_is_refused(tmp_path, content, ending):
    (tmp_path / f"other{ending}").write_bytes(content)
    assert f"other{ending}" in refuses(fresh(), tmp_path / f"other{ending}")


def test_no_such_file(tmp_path):
    for source in (
        tmp_path / "none.pth",
        str(tmp_path / "none.safetensors"),
        "weights/none.pth",
        tmp_path,
    ):
        assert "is not a file" in refuses(fresh(), source, FileNotFoundError)


def test_what_is_not_tensors_by_name_is_refused(tmp_path):
    torch.save([torch.ones(1)], tmp_path / "list.pth")
    assert "source holds a list; it must hold tensors by name" in refuses(
        fresh(), tmp_path / "list.pth"
    )
    message = refuses(fresh(), {"cls_token": torch.ones(1), "epoch": 3, "optimizer": {}})
    assert "'epoch': 'int'" in message and "'optimizer': 'dict'" in message


# --- weights that do not fit ------------------------------------------------------------------


def test_every_key_that_does_not_fit_is_listed(published):
    wrong = dict(published[1].state_dict())
    del wrong["norm.bias"], wrong["blocks.0.attn.qkv.weight"]
    wrong |= {
        "blocks.7.ls": torch.ones(3),
        "extra": torch.ones(2, 2),
        "blocks.1.mlp.fc1.bias": torch.ones(5),
    }
    wrong["norm.weight"] = torch.ones(48, dtype=torch.int8)
    assert refuses(fresh(), wrong).split("\n  ") == [
        "source does not fit VisionTransformer; nothing was loaded.",
        "missing: blocks.0.attn.qkv.weight (144, 48)",
        "missing: norm.bias (48,)",
        "unexpected: blocks.7.ls (3,)",
        "unexpected: extra (2, 2)",
        "of another shape: blocks.1.mlp.fc1.bias (5,), the model has (192,)",
        "of another shape: norm.weight (48,) of torch.int8, the model has (48,)",
    ]


@given(data=st.data())
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_nothing_is_ever_half_loaded(published, data):
    wrong = dict(published[1].state_dict())
    body = sorted(key for key in wrong if not key.startswith("head."))
    keys = data.draw(st.sets(st.sampled_from(body), min_size=1, max_size=4))
    for key in keys:
        change = data.draw(st.sampled_from(["missing", "renamed", "reshaped"]))
        x = wrong.pop(key)
        if change == "renamed":
            wrong[f"{key}_"] = x
        if change == "reshaped":
            wrong[key] = torch.zeros(*x.shape[:-1], x.shape[-1] + 1)
    message = refuses(fresh(num_classes=data.draw(st.sampled_from([1000, 10, 0]))), wrong)
    assert all(key in message for key in keys)


def test_other_classes_do_not_hide_other_errors(published):
    wrong = {
        key: x
        for key, x in published[1].state_dict().items()
        if not key.startswith("blocks.1.")
    }
    assert refuses(fresh(num_classes=10), wrong).count("missing: blocks.1.") == 12


def test_another_pooling_is_another_model(published):
    """timm leaves the norm before the classifier, which has another name there, as it is."""
    message = refuses(fresh(num_classes=10, global_pool="avg"), published[0])
    assert (
        "missing: fc_norm.weight (48,)" in message
        and "unexpected: norm.weight (48,)" in message
    )


def test_a_classifier_with_a_part_missing_is_listed(published):
    wrong = {key: x for key, x in published[1].state_dict().items() if key != "head.bias"}
    assert "missing: head.bias (1000,)" in refuses(fresh(), wrong)


def test_weights_without_classifier_load_with_a_warning(published):
    features = {
        key: x for key, x in published[1].state_dict().items() if not key.startswith("head.")
    }
    model = fresh()
    start = copy_of(model)
    with pytest.warns(
        UserWarning, match="source has no classifier; the model's keeps its random values"
    ):
        assert load_pretrained(model, features) == ["head.weight", "head.bias"]
    assert torch.equal(model.head.weight, start["head.weight"]) and torch.equal(
        model.cls_token, features["cls_token"]
    )
    assert load_pretrained(fresh(num_classes=0), features) == []


def test_a_model_without_values_is_refused(published):
    with pytest.raises(ValueError, match='model is on the device "meta"'):
        create_model(NAME, pretrained=published[0], device="meta", **SMALL)


def test_a_module_without_hooks_loads_as_it_is():
    source, model = nn.Linear(3, 4), nn.Linear(3, 4)
    assert load_pretrained(model, source.state_dict()) == [] and equal(
        model.state_dict(), source.state_dict()
    )
    assert "weight (4, 3), the model has (4, 5)" in refuses(
        nn.Linear(5, 4), source.state_dict()
    )


# --- checkpoints of train.fit -----------------------------------------------------------------


def checkpoint(folder, **state):
    model = fresh()
    nn.init.normal_(model.cls_token)
    tensors = {f"model.{key}": x for key, x in model.state_dict().items()}
    tensors["optimizer.0.exp_avg"] = torch.zeros(3)
    train.save_checkpoint(folder / "run.json", tensors, {"step": 400} | state)
    return model


def test_a_checkpoint_is_read_by_its_record_and_by_its_tensors(tmp_path):
    trained = checkpoint(tmp_path)
    for name in ("run.json", "run-00000400.safetensors"):
        model = create_model(NAME, pretrained=tmp_path / name, **SMALL)
        assert equal(copy_of(model), copy_of(trained))


def test_a_record_without_weights_is_no_pickle(tmp_path):
    path = tmp_path / "run.json"
    for content in ('{"loss": 1}', "[1]", "no JSON"):
        path.write_text(content)
        message = refuses(fresh(), path)
        assert "pickle" not in message and "run.json holds no weights" in message
    checkpoint(tmp_path)
    (tmp_path / "run-00000400.safetensors").unlink()
    message = refuses(fresh(), path, FileNotFoundError)
    assert "run-00000400.safetensors, which is missing" in message
    path.write_text('{"tensors": "run-00000400.shards"}')
    assert "several processes wrote; train.load_checkpoint" in refuses(fresh(), path)


# --- the hub ----------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub in a folder: repository/file; without the folder there is no network."""

    class Hub:
        folder = tmp_path / "hub"
        asked = []

        def put(self, repository, name, content):
            path = self.folder / repository / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

        def metadata(self, url):
            repository, name = url.split("/resolve/")
            repository = repository.removeprefix("https://huggingface.co/")
            if not self.folder.exists():
                raise OSError("no route to host\nand more")
            if not (self.folder / repository / name.rpartition("/")[2]).exists():
                raise huggingface_hub.errors.EntryNotFoundError("404")

        def download(self, repository, name, revision=None, local_files_only=False):
            self.asked.append((repository, name, revision, local_files_only))
            if local_files_only:
                raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")
            return str(self.folder / repository / name)

    fake = Hub()
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fake.metadata)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.download)
    return fake


def test_a_repository_with_a_pickle_alone_is_read_without_running_it(published, hub):
    content = published[0].with_suffix(".pth").read_bytes()
    hub.put("owner/old", "pytorch_model.bin", content)
    model = fresh()
    assert load_pretrained(model, "owner/old") == []
    assert torch.equal(model.cls_token, published[1].cls_token)
    assert hub.asked == [("owner/old", "pytorch_model.bin", None, False)]
    hub.put("owner/old", "model.safetensors", published[0].read_bytes())
    assert fetch_weights("owner/old").name == "model.safetensors"
    hub.put("owner/bad", "pytorch_model.bin", pickle.dumps(print))
    assert "is refused: a pickle may run code" in refuses(fresh(), "owner/bad")
    hub.put("owner/empty", "config.json", b"{}")
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor pytorch_model"):
        fetch_weights("owner/empty")


def test_a_folder_with_a_pickle_alone(published, tmp_path):
    content = published[0].with_suffix(".pth").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    assert load_pretrained(fresh(), tmp_path) == []


def test_offline_there_is_one_attempt(hub, monkeypatch):
    """The hub's own download would try again for half a minute."""
    attempts = []

    def metadata(url):
        attempts.append(url)
        hub.metadata(url)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    with pytest.raises(ConnectionError):
        fetch_weights("owner/name")
    assert len(attempts) == 1 and all(local for *_, local in hub.asked)


def test_offline_the_cache_is_used(published, monkeypatch):
    def offline(url):
        raise OSError("no network")

    def cached(repository, name, revision=None, local_files_only=False):
        if name != "pytorch_model.bin":
            raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")
        return str(published[0].with_suffix(".pth"))

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", offline)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", cached)
    assert load_pretrained(fresh(), "owner/name") == []


def test_pretrained_fetches_timms_file(published, monkeypatch):
    asked = []

    def download(*args, **kwargs):
        asked.append((args, kwargs))
        return str(published[0])

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    model = create_model(NAME, pretrained=True, num_classes=10, **SMALL)
    repository = "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert asked == [((repository, "model.safetensors"), {"revision": None})]
    assert torch.equal(model.cls_token, published[1].cls_token)
    load_pretrained(model, "owner/other.name@v1.0")
    assert asked[1] == (("owner/other.name", "model.safetensors"), {"revision": "v1.0"})


def test_offline_says_what_was_wanted_and_what_to_do(hub):
    with pytest.raises(ConnectionError) as caught:
        create_model(NAME, pretrained=True, **SMALL)
    assert str(caught.value) == (
        "model.safetensors of timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k could not be "
        "fetched from huggingface.co (OSError: no route to host). With a copy, pass its path: "
        "create_model(name, pretrained=path) or load_pretrained(model, path). These come with "
        "the library and need no network: swin_collages, tnt_collages, vit_collages"
    )
    assert "timm/anything" in refuses(fresh(), "timm/anything", ConnectionError)


def test_the_hubs_own_offline_error_is_understood(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ConnectionError, match="model.safetensors of timm/no-such-model could not be fetched"
    ):
        load_pretrained(fresh(), "timm/no-such-model")


def test_without_the_hubs_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r'pip install "attnlib\[hub\]"'):
        load_pretrained(fresh(), "timm/x")


def test_without_safetensors(published, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(
        ImportError, match=r'safetensors is missing: pip install "attnlib\[hub\]"'
    ):
        load_pretrained(fresh(), published[0])
    load_pretrained(fresh(), published[0].with_suffix(".pth"))  # the other format needs none


def test_a_file_in_the_cache_is_held_to_its_checksum(published, monkeypatch, tmp_path):
    """The cache links snapshots/…/model.safetensors to blobs/SHA-256."""
    content = published[0].read_bytes()
    blob = tmp_path / "blobs" / hashlib.sha256(content).hexdigest()
    link = tmp_path / "snapshots" / "model.safetensors"
    for path in (blob, link):
        path.parent.mkdir()
    blob.write_bytes(content)
    link.symlink_to(Path("..") / "blobs" / blob.name)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args, **kwargs: str(link))
    assert load_pretrained(fresh(), "owner/name") == []
    blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # one bit
    message = refuses(fresh(), "owner/name")
    assert (
        "has another SHA-256 than the published file: delete" in message
        and blob.name in message
    )


def test_no_published_weights(registry):
    registry.register_model("a_model", VisionTransformer, **SMALL)
    with pytest.raises(
        ValueError, match=r"pretrained \(True\): no weights are published for a_model"
    ):
        create_model("a_model", pretrained=True)


# --- names ------------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(models, "MODELS", {})
    return models


@pytest.mark.parametrize(
    "name, near",
    [
        ("vit_bas_patch16_224", "vit_base_patch16_224"),
        ("vit_tiny_patch16", "vit_tiny_patch16_224"),
        ("swin_tiny", "swin_tiny_patch4_window7_224"),
        ("vit_small", "vit_small_patch16_224"),
        ("ViT_Huge_patch14_224", "vit_huge_patch14_224"),
        ("vit_base_patch23_224", "vit_base_patch32_224"),
    ],
)
def test_an_unknown_name_gets_the_nearest(name, near):
    with pytest.raises(
        ValueError,
        match=rf"name \('{name}'\) is not the name of a model; nearest names: .*{near}",
    ):
        create_model(name)


def test_a_name_like_no_other():
    with pytest.raises(
        ValueError,
        match=r"name \('zzz'\) is not the name of a model; list_models\(\) has all names",
    ):
        create_model("zzz")


def test_list_models_sorts_numbers_as_numbers_and_filters(registry):
    for name in ("net_10_a", "net_9_b", "net_9_a", "other"):
        registry.register_model(name, VisionTransformer)
    assert list_models() == ["net_9_a", "net_9_b", "net_10_a", "other"]
    assert list_models("net_*") == ["net_9_a", "net_9_b", "net_10_a"]
    assert list_models("*_[ab]") == list_models("net_*") and list_models("?ther") == ["other"]
    assert list_models("nothing*") == []


def test_registering_again_replaces_and_a_taken_name_is_refused(registry):
    registry.register_model("a", VisionTransformer, depth=1)
    registry.register_model(
        "a", type("VisionTransformer", (VisionTransformer,), {}), depth=2, **{"embed_dim": 48}
    )
    assert len(create_model("a", num_heads=3).blocks) == 2
    with pytest.raises(
        ValueError, match=r"name \('a'\) belongs to VisionTransformer already; Linear"
    ):
        registry.register_model("a", nn.Linear)


def test_arguments_override_those_of_the_name(registry):
    registry.register_model("a", VisionTransformer, img_size=64, patch_size=16, **SMALL)
    model = create_model("a", num_classes=3, in_chans=2, depth=1, drop_path_rate=0.1)
    assert model(torch.zeros(1, 2, 64, 64)).shape == (1, 3) and len(model.blocks) == 1
    assert create_model("a", img_size=(32, 48)).pos_embed.shape == (1, 7, 48)
    with pytest.raises(TypeError, match="no_such"):
        create_model("a", no_such=1)


def test_models_imports_no_chapter():
    found = re.findall(
        r"(?m)^\s*(?:from|import) (\.\S*|attnlib\S*)", Path(models.__file__).read_text()
    )
    assert found == [".backbone", ".convert", "._renamed"]


def test_the_older_names_are_the_same_functions():
    assert models.state_dict_of is unwrap_state_dict
    assert models.adapt_channels is adapt_input_conv


# --- a picture of one's own -------------------------------------------------------------------

timms = [name for name in list_models() if timm.is_model(name)]


@pytest.mark.parametrize("name", timms)
def test_preprocessing_is_timms(name):
    wanted = timm.data.resolve_data_config(
        pretrained_cfg=timm.get_pretrained_cfg(tagged(name)).to_dict()
    )
    model = create_model(name, device="meta")
    assert models.data_config(name) == model.data_config == wanted
    assert timm.data.resolve_model_data_config(model) == wanted
    assert model.pretrained_cfg["architecture"] == name
    assert model.pretrained_cfg["num_classes"] == model.num_classes
    timm.data.create_transform(**model.data_config)


def test_every_model_says_what_images_it_wants():
    """Those that timm does not have, too; what is said follows the changes of a model."""
    for name in ("mae_photographs", "autoformer_tiny", "autoformer_tiny_supernet"):
        model = create_model(name)
        resolved = timm.data.resolve_model_data_config(model)
        assert resolved == model.data_config == models.data_config(name)


@pytest.mark.parametrize("name", ["vit_collages", "swin_collages", "tnt_collages"])
def test_what_a_model_wants_follows_its_changes(name):
    model = create_model(name)
    before = model.data_config
    model.set_input_size((96, 128))
    model.reset_classifier(7)
    assert model.data_config == before | {"input_size": (3, 96, 128)}
    assert timm.data.resolve_model_data_config(model) == model.data_config
    assert model.pretrained_cfg["num_classes"] == 7
    assert before["input_size"] == (3, 64, 64)
    model = create_model(name, num_classes=3, in_chans=1, img_size=(32, 64))
    assert model.data_config["input_size"] == (1, 32, 64)
    assert model.data_config["mean"] == (0.5,) and model.pretrained_cfg["num_classes"] == 3
    with pytest.raises(ValueError, match="config wants images of 1 channels"):
        models.preprocess(model.data_config)


def test_means_are_adapted_like_the_weights():
    """A first layer for six channels repeats its weights, and one for gray adds them up."""
    config = models.data_config("swin_tiny_patch4_window7_224", in_chans=6)
    assert config["mean"] == (0.485, 0.456, 0.406) * 2
    config = models.data_config("swin_tiny_patch4_window7_224", in_chans=1)
    assert config["std"] == pytest.approx(((0.229 + 0.224 + 0.225) / 3,))


@given(
    height=st.integers(8, 700),
    width=st.integers(8, 700),
    name=st.sampled_from(["vit_tiny_patch16_224", "swin_base_patch4_window12_384"]),
)
@settings(max_examples=25, deadline=None)
def test_pixels_are_timms(height, width, name):
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    config = timm.data.resolve_data_config(
        pretrained_cfg=timm.get_pretrained_cfg(name).to_dict()
    )
    theirs = timm.data.create_transform(**config)(Image.fromarray(picture))
    ours = models.preprocess(name)(picture)
    torch.testing.assert_close(ours[0], theirs, rtol=0, atol=1e-6)


def test_a_picture_may_be_a_path_an_image_or_an_array(tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (300, 260, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "picture.png")
    transform = models.preprocess(NAME)
    found = [
        transform(kind)
        for kind in (picture, Image.fromarray(picture), tmp_path / "picture.png")
    ]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    gray = transform(Image.fromarray(picture[..., 0]))
    assert torch.equal(gray[:, 0], gray[:, 1])
    for wrong in (picture[..., 0], picture.astype(float), np.zeros((3, 8, 8), np.uint8)):
        with pytest.raises(ValueError, match="picture of shape"):
            transform(wrong)


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_gray_pictures_of_sixteen_bits(tmp_path, suffix):
    gray = np.random.default_rng(0).integers(0, 65536, (24, 40)).astype(np.uint16)
    gray[0, :4] = 0, 65535, 255 * 257, 128 * 257
    path = tmp_path / f"picture.{suffix}"
    if suffix == "pgm":  # which has the more significant byte first
        path.write_bytes(b"P5 40 24 65535 " + gray.astype(">u2").tobytes())
    else:
        Image.fromarray(gray).save(path)
    wanted = np.rint(gray / 65535 * 255).astype(np.uint8)
    kinds = [path, Image.open(path), Image.fromarray(gray)]
    for picture in kinds:
        found = np.asarray(models.open_picture(picture))
        assert np.array_equal(found, np.stack([wanted] * 3, axis=2))
    turned = Image.fromarray(gray)
    turned.getexif()[0x0112] = 6
    assert models.open_picture(turned).size == (24, 40)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pictures_of_an_unknown_range_are_refused(tmp_path, mode):
    picture = Image.new(mode, (8, 8), 1)
    picture.save(tmp_path / "picture.tif")
    for kind in (picture, tmp_path / "picture.tif"):
        with pytest.raises(ValueError, match=f"picture of mode '{mode}' may have any range"):
            models.open_picture(kind)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_upright(tmp_path, orientation):
    stored = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    y_of_first = {1: 0, 2: 0, 3: -1, 4: -1}  # EXIF 2.3, table 4: where row 0, column 0 belongs
    if orientation <= 4:
        wanted = stored if y_of_first[orientation] == 0 else stored[::-1]
        wanted = wanted[:, ::-1] if orientation in (2, 3) else wanted
    else:
        wanted = stored.transpose(1, 0, 2)
        wanted = wanted[:, ::-1] if orientation in (6, 7) else wanted
        wanted = wanted[::-1] if orientation in (7, 8) else wanted
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(stored).save(tmp_path / "picture.png", exif=exif)
    for kind in (tmp_path / "picture.png", Image.open(tmp_path / "picture.png")):
        found = models.open_picture(kind)
        assert np.array_equal(np.asarray(found), wanted)
        again = models.open_picture(found)  # which is upright
        assert np.array_equal(np.asarray(again), wanted)


def test_labels():
    names = models.class_names(NAME)
    assert len(set(names)) == 1000 and names[0] == "tench" and names[999] == "toilet tissue"
    with pytest.raises(ValueError, match="nearest names"):
        models.class_names("vit_tiny_patch16_223")


def test_classify_refuses_a_model_that_classifies_nothing():
    model = create_model("mae_photographs").eval()
    with pytest.raises(ValueError, match=r"model \(MaskedAutoencoder\) has no classifier"):
        models.classify(model, np.zeros((96, 96, 3), np.uint8))
    model = fresh(num_classes=0)
    with pytest.raises(ValueError, match=r"model \(VisionTransformer\) has no classifier"):
        models.classify(model, np.zeros((96, 96, 3), np.uint8))


def test_classify_gives_the_softmaxs_largest():
    torch.manual_seed(0)
    model = fresh(num_classes=4)
    nn.init.normal_(model.head.weight)
    picture = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    found = models.classify(model, picture, k=9, names="abcd")
    with torch.no_grad():
        wanted = model(models.preprocess(NAME)(picture)).softmax(-1)[0]
    assert [p for _, p in found] == sorted(wanted.tolist(), reverse=True)
    assert all(p == wanted["abcd".index(name)] for name, p in found)
    with pytest.raises(ValueError, match=r"names \(None\)"):
        models.classify(model, picture)
    for wrong in (VisionTransformer(32, 8, embed_dim=12, num_heads=1).eval(),):
        with pytest.raises(ValueError, match="data_config"):
            models.classify(wrong, picture)


def test_weights_that_do_not_come_with_the_library():
    with pytest.raises(FileNotFoundError, match="nothing.safetensors"):
        load_pretrained(fresh(), "attnlib/nothing")
