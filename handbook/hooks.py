"""Hooks that mkdocs calls while it builds the site: generated pages, and links from docs/ to other
files.

The site also contains pages of benchmarks/ and of the repository's root, which stay in their
folders. A link to a file that is not in the site becomes plain text.
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
PAGES_OUTSIDE_DOCS = {
    "benchmarks/README.md": "benchmarks/index.md",
    "benchmarks/corpus/README.md": "benchmarks/corpus.md",
    "benchmarks/world/README.md": "benchmarks/world.md",
    "benchmarks/preprocess.md": "benchmarks/preprocess.md",
    "benchmarks/torchvision.md": "benchmarks/torchvision.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Pages of the repository outside docs/, and their paths in the site."""
_LINK = re.compile(
    r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]"  # the link text may contain brackets
    r"\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)"
)
_ASSETS = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*\ssrc=[\"']?(?:https?:)?//[^\"'>\s]+"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preconnect|preload|icon|dns-prefetch))[^>]*"
    r"\shref=[\"']?(?:https?:)?//[^\"'>\s]+"
    r"|@import\s+(?:url\()?[\"']?(?:https?:)?//\S+|\burl\([\"']?(?:https?:)?//[^)]+"
)


def generated_pages() -> dict[str, str]:
    """Return the generated pages by their path in the site."""
    return {**command_pages(), POLICY: policy_page(), LIBRARY: library_page()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add generated pages and folders of pages to the navigation."""
    parts = {
        "Commands": [f"{COMMANDS}/index.md", *_command_navigation()],
        "Decisions": _list_pages("adr"),
        "Trace safety": _list_pages("lint"),
    }
    config.nav = _fill_navigation(config.nav, parts)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and the pages outside docs/."""
    from mkdocs.structure.files import File

    for site_path, text in generated_pages().items():
        files.append(File.generated(config, site_path, content=text))
    for source, site_path in PAGES_OUTSIDE_DOCS.items():
        files.append(File.generated(config, site_path, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Rewrite the links of a page for the site."""
    site_path = page.file.src_uri
    if site_path in generated_paths():
        return markdown
    source = next((s for s, p in PAGES_OUTSIDE_DOCS.items() if p == site_path), f"docs/{site_path}")
    return with_site_links(markdown, source=source, site_path=site_path)


def on_post_build(config: MkDocsConfig) -> None:
    """Fail the build if the site loads anything from another host."""
    from mkdocs.exceptions import PluginError

    if assets := foreign_assets(Path(config.site_dir)):
        raise PluginError("the site loads from elsewhere:\n" + "\n".join(assets))


def foreign_assets(site: Path) -> list[str]:
    """Return scripts, images, styles and fonts that a browser would load from another address."""
    return [
        f"{path.relative_to(site)}: {match}"
        for path in sorted(site.rglob("*"))
        if path.suffix in {".html", ".css", ".svg"}
        for match in _ASSETS.findall(path.read_text(errors="replace"))
    ]


def generated_paths() -> set[str]:
    """Return the paths of the generated pages."""
    return {POLICY, LIBRARY} | {f"{COMMANDS}/{name}.md" for name in ("index", *_names())}


def with_site_links(markdown: str, *, source: str, site_path: str) -> str:
    """Return a page with its links rewritten for the site.

    source: path of the page in the repository. site_path: its path in the site.
    """

    def replaced(match: re.Match[str]) -> str:
        label, link, anchor = match[1], match[2], match[3] or ""
        target = os.path.normpath(PurePosixPath(source).parent / link)
        if target.startswith("docs/"):
            target_path: str | None = target.removeprefix("docs/")
        else:
            target_path = PAGES_OUTSIDE_DOCS.get(target)
        if target_path is None:
            return label
        return f"[{label}]({os.path.relpath(target_path, PurePosixPath(site_path).parent)}{anchor})"

    return _LINK.sub(replaced, markdown)


def _names() -> tuple[str, ...]:
    from gate.cli import COMMANDS as NAMES

    return NAMES


def _command_navigation() -> list[dict[str, str]]:
    return [{name: f"{COMMANDS}/{name}.md"} for name in _names()]


def _list_pages(folder: str) -> list[str]:
    pages = sorted((ROOT / "docs" / folder).glob("[!R]*.md"))
    return [f"{folder}/README.md", *(f"{folder}/{page.name}" for page in pages)]


def _fill_navigation(nav: Any, parts: dict[str, Any]) -> Any:
    if isinstance(nav, list):
        return [_fill_navigation(item, parts) for item in nav]
    if isinstance(nav, dict):
        return {
            k: parts[k] if k in parts and not v else _fill_navigation(v, parts)
            for k, v in nav.items()
        }
    return nav
