"""The site of docs/: it builds without a warning, its links hold, and a browser shows it.

For mkdocs.yml.
"""

import functools
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
MKDOCS = ROOT / "build" / "docs-env" / "bin" / "mkdocs"
LEFT_OUT = shutil.ignore_patterns("__pycache__", "build", "dist", "tests", ".*")
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
QUIET = ("headless", "no-sandbox", "disable-gpu", "disable-background-networking", "no-first-run")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MKDOCS.exists(), reason="no environment for the site: make docs"),
]


def built(site: Path, root: Path = ROOT) -> str:
    """Build the site of a tree; return what that says, and whether it failed."""
    command = [str(MKDOCS), "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    return f"{done.stderr}\nexit status {done.returncode}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("site")
    said = built(found)
    assert "exit status 0" in said and "WARNING" not in said, said
    return found


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("href", "src", "srcset") and value:
                self.links.append(value)
            if key in ("id", "name") and value:
                self.anchors.add(value)


def broken(site: Path) -> list[str]:
    """Return the links of a site that lead nowhere in it."""
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        for link in page.links:
            target, anchor = urldefrag(link)
            if urlsplit(target).scheme:
                continue
            file = (path.parent / unquote(target)).resolve() if target else path
            file = file / "index.html" if file.is_dir() else file
            there = pages[file].anchors if file in pages else ()
            if not file.exists() or (anchor and file in pages and unquote(anchor) not in there):
                found.append(f"{path.relative_to(site)}: {link}")
    return found


def test_its_links_hold(site: Path) -> None:
    pages = {path.parent.name for path in site.rglob("index.html")}
    assert {
        "start",
        "choosing",
        "warnings",
        "api",
        "evidence",
        "glossary",
        "hf_trainer.py",
    } <= pages
    assert not broken(site)


def test_it_asks_no_other_server(site: Path) -> None:
    """But for the links that a reader clicks."""
    for path in site.rglob("*.html"):
        text = path.read_text()
        assert 'src="http' not in text and 'rel="stylesheet" href="http' not in text, path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('id="residual-cleared"', 'id="cleared"'),
        ('href="../doctor/"', 'href="../doctors/"'),
    ],
)
def test_a_link_that_is_broken_is_found(site: Path, tmp_path: Path, old: str, new: str) -> None:
    copy = shutil.copytree(site, tmp_path / "site")
    name = "warnings" if old.startswith("id") else "start"
    page = copy / name / "index.html"
    assert old in page.read_text()
    page.write_text(page.read_text().replace(old, new))
    assert broken(copy)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the repository, as in a clone: passes/ and runtime/ are not in collage_fx/."""
    found = shutil.copytree(ROOT, tmp_path / "tree", symlinks=True, ignore=LEFT_OUT)
    for link in found.rglob("*"):
        if link.is_symlink():
            link.unlink()
    return found


HTML = """
[licence](LICENSE), [![picture](docs/images/explain_light.png)](docs/page.md#the-page-of-a-step)
<a href="docs/doctor.md#an-answer">doctor</a> <a href="README.md">here</a>
<picture><source srcset="docs/images/explain_dark.png"><img src="docs/images/explain_light.png">
</picture>
"""


def test_readme_may_have_html(tree: Path) -> None:
    with (tree / "README.md").open("a") as file:
        file.write(HTML)
    said = built(tree / "site", tree)
    assert "exit status 0" in said, said
    assert not broken(tree / "site")
    text = (tree / "site" / "index.html").read_text()
    assert all(f'"{to}"' in text for to in ("doctor/#an-answer", "images/explain_dark.png", "./"))


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("docs/start.md", "[nowhere](nowhere.md)"),
        ("docs/start.md", "[nowhere](doctor.md#nowhere)"),
        ("docs/start.md", "[nowhere](../examples/nowhere.py)"),
        ("README.md", "[nowhere](docs/nowhere.md)"),
        ("docs/api.md", "::: collage_fx.nowhere"),
        ("docs/nowhere.md", "# A page that the navigation lacks"),
    ],
)
def test_a_fault_fails_the_build(tree: Path, page: str, text: str) -> None:
    with (tree / page).open("a") as file:
        file.write(f"\n{text}\n")
    said = built(tree / "site", tree)
    assert "exit status 1" in said and "nowhere" in said, said


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    if not (BROWSER and DRIVER):
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = BROWSER
        for argument in (*QUIET, "window-size=1280,900", f"user-data-dir={profile}"):
            options.add_argument(f"--{argument}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        found = webdriver.Chrome(options=options, service=Service(DRIVER))
        yield found
        found.quit()


def awaited(found: Callable[[], Any]) -> Any:
    """Return what a page shows, once it does."""
    end = time.monotonic() + 20
    while not (result := found()) and time.monotonic() < end:
        time.sleep(0.1)
    assert result
    return result


def test_a_browser_shows_it(driver: Any, address: str) -> None:
    driver.get(address)
    assert driver.find_element("css selector", "h1").text.startswith("collage_fx")
    tabs = [tab.text for tab in driver.find_elements("css selector", ".md-tabs__link")]
    assert tabs[:3] == ["Start", "Choosing", "Reading"] and "Warnings" in tabs
    assert not [one for one in driver.get_log("browser") if one["level"] == "SEVERE"]


def test_it_is_dark_and_light(driver: Any, address: str) -> None:
    driver.get(address)
    body = driver.find_element("css selector", "body")
    before = body.get_attribute("data-md-color-scheme")
    shown = driver.find_elements("css selector", "[data-md-component=palette] label")
    next(label for label in shown if label.is_displayed()).click()
    awaited(lambda: body.get_attribute("data-md-color-scheme") != before)
    assert {before, body.get_attribute("data-md-color-scheme")} == {"default", "slate"}


def test_its_search_finds_a_warning(driver: Any, address: str) -> None:
    driver.get(address)
    field = driver.find_element("css selector", "input.md-search__input")
    driver.execute_script("arguments[0].focus()", field)
    field.send_keys("residual-cleared")
    link = "a.md-search-result__link"
    found = awaited(lambda: driver.find_elements("css selector", link))
    assert any("warnings/" in one.get_attribute("href") for one in found)


def test_a_warning_leads_to_its_entry(driver: Any, address: str) -> None:
    driver.get(f"{address}/warnings/#residual-cleared")
    heading = driver.find_element("css selector", "#residual-cleared")
    awaited(lambda: 0 <= heading.rect["y"] - driver.execute_script("return scrollY") < 400)
