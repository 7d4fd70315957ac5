"""Photographs a page: python docs/images/screenshot.py URL FILE WIDTHxHEIGHT [ELEMENT_ID].

Needs selenium (the extra browser-test), and Debian's chromium and chromium-driver.
"""

import sys
import time
from contextlib import suppress

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
)
SECONDS = 12
"""MLflow's tables and the report's figures are drawn by then."""


def main(url: str, file: str, size: str, element: str | None = None) -> None:
    """Opens the page, goes to an element of it, and saves what is seen."""
    options = webdriver.ChromeOptions()
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.binary_location = "/usr/bin/chromium"
    driver = webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))
    width, height = map(int, size.split("x"))
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.get(url)
    time.sleep(SECONDS)
    for button in driver.find_elements(By.CSS_SELECTOR, "button[aria-label*='lose']"):
        with suppress(WebDriverException):  # the MLflow assistant's panel
            button.click()
    if element:
        driver.execute_script("document.getElementById(arguments[0]).scrollIntoView()", element)
    time.sleep(2)
    driver.save_screenshot(file)
    driver.quit()


if __name__ == "__main__":
    main(*sys.argv[1:])
