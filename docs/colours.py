"""The colours of the site: those of the pictures of the concepts, on light and on dark. Links alone are blue."""

from __future__ import annotations

from typing import Any, ClassVar

from pygments.style import Style
from pygments.token import Comment, Error, Generic, Keyword, Name, Number, Operator, Punctuation, String, Token

LIGHT = {
    "color-foreground-primary": "#1f2430",
    "color-foreground-secondary": "#545b69",
    "color-foreground-muted": "#636a78",
    "color-background-primary": "#ffffff",
    "color-background-secondary": "#fbfaf6",
    "color-background-hover": "#f2f0e9",
    "color-background-hover--transparent": "#f2f0e900",
    "color-background-border": "#e4e1d8",
    "color-brand-primary": "#2563b8",
    "color-brand-content": "#2563b8",
    "color-brand-visited": "#6b4fa0",
    "color-sidebar-link-text--top-level": "#3a414f",
    "color-api-name": "#1f2430",
    "color-api-pre-name": "#545b69",
    "color-inline-code-background": "#f2f0e9",
    "color-output-green": "#256a43",
    "color-output-cyan": "#1c6a73",
}
DARK = {
    "color-foreground-primary": "#dfe3ea",
    "color-foreground-secondary": "#a9b1be",
    "color-foreground-muted": "#939cab",
    "color-background-primary": "#14171c",
    "color-background-secondary": "#1a1e25",
    "color-background-hover": "#222831",
    "color-background-hover--transparent": "#22283100",
    "color-background-border": "#313945",
    "color-brand-primary": "#7fb0f5",
    "color-brand-content": "#7fb0f5",
    "color-brand-visited": "#b99df2",
    "color-sidebar-link-text--top-level": "#c3cad5",
    "color-api-name": "#dfe3ea",
    "color-api-pre-name": "#a9b1be",
    "color-inline-code-background": "#222831",
    "color-output-green": "#8ed0a5",
    "color-output-cyan": "#82c8d1",
}


def _code(ink: str, quiet: str, keyword: str, string: str, number: str, bad: str) -> dict[Any, str]:
    """Choose the colours of code: no blue and no underline, which links have."""
    return {
        Token: ink,
        Comment: f"italic {quiet}",
        Keyword: keyword,
        Operator: quiet,
        Operator.Word: keyword,
        Punctuation: ink,
        Name: ink,
        Name.Class: f"bold {ink}",
        Name.Function: f"bold {ink}",
        Name.Decorator: number,
        Name.Tag: keyword,
        Number: number,
        String: string,
        String.Escape: number,
        Generic.Heading: f"bold {ink}",
        Generic.Prompt: quiet,
        Generic.Output: ink,
        Generic.Inserted: string,
        Generic.Deleted: bad,
        Generic.Error: bad,
        Generic.Emph: "italic",
        Generic.Strong: "bold",
        Error: ink,
    }


class LightCode(Style):
    """Code on light."""

    background_color = "#f7f5ef"
    styles: ClassVar = _code("#1f2430", "#636a78", "#6b4fa0", "#256a43", "#8f4c17", "#b3261e")


class DarkCode(Style):
    """Code on dark."""

    background_color = "#1b2028"
    styles: ClassVar = _code("#dfe3ea", "#98a1b0", "#c3a9f4", "#8ed0a5", "#e9b37d", "#f28b82")
