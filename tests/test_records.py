"""Records of long runs: they are complete, and say which machine and commit they come from."""

import json
import subprocess

import pytest
import torch

from benchmarks.records import machine, write_record


@pytest.mark.parametrize("result", [{}, {"runs": [{"loss": 0.1, "seed": 3}], "title": "ä"}])
def test_records_come_back_with_their_machine(tmp_path, result):
    path = tmp_path / "deep" / "record.json"
    path.parent.mkdir()
    path.write_text("older")
    write_record(path, result)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [p.name for p in path.parent.iterdir()] == ["record.json"]
    about = machine()
    assert found == {**about, **result} and about["torch"] == torch.__version__


def test_the_commit_is_none_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert machine()["commit"] is None


def test_the_commit_of_a_record_is_not_that_of_another_repository(tmp_path, monkeypatch):
    here = machine()["commit"]
    monkeypatch.chdir(tmp_path)
    identity = "-c", "user.name=a", "-c", "user.email=a@b"
    for command in ["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "x"]:
        subprocess.run(["git", *command], check=True)
    assert machine()["commit"] == here
