"""What mkdocs calls while it builds the site: pages of the code, links between docs/ and the rest.

Pages stay where a reader of the repository finds them; the site shows those of benchmarks/ and of
the root, too. A link to a file that the site does not have becomes its name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from handbook.commands import FOLDER as COMMANDS
from handbook.commands import command_pages
from handbook.library import PAGE as LIBRARY
from handbook.library import library_page
from handbook.policy import PAGE as POLICY
from handbook.policy import policy_page

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
BESIDE = {
    "benchmarks/README.md": "benchmarks/index.md",
    "benchmarks/corpus/README.md": "benchmarks/corpus.md",
    "benchmarks/world/README.md": "benchmarks/world.md",
    "benchmarks/preprocess.md": "benchmarks/preprocess.md",
    "benchmarks/torchvision.md": "benchmarks/torchvision.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Pages of the repository outside of docs/, and where the site has them."""
_LINK = re.compile(
    r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]"  # the words, in which there may be brackets
    r"\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)"
)
_ASSETS = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*\ssrc=[\"']?(?:https?:)?//[^\"'>\s]+"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preconnect|preload|icon|dns-prefetch))[^>]*"
    r"\shref=[\"']?(?:https?:)?//[^\"'>\s]+"
    r"|@import\s+(?:url\()?[\"']?(?:https?:)?//\S+|\burl\([\"']?(?:https?:)?//[^)]+"
)


def generated() -> dict[str, str]:
    """The pages that are made from the code, by their place in the site."""
    return {**command_pages(), POLICY: policy_page(), LIBRARY: library_page()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """What is made from the code, or is a folder of pages, gets its place in the navigation."""
    parts = {
        "Commands": [f"{COMMANDS}/index.md", *_nav_of_commands()],
        "Decisions": _pages_of("adr"),
        "Trace safety": _pages_of("lint"),
    }
    config.nav = _filled(config.nav, parts)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages of the code, and those beside docs/."""
    from mkdocs.structure.files import File

    for place, text in generated().items():
        files.append(File.generated(config, place, content=text))
    for source, place in BESIDE.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Links of a page of the repository, as the site has their targets."""
    place = page.file.src_uri
    if place in generated_places():
        return markdown
    source = next((s for s, p in BESIDE.items() if p == place), f"docs/{place}")
    return with_site_links(markdown, source=source, place=place)


def on_post_build(config: MkDocsConfig) -> None:
    """Nothing is loaded from elsewhere, or the build fails."""
    from mkdocs.exceptions import PluginError

    if found := foreign_assets(Path(config.site_dir)):
        raise PluginError("the site loads from elsewhere:\n" + "\n".join(found))


def foreign_assets(site: Path) -> list[str]:
    """Scripts, pictures, styles and fonts that a browser would fetch from another address."""
    return [
        f"{path.relative_to(site)}: {match}"
        for path in sorted(site.rglob("*"))
        if path.suffix in {".html", ".css", ".svg"}
        for match in _ASSETS.findall(path.read_text(errors="replace"))
    ]


def generated_places() -> set[str]:
    """Where the pages are that are made from the code."""
    return {POLICY, LIBRARY} | {f"{COMMANDS}/{name}.md" for name in ("index", *_names())}


def with_site_links(markdown: str, *, source: str, place: str) -> str:
    """A page with its links as the site has them. `source`: where the page lies in the repository;
    `place`: where in the site."""

    def replaced(match: re.Match[str]) -> str:
        words, link, anchor = match[1], match[2], match[3] or ""
        target = os.path.normpath(PurePosixPath(source).parent / link)
        if target.startswith("docs/"):
            there: str | None = target.removeprefix("docs/")
        else:
            there = BESIDE.get(target)
        if there is None:
            return words
        return f"[{words}]({os.path.relpath(there, PurePosixPath(place).parent)}{anchor})"

    return _LINK.sub(replaced, markdown)


def _names() -> tuple[str, ...]:
    from gate.cli import COMMANDS as NAMES

    return NAMES


def _nav_of_commands() -> list[dict[str, str]]:
    return [{name: f"{COMMANDS}/{name}.md"} for name in _names()]


def _pages_of(folder: str) -> list[str]:
    pages = sorted((ROOT / "docs" / folder).glob("[!R]*.md"))
    return [f"{folder}/README.md", *(f"{folder}/{page.name}" for page in pages)]


def _filled(nav: Any, parts: dict[str, Any]) -> Any:
    if isinstance(nav, list):
        return [_filled(item, parts) for item in nav]
    if isinstance(nav, dict):
        return {k: parts[k] if k in parts and not v else _filled(v, parts) for k, v in nav.items()}
    return nav
