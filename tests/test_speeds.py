"""The page of speeds shows what the records hold."""

import json

import chapters
import speeds

RECORD = {
    "device": "a processor",
    "rows": [
        {"pass": "forward", "batch": 8, "compiled": False, "mode": "float32"}
        | {"library": "attnlib", "ms": 11.2},
        {"pass": "forward", "batch": 8, "compiled": False, "mode": "float32"}
        | {"library": "timm", "ms": 12.4, "ratio": 0.9, "quartiles": [0.85, 0.95]},
        {"pass": "forward", "batch": 8, "compiled": True, "mode": "float32"}
        | {"library": "timm", "ms": 1.0, "ratio": 9.0, "quartiles": [8.0, 9.5]},
    ],
}


def test_a_table_compares_the_libraries(tmp_path):
    folder = tmp_path / speeds.RECORDS
    folder.mkdir(parents=True)
    (folder / "vit_cpu.json").write_text(json.dumps(RECORD))
    assert speeds.listed(tmp_path).splitlines() == [
        "",
        "## ViT-S on a processor",
        "",
        "**Forward, batch 8**",
        "",
        "| ms | float32 | float32, medium | bfloat16 |",
        "|---|---|---|---|",
        "| attnlib | 11 |  |  |",
        "| timm | 12; 0.90 (0.85–0.95) |  |  |",
    ]


def test_every_recorded_model_is_shown():
    page = speeds.listed(chapters.ROOT)
    for title in speeds.MODELS.values():
        assert f"## {title} on " in page
