"""A strict reader of the pages that Eyas writes, for the tests of reports."""

from __future__ import annotations

from html.parser import HTMLParser

LOADING = {"src", "srcset", "action", "data", "poster", "xlink:href", "background", "formaction", "ping"}
VOID = {"meta", "br", "img", "input", "link"}
DRAWN = {"d", "x", "y", "cx", "width", "height", "viewbox"}


class Page(HTMLParser):
    """Raises AssertionError where tags do not balance, an id stands twice, something would be loaded or run by an
    attribute, or a drawing has a number that is none."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.labels: list[str] = []
        self.values: list[float] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, f"left open: {self.open}"
        assert len(self.ids) == len(set(self.ids)), "an id stands twice"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, said in attrs:
            value = said or ""
            assert name not in LOADING and not name.startswith("on"), f"<{tag} {name}={value}>"
            assert name not in DRAWN or not ("nan" in value or "inf" in value), f"<{tag} {name}={value}>"
            if name == "id":
                self.ids.append(value)
            elif name == "href":
                assert tag == "a" and value
                self.links.append(value)
            elif name == "aria-label":
                self.labels.append(value)
            elif tag == "data" and name == "value":
                self.values.append(float(value or "nan"))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            self.scripts.append(data)
        elif "style" not in self.open:
            self.text.append(data)

    @property
    def said(self) -> str:
        """What a reader sees, in one line."""
        return " ".join("".join(self.text).split())
