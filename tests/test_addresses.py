"""The repository's address and the version stand in one place; the others are held to it."""

import re
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

import attnlib

ROOT = Path(__file__).parent.parent
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
REPOSITORY, BOOK = URLS["Repository"], URLS["Book"]
PROSE = "README.md CONTRIBUTING.md CHANGELOG.md CITATION.cff _config.yml book/index.md"
FILES = [
    *(ROOT / name for name in PROSE.split()),
    *sorted((ROOT / "nbs").glob("*.ipynb")),
    *sorted((ROOT / "book" / "api").glob("*.md")),
    *sorted((ROOT / ".github").rglob("*.yml")),
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_address_is_the_address(path):
    text = path.read_text()
    name = REPOSITORY.rsplit("/", 1)[1]
    for found in re.findall(rf"https?://github\.com/[\w.-]+/{name}\b", text):
        assert found == REPOSITORY
    for found in re.findall(r"colab\.research\.google\.com/github/([\w.-]+/[\w.-]+)", text):
        assert found == REPOSITORY.split("github.com/")[1]
    for found in re.findall(rf"https?://[\w.-]+\.github\.io/{name}\b", text):
        assert found == BOOK


def test_the_book_points_to_the_repository():
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    assert config["repository"]["url"] == REPOSITORY


def test_the_page_for_a_wrong_address_starts_from_the_book():
    config = yaml.safe_load((ROOT / "_config.yml").read_text())["sphinx"]["config"]
    base = urlsplit(BOOK).path + "/"
    assert config["notfound_urls_prefix"] == base
    assert f'<base href="{base}" />' in config["notfound_context"]["metatags"]
    assert config["ogp_site_url"] == f"{BOOK}/"


def test_citation_carries_version_and_address():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == attnlib.__version__
    assert citation["repository-code"] == REPOSITORY and citation["url"] == BOOK
    assert citation["license"] == "Apache-2.0"
