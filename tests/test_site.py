"""The built site: its links, and every page and slider in a real browser, wide and narrow, light and dark.

It reads _build/html, which `make test` builds first: how the book is built is said once, in the Makefile.
"""

import functools
import http.server
import os
import re
import shutil
import threading
from html.parser import HTMLParser
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright
from test_book import ROOT, toc_files

SITE = ROOT / "_build" / "html"
PAGES = [f"{name}.html" for name in toc_files()] + ["search.html"]
WIDTHS = {"desktop": 1280, "phone": 390}

# No host but the server of this test, not even by name: the test behaves the same with and without a network.
BROWSER_ARGUMENTS = [
    "--no-sandbox",  # test machines run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]

# What the theme and its extensions do wrong, outside our reach: the rule of axe and the element. None is kept longer
# than the issue lasts: with a newer theme, empty this and see.
THEME_ISSUES = {
    "label-content-name-mismatch": r"search-button",  # shows its keyboard shortcut, which is not part of its name
    "aria-required-children": r'role="list" class="citation-list"',  # docutils: a bibliography as a list without items
}


class Page(HTMLParser):
    """What a page links to, what it loads, and the places in it that a link can name."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.ids = [], [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = {name: value or "" for name, value in attrs}
        self.ids |= {attrs[name] for name in ("id", "name") if name in attrs}
        if "href" in attrs:
            (self.loads if tag == "link" else self.links).append(attrs["href"])
        if "src" in attrs:
            self.loads.append(attrs["src"])


@pytest.fixture(scope="session")
def site(unchecked):
    """The folder of the site, if it has been built from what the sources say now."""
    index = SITE / "index.html"
    if not index.exists():
        unchecked("the site", "it is not built, run `make book`")
    suffixes = {".md", ".ipynb", ".bib", ".css", ".js", ".svg"}
    book = [
        path
        for path in (ROOT / "book").rglob("*.*")
        if path.suffix in suffixes and not path.parent.name.startswith(".")
    ]
    if any(path.stat().st_mtime > index.stat().st_mtime for path in [ROOT / "_config.yml", ROOT / "_toc.yml", *book]):
        unchecked("the site", "it is older than its sources, run `make book`")
    return SITE


@pytest.fixture(scope="session")
def pages(site):
    """Every page of the site by its path, the theme's building blocks left out."""
    files = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    return {path.relative_to(site).as_posix(): Page(path) for path in files}


@pytest.fixture(scope="session")
def address(site):
    """The site at a local address, as `make serve` shows it."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def browser(unchecked):
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    executable = os.environ.get("CHROME") or next(filter(None, map(shutil.which, names)), None)
    if not executable:
        unchecked("the site in a browser", "install Chromium or Chrome, or name one in the variable CHROME")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=BROWSER_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=["light", "dark"])
def scheme(request):
    return request.param


@pytest.fixture(scope="module", params=list(WIDTHS))
def width(request):
    return WIDTHS[request.param]


@pytest.fixture(scope="module", params=PAGES)
def visit(request, address, browser, scheme, width):
    """One page, opened and left open: what it asked for, what it complained about, and the page itself."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    found = SimpleNamespace(page=page, scheme=scheme, requests=[], errors=[])
    page.on("request", lambda sent: found.requests.append(sent.url))
    page.on("response", lambda got: got.ok or found.errors.append(f"{got.status} {got.url}"))
    page.on("console", lambda message: message.type == "error" and found.errors.append(message.text))
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    page.goto(f"{address}/{request.param}")
    page.evaluate("window.MathJax?.startup?.promise")
    # A reader opens what is folded; so do we, before anything is measured.
    page.evaluate("document.querySelectorAll('details').forEach(folded => folded.open = true)")
    page.evaluate("document.querySelectorAll('.toggle-hidden').forEach(e => e.classList.remove('toggle-hidden'))")
    yield found
    context.close()


def test_every_link_within_the_site_leads_somewhere(site, pages):
    """The file exists, and so does the place in it that the link names."""
    broken = []
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (site / name).parent / unquote(parts.path) if parts.path else site / name
            known = pages.get(target.resolve().relative_to(site.resolve()).as_posix())
            if not target.exists() or (known and parts.fragment and unquote(parts.fragment) not in known.ids):
                broken.append(f"{name}: {link}")
    assert broken == []


def test_pages_load_nothing_from_elsewhere(pages):
    """No script, style, picture or font comes from another host, nor is one named for later."""
    hosts = re.compile(r"cdn\.|jsdelivr|cdnjs|unpkg|googleapis|gstatic")
    for name, page in pages.items():
        assert [url for url in page.loads if urlsplit(url).netloc] == [], name
        assert hosts.findall((SITE / name).read_text(encoding="utf-8")) == [], name


def test_a_page_asks_no_one_else(visit, address):
    """Reading the book tells no third party about it."""
    assert [url for url in visit.requests if not url.startswith((f"{address}/", "data:", "blob:"))] == []


def test_a_page_logs_no_error(visit):
    """No script fails and no file is missing."""
    assert visit.errors == []


def test_a_page_follows_the_colour_scheme(visit):
    """Light and dark are what the reader's system says."""
    assert visit.page.evaluate("document.documentElement.dataset.theme") == visit.scheme


def test_a_page_never_scrolls_sideways(visit):
    """Wide tables, formulas and code scroll in their own boxes, on a phone too."""
    assert visit.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0, (
        visit.page.evaluate(
            """() => [...document.querySelectorAll('article *')]
            .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth)
            .map(e => e.outerHTML.slice(0, 80)).slice(0, 5)"""
        )
    )


def test_formulas_are_typeset(visit):
    """Every formula becomes one, and none shows an error in its place."""
    page = visit.page
    assert page.locator("mjx-container").count() == page.locator("span.math, div.math").count()
    assert page.locator("mjx-merror, [data-mjx-error]").count() == 0


def test_pictures_have_a_text(visit):
    """The alternative text is a sentence, not the file name that the builder puts where there is none."""
    texts = visit.page.locator("article img").evaluate_all("pictures => pictures.map(p => p.alt)")
    assert [text for text in texts if not text.strip() or re.search(r"\.(svg|png|jpe?g)$", text)] == []


def test_a_page_is_accessible(visit):
    """axe finds nothing serious or critical that is ours to mend."""
    ours = []
    for rule in Axe().run(visit.page).response["violations"]:
        if rule["impact"] in ("serious", "critical"):
            known = THEME_ISSUES.get(rule["id"], r"(?!)")  # (?!) matches nothing
            nodes = [node for node in rule["nodes"] if not re.search(known, node["html"])]
            ours += [(rule["id"], node["html"][:150], node["failureSummary"]) for node in nodes]
    assert ours == []


def test_sliders_move_the_figure(visit):
    """A key press on any slider changes the picture beside it, without a kernel."""
    for control in visit.page.locator(".slider input[type=range]").all():
        before = control.evaluate(VISIBLE_PICTURES)
        assert before, "a slider without a picture"
        at_end = control.evaluate("control => Number(control.value) >= Number(control.max || 100)")
        control.press("ArrowLeft" if at_end else "ArrowRight")
        assert control.evaluate(VISIBLE_PICTURES) != before


VISIBLE_PICTURES = """control => [...control.closest('.slider').querySelectorAll('svg, img, canvas')]
    .filter(picture => picture.checkVisibility()).map(picture => picture.outerHTML).join()"""
