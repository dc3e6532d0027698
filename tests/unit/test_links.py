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
PACKAGE = ROOT / "src" / "kubelend"
LAYERS = "|".join(sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
MODULE = re.compile(rf"(?<![\w/.*-])(?:{LAYERS})/[a-z_]+(?:/[a-z_]+)*(?![\w*<-]|/v1)")
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


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_that_a_document_names_exists(path):
    named = {PACKAGE / name for name in MODULE.findall(path.read_text("utf-8"))}
    assert {
        one for one in named if not one.is_dir() and not one.with_suffix(".py").exists()
    } == set()


def test_modules_are_found_in_tables_and_diagrams():
    text = "`core/ledger.py` (`apply`)\nparticipant A as api/app, api/clusters\nPOST /api/v1/x tests/kube/y"
    assert MODULE.findall(text) == ["core/ledger", "api/app", "api/clusters"]


def test_every_class_and_function_of_the_architecture_exists():
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    names = {one.split(".")[-1] for one in re.findall(r"`([A-Z]\w+(?:\.\w+)?)(?:\(\w*\))?`", text)}
    names |= set(re.findall(r"\b([a-z]+_[a-z_]+): ", text))
    source = "\n".join(one.read_text("utf-8") for one in PACKAGE.rglob("*.py"))
    assert names, "nothing was found"
    assert {
        name for name in names if not re.search(rf"^ *(class|(async )?def) {name}\b", source, re.M)
    } == set()
