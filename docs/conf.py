"""Builds these pages as a site with Sphinx: `make docs`.

The pages are plain Markdown, for GitHub too; the site's menu is made of the links of index.md, chapter by chapter.
"""

import re

from sphinx.application import Sphinx

project = "areal-like"
extensions = ["myst_parser"]
root_doc = "index"
exclude_patterns = ["site"]
html_theme = "furo"
html_title = project
html_show_copyright = False
html_copy_source = False
myst_heading_anchors = 4
highlight_language = "text"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _add_menu)


def _add_menu(app: Sphinx, page: str, source: list[str]) -> None:
    if page != root_doc:
        return
    for chapter in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
        caption = chapter.partition("\n")[0]
        pages = re.findall(r"^\| \[[^]]*\]\(([\w/]+)\.md\)", chapter, re.MULTILINE)
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])
