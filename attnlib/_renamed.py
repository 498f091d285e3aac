"""Names of earlier versions.

A renamed name still works and warns; a name that left the library says what to use instead.
Each module with such a name hands its `__getattr__` to `former_name`.
"""

import difflib
import functools
import importlib
import inspect
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
        "check_elastic": "_check_elastic",
        "chosen": "_best_subnet",
        "draw": "sample_distinct",
        "first_outputs": "_first_outputs",
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
        "TABLE": "_TABLE",
        "adapt_tables": "_adapt_tables",
        "bias_table": "_bias_table",
        "check_mask": "_check_masked",
        "check_masked": "_check_num_masked",
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
        "FORMULAS": "_FORMULAS",
        "NO_PRODUCTS": "_NO_PRODUCTS",
        "OperatorWatch": "_OperatorWatch",
        "PRECISIONS": "_PRECISIONS",
        "REGIMES": "_REGIMES",
        "Recorder": "_Recorder",
        "SHAPES": "_SHAPES",
        "measure_precisions": "_measure_precisions",
    },
    "data": {
        "BOOK_PARTS": "_BOOK_PARTS",
        "CAPTION_COLORS": "_CAPTION_COLORS",
        "MULTI30K": "_MULTI30K",
        "PLURALS": "_PLURALS",
    },
    "decoding": {
        "check_decoding": "_check_decoding",
        "vocabulary_size": "_vocabulary_size",
    },
    "deit": {
        "check_losses": "_check_losses",
    },
    "detr": {
        "AnchorDETR": "BoxQueryDETR",
        "InOrder": "IdentityMatcher",
        "PlacedAttention": "_PlacedAttention",
        "SetLoss": "SetCriterion",
        "anchor_sines": "_sine_box_embedding",
        "check_fourths": "_check_multiples_of_four",
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
        "check_prompt": "_check_input",
        "check_prompts": "_check_generation",
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
        "attend": "fast_attention",
        "can_pack": "_can_pack",
        "can_pack_resnet": "_can_pack_resnet",
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
        "check_noise": "_check_noise",
        "init_weights": "_init_weights",
        "normalized": "normalize_patches",
        "positions": "_position_embeddings",
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
        "check_masks": "_check_masks",
        "check_merge": "_check_merge",
        "check_segments": "_check_segments",
        "confident": "confident_queries",
        "join_stuff": "_join_stuff",
        "match_segments": "_match_segments",
        "mean_quality": "_mean_quality",
        "merge": "panoptic_postprocess",
        "quality": "_class_quality",
    },
    "recipes": {
        "VIT": "_VIT",
        "WORDS": "_WORDS",
        "names_right": "translation_accuracy",
        "small_run": "_small_run",
    },
    "scaling": {
        "COUNTS": "_COUNTS",
        "CUTS": "_SHARDED",
        "LocalRows": "_LocalRows",
        "OwnRandomness": "_OwnRandomness",
        "activations_of": "_activation_bytes",
        "block_attention": "_block_attention",
        "block_gradients": "_block_gradients",
        "block_weights": "_block_weights",
        "check_shards": "_check_shards",
        "chunks_of": "sequence_chunks",
        "compute_seconds": "_compute_seconds",
        "cut_module": "shard_module",
        "enter": "copy_to_group",
        "go_round": "_ring_iter",
        "has_dropout": "_has_dropout",
        "memory_of": "memory_per_device",
        "operations_of": "flops_per_token",
        "parameters_of": "_parameter_counts",
        "possible_plans": "_possible_plans",
        "rank_order": "_rank_order",
        "seconds_of": "step_time",
        "send_on": "_send_on",
        "summed": "sum_gradient",
        "visits": "ring_schedule",
    },
    "spatial": {
        "Drawing": "DrawOutput",
        "PlaceEncoder": "ConvEncoder",
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
        "prepare": "_prepare",
        "resume": "_resume",
        "save_shards": "_save_shards",
        "share_buffers": "_share_buffers",
        "train_step": "_train_step",
        "training_state": "_training_state",
        "without_decay": "_without_decay",
    },
    "transformer": {
        "ACTIVATIONS": "_ACTIVATIONS",
        "check_rows": "_check_rows",
        "layer_from_torch": "_layer_from_torch",
        "tie_embeddings": "_tie_embeddings",
    },
    "translation": {
        "check_side": "_check_side",
        "marian_weights": "_marian_weights",
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
    "attention": {
        "active_backend": "a kernel is a module that replaces another",
    },
    "autoformer": {
        "at_places": "it is shifted_digits on the page nbs/44_autoformer",
        "random_search": "it is defined on the page nbs/44_autoformer",
        "random_subnet": "it is defined on the page nbs/44_autoformer",
        "sandwich_loss": "it is defined on the page nbs/44_autoformer",
        "small_supernet": "it is defined on the page nbs/44_autoformer",
        "uniform_loss": "it is defined on the page nbs/44_autoformer",
    },
    "backbone": {
        "torchvision_import": "use attnlib.backbone.requires",
    },
    "data": {
        "STORIES": "it is in benchmarks/corpora.py of the repository",
        "data_extra": "use attnlib.backbone.requires",
        "encode_captions": "it is in benchmarks/corpora.py of the repository",
        "flickr8k": "it is in benchmarks/corpora.py of the repository",
        "text_corpus": "it is in benchmarks/corpora.py of the repository",
    },
    "decoding": {
        "check_count": "use attnlib.backbone.check_counts",
    },
    "detr": {
        "detection_extra": "use attnlib.backbone.requires",
    },
    "finetune": {
        "fine_tune": "use train.fit with lr_scale=layer_scales(model), "
                     "loss_fn=MixupCrossEntropy(model.num_classes), and ema=0.9",
        "moving_average": "use train.fit(ema=...), or PyTorch's AveragedModel",
    },
    "gpt": {
        "min_p_filter": "use attnlib.decoding.min_p_filter",
    },
    "inference": {
        "WHOLE": "`optimize_for_inference` knows the classes itself",
        "can_replace": "use attnlib.backbone.is_as_built",
    },
    "mae": {
        "check_hidden": "`MaskedAutoencoder.forward` checks this itself",
        "harmonic_fill": "it is defined on the page nbs/40_mae",
        "hidden_pixels": "it is masked_pixels on the page nbs/40_mae",
        "kernel_fill": "it is defined on the page nbs/40_mae",
        "last_block": "it is defined on the page nbs/40_mae",
        "lean_loss": "it is defined on the page nbs/40_mae",
        "linear_fill": "it is defined on the page nbs/40_mae",
        "pieces": "it is photo_crops on the page nbs/40_mae",
        "stack": "append attnlib.vit.Block to nn.Sequential in a loop",
    },
    "models": {
        "hub_extra": "use attnlib.backbone.requires",
    },
    "panoptic": {
        "bounds": "it is called masks_to_boxes and defined on the page nbs/43_panoptic",
        "label_maps": "it is defined on the page nbs/43_panoptic",
        "masks_to_boxes": "it is defined on the page nbs/43_panoptic",
        "panoptic_scenes": "it is defined on the page nbs/43_panoptic",
        "small_panoptic": "it is defined on the page nbs/43_panoptic",
    },
    "recipes": {
        "WINDOWS": "use the row of attnlib.recipes.SMALL",
        "cross_entropy": "use classification_loss(model, batch), which returns sum and count",
        "distill": "use train.fit with loss_fn=deit.DistillationLoss(teacher)",
        "train_processes": "it is defined on the page nbs/33_swinv2",
    },
    "scaling": {
        "Sleeper": "it is defined on the page nbs/55_scaling",
        "Workers": "it is defined on the page nbs/55_scaling",
        "bytes_sent": "it is defined on the page nbs/55_scaling",
        "cut_as_it_lies": "it is defined on the page nbs/55_scaling",
        "failure": "it is cause_of_failure on the page nbs/55_scaling",
        "join_group": "it is defined on the page nbs/55_scaling",
        "local": "it is defined on the page nbs/55_scaling",
        "nap_lesson": "it is defined on the page nbs/55_scaling",
        "reduce_lesson": "it is defined on the page nbs/55_scaling",
        "ring_lesson": "it is defined on the page nbs/55_scaling",
        "stage_lesson": "it is defined on the page nbs/55_scaling",
        "states_lesson": "it is defined on the page nbs/55_scaling",
        "tensor_lesson": "it is defined on the page nbs/55_scaling",
        "wire_bytes": "it is defined on the page nbs/55_scaling",
    },
    "spatial": {
        "changed_attention": "it is defined on the page nbs/45_spatial",
        "weight_on_objects": "it is defined on the page nbs/45_spatial",
    },
    "train": {
        "machine": "it is in benchmarks/records.py of the repository",
        "write_record": "it is in benchmarks/records.py of the repository",
    },
    "transformer": {
        "can_read": "use attnlib.seq2seq.can_read",
        "check_settings": "use attnlib.backbone.check_counts",
    },
    "translation": {
        "answer_kind": "it is in benchmarks/translation.py of the repository",
        "direction_accuracy": "compare the answers of translate_numbers with number_words",
        "is_in": "it is in benchmarks/translation.py of the repository",
        "keep_best": "attnlib.train.fit keeps the best weights",
        "length_run": "it is in benchmarks/translation.py of the repository",
        "lowest_row": "attnlib.train.fit keeps the best weights",
        "multi30k_run": "benchmarks/multi30k.py of the repository trains translators",
        "number_pieces": "it is in benchmarks/translation.py of the repository",
        "number_run": "benchmarks/translation.py of the repository has such runs",
        "number_scores": "compare the answers of translate_numbers with number_words",
        "own_tokens": "it is in benchmarks/translation.py of the repository",
        "sparse_numbers": "it is in benchmarks/translation.py of the repository",
    },
    "windows": {
        "window_backend": "use attnlib.windows.fuse_attention",
    },
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


class former_attribute:
    """An attribute of a class under the name that it had in an earlier version.

    Parameters
    ----------
    former, name : str
        The former name and the new one.
    """

    def __init__(self, former: str, name: str):
        self.former = former
        self.name = name

    def __get__(self, owner: Any, owner_class: type | None = None) -> Any:
        if owner is None:
            return self
        warnings.warn(f"{self.former} of {type(owner).__name__} is called {self.name} since "
                      "version 0.3", DeprecationWarning, stacklevel=2)
        return getattr(owner, self.name)


def former_arguments(**names: str) -> Callable[[Function], Function]:
    """Let a function take keyword arguments under the names of an earlier version, too.

    Parameters
    ----------
    **names : str
        The new name of each former one.

    Returns
    -------
    callable
        A decorator; the function that it returns warns where a former name is used, and its
        TypeError for a name that it does not know has the nearest one.
    """

    def decorate(function):
        own_name = function.__qualname__.rpartition("<locals>.")[2].removesuffix(".__init__")
        parameters = inspect.signature(function).parameters
        takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())

        @functools.wraps(function)
        def call(*args, **options):
            for former, name in names.items():
                if former in options and name not in options:
                    warnings.warn(
                        f"the argument {former} of {own_name} is called {name} since version "
                        "0.3", DeprecationWarning, stacklevel=2)
                    options[name] = options.pop(former)
            for name in options:
                near = difflib.get_close_matches(name, parameters, n=1)
                if near and name not in parameters and not takes_any:
                    raise TypeError(f"{own_name}() got an unexpected keyword argument "
                                    f"{name!r}; the nearest is {near[0]!r}")
            return function(*args, **options)

        return call

    return decorate
