"""A real headless Chromium; where there is none, the tests here are skipped and say so."""

import json
import shutil

import pytest
from waiting import CEILING_SECONDS, wait_for

selenium = pytest.importorskip(
    "selenium", reason="needs selenium: pip install 'dpsweep[browser-test]'"
)

from selenium import webdriver  # noqa: E402

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1200,900"
)


class Browser:
    """Chromium with one tab; every request and every console message is noted."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, url, *, width=1200, scheme="light"):
        """Opens a page from nothing, `width` CSS pixels wide."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.cdp("Emulation.setDeviceMetricsOverride", **size)
        self.cdp(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.driver.get("about:blank")
        self.console(), self.requests()
        self.driver.get(url)

    def cdp(self, command, **arguments):
        return self.driver.execute_cdp_cmd(command, arguments)

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, script, what):
        """Waits until a script gives something true, and gives it."""
        return wait_for(lambda: self.run(script), what)

    def console(self):
        """Console messages since this was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self):
        """Addresses that were asked for since this was last asked."""
        events = (json.loads(e["message"])["message"] for e in self.driver.get_log("performance"))
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]


@pytest.fixture(scope="session")
def browser():
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and chromedriver):
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(chromedriver))
    driver.set_page_load_timeout(CEILING_SECONDS)
    yield Browser(driver)
    driver.quit()
