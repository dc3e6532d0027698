"""Whoever follows a link in the documents arrives somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *ROOT.glob("docs/**/*.md"),
    ]
)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(\s*([^)\s]+)[^)]*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)


def links(text):
    """Where the links of a document lead, but for those out of the repository and those in examples."""
    targets = [inline or reference for inline, reference in LINK.findall(CODE.sub("", text))]
    return [target for target in targets if not ELSEWHERE.match(target)]


def heading_anchors(text):
    """The fragments that a page of this text has, named as forges name them."""
    titles = re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(path):
    lost = []
    for target in links(path.read_text("utf-8")):
        name, _, fragment = target.partition("#")
        page = path.parent / name if name else path
        known = page.exists() and page.resolve().is_relative_to(ROOT)
        if not known or (fragment and fragment not in heading_anchors(page.read_text("utf-8"))):
            lost.append(target)
    assert lost == []


def test_links_are_found_in_every_form_but_not_in_examples():
    text = (
        "[a](b.md) [![c](d.png)](e/) [f]\n[f]: g.md#h\n[i](https://j)\n`[k](l)`\n```\n[m](n)\n```\n"
    )
    assert links(text) == ["b.md", "d.png", "e/", "g.md#h"]
    assert len(links((ROOT / "README.md").read_text("utf-8"))) > 5
