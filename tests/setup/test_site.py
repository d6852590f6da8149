"""The pages build as a site without a warning, every link in it leads somewhere, and what is generated is current."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import ask

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


class Page(HTMLParser):
    """Its links, what it loads, and the places that can be linked to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.places: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id":
                self.places.add(str(value))
            elif name in ("href", "src"):
                self.targets.append(str(value))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="needs requirements/docs.lock")
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(built)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    return built


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file.resolve(): Page(file) for file in site.rglob("*.html")}


def test_every_page_is_in_the_site_and_its_menu(site: Path, pages: dict[Path, Page]) -> None:
    wanted = {page.relative_to(DOCS).with_suffix("") for page in DOCS.rglob("*.md")}
    assert {page.with_suffix("") for page in wanted if not (site / page).with_suffix(".html").exists()} == set()
    menu = {target.partition("#")[0] for target in pages[(site / "index.html").resolve()].targets}
    assert {str(page.with_suffix(".html")) for page in wanted} - menu - {"index.html"} == set()


def test_every_link_leads_to_a_file_and_a_place_that_are_there(pages: dict[Path, Page]) -> None:
    wrong = []
    for file, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme in ("http", "https", "data"):
                continue
            found = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            there = found.exists() and (not parts.fragment or parts.fragment in pages[found].places)
            wrong += (
                [] if there or (parts.fragment in ("", "furo-main-content") and found.exists()) else [(file, target)]
            )
    assert wrong == []
    assert sum(len(page.targets) for page in pages.values()) > 500


def test_the_site_loads_nothing_from_elsewhere(pages: dict[Path, Page]) -> None:
    texts = [file.read_text() for file in pages]
    assert [
        found for text in texts for found in re.findall(r"<(?:script|img)[^>]*src=\"(?:https?:)?//[^>]*", text)
    ] == []


@pytest.mark.parametrize("name", ["index", pytest.param("concepts", marks=pytest.mark.long)])
def test_a_browser_shows_the_pages_without_complaint(site: Path, tmp_path: Path, name: str) -> None:
    look = """(drawn) => ({
      heading: document.querySelector("h1").innerText,
      hidden: [...document.querySelectorAll("article img")].filter((image) => !drawn(image) || !image.naturalWidth).length,
      menu: document.querySelectorAll(".sidebar-tree a").length})"""
    found = ask(site / f"{name}.html", look, tmp_path)
    assert found["hidden"] == 0 and found["menu"] > 20
    assert found["heading"].startswith({"index": "areal-like", "concepts": "Concepts"}[name])


def generator(name: str) -> dict[str, object]:
    return runpy.run_path(str(DOCS / f"generate/{name}.py"))


@pytest.mark.parametrize("name", ["commands", "errors", "python"])
def test_generated_pages_are_current(name: str) -> None:
    made = generator(name)
    assert made["PAGE"].read_text() == made["page"](), f"run `python docs/generate/{name}.py`"  # type: ignore[attr-defined, operator]


@pytest.mark.parametrize("system", ["areal", "verl", "siirl", "trinity", "roll", "slime"])
def test_pages_for_who_comes_from_another_system_are_current(system: str) -> None:
    made = generator("coming_from")["page"](system)  # type: ignore[operator]
    assert (DOCS / f"coming_from/{system}.md").read_text() == made, "run `python docs/generate/coming_from.py`"


def test_pictures_are_current() -> None:
    for name, svg in generator("pictures")["pictures"]().items():  # type: ignore[operator]
        assert (DOCS / "images" / name).read_text() == svg, "run `python docs/generate/pictures.py`"
