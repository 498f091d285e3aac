"""Names of earlier versions.

A renamed name still works and warns; a name that left the library says what to use instead.
Each module with such a name hands its `__getattr__` to `former_name`.
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

RENAMED = {  # module: {name until version 0.2: name since version 0.3}
    "attention": {
        "MapRecorder": "_MapRecorder",
        "SameBackend": "_SameBackend",
        "SameTensors": "_SameTensors",
        "checkpoint_contexts": "_checkpoint_contexts",
        "cpu_flags": "_cpu_flags",
        "has_amx": "_has_amx",
        "narrow_bias": "_narrow_bias",
    },
    "autoformer": {
        "at_places": "shifted_digits",
        "check_elastic": "_check_elastic",
        "chosen": "best_subnet",
        "draw": "sample_distinct",
        "first_outputs": "_first_outputs",
        "random_subnet": "_random_subnet",
        "relative_index": "_relative_index",
        "renew_grid": "_renew_grid",
        "sample": "sample_subnet",
        "scores_of": "_scores_of",
        "search": "evolutionary_search",
    },
    "backbone": {
        "FORWARD_HOOKS": "_HOOKS",
        "SameParameters": "_SameParameters",
        "keep_evaluation": "_keep_evaluation",
        "refuse_weights": "_refuse_weights",
        "source_grid": "_source_grid",
    },
    "beit": {
        "adapt_tables": "_adapt_tables",
        "check_mask": "_check_mask",
        "check_masked": "_check_masked",
        "check_vocabulary": "_check_vocabulary",
        "gather_rows": "_gather_rows",
        "hide_rectangle": "_mask_rectangle",
        "init_beit": "_init_beit",
        "random_rectangle": "_random_rectangle",
        "renew_index": "_renew_index",
        "resize_beit_table": "_resize_beit_table",
        "without_pretraining": "_without_pretraining",
    },
    "cli": {
        "LICENSES": "_LICENSES",
        "NAME": "_NAME",
        "ORANGE": "_ORANGE",
        "REPORTED": "_REPORTED",
        "TOP1": "_TOP1",
        "UNKNOWN": "_UNKNOWN",
        "answer": "predict",
        "beside_timm": "_benchmark",
        "draw_map": "_draw_map",
        "last_window": "_last_window",
        "looked_at": "_attention_map",
        "middle": "_median_iqr",
        "parser": "_parser",
        "print_classes": "_print_classes",
        "print_facts": "_print_facts",
        "print_models": "_print_models",
        "print_times": "_print_times",
    },
    "convert": {
        "TABLES": "_TABLES",
        "drop_key_bias": "_drop_key_bias",
    },
    "cost": {
        "Diagnosis": "_Diagnosis",
        "FORMULAS": "_FORMULAS",
        "NO_PRODUCTS": "_NO_PRODUCTS",
        "OperatorWatch": "_OperatorWatch",
        "PRECISIONS": "_PRECISIONS",
        "Precision": "_Precision",
        "PrecisionChoice": "_PrecisionChoice",
        "REGIMES": "_REGIMES",
        "Recorder": "_Recorder",
        "SHAPES": "_SHAPES",
        "Saved": "_Saved",
        "measure_precisions": "_measure_precisions",
    },
    "data": {
        "BOOK_PARTS": "_BOOK_PARTS",
        "CAPTION_COLORS": "_CAPTION_COLORS",
        "MULTI30K": "_MULTI30K",
        "PLURALS": "_PLURALS",
        "STORIES": "_STORY_FILES",
    },
    "decoding": {
        "check_decoding": "_check_decoding",
        "vocabulary_size": "_vocabulary_size",
    },
    "deit": {
        "check_losses": "_check_losses",
    },
    "detr": {
        "InOrder": "IdentityMatcher",
        "PlacedAttention": "_PlacedAttention",
        "SetLoss": "SetCriterion",
        "check_fourths": "_check_fourths",
        "check_values": "_check_values",
        "frozen_conv": "_frozen_conv",
        "pad_targets": "_pad_targets",
        "residual_block": "_residual_block",
        "safe_ratio": "_safe_ratio",
        "sine_positions": "sine_position_embedding",
    },
    "efficient": {
        "check_grid": "_check_grid",
        "check_lengths": "_check_lengths",
        "iterated_inverse": "_iterated_inverse",
        "segment_means": "_segment_means",
    },
    "finetune": {
        "check_folding": "_check_folding",
        "check_pixels": "_check_pixels",
        "folded_config": "_folded_config",
        "hide": "mask_patches",
        "prepared": "normalize_for",
    },
    "flash": {
        "DTYPES": "_DTYPES",
        "OLDEST_TRITON": "_OLDEST_TRITON",
        "SHARED": "_SHARED_MEMORY",
        "WITH_EXTRA": "_WITH_EXTRA",
    },
    "gpt": {
        "CHOICES": "_CHOICES",
        "OF_2019": "GPT2_STYLE",
        "SCALINGS": "_SCALINGS",
        "boolean_mask": "_boolean_mask",
        "check_config": "_check_config",
        "check_prompt": "_check_prompt",
        "check_prompts": "_check_prompts",
        "check_published": "_check_published",
        "config_of": "config_from_transformers",
        "for_groups": "_for_groups",
        "make_norm": "_make_norm",
        "read_transformers": "_read_transformers",
        "rotation": "rope_cos_sin",
        "slowdown": "rope_scaling_factors",
        "tie_weights": "_tie_weights",
        "token_positions": "_token_positions",
    },
    "inference": {
        "EACH_TOKEN": "_EACH_TOKEN",
        "FastBlock": "_FastBlock",
        "FastCausalAttention": "_FastCausalAttention",
        "FastCrossAttention": "_FastCrossAttention",
        "FastSelfAttention": "_FastSelfAttention",
        "NORMS": "_NORMS",
        "PARTS": "_PARTS",
        "PackedConv": "_PackedConv",
        "REPLACEMENTS": "_REPLACEMENTS",
        "SMALL": "_SMALL",
        "WHOLE": "_WHOLE",
        "attend": "fast_attention",
        "can_pack": "_can_pack",
        "can_pack_resnet": "_can_pack_resnet",
        "can_replace": "_can_replace",
        "can_shorten": "_can_shorten",
        "check_packed": "_check_packed",
        "first_tokens": "_first_tokens",
        "has_global_hooks": "_has_global_hooks",
        "no_maps": "_refuse_maps",
        "pack_all": "_pack_all",
        "pack_feed_forward": "_pack_feed_forward",
        "pack_gpt_mlp": "_pack_gpt_mlp",
        "pack_mlp": "_pack_mlp",
        "replace": "replace_module",
    },
    "mae": {
        "check_hidden": "_check_masked_ratio",
        "check_noise": "_check_noise",
        "pieces": "photo_crops",
    },
    "models": {
        "CLASSIFIER": "_CLASSIFIER",
        "DATA": "DATA_CONFIGS",
        "FIRST_LAYER": "_FIRST_LAYER",
        "HALF": "INCEPTION",
        "IMAGENET": "_IMAGENET",
        "WEIGHT_FILES": "_WEIGHT_FILES",
        "labels": "class_names",
    },
    "panoptic": {
        "bounds": "masks_to_boxes",
        "check_masks": "_check_masks",
        "check_merge": "_check_merge",
        "check_segments": "_check_segments",
        "confident": "confident_queries",
        "join_stuff": "_join_stuff",
        "match_segments": "_match_segments",
        "merge": "panoptic_postprocess",
    },
    "recipes": {
        "VIT": "_VIT",
        "WINDOWS": "_WINDOWS",
        "WORDS": "_WORDS",
        "names_right": "translation_accuracy",
    },
    "scaling": {
        "COUNTS": "_COUNTS",
        "CUTS": "_SHARDED",
        "LocalRows": "_LocalRows",
        "OwnRandomness": "_OwnRandomness",
        "block_attention": "_block_attention",
        "block_gradients": "_block_gradients",
        "block_weights": "_block_weights",
        "check_shards": "_check_shards",
        "chunks_of": "sequence_chunks",
        "compute_seconds": "_compute_seconds",
        "cut_as_it_lies": "shard_contiguous",
        "cut_module": "shard_module",
        "enter": "copy_to_group",
        "go_round": "_ring_iter",
        "has_dropout": "_has_dropout",
        "join_group": "_join_group",
        "possible_plans": "_possible_plans",
        "rank_order": "_rank_order",
        "send_on": "_send_on",
        "summed": "sum_gradient",
        "visits": "ring_schedule",
    },
    "spatial": {
        "check_captions": "_check_captions",
        "check_odd": "_check_odd",
        "reduced_channels": "_reduced_channels",
    },
    "swin": {
        "block_shift": "_block_shift",
        "pad_images": "_pad_images",
        "resample_tables": "_resample_tables",
        "resampling_matrix": "_resampling_matrix",
        "source_window": "_source_window",
        "token_map": "_token_map",
    },
    "swinv2": {
        "check_pretrained_window": "_check_pretrained_window",
        "restore_trained_window": "_restore_trained_window",
        "sequential_attention": "_sequential_attention",
        "store_trained_window": "_store_trained_window",
    },
    "train": {
        "epochs": "shuffled_batches",
        "save_shards": "_save_shards",
        "share_buffers": "_share_buffers",
        "training_state": "_training_state",
        "without_decay": "_without_decay",
    },
    "transformer": {
        "ACTIVATIONS": "_ACTIVATIONS",
        "check_padding": "_check_padding",
        "check_rows": "_check_rows",
        "check_settings": "_check_settings",
        "layer_from_torch": "_layer_from_torch",
        "tie_embeddings": "_tie_embeddings",
    },
    "translation": {
        "check_side": "_check_side",
        "is_in": "_is_in",
        "keep_best": "_keep_best",
        "lowest_row": "_lowest_row",
        "marian_weights": "_marian_weights",
        "number_pieces": "_number_pieces",
        "own_tokens": "_own_tokens",
        "trim": "_trim",
    },
    "vit": {
        "learned_tokens": "_learned_tokens",
    },
    "vit_variants": {
        "DINOV2": "_DINOV2",
        "GIANT": "_GIANT",
        "QUICK": "_QUICK",
    },
    "windows": {
        "MAKES": "_MAKES",
        "PRODUCT_TILES": "_PRODUCT_TILES",
        "SEVERAL": "_SEVERAL",
        "can_fuse": "_can_fuse",
        "can_fuse_merging": "_can_fuse_merging",
        "compile_linear": "_compile_linear",
    },
}
MOVED = {  # module: {name until version 0.2: what to use instead}
    "attention": {"active_backend": "a kernel is a module that replaces another"},
    "backbone": {"torchvision_import": "use attnlib.backbone.requires"},
    "data": {"data_extra": "use attnlib.backbone.requires"},
    "decoding": {"check_count": "use attnlib.backbone.check_counts"},
    "detr": {"detection_extra": "use attnlib.backbone.requires"},
    "models": {"hub_extra": "use attnlib.backbone.requires"},
    "windows": {"window_backend": "use attnlib.windows.fuse_attention"},
}
MODULES = {  # name of a module until version 0.2: its name since version 0.3
    "modern": "vit_variants",
    "practice": "finetune",
}


def former_name(module: str, name: str) -> Any:
    """Find an attribute under the name that it had in an earlier version.

    Parameters
    ----------
    module : str
        Full name of the module, such as "attnlib.train".
    name : str
        The attribute that the module does not have.

    Returns
    -------
    object
        The attribute that has another name now. A `DeprecationWarning` tells the new name.

    Raises
    ------
    ImportError
        If the name left the library; the message says what to use instead.
    AttributeError
        If no version had the name.

    Examples
    --------
    >>> former_name("attnlib.train", "epochs").__name__
    'shuffled_batches'
    """
    part = module.rpartition(".")[2]
    if name in MOVED.get(part, {}):
        raise ImportError(f"{module}.{name} has left the library: {MOVED[part][name]}")
    if name not in RENAMED.get(part, {}):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    new_name = RENAMED[part][name]
    warnings.warn(f"{module}.{name} is called {new_name} since version 0.3",
                  DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(module), new_name)


def former_module(module: str, name: str) -> Any:
    """Find an attribute of a module under the name that the module had in an earlier version.

    Parameters
    ----------
    module : str
        The former name, a key of `MODULES`.
    name : str

    Returns
    -------
    object

    Raises
    ------
    AttributeError
        If the module has no such attribute.
    """
    new_module = MODULES[module]
    if name.startswith("__"):
        raise AttributeError(f"module 'attnlib.{module}' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"attnlib.{new_module}"), name)
    warnings.warn(f"attnlib.{module} is called attnlib.{new_module} since version 0.3",
                  DeprecationWarning, stacklevel=3)
    return found


def former_arguments(**names: str) -> Callable[[Function], Function]:
    """Let a function take keyword arguments under the names of an earlier version, too.

    Parameters
    ----------
    **names : str
        The new name of each former one.

    Returns
    -------
    callable
        A decorator; the function that it returns warns where a former name is used.
    """

    def decorate(function):
        @functools.wraps(function)
        def call(*args, **options):
            for former, name in names.items():
                if former in options and name not in options:
                    warnings.warn(
                        f"the argument {former} of {function.__name__} is called {name} since "
                        "version 0.3", DeprecationWarning, stacklevel=2)
                    options[name] = options.pop(former)
            return function(*args, **options)

        return call

    return decorate
