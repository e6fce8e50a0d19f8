"""The saved page in a real browser: opened from disk, searched with the keyboard."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from saved_reports import saved_report

from fx_fusion.report import FusionReport

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs Chromium and its driver (Debian: chromium, chromium-driver)",
)


@pytest.fixture(scope="module")
def report() -> FusionReport:
    return saved_report()


@pytest.fixture(scope="module")
def browser(
    report: FusionReport, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, str]]:
    """The browser with the page open, and the page's address."""
    selenium = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    page = report.save(tmp_path_factory.mktemp("report") / "saved")
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("profile")
    for argument in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = selenium.ChromeService(executable_path=DRIVER, env=dict(os.environ))
    driver = selenium.Chrome(options=options, service=service)
    try:
        # The new tab that the browser starts with is no page of ours.
        driver.get("about:blank")
        driver.get_log("performance")
        driver.get(page.as_uri())
        yield driver, page.as_uri()
    finally:
        driver.quit()


def visible_rows(driver: Any) -> list[str]:
    rows = driver.find_elements("css selector", "#sites tbody tr")
    return [row.text for row in rows if row.is_displayed()]


def test_typing_into_the_search_box_filters_the_rows(
    browser: tuple[Any, str], report: FusionReport
) -> None:
    from selenium.webdriver.common.keys import Keys

    driver, _ = browser
    assert len(visible_rows(driver)) == len(report.sites)
    box = driver.find_element("id", "search")
    box.send_keys("LAYER_norm saved_reports")
    rows = visible_rows(driver)
    assert len(rows) == 1
    assert "layer_norm" in rows[0]
    status = driver.find_element("id", "shown")
    assert status.text == f"1 of {len(report.sites)} sites"
    box.clear()
    box.send_keys("no such site")
    assert visible_rows(driver) == []
    box.clear()
    box.send_keys(" ")
    choice = driver.find_element("id", "outcome")
    choice.send_keys("fused")
    assert len(visible_rows(driver)) == report.fused_count
    choice.send_keys(Keys.HOME)
    assert len(visible_rows(driver)) == len(report.sites)


def test_a_row_s_link_opens_its_site(browser: tuple[Any, str]) -> None:
    driver, _ = browser
    last = driver.find_elements("css selector", "main > details")[-1]
    assert last.get_attribute("open") is None
    number = last.get_attribute("id")
    driver.find_element("css selector", f'#sites a[href="#{number}"]').send_keys("\n")
    assert last.get_attribute("open") is not None
    assert driver.switch_to.active_element.tag_name == "summary"
    assert last.find_element("css selector", "svg").is_displayed()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone_and_can_be_read(browser: tuple[Any, str], scheme: str) -> None:
    driver, _ = browser
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True},
    )
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 390
    ink, page = (
        luminance(driver.execute_script(f"return getComputedStyle(document.body).{name}"))
        for name in ("color", "backgroundColor")
    )
    assert (ink < page) == (scheme == "light")
    # The contrast that WCAG 2 asks of text: (L1 + 0.05) / (L2 + 0.05) of at least 4.5.
    assert (max(ink, page) + 0.05) / (min(ink, page) + 0.05) > 4.5


def luminance(colour: str) -> float:
    """The relative luminance of "rgb(r, g, b)", as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_the_page_loads_nothing_and_logs_nothing(browser: tuple[Any, str]) -> None:
    driver, address = browser
    assert driver.get_log("browser") == []
    messages = [
        json.loads(entry["message"])["message"] for entry in driver.get_log("performance")
    ]
    asked = {
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    }
    assert {url for url in asked if not url.startswith("data:")} == {address}


def test_the_page_s_ids_and_links_agree(report: FusionReport, tmp_path: Path) -> None:
    from html.parser import HTMLParser

    ids: list[str] = []
    links: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found = dict(attrs)
            ids.extend(v for v in [found.get("id")] if v)
            links.extend(v for v in [found.get("href")] if v)

    page = report.save(tmp_path / "saved")
    Reader().feed(page.read_text(encoding="utf-8"))
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    files = {link for link in links if not link.startswith(("#", "data:"))}
    assert all((page.parent / name).is_file() for name in files)
