"""The page in a real browser: what is clicked, pointed at, typed, and what becomes of it.

For inspection.page.page and inspection.page.plot.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pages
import pytest

import collage_fx

BROWSER, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER.exists() and DRIVER.exists()),
    reason="no Chromium here: apt-get install chromium chromium-driver",
)
QUIET = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"),
    *("disable-background-networking", "disable-component-update", "window-size=1280,900"),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    optimizer = pages.optimizer(20)
    return collage_fx.explain(optimizer, replay=3).save(tmp_path_factory.mktemp("page") / "p.html")


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(BROWSER)
        for argument in (*QUIET, f"user-data-dir={profile}"):
            options.add_argument(f"--{argument}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        found = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        yield found
        found.quit()


@pytest.fixture
def page(driver: Any, saved: Path) -> "Page":
    driver.get("about:blank")
    for log in ("browser", "performance"):  # what the browser does for itself
        driver.get_log(log)
    driver.get(saved.as_uri())
    return Page(driver)


class Page:
    """The page as its reader has it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def tab(self, name: str) -> None:
        self.one(f"#tab-{name}").click()
        shown = [p.get_attribute("id") for p in self.all("[role=tabpanel]") if p.is_displayed()]
        assert shown == [name]

    def script(self, text: str, *args: Any) -> Any:
        return self.driver.execute_script(text, *args)

    def point_at(self, element: Any) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).move_to_element(element).perform()

    def named(self, column: int, name: str) -> Any:
        """Return the place where a value gets its name in one of the three columns."""
        names = self.all(f".view:not([hidden]) .columns .pane:nth-child({column}) .def")
        return next(e for e in names if e.text == name)

    def marked(self) -> list[set[str]]:
        """Return what is marked in each of the three columns, and in the kernel."""
        panes = self.all(".view:not([hidden]) .code")[:4]
        query = "return [...arguments[0].querySelectorAll('[data-v].on, [data-v].at')]"
        return [{e.get_attribute("data-v") for e in self.script(query, pane)} for pane in panes]

    def stores(self) -> set[str]:
        lines = self.all(".view:not([hidden]) .language:not([hidden]) .line.store.on .stores")
        return {line.text.removeprefix("stores ") for line in lines}


def until(check: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(None, 5, poll_frequency=0.05).until(lambda _: check())


def test_it_opens_without_errors_or_network(page: Page) -> None:
    for name in ("states", "graphs", "code", "errors", "memory"):
        page.tab(name)
        assert page.script("return document.documentElement.scrollWidth <= innerWidth"), name
    assert page.driver.get_log("browser") == []
    sent = [e["message"] for e in page.driver.get_log("performance")]
    own = f'"documentURL":"{page.driver.current_url}'
    sent = [m for m in sent if '"Network.requestWillBeSent"' in m and own in m]
    assert sent and all('"url":"file://' in m or '"url":"data:' in m for m in sent)


def test_tabs_by_keyboard(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page.one("#tab-states").click()
    page.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert page.one("#graphs").is_displayed()
    assert page.driver.switch_to.active_element.get_attribute("id") == "tab-graphs"


def test_pointing_at_a_value(page: Page) -> None:
    page.tab("graphs")
    page.point_at(page.named(1, "exp_avg_sq"))
    marked = page.marked()
    assert all(marked), "in all three graphs and in the kernel"
    assert page.stores() == {"exp_avg_sq", "exp_avg_sq_lo"}
    page.point_at(page.named(1, "exp_avg"))
    assert page.stores() == {"exp_avg"}
    assert "stores exp_avg" in page.one("#where").text
    # From what is stored back to the user's line.
    page.point_at(page.named(3, "exp_avg"))
    assert page.stores() == {"exp_avg"}
    assert page.named(1, "exp_avg").get_attribute("data-v") in page.marked()[0]


def test_marks_are_kept_when_clicked(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page.tab("graphs")
    page.named(2, "denom").click()
    kept = page.marked()
    page.point_at(page.named(1, "exp_avg"))
    assert page.marked() == kept and all(kept)
    page.one("body").send_keys(Keys.ESCAPE)
    assert not any(page.marked())
    # The same by keyboard alone: a column is one stop, and arrows go on in it.
    first = page.one(".view:not([hidden]) .columns .pane:nth-child(2) .def")
    page.script("arguments[0].focus()", first)
    page.driver.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    assert page.driver.switch_to.active_element.text == "exp_avg"
    assert page.stores() == {"exp_avg"}
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    page.point_at(page.named(1, "step"))
    assert page.stores() == {"exp_avg"}


def test_the_other_language(page: Page) -> None:
    page.tab("graphs")
    languages = {b.text: b for b in page.all(".view:not([hidden]) .languages button")}
    if set(languages) != {"C++", "Triton"}:
        pytest.skip(f"kernels in {', '.join(languages) or 'one language'} only")
    languages["Triton"].click()
    page.point_at(page.named(1, "exp_avg"))
    assert page.stores() == {"exp_avg"}
    assert "tl.store" in page.one(".language:not([hidden]) .line.store.on").text


def test_search_and_layers(page: Page) -> None:
    def rows() -> list[str]:
        return [e.text for e in page.all("tr[data-row] th") if e.is_displayed()]

    assert rows() == ["parameter", "exp_avg", "exp_avg_sq", "step"]
    page.one("#search").send_keys("params[13] compensated")
    until(lambda: page.one("#found").text == "2 states found")
    assert rows() == ["parameter", "exp_avg_sq"]
    names = [e.text for e in page.all(".members li")]
    assert names == ["param_groups[0].params[13] 4 x 4"] * 2
    page.one("#by-layer").click()
    assert page.one("#layers th").text == "param_groups[0].params[13]"
    assert [e.text for e in page.all("#layers .verdict")][:3] == [
        "parameter",
        "exp_avg",
        "exp_avg_sq",
    ]
    page.one("#search").clear()
    page.one("#search").send_keys(" ")
    until(lambda: len(page.all("#layers tr")) == 20)


def test_a_row_opens(page: Page) -> None:
    button = page.one("tr[data-row] .more")
    button.click()
    assert button.get_attribute("aria-expanded") == "true"
    assert len(page.all(".members li")) == 20
    button.click()
    assert not page.all(".members")


def test_themes(page: Page) -> None:
    def ground() -> str:
        return page.one("body").value_of_css_property("background-color")

    seen = {}
    for _ in range(3):
        seen[page.one("#theme").text] = ground()
        page.one("#theme").click()
    assert seen.keys() == {"theme: system", "theme: light", "theme: dark"}
    assert seen["theme: light"] != seen["theme: dark"]


def test_errors_are_drawn(page: Page) -> None:
    page.tab("errors")
    assert len(page.all("#errors figure")) == 3
    shown = [e.text for e in page.all("#errors .curve text")]
    assert shown[0] == "plain" and shown[2] == "compensated"
    assert float(shown[3]) < float(shown[1])
