"""The check of the built site finds each defect it looks for, and none where there is none."""

import pytest

from defects import Page, api_defects, defects, public_names


def sample(v: int, A: int) -> None:
    """One function.

    >>> 1 + 1
    2
    """


class Layer:
    """One class, with a member."""

    size: int

    def __init__(self, width: int):
        self.size = width


NAMES = {"taut.sample": sample, "taut.Layer": Layer}
GOOD = """<html><body><a href="../index.html#top">Home</a> <a href="https://elsewhere.org">out</a>
<h3 id="taut.sample" class="doc doc-heading">sample</h3>
<div class="doc-signature highlight"><pre><code>sample(v: int, A: int)</code></pre></div>
<div class="doc doc-contents"><p>One function: (*batch, K).</p>
<pre><code>&gt;&gt;&gt; 1 + 1
2</code></pre></div>
<h3 id="taut.Layer" class="doc doc-heading">Layer</h3>
<div class="doc-signature highlight"><pre><code>Layer(width: int)</code></pre></div>
<h4 id="taut.Layer.size" class="doc doc-heading">size</h4>
</body></html>"""


def found(folder, text: str) -> list[str]:
    (folder / "api").mkdir(exist_ok=True)
    (folder / "index.html").write_text('<h1 id="top">taut</h1><a href="api/">API</a>')
    (folder / "api" / "index.html").write_text(text, encoding="utf-8")
    return defects(folder, NAMES)


def test_a_page_without_defects(tmp_path):
    assert found(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("<pre><code>&gt;", "<blockquote><p>&gt;", "a quote"),
        ("<pre><code>&gt;", "<p>&gt;", ">>> in the text"),
        ("<pre><code>&gt;&gt;&gt; 1 + 1", "<pre><code>", "an example of taut.sample is not shown"),
        ("(*batch, K)", "(<em>batch, K)</em>", "italics in the description of taut.sample"),
        ("(*batch, K)", "`(*batch, K)`", "` in the text"),
        ("Layer(width: int)", "Layer", "the signature of taut.Layer lacks width"),
        ("v: int, A: int", "v: Activation", "the signature of taut.sample lacks A"),
        ('id="taut.sample"', 'id="sample"', "taut.sample is missing"),
        ('id="taut.Layer.size"', "", "taut.Layer.size is missing"),
        ("../index.html#top", "../nowhere.html", "dead link: ../nowhere.html"),
        ("../index.html#top", "../index.html#bottom", "dead link: no such place"),
        ("../index.html#top", "#bottom", "dead link: no such place"),
    ],
)
def test_every_defect_is_found(tmp_path, good, bad, message):
    assert good in GOOD
    texts = found(tmp_path, GOOD.replace(good, bad))
    assert any(message in text for text in texts), texts


def test_a_site_without_an_api_page(tmp_path):
    (tmp_path / "index.html").write_text("<h1>taut</h1>")
    assert defects(tmp_path, NAMES) == [".: there is no page api"]


def test_an_empty_page_lacks_every_public_name(tmp_path):
    found(tmp_path, "")
    names = public_names()
    missing = api_defects(Page(tmp_path / "api" / "index.html"), names)
    assert missing == [f"{name} is missing" for name in names]
    assert {"taut.project", "taut.Activation", "taut.activations.exp"} <= set(names)
