"""What mkdocs asks while it builds the site (`hooks` in mkdocs.yml): pages in docs/zh are Chinese, theme and all."""

from __future__ import annotations

from typing import Any

CHINESE = "zh/"


def on_page_context(context: dict[str, Any], page: Any, config: Any, nav: Any) -> dict[str, Any]:
    """Of two kinds of glyphs for one character, a browser shows those of the language that the page says it is in."""
    config.theme["language"] = "zh" if page.file.src_uri.startswith(CHINESE) else "en"
    return context
