"""The measurements for many devices run, and their records hold what the page says."""

import json

import pytest

from attnlib.train import read_record
from benchmarks import scaling


@pytest.mark.slow
def test_the_parts_run(tmp_path):
    scaling.main(["links", "--tiny", "--out", str(tmp_path)])
    scaling.main(["traffic", "--tiny", "--out", str(tmp_path)])
    links = json.loads((tmp_path / "scaling_links.json").read_text())
    assert links["tiny"] and set(links["calls"]) == {"message", "all-reduce"}
    rows = json.loads((tmp_path / "scaling_traffic.json").read_text())["rows"]
    assert [row["ranks"] for row in rows] == [4, 64]
    for row in rows:  # 64 rows on 4 and on 64 ranks
        assert row["held"] * row["ranks"] == row["parameters"]


def test_a_line_through_a_line():
    sizes = [100, 10_000, 1_000_000]
    alpha, beta, miss = scaling.fitted(sizes, [1e-3 + 2e-9 * n for n in sizes])
    assert alpha == pytest.approx(1e-3) and beta == pytest.approx(2e-9) and miss < 1e-9
    assert scaling.fitted(sizes, [1e-3, 1e-3, 2e-3])[2] < 0.01
    assert scaling.fitted(sizes, [1e-3, 5e-3, 6e-3])[2] > 0.3  # no line


def test_unknown_parts_are_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        scaling.main(["speed", "--out", str(tmp_path)])
    assert "invalid choice: 'speed'" in capsys.readouterr().err


def test_the_records_are_whole():
    traffic, links = read_record("scaling_traffic"), read_record("scaling_links")
    assert not traffic["tiny"] and not links["tiny"]
    assert {row["ranks"] for row in traffic["rows"]} == {4, 64, 512}
    assert len(links["calls"]["message"]["least"]) == len(links["bytes"]) == 17
